"""What reads from outside, and inputs made to break it: each either gives what it promises or refuses in a sentence."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cplus.base import terminal
from cplus.data.examples import Choice, FreeForm, Message, to_row
from cplus.data.formats import FIELDS, from_row
from cplus.data.readers import read_rows
from cplus.evaluation.judges import is_json
from cplus.evaluation.requirements import parse
from cplus.jobs.checkpoint import Checkpoints
from cplus.jobs.folder import Folder
from cplus.jobs.folder import read_settings as read_job
from cplus.jobs.settings import AdaptConfig, read_yaml
from cplus.jobs.settings import settings as read_settings
from cplus.lab.records import RunResult, load_result, save_result
from cplus.models.loading import _opened
from cplus.probes.bank import Bank, Probe, open_journal, seal
from cplus.probes.build import _block_from_entry
from cplus.receipts.contents import ModelId, Receipt, RowComparison, RowSet
from cplus.receipts.page import from_json, to_json
from cplus.training.settings import RunSpec

CHUNK = 5_000  # hypothesis remembers what it tried; a new search now and then keeps that small


@dataclass(frozen=True)
class Target:
    """A reader, inputs for it, and a check that says in one word what came of one; any other error is a crash."""

    name: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], str]


def fuzz(target: Target, examples: int, *, first_seed: int = 0) -> Counter[str]:
    """So many inputs, and the counts of what came of them; the smallest input that crashes is shown."""
    outcomes: Counter[str] = Counter()
    for start in range(0, examples, CHUNK):

        @seed(first_seed + start)
        @settings(
            max_examples=min(CHUNK, examples - start),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(target.inputs)
        def run(value: Any) -> None:
            outcomes[target.check(value)] += 1

        run()
    return outcomes


# Inputs

KINDS = ("cut", "drop", "insert", "flip", "repeat")
ODD = (b'"', b"{", b"[" * 9, b"\xff", b"\x00", b"NaN", b"1e999", b"\n", b"\\ud800")
_EDIT = st.tuples(
    st.sampled_from(KINDS), st.floats(0, 1), st.floats(0, 0.2), st.binary(max_size=8) | st.sampled_from(ODD)
)


def edit(data: bytes, kind: str, at: float, share: float, new: bytes) -> bytes:
    """The data with one edit at a place and over a share of its length."""
    start = int(at * len(data))
    end = start + int(share * len(data))
    if kind == "cut":
        return data[:start]
    if kind == "drop":
        return data[:start] + data[end:]
    if kind == "insert":
        return data[:start] + new + data[start:]
    if kind == "repeat":
        return data[:end] + data[start:]
    if start < len(data):
        return data[:start] + bytes([data[start] ^ (new[0] if new else 1)]) + data[start + 1 :]
    return data


def edited(whole: bytes) -> st.SearchStrategy[bytes]:
    """A file with a few edits, or none."""
    return st.lists(_EDIT, max_size=4).map(lambda edits: reduce(lambda data, one: edit(data, *one), edits, whole))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
DEEP = st.sampled_from([9, 999, 99_999]).map(lambda depth: "[" * depth)
TURNS = ("role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "weight")
VALUES = st.recursive(
    JSON | st.sampled_from(["{}", "[]", "user", "assistant"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TURNS), inner, max_size=4),
    max_leaves=12,
)
ROWS = st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), max_size=4)
WORDS = st.sampled_from(
    ["Question:", "Options:", "Answer:", "A:", "B)", "C.", "D ", "\n", "\n\n", "\n---", "```", "<think>", "</think>",
     "Request:", "<|im_end|>", "\u2028", "\x1b[31m", "what is ice", " ", "\u202e", "<script>"]
)  # fmt: skip
GENERATED = st.lists(WORDS | st.text(max_size=10), max_size=14).map("".join)

CHOICES = tuple(
    Choice(id=f"q{i}", question=f"What is thing {i}?", choices=("ice", "fire", f"stone {i}"), answer=i % 3)
    for i in range(3)
)
FREE = tuple(
    FreeForm(id=f"f{i}", messages=(Message(role="user", content=f"Write {i} words."),), response=f"{i} words")
    for i in range(3)
)


def refusing(read: Callable[[], object], named: str = "") -> str:
    """`accepted` or `refused`: a ValueError is the one way to refuse, in a sentence that names what it is about."""
    try:
        read()
    except ValueError as error:
        sentence = str(error)
    else:
        return "accepted"
    assert sentence
    assert named in sentence
    return "refused"


def refusing_bytes(path: Path, read: Callable[[], object], named: str = "") -> Callable[[bytes], str]:
    """The same for what stands in a file, which is made anew each time: the last one may still be mapped."""

    def check(value: bytes) -> str:
        path.unlink(missing_ok=True)
        path.write_bytes(value)
        return refusing(read, named)

    return check


# Readers of rows


def _read_twice(path: Path) -> None:
    for example in read_rows(path, requests=True).examples:
        assert from_row(to_row(example), where="again", id="", requests=True) == example


def _row_targets(folder: Path) -> Iterator[Target]:
    known = [to_row(example) for example in CHOICES]
    talk = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}, to_row(FREE[0])]
    table = "question,choices,answer\n" + "".join(f'q{i},"[""ice"", ""fire""]",{i % 2}\n' for i in range(3))

    def lines(rows: list[Any]) -> bytes:
        return "\n".join(map(json.dumps, rows)).encode()

    inputs = {
        "jsonl": edited(lines(known)) | edited(lines(talk)) | ROWS.map(lines),
        "json": edited(json.dumps(known).encode()) | (ROWS | JSON).map(lambda value: json.dumps(value).encode()),
        "csv": edited(table.encode()) | st.binary(max_size=60),
    }
    for name, made in inputs.items():
        path = folder / f"rows.{name}"
        yield Target(path.name, made, refusing_bytes(path, partial(_read_twice, path), str(path)))


def _cleaned(text: str) -> str:
    shown = terminal.clean(text)
    assert all(character.isprintable() or character in "\t\n " or ord(character) > 0x9F for character in shown), shown
    assert not any(character in shown for character in "\x1b\r\x9b\u202e\u2066")
    assert terminal.clean(shown) == shown
    return "cleaned"


# Sealed things: an edit is refused, or it changed nothing


def _unchanged(found: object, right: object) -> None:
    assert found == right, "an altered file was accepted"


def _bank_target(folder: Path) -> Target:
    probes = [Probe(example=e, confidence=0.5, request=i, shots=("a",), topic=None) for i, e in enumerate(CHOICES)]
    manifest = {"model": {"name": "toy", "fingerprint": "0" * 64}, "anchors": {"count": 1, "sha256": "0" * 64}}
    bank = seal(folder / "bank", probes, manifest)
    whole = {path: path.read_bytes() for path in (folder / "bank").iterdir()}

    def check(value: tuple[Path, bytes]) -> str:
        for path, right in whole.items():
            path.write_bytes(value[1] if path == value[0] else right)
        return refusing(lambda: _unchanged(Bank.load(folder / "bank"), bank))

    return Target("bank", st.one_of(*(st.tuples(st.just(path), edited(data)) for path, data in whole.items())), check)


def _receipt_target() -> Target:
    row = RowComparison(
        id="a", kind="kept", input="?", gold="x", before="x", after="x", confidence_before=0.5, confidence_after=0.5
    )
    model = ModelId(name="toy", fingerprint="0" * 64)
    sets = (RowSet(name="past", kind="retention", interface="cloze", rows=(row,)),)
    receipt = Receipt(title="t", created="2026-01-01", before=model, after=model, sets=sets)
    whole = json.dumps(to_json(receipt)).encode()

    def check(value: bytes) -> str:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return "no JSON"
        # Equal receipts may be written as other bytes: a blank, or a key given twice.
        return refusing(lambda: _unchanged(from_json(found), receipt))

    return Target("receipt", edited(whole), check)


def _run_record_target(folder: Path) -> Target:
    spec = RunSpec(
        model="toy", task="t", interface="cloze", method="sft", seed=0, num_anchors=8, num_probes=0, external=("x",)
    )
    result = RunResult(
        spec=spec, retention=90.0, retention_uncovered=90.0, acquisition=99.0, external={}, counts={}, cost={},
        seconds=1.0, extra_bytes=0,
    )  # fmt: skip
    path = save_result(result, folder / "runs")
    inputs = edited(path.read_bytes()) | JSON.map(lambda value: json.dumps(value).encode())
    return Target("run record", inputs, refusing_bytes(path, lambda: _unchanged(load_result(path), result)))


# States that a process goes on from


class _State:
    """A training's place in a checkpoint: all that is asked of it is to give and take a state."""

    def __init__(self) -> None:
        self.log = self
        self.cursor = self
        self.done = False
        self.step = 3
        self.twin = None
        self.state = {"weights": {"w": torch.arange(6.0)}, "random_cuda": [], "log": {"losses": [1.0, 2.0]}}

    def finite(self) -> bool:
        return True

    def tally(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["weights"]["w"], torch.arange(6.0)), "an edited checkpoint was accepted"
        assert state["log"] == self.state["log"]


