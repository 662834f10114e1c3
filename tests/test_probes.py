"""Self-probe banks: the engine samples what the model would, banks are the same byte for byte and refuse changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from typer.testing import CliRunner

from cplus import models
from cplus.cli.app import app
from cplus.data import interfaces
from cplus.data.examples import Choice, Example
from cplus.data.interfaces import Rejected
from cplus.models import Loaded
from cplus.models.decoding import DecodingRow, LocalEngine, Request, Sampling, cut, pick, request_seed
from cplus.probes import build as building
from cplus.probes.bank import Bank, Probe, anchors_hash, open_journal, probe_from_row, probe_to_row
from cplus.probes.build import build
from cplus.probes.labels import Label
from cplus.probes.settings import TOPICS, ProbeSettings, input_key, normalise, plan
from cplus.probes.writing import Tally, TooFewProbes, write_probes, writer
from cplus.toy.world import taught

SAMPLING = Sampling(temperature=0.8, max_new_tokens=12, stop=("\n",))


def question(text: str, *choices: str, answer: int = 0) -> Choice:
    return Choice(id=f"q-{text}", question=text, choices=choices, answer=answer)


ANCHORS = [question(f"Which animal is number {n}?", "a dog", "a fish", answer=n % 2) for n in range(6)]


pytestmark = pytest.mark.usefixtures("one_thread")

# The engine


def naive(model: Any, tokenizer: Any, request: Request, sampling: Sampling) -> str:
    """One row, one token at a time, with the same numbers: what any engine must equal."""
    numbers = torch.rand(
        sampling.max_new_tokens, generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64
    )
    cache, ids, tokens = DynamicCache(), list(request.prompt), []
    for number in numbers:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), past_key_values=cache).logits[:, -1]
        token = int(pick(logits, number.unsqueeze(0), sampling.temperature))
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        if (stopped := cut(text, sampling.stop)) is not None:
            return stopped
        ids = [token]
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def requests(tokenizer: Any, count: int) -> list[Request]:
    lines = [f"Question: what is {n}?\nAnswer: a dog{' in water' * (n % 3)}\n\n" for n in range(5)]
    plans = [plan(i, ANCHORS[:5], ProbeSettings()) for i in range(count)]
    texts = ["".join(lines[ANCHORS.index(shot)] for shot in p.shots) + "Question:" for p in plans]
    return [
        Request(index=i, prompt=tuple(tokenizer.encode(text, add_special_tokens=False)), seed=request_seed(7, i))
        for i, text in enumerate(texts)
    ]


def test_the_engine_samples_what_each_row_would_alone(tiny: Any) -> None:
    """Four architectures, sliding windows and shared key heads among them; rows join, leave and shift all the while."""
    asked = requests(tiny.tokenizer, 24)
    sampling = replace(SAMPLING, max_new_tokens=40)
    engine = LocalEngine(tiny.model, tiny.tokenizer, rows=5)
    samples = {sample.index: sample for sample in engine.sample(asked, sampling)}
    assert sorted(samples) == list(range(24))
    for request in asked:
        assert samples[request.index].text == naive(tiny.model, tiny.tokenizer, request, sampling)
    assert {sample.end for sample in samples.values()} >= {"stop", "limit"}
    assert tiny.model.config._attn_implementation in ("sdpa", "eager")
    with pytest.raises(ValueError, match="take 550 tokens, but the model's window is 512"):
        list(engine.sample([Request(index=0, prompt=(5,) * 510, seed=0)], sampling))


# The plan


def test_contexts_are_anchors_alone_and_topics_are_balanced() -> None:
    settings = ProbeSettings(topics=TOPICS, seed=3)
    plans = [plan(index, ANCHORS, settings) for index in range(72)]
    assert all(len(set(p.shots)) == 2 and set(p.shots) <= set(ANCHORS) for p in plans)
    rounds = [[p.topic for p in plans[at : at + 24]] for at in (0, 24, 48)]
    assert all(sorted(one, key=str) == sorted(TOPICS) for one in rounds)
    assert rounds[0] != rounds[1]
    assert len({p.shots for p in plans}) > 20
    assert plan(40, ANCHORS, settings) == plans[40]
    with pytest.raises(ValueError, match="a request shows 2 anchors, but there are 1"):
        plan(0, ANCHORS[:1], ProbeSettings())
    with pytest.raises(ValueError, match="might never end"):
        ProbeSettings(min_yield=0.0)


@given(st.text(), st.text(alphabet=" \t\n.,!?\"'"))
def test_normalising_is_idempotent_and_blind_to_marks(text: str, marks: str) -> None:
    assert normalise(normalise(text)) == normalise(text)
    assert normalise(marks + text + marks) == normalise(text)


# From anchors to probes, with an engine that says what it is told


@dataclass
class Scripted:
    """An engine that answers request i with texts[i]."""

    texts: Callable[[int], str]
    end: Any = "stop"

    def describe(self) -> dict[str, Any]:
        return {"name": "scripted"}

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[DecodingRow]:
        for request in reversed(requests):
            yield DecodingRow(request.index, request.prompt, text=self.texts(request.index), end=self.end)


def yes(interface: interfaces.Interface) -> Callable[[Sequence[Example]], list[Label | Rejected]]:
    return lambda examples: [Label(interface.with_answer(example, "yes"), 0.5) for example in examples]


def run(tokenizer: Any, texts: Callable[[int], str], settings: ProbeSettings) -> Tally:
    interface = interfaces.build("cloze", tokenizer)
    tally = Tally(ANCHORS, interface, settings)
    for _ in tally.generate(Scripted(texts), yes(interface)):
        pass
    return tally


def test_copies_are_dropped_in_the_order_of_the_requests_and_too_few_probes_end_it(tiny_llama: Any) -> None:
    texts = {0: "Why ice?\n", 1: "why ICE ?\n", 2: "which animal is number 3\n", 3: "no end"}
    tally = run(tiny_llama.tokenizer, lambda i: texts.get(i, f"Is it {i}?\n"), ProbeSettings(num_probes=5))
    reasons = {i: own.reason for i, own in tally.blocks[0].items() if isinstance(own, Rejected)}
    assert reasons == {1: "duplicate", 2: "copy of an anchor", 3: "no end"} or reasons[2] == "copy of a shot"
    assert [probe.request for probe in tally.probes[:3]] == [0, 4, 5]
    assert tally.probes[0].example.choices == ("yes",)  # type: ignore[union-attr]
    with pytest.raises(TooFewProbes, match=r"0 of 4 probes in 256 requests .* rejected: no end 256"):
        run(tiny_llama.tokenizer, lambda i: "on and on", ProbeSettings(num_probes=4))


def test_label_balanced_banks_hold_as_many_of_each(tiny_llama: Any) -> None:
    interface = interfaces.build("letter", tiny_llama.tokenizer)
    settings = ProbeSettings(num_probes=40, label_balanced=True)
    tally = Tally(ANCHORS, interface, settings)

    def mostly_a(examples: Sequence[Example]) -> list[Label | Rejected]:
        return [Label(interface.with_answer(example, int(i % 5 == 0)), 0.9) for i, example in enumerate(examples)]

    engine = Scripted(lambda i: f"Question: Is it {i}?\nOptions:\nA: yes\nB: no\nAnswer")
    for _ in tally.generate(engine, mostly_a):
        pass
    answers = [probe.example.answer for probe in tally.probes[:40]]  # type: ignore[union-attr]
    assert (answers.count(0), answers.count(1)) == (20, 20)
    with pytest.raises(ValueError, match="label-balanced banks need one fixed set of answers"):
        Tally(ANCHORS, interfaces.build("cloze", tiny_llama.tokenizer), settings)


def test_long_questions_get_enough_tokens_and_a_cut_question_is_named_as_such(make_tiny: Callable[[str], Any]) -> None:
    interface = interfaces.build("letter", make_tiny("qwen3").tokenizer)
    short = [question(f"Why {n}?", "a", "b", "c", "d") for n in range(4)]
    long = question("A patient of 54 years " * 60, "a", "b", "c", "d")
    assert writer(interface, [long, *short], ProbeSettings()).max_new_tokens >= len(interface.prompt(long))
    assert writer(interface, short, ProbeSettings()).max_new_tokens == 256
    engine = Scripted(lambda i: f"Question: Is it {i} or\nOptions:\nA: k", end="limit")
    asked = Tally(short, interface, ProbeSettings(num_probes=2)).generate(engine, yes(interface))
    with pytest.raises(TooFewProbes, match=r"rejected: cut off at the token limit 256. Give .* max_new_tokens=N"):
        list(asked)


# The bank


@pytest.fixture
def base(tiny_llama: Any) -> Loaded:
    return replace(models.of(tiny_llama.model, tiny_llama.tokenizer), name="tiny", fingerprint="f" * 64)


def scripted_bank(folder: Path, base: Loaded, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Bank:
    interface = interfaces.build("cloze", base.tokenizer)
    monkeypatch.setattr(building, "labeller_of", lambda base, interface, settings: yes(interface))
    texts = Scripted(lambda i: f"Is it {i}?\n" if i % 3 else "no end")
    return build(folder, base, interface, ANCHORS, ProbeSettings(**settings), engine=texts)


def test_a_bank_says_whose_it_is_and_comes_back(tmp_path: Path, base: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = scripted_bank(tmp_path / "bank", base, monkeypatch, num_probes=20)
    with pytest.raises(ValueError, match="was sealed for tiny@fffffff but the base model is @eeeeeee"):
        Bank.load(tmp_path / "bank", model_fingerprint="e" * 64)
    with pytest.raises(ValueError, match=r"was sealed for 6 anchors @.* but these 5 are @"):
        Bank.load(tmp_path / "bank", anchors=ANCHORS[:5])
    assert bank == Bank.load(tmp_path / "bank", model_fingerprint=base.fingerprint, anchors=ANCHORS[::-1])
    assert bank.manifest["counts"] == {"requests": 30, "accepted": 20, "rejected": {"no end": 10}}
    assert bank.manifest["anchors"]["sha256"] == anchors_hash(ANCHORS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bank"]
    assert scripted_bank(tmp_path / "bank", base, monkeypatch, num_probes=20) == bank
    with pytest.raises(ValueError, match="already exists and is not this bank"):
        scripted_bank(tmp_path / "bank", base, monkeypatch, num_probes=21)
    for name in ("probes.jsonl", "manifest.json"):  # one changed byte is refused
        path = tmp_path / "bank" / name
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=r"was changed after|does not parse|expected the format"):
                Bank.load(tmp_path / "bank")
        path.write_bytes(whole)
    (tmp_path / "bank" / "probes.jsonl").unlink()
    with pytest.raises(ValueError, match="expected a sealed bank"):
        Bank.load(tmp_path / "bank")


def test_a_full_disk_leaves_nothing_that_looks_sealed(
    tmp_path: Path, base: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("cplus.base.files.write_json", full)
        with pytest.raises(OSError, match="No space left"):
            scripted_bank(tmp_path / "bank", base, broken, num_probes=200)
    assert [path.name for path in tmp_path.iterdir()] == ["bank.partial.jsonl"]
    interface = interfaces.build("cloze", base.tokenizer)
    silent = Scripted(lambda i: pytest.fail("asked again for what was accepted"))
    bank = build(tmp_path / "bank", base, interface, ANCHORS, ProbeSettings(num_probes=200), engine=silent)
    assert len(bank.probes) == 200


# The journal


def test_a_line_cut_short_is_taken_off_and_a_journal_of_another_bank_or_process_refused(tmp_path: Path) -> None:
    path, identity = tmp_path / "j.jsonl", {"settings": {"temperature": 0.8}}

    def refused(identity: dict[str, Any], why: str) -> None:
        with pytest.raises(ValueError, match=why), open_journal(path, identity):
            pass

    with open_journal(path, identity) as journal:
        journal.append({"n": 1})
        refused({}, "is in use by process")
    with path.open("ab") as file:
        file.write(b'{"n": 2')
    with open_journal(path, identity) as journal:
        assert journal.entries == [{"n": 1}]
        journal.append({"n": 3})
    with open_journal(path, identity) as journal:
        assert journal.entries == [{"n": 1}, {"n": 3}]
    refused({"settings": {"temperature": 0.7}}, "was started with other settings or versions")
    path.write_bytes(path.read_bytes() + b"not json\n")
    refused(identity, "line 4 is damaged")


texts = st.text(min_size=1).filter(str.strip)


@given(texts, st.lists(texts, min_size=1, max_size=5), st.floats(0, 1), st.none() | texts)
def test_a_probe_survives_its_row(asked: str, choices: list[str], confidence: float, topic: str | None) -> None:
    example = Choice(id="p", question=asked, choices=tuple(choices), answer=0)
    probe = Probe(example=example, confidence=confidence, request=3, shots=("a", "b"), topic=topic)
    assert probe_from_row(json.loads(json.dumps(probe_to_row(probe)))) == probe
    assert input_key(example, options=True) == input_key(replace(example, choices=example.choices[::-1]), options=True)


# With the built-in model


def test_what_the_toy_model_writes_is_sealed_and_new(tmp_path: Path) -> None:
    base = models.load("toy", device="cpu")
    anchors = taught("plants")[::111][:8]
    interface = interfaces.build("cloze", base.tokenizer)
    settings = ProbeSettings(num_probes=64, seed=5)
    bank = build(tmp_path / "bank", base, interface, anchors, settings)
    assert Bank.load(tmp_path / "bank", model_fingerprint=base.fingerprint, anchors=anchors) == bank
    assert bank.manifest["yield"] > 0.5
    assert list(bank.probes) == write_probes(base, interface, anchors, settings)
    assert all(interface.encode(example).target for example in bank.examples)


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    for arguments, message in {
        "--anchors 8": "expected a task to draw 8 anchors from",
        "--anchors 99999 --task harbours": "asked for 99999",
        "--task harbours --set min_yield=0": "min_yield must be above 0",
        "--task harbours --set min_yield=much": "min_yield must be a valid number",
        "--task harbours --set min_yeild=1": "'min_yeild' is not a setting; did you mean min_yield?",
    }.items():
        result = CliRunner().invoke(app, ["probe", "toy-s", *arguments.split(), "--out", str(tmp_path / "bank")])
        assert isinstance(result.exception, ValueError)
        assert message in str(result.exception)
    assert not (tmp_path / "bank").exists()
