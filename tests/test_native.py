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


def forget() -> None:
    """Nothing is loaded yet."""
    for each in (kernels.library, kernels._function, kernels.can_compile):
        each.cache_clear()


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; the folder of the kernels."""
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield tmp_path / "kernels"
    forget()


def gated() -> list[float]:
    theta, param = torch.zeros(5), torch.ones(5)
    kernels.gate(theta, param, Signs.of(torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])), None, (0.0, 1.0, 1.0))
    return param.tolist()


def stepped(optimizer: torch.optim.Optimizer, bag: Bag) -> Guard:
    guard = Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    guard.refresh()
    return guard


@needs_compiler
@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
def test_a_graph_that_holds_a_stepped_parameter_does_not_go_backward(
    kind: type[torch.optim.AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 0)
    bag = Bag(torch.float32)
    optimizer = kind(bag.weights, lr=0.1)
    assert stepped(optimizer, bag).gating.compiled
    loss = sum((p.square().sum() for p in bag.weights), torch.zeros(()))
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@needs_compiler
def test_kernels_are_built_once_and_anew_where_damaged_or_for_another_source_compiler_or_width(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gated() == [0.0, 1.0, 1.0, 0.0, 1.0]
    [file] = built.iterdir()
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_build", None)  # what is there is not built again
        assert gated() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert [file] == list(built.iterdir())

    content = file.read_bytes()
    monkeypatch.setattr(kernels, "_build", lambda line, path: path.write_bytes(content))
    for damaged in (b"", b"\x7fELF", content[:-100]):
        file.unlink()  # not written over: this process has it mapped
        file.write_bytes(damaged)
        forget()
        kernels.library()
        assert file.read_bytes() == content

    def files() -> int:
        forget()
        kernels.library()
        return len(list(built.iterdir()))

    compiler = kernels.command()[0]
    assert files() == 1
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
    guard = stepped(AdamW(bag.weights), bag)
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