def _checkpoint_target(folder: Path) -> Target:
    path, training = folder / "checkpoint.pt", _State()
    Checkpoints(path, "identity", minutes=1, steps=1).save(training)  # type: ignore[arg-type]
    inputs = edited(path.read_bytes()) | st.binary(max_size=80)

    def read() -> None:
        Checkpoints(path, "identity", minutes=1, steps=1).load(training)  # type: ignore[arg-type]

    return Target("checkpoint", inputs, refusing_bytes(path, read))


def _journal_target(folder: Path) -> Target:
    path = folder / "bank.partial.jsonl"
    entry = {"outcomes": [{"index": 0, "reason": "empty"}, {"index": 1, "reason": "copy of a shot"}]}
    with open_journal(path, {"seed": 0}) as journal:
        journal.append(entry)
        journal.append(entry)
    inputs = edited(path.read_bytes())

    def read() -> None:
        with open_journal(path, {"seed": 0}) as again:
            for one in again.entries:
                _block_from_entry(one)

    return Target("journal", inputs, refusing_bytes(path, read))


# Settings


def _settings_targets(folder: Path) -> Iterator[Target]:
    path, job = folder / "adapt.yaml", Folder(folder / "job")
    whole = b"model: toy\nnew: new.jsonl\nanchors: keep.jsonl\nlr: 1.0e-3\nepochs: 3\nrequire: [retention>=0.9]\n"
    names = st.sampled_from(sorted(AdaptConfig.model_fields))
    odd = st.dictionaries(names, JSON, max_size=5).map(lambda values: json.dumps(values).encode())
    yaml_text = st.text(alphabet=string.printable, max_size=60).map(str.encode)

    config = refusing_bytes(path, lambda: read_settings(read_yaml(path), where=str(path)))
    yield Target("config", edited(whole) | odd | yaml_text, config)
    kept = {"format": "cplus-job/1", "settings": {"model": "toy", "new": "new.jsonl", "out": "out"}}
    job.root.mkdir()

    begun = refusing_bytes(job.settings, lambda: read_job(job, {}))
    yield Target("job settings", edited(json.dumps(kept).encode()) | odd, begun)
    words = st.sampled_from(["retention", "acquisition", ">=", "0.9", " "]) | st.text(max_size=6)
    demands = st.lists(words, max_size=5) | st.floats().map(lambda bound: ["retention", ">=", str(bound)])
    yield Target("requirement", demands.map("".join), lambda text: refusing(lambda: parse(text)))


def _gguf_target(folder: Path) -> Target:
    from gguf import GGUFWriter

    path = folder / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_uint32("llama.block_count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Target("gguf", edited(path.read_bytes()), refusing_bytes(path, lambda: _opened(path)))


@contextmanager
def quiet() -> Iterator[None]:
    """Without what readers print on the way."""
    was, terminal.console.quiet = terminal.console.quiet, True
    try:
        yield
    finally:
        terminal.console.quiet = was


def targets(folder: Path) -> tuple[Target, ...]:
    """Every reader, working in a folder of its own."""
    return (
        *_row_targets(folder),
        Target("judge.json", GENERATED | DEEP | JSON.map(json.dumps), lambda text: str(is_json(text, FREE[0]))),
        Target("terminal", GENERATED | st.text(), _cleaned),
        _bank_target(folder),
        _receipt_target(),
        _run_record_target(folder),
        _checkpoint_target(folder),
        _journal_target(folder),
        *_settings_targets(folder),
        _gguf_target(folder),
    )
