"""The C++ kernels are built once, whole or not at all, by whichever process comes first; without a compiler, not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quadratic import Bag, PastEvidence

from cplus.core import kernels
from cplus.core.gates import Collaborative
from cplus.core.guard import Guard
from cplus.core.kernels import Signs
from cplus.core.optim import AdamW

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, kernels.COMPILERS)), reason="no C++ compiler here")
CACHES = (kernels.library, kernels._function, kernels.can_compile)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing loaded yet; the folder of the kernels."""
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for each in CACHES:
        each.cache_clear()
    yield tmp_path / "kernels"
    for each in CACHES:
        each.cache_clear()


def gated() -> list[float]:
    theta, param = torch.zeros(5), torch.ones(5)
    kernels.gate(theta, param, Signs.of(torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])), None, (0.0, 1.0, 1.0))
    return param.tolist()


@needs_compiler
@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
def test_a_graph_that_holds_a_stepped_parameter_does_not_go_backward(
    kind: type[torch.optim.AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 0)
    bag = Bag(torch.float32)
    optimizer = kind(bag.weights, lr=0.1)
    guard = Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    guard.refresh()
    assert guard.gating.compiled
    loss = sum((p.square().sum() for p in bag.weights), torch.zeros(()))
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@needs_compiler
def test_kernels_are_built_once_and_kept(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gated() == [0.0, 1.0, 1.0, 0.0, 1.0]
    [file] = built.iterdir()
    for each in CACHES:
        each.cache_clear()
    monkeypatch.setattr(kernels, "_build", None)  # what is there is not built again
    assert gated() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert [file] == list(built.iterdir())


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The library, compiled once for the module."""
    file = tmp_path_factory.mktemp("whole") / "whole.so"
    kernels._build(kernels.command(), file)
    return file.read_bytes()


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_damaged_file_is_built_again(
    damage: bytes | None, built: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.mkdir()
    monkeypatch.setattr(kernels, "_build", lambda line, path: path.write_bytes(content))
    kernels.library()
    [file] = built.iterdir()
    file.unlink()  # not written over: this process has it mapped
    file.write_bytes(content[:-100] if damage is None else damage)
    for each in CACHES:
        each.cache_clear()
    kernels.library()
    assert file.read_bytes() == content


@needs_compiler
def test_another_source_compiler_or_width_is_another_file(
    built: Path, tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = kernels.command()[0]
    monkeypatch.setattr(kernels, "_build", lambda line, path: path.write_bytes(content))
    built.mkdir()

    def files() -> int:
        kernels.library.cache_clear()
        kernels.library()
        return len(list(built.iterdir()))

    assert [files(), files()] == [1, 1]
    monkeypatch.setenv("CXX", f"{compiler} -g")
    assert kernels.command()[:2] == [compiler, "-g"]
    assert files() == 2
    other = "AVX2" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "AVX512"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: other)
    assert files() == 3
    source = tmp_path / "gate.cpp"
    source.write_text(kernels.SOURCE.read_text() + "// another\n")
    monkeypatch.setattr(kernels, "SOURCE", source)
    assert files() == 4


@pytest.mark.parametrize(
    ("capability", "bits", "flag"), [("AVX2", 256, "-mavx2"), ("AVX512", 512, "-mavx512f"), ("DEFAULT", 128, "")]
)
def test_the_width_is_the_one_torch_uses(
    capability: str, bits: int, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setenv("CXX", "some++")
    assert kernels.vector()[0] == bits
    assert [word for word in kernels.command() if word.startswith("-mavx")][:1] == ([flag] if flag else [])


def one_pass() -> bool:
    bag = Bag(torch.float32)
    guard = Guard(AdamW(bag.weights), bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    guard.refresh()
    for p in bag.weights:
        p.grad = torch.ones_like(p)
    guard.optimizer.step()
    assert guard.gate.average.step == 1
    return guard.one_pass


def test_without_a_compiler_the_plain_gate_works_and_is_reported_once(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 0)
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler") as told:
        assert [one_pass(), one_pass()] == [False, False]
    assert len([each for each in told if "compiled gate" in str(each.message)]) == 1
    assert not built.exists()


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false"])
def test_a_compiler_that_fails_leaves_nothing_behind(
    compiler: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match="no compiled gate on cpu"):
        assert not kernels.can_compile("cpu")
    assert list(built.iterdir()) == []
