"""Rows cut to a length by choice: the prompt's beginning goes, the answer stays, and everyone is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toyjob import asked, write_rows

import cplus
from cplus.data.examples import Choice, Example, FreeForm, Message
from cplus.data.interfaces import build, longest_row, shortened
from cplus.jobs.plan import plan
from cplus.models.scoring import fitting
from cplus.toy import world

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


def turn(role: Any, content: str) -> Message:
    return Message(role=role, content=content)


def talk(*, system: str = "Be brief.", words: int = 60, **changes: Any) -> FreeForm:
    """Two exchanges; the last request has numbered words."""
    asked = " ".join(f"w{i}" for i in range(words))
    messages = (turn("system", system), turn("user", "first " * 20), turn("assistant", "yes"), turn("user", asked))
    return FreeForm(id="talk", messages=messages, response="It is blue.", **changes)


def length(interface: Any, example: Example) -> int:
    return len(longest_row(interface, example)) - 1


def test_a_conversation_loses_old_turns_then_the_beginning_of_the_request(tiny: Any) -> None:
    interface, row = build("freeform", tiny.tokenizer), talk()
    if tiny.family == "gemma2":  # its template knows no system role
        row = FreeForm(id="talk", messages=row.messages[1:], response=row.response)
    system = tuple(m for m in row.messages if m.role == "system")
    whole = length(interface, row)
    assert shortened(interface, row, whole) is row
    later = shortened(interface, row, whole - 1)
    assert isinstance(later, FreeForm)
    assert later.messages == (*system, row.messages[-1])
    window = length(interface, later) - 20
    cut = shortened(interface, row, window)
    assert isinstance(cut, FreeForm)
    assert cut.messages[:-1] == system
    assert cut.response == row.response
    assert row.messages[-1].content.endswith(cut.messages[-1].content)
    assert window - 4 <= length(interface, cut) <= window  # nothing is cut in vain
    assert shortened(interface, row, 5) is None


def test_a_tool_result_keeps_its_call(tiny_llama: Any) -> None:
    call = json.dumps([{"type": "function", "function": {"name": "look", "arguments": "{}"}}])
    messages = (
        turn("user", "old " * 30),
        turn("assistant", "ok"),
        turn("user", "look " * 30),
        Message(role="assistant", content="", calls=call),
        Message(role="tool", content="42", name="look"),
    )
    row = FreeForm(id="t", messages=messages, response="It is 42.")
    interface = build("freeform", tiny_llama.tokenizer)
    cut = shortened(interface, row, length(interface, row) - 60)
    assert isinstance(cut, FreeForm)
    assert cut.messages[1:] == messages[3:]
    assert messages[2].content.endswith(cut.messages[0].content)


def test_a_question_keeps_its_end_and_its_choices_and_an_answer_that_does_not_fit_is_refused(tiny_llama: Any) -> None:
    row = Choice(id="q", question="why " * 40 + "is it blue?", choices=("a dog", "in water"), answer=1)
    for name in ("letter", "cloze"):
        interface = build(name, tiny_llama.tokenizer)
        cut = shortened(interface, row, length(interface, row) - 30)
        assert isinstance(cut, Choice)
        assert (cut.choices, cut.answer) == (row.choices, row.answer)
        assert row.question.endswith(cut.question)
        assert cut.question.endswith("is it blue?")
    interface = build("freeform", tiny_llama.tokenizer)
    long = FreeForm(id="essay", messages=(turn("user", "Write."),), response="word " * 90)
    text = FreeForm(id="page", messages=(), response="word " * 90)
    for own in (long, text):
        with pytest.raises(ValueError, match=f"{own.id}: expected a row that fits 64 tokens once its prompt is cut"):
            fitting(interface, [talk(words=3), own], 64, "truncate")
    assert fitting(interface, [talk(words=3), long], 64, "exclude") == []


def test_a_job_says_what_it_cut_or_left_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = list(world.untaught("harbours")[:12])
    long = [Choice(id=f"long-{i}", question="of " * 40 + e.question, choices=e.choices, answer=e.answer)
            for i, e in enumerate(new[:3])]  # fmt: skip
    write_rows(here / "new.jsonl", [*long, *new[3:]])
    config = asked(here, method="sft", epochs=1, evaluate_every=0, max_length=24)
    with pytest.raises(ValueError, match=r"3 of 12 rows are longer than the limit of 24 tokens .* too_long"):
        cplus.adapt(config)
    with monkeypatch.context() as patch:
        patch.setattr("cplus.models.load", lambda *_, **__: pytest.fail("loaded"))
        with pytest.raises(ValueError, match="must be at most the context window of toy, 512 tokens, got 4096"):
            cplus.adapt(asked(here, method="sft", max_length=4096))
    cut = config.model_copy(update={"too_long": "truncate"})
    sentence = "3 of 12 new rows are longer than 24 tokens: their prompts lost the beginning."
    assert f"warning    {sentence}" in plan(cut).lines
    record = cplus.adapt(cut).record
    assert sentence in record["notes"]
    assert record["counts"]["new"] == 12
    assert record["cost"]["training_padded"] <= 12 * 25
    left = cplus.adapt(config.model_copy(update={"too_long": "exclude", "out": here / "left"})).record
    assert "3 of 12 new rows are longer than 24 tokens and are left out." in left["notes"]
    assert left["counts"]["new"] == 9
