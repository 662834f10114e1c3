"""Requests that a model writes from nothing: how they begin, which are rejected, how they are sealed and split up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_probes import Scripted

from cplus import models
from cplus.data import interfaces
from cplus.data.examples import FreeForm, Message, to_row
from cplus.data.formats import from_row
from cplus.data.interfaces import Rejected
from cplus.evaluation import abilities
from cplus.jobs import settings as keep
from cplus.jobs.keep import PAST_ROWS, portions
from cplus.jobs.settings import AdaptConfig, settings
from cplus.methods.table import METHODS
from cplus.models import Loaded
from cplus.probes import audit, build
from cplus.probes.bank import Bank
from cplus.probes.labels import Label, label
from cplus.probes.settings import TOPICS, ProbeSettings
from cplus.probes.writing import SelfWritten, Tally, TooFewProbes, answer_flaw

SETTINGS = ProbeSettings(num_probes=24, topics=TOPICS, ability="general", min_yield=0.25)
_WORDS = [
    "river", "stone", "music", "engine", "garden", "letter", "market", "window", "bridge", "candle", "leaf", "sun",
]  # fmt: skip


def writer(tokenizer: Any, settings: ProbeSettings = SETTINGS, *, chat: bool = True) -> SelfWritten:
    return SelfWritten.of(interfaces.build("freeform", tokenizer, chat=chat), settings)


def asked(content: str, response: str = "", **more: Any) -> FreeForm:
    return FreeForm(id="a", messages=(Message(role="user", content=content),), response=response, **more)


# Requests


def test_a_bare_request_is_the_start_of_the_template_with_the_users_turn_open(tiny: Any) -> None:
    own = writer(tiny.tokenizer)
    whole = tiny.tokenizer.apply_chat_template([{"role": "user", "content": "QUESTION"}], tokenize=False)
    bare = next(plan for plan in map(own.plan, range(24)) if plan.topic is None)
    assert tiny.tokenizer.decode(own.request(bare)) == whole.partition("QUESTION")[0]
    assert whole.partition("QUESTION")[2].strip().startswith(own.stop[0].strip())
    steered = own.plan(0)
    end = f"Topic: {steered.topic}\n\n{steered.opener}"
    assert tiny.tokenizer.decode(own.request(steered)) == whole.partition("QUESTION")[0] + end


def test_every_topic_and_every_opener_comes_once_per_round(tiny_llama: Any) -> None:
    plans = [writer(tiny_llama.tokenizer).plan(index) for index in range(128)]
    steered = [plan for plan in plans if plan.topic is not None]
    assert len(steered) == 96
    assert set(Counter(plan.topic for plan in steered).values()) == {4}
    assert set(Counter(plan.opener for plan in steered).values()) == {6}
    assert len({(plan.topic, plan.opener) for plan in steered}) > 80
    assert plans == [writer(tiny_llama.tokenizer).plan(index) for index in range(128)]


def test_a_model_without_a_template_continues_plain_text(tiny_llama: Any) -> None:
    own = writer(tiny_llama.tokenizer, chat=False)
    text = tiny_llama.tokenizer.decode(own.request(own.plan(0)))
    assert text.endswith(f"{own.plan(0).topic.capitalize()}\n\n{own.plan(0).opener}")  # type: ignore[union-attr]
    read = own.parse(" sky is blue today. It was grey before. And tomor", replace(own.plan(0), opener="The"))
    assert isinstance(read, FreeForm)
    assert read.is_text
    assert read.response == "The sky is blue today. It was grey before."


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{end}", "empty"),
        (" now{end}", "too short"),
        (" is the sky " + " ".join(f"{a}{b}" for a in _WORDS for b in _WORDS) + "{end}", "too long"),
        (" is it? " + "Sports - none. " * 8 + "{end}", "repetition"),
        (" is <|start_header_id|>user here?{end}", "template leakage"),
        (" is the sky blue and the", "no end"),
    ],
)
def test_degenerate_requests_are_rejected_by_reason(tiny_llama: Any, text: str, reason: str) -> None:
    own = writer(tiny_llama.tokenizer)
    plan = replace(own.plan(0), opener="" if reason == "empty" else "Why")
    assert own.parse(text.replace("{end}", own.stop[0]), plan) == Rejected(reason)


def test_the_topic_line_is_no_part_of_a_request_and_the_opener_is(tiny_llama: Any) -> None:
    own = writer(tiny_llama.tokenizer)
    read = own.parse(f" do whales sing?{own.stop[0]}", replace(own.plan(0), opener="Why"))
    assert isinstance(read, FreeForm)
    assert read.messages == (Message(role="user", content="Why do whales sing?"),)
    cut = own.parse(" do whales sing? I have always wanted to know it. But", replace(own.plan(0), opener="Why"))
    assert isinstance(cut, FreeForm)
    assert cut.messages[0].content == "Why do whales sing? I have always wanted to know it."


def test_an_ability_that_the_model_cannot_show_is_refused_with_a_remedy(tiny_llama: Any) -> None:
    with pytest.raises(ValueError, match=r"keeping json needs a chat template.* keep general"):
        writer(tiny_llama.tokenizer, replace(SETTINGS, ability="json"), chat=False)
    with pytest.raises(ValueError, match="add --set thinking=keep"):
        writer(tiny_llama.tokenizer, replace(SETTINGS, ability="thinking"))
    with pytest.raises(ValueError, match=r"expected an ability of general, json, tools, .*, got 'wit'"):
        writer(tiny_llama.tokenizer, replace(SETTINGS, ability="wit"))


# Answers


def test_answers_must_show_the_ability() -> None:
    fenced = '```json\n{"a": [1]}\n```'
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    prose = (
        "The old man went down to the harbour each morning, because he liked how boats smell of salt and far places."
    )
    good = {"json": fenced, "tools": call, "thinking": "<think>hm</think>Yes.", "style": prose}
    bad = {"json": "{a: 1}", "tools": '{"name": "fly", "arguments": {}}', "thinking": "Yes.", "style": "Yes."}
    for name in good:
        assert answer_flaw(name, asked("?", good[name])) is None
        assert answer_flaw(name, asked("?", bad[name])) == abilities.ABILITIES[name].unlike
    assert answer_flaw("general", asked("?", "Yes it is so. " * 9)) == "repetition"


def test_a_cut_answer_has_no_end_and_survives_its_row(tiny: Any) -> None:
    interface = interfaces.build("freeform", tiny.tokenizer)
    row = asked("Is it?", "Yes and", cut=True)
    whole = interface.encode(replace(row, cut=False))
    assert interface.encode(row).target == whole.target[: len(interface.encode(row).target)]
    assert tiny.tokenizer.decode(interface.encode(row).target).strip() == "Yes and"
    assert len(whole.target) > len(interface.encode(row).target)
    assert from_row(to_row(row), where="x", id="a") == row
    assert not interface.with_answer(row, "No.").cut  # type: ignore[union-attr]


def test_labels_may_be_cut_at_the_limit_and_texts_are_their_own(tiny_llama: Any) -> None:
    model = tiny_llama.model
    interface = interfaces.build("freeform", tiny_llama.tokenizer)
    text = FreeForm(id="t", messages=(), response="the sky is blue")
    (own,) = label(model, interface, [text])
    assert isinstance(own, Label)
    assert own.example == text
    (whole,) = label(model, interface, [asked("Is it?")], max_tokens=1)
    (cut,) = label(model, interface, [asked("Is it?")], max_tokens=1, cut=True)
    assert whole == Rejected("answer without end")
    assert cut == Rejected("empty answer") or (isinstance(cut, Label) and cut.example.cut)  # type: ignore[union-attr]


# Banks, by an engine that says what it is told


def sentence(index: int) -> str:
    """A different request for each index."""
    picked = [_WORDS[(index // 12**place) % 12] for place in range(3)]
    return f" {index} {picked[0]}s {picked[1]} or {picked[2]} number {index * 7 + 1}?"


def answer(examples: Sequence[Any]) -> list[Label | Rejected]:
    return [Label(replace(example, response=f"Yes, {example.id}."), 0.5) for example in examples]


def tally_of(tokenizer: Any, texts: Callable[[int], str], settings: ProbeSettings = SETTINGS) -> Tally:
    interface = interfaces.build("freeform", tokenizer)
    end = writer(tokenizer).stop[0]
    tally = Tally((), interface, settings)
    for _ in tally.generate(Scripted(lambda i: texts(i) + end), answer):
        pass
    return tally


def test_near_duplicates_are_rejected(tiny_llama: Any) -> None:
    long = " do the large grey whales of northern seas sing so loud when winter comes near"
    texts = {8: f"{long}?", 9: f"{long} again?"}
    tally = tally_of(tiny_llama.tokenizer, lambda i: texts.get(i, sentence(i)))
    reasons = {i: own.reason for i, own in tally.blocks[0].items() if isinstance(own, Rejected)}
    assert reasons.pop(9) == "near duplicate"
    assert 8 not in reasons
    assert len(tally.probes) >= 24


def test_a_model_that_writes_only_rubbish_is_refused_with_a_remedy(tiny_llama: Any) -> None:
    with pytest.raises(TooFewProbes, match=r"below 25%; rejected: repetition .*\(general\): give rows with --anchors"):
        tally_of(tiny_llama.tokenizer, lambda i: sentence(i) if i % 5 == 0 else " la la" * 20)


@pytest.fixture
def base(tiny_llama: Any) -> Loaded:
    return replace(models.of(tiny_llama.model, tiny_llama.tokenizer), fingerprint="f" * 64)


def sealed(folder: Path, base: Loaded, monkeypatch: pytest.MonkeyPatch, count: int) -> Bank:
    monkeypatch.setattr(build, "labeller_of", lambda *given: answer)
    interface = interfaces.build("freeform", base.tokenizer)
    end = writer(base.tokenizer).stop[0]
    engine = Scripted(lambda i: sentence(i) + end)
    return build.build(folder, base, interface, (), replace(SETTINGS, num_probes=count), engine=engine)


def test_a_self_written_bank_is_sealed_and_a_smaller_one_is_its_beginning(
    tmp_path: Path, base: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = (sealed(tmp_path / str(n), base, monkeypatch, n) for n in (60, 20))
    assert large.probes[:20] == small.probes
    assert large.manifest["anchors"]["count"] == 0
    assert large.manifest["settings"]["ability"] == "general"
    assert Bank.load(tmp_path / "60", anchors=[]).probes == large.probes
    found = audit.audit(large, {})
    assert found["distinct_share"] == 1.0
    assert len({probe.topic for probe in large.probes} - {None}) >= 20
    counts = large.manifest["counts"]
    assert sum(found["rejected_shares"].values()) == pytest.approx(1 - 60 / counts["requests"], abs=1e-4)


# The setting `keep`


def job(**values: Any) -> AdaptConfig:
    return settings({"model": "toy", "new": "new.jsonl", **values})


def test_without_anchors_the_general_behaviour_is_kept() -> None:
    assert job().written == {"general": 1.0}
    assert job(anchors="keep.jsonl").written == {}
    assert job(keep="none").written == {}
    assert job(keep=["general=0.7", "json=0.3"]).written == {"general": 0.7, "json": 0.3}
    both = job(keep=["rows.jsonl=3", "general=1"])
    assert (both.anchors, both.written) == ("rows.jsonl", {"general": 0.25})
    assert job(anchors="a.jsonl", keep="general").written == {"general": 0.5}
    again = settings(both.model_dump(mode="json"))
    assert again == both


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"keep": ["general=0"]}, "each with a weight above 0, got 'general=0'"),
        (
            {"keep": ["general=much"]},
            "expected general, json, tools, reasoning, refusals, style, code, thinking, a file of rows, or none",
        ),
        ({"keep": ["none", "json"]}, "none keeps nothing; leave it out beside none and json"),
        ({"keep": ["json", "json"]}, "expected each thing to keep once, got json more than once"),
        ({"keep": ["a.jsonl", "b.jsonl"]}, "expected one file to keep, got a.jsonl and b.jsonl"),
        ({"keep": "a.jsonl", "anchors": "b.jsonl"}, "expected a.jsonl or b.jsonl, not both"),
        ({"keep": "general", "bank": "bank"}, "here the model writes its own; provide anchors"),
        ({"stop": "lost"}, "expected learned, never or lost:LIMIT"),
        ({"stop": "lost:-1"}, "with a limit above 0"),
        ({"stop": "lost:0.1", "evaluate_every": 0}, "stop lost:0.1 needs evaluations during training"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        job(**values)
    assert sentence in str(error.value)


def test_rows_are_written_only_where_they_are_used() -> None:
    def counts(method: str, **values: Any) -> list[tuple[str, int, int, int]]:
        found = portions(job(method=method, **values), METHODS[method], 64)
        return [(own.ability, own.past, own.anchors, own.probes) for own in found]

    assert counts("cplus") == [("general", PAST_ROWS, 8, 16)]
    assert counts("sft") == [("general", PAST_ROWS, 0, 0)]
    assert counts("sft", past="past.jsonl") == []
    assert counts("cpl", past="past.jsonl") == [("general", 0, 8, 0)]
    mixed = counts("cplus", keep=["general=0.7", "json=0.3"], num_probes=100)
    assert mixed == [("general", 20, 6, 70), ("json", 8, 2, 30)]
    assert counts("cplus", keep=["rows.jsonl", "general"], num_probes=100) == [("general", PAST_ROWS, 8, 50)]
    assert sum(keep.allotted(7, {"a": 0.34, "b": 0.33, "c": 0.33}).values()) == 7
