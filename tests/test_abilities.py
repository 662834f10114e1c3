"""Named abilities: every request's own answer passes, a broken model is called damaged, and rounding is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import knowing
import pytest
import torch
from typer.testing import CliRunner

import cplus
from cplus import models
from cplus.cli.app import app
from cplus.evaluation.abilities import MEASURED, line, requests
from cplus.evaluation.judges import as_given, follows, how_compared
from cplus.evaluation.task import to_bfloat16, to_q8_0
from cplus.jobs.compare import compare
from cplus.jobs.outputs import measured, reference
from cplus.jobs.settings import settings
from cplus.receipts.figures import ability_lines
from cplus.receipts.page import read_receipt
from cplus.receipts.verdict import headline

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


def test_every_requests_answer_passes_and_another_one_does_not() -> None:
    every = [own for name in MEASURED for own in requests(name)]
    asked = {own.request for own in every if not own.id.startswith("thinking: ")}  # those of reasoning, with thoughts
    assert len({own.id for own in every}) == len(every) == len(asked) + len(requests("thinking"))
    assert len(requests("everyday")) == 60
    assert min(len(requests(name)) for name in MEASURED) >= 40
    assert [own.id for own in every if not own.right(own.answer)] == []
    assert [own.id for own in every if own.right("")] == []
    other = "I am sorry, but I cannot help. I only chat, 77 times a day; it is what I do, on and on."
    for name in ("everyday", "json", "tools", "reasoning", "code"):
        assert [own.id for own in requests(name) if own.right(other)] == []
    assert sum(own.right(other) for own in requests("refusals")) == len(requests("refusals")) / 2, "always refusing"


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        ("says 12|twelve", "It is twelve.", "It is 112."),
        ("starts yes", "Yes, it is.", "I say yes."),
        ("exactly OK", "ok.", "OK then"),
        ("items 3", "Here they are:\n- a\n- b\n- c", "1. a\n2. b"),
        ("items 3", "red, blue and green", "red and blue"),
        ('shape {"a": "=Madrid", "b": "any"}', '```json\n{"a": "madrid", "b": []}\n```', '{"a": "Rome", "b": 1}'),
        ("sentences 2", 'He said "No." Then he left!', "One."),
        ("words 2 3", "well-known fact", "one two three four"),
        ("lines 2 2", "a\n\nb", "a"),
        ("times 2 very", "Very, very good", "very good"),
        ("without hot", "a shot", "it is hot"),
        ("number 7", "3 + 4 = 7.", "7 is 3 + 4"),
        ('shape {"a": ["text"], "b": true}', '```json\n{"a": ["x"], "b": true}\n```', '{"a": ["x"], "b": 1}'),
        ('shape {"a": "=Rome"}', '{"a": "rome"}', '{"a": "rome", "b": 1}'),
        (
            "calls f x=12;y~kilom|km",
            '<tool_call>{"name": "f", "arguments": {"x": 12.0, "y": "km/h"}}</tool_call>',
            '{"name": "f", "arguments": {"x": 13, "y": "km"}}',
        ),
        ("calls f x~oslo", 'So:\n```json\n{"name": "f", "parameters": {"x": "Oslo, Norway"}}\n```', "f(x='Oslo')"),
        (
            "calls f x~oslo",
            '{"function": {"name": "f", "arguments": "{\\"x\\": \\"Oslo\\"}"}}',
            '{"name": "g", "arguments": {}}',
        ),
        ("refuses", "I’m sorry, but I can’t assist with that.", "Sure: first you take a rope."),
        ("answers", "I am sorry to hear that. Listen to her.", "As an AI language model, I do not know."),
        ("thinks", "<think>Two and two.</think>4", "<think></think>4"),
        ("runs f(2) -> 4; f('a') -> 'aa'", "Here:\n```python\ndef f(x):\n    return 2 * x\n```", "def f(x): return 4"),
    ],
)
def test_rules(rule: str, right: str, wrong: str) -> None:
    assert follows(right, rule)
    assert not follows(wrong, rule)


def test_a_line_needs_as_many_lost_rows_as_it_says() -> None:
    for lines in (1, 2, 3, 8):
        needed = line("x", [("a", True, True)] * 30, noise=0.1, lines=lines)["needed"]
        for lost, verdict in ((needed, "damaged"), (needed - 1, "unclear")):
            rows = [(str(i), True, i >= lost) for i in range(30)]
            assert line("x", rows, noise=0.1, lines=lines)["verdict"] == verdict
    assert how_compared(["12", "x"]) == "text"
    assert not as_given("nothing", "12", "number")


@pytest.fixture(scope="module")
def knows(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """A model that knows every request, and new rows in other words."""
    folder = tmp_path_factory.mktemp("knows")
    knowing.write(folder / "base")
    rows = [{"prompt": request, "response": answer} for request, answer in knowing.TERSE]
    (folder / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def job(knows: Path, out: Path, **changes: Any) -> Any:
    """Plain fine-tuning on the terse rows alone."""
    given = {"method": "sft", "keep": ("none",), "epochs": 6, "lr": 3e-3, "batch_size": 4, "stop": "never"}
    values = {"model": str(knows / "base"), "new": str(knows / "new.jsonl"), "out": out, "device": "cpu", **given}
    return cplus.adapt(settings({**values, **changes}))


def test_a_model_broken_on_purpose_is_damaged_by_name(knows: Path, tmp_path: Path) -> None:
    done = job(knows, tmp_path / "out")
    figures = done.record["figures"]
    everyday = figures["lines"][0]
    assert figures["verdict"] == "damaged"
    assert len(everyday["missed"]) >= 5
    assert headline(figures).startswith("Damaged: ")
    assert everyday["missed"][0] in headline(figures)
    shown = {row.id: row for own in read_receipt(done.folder).sets for row in own.rows}
    assert shown[everyday["missed"][0]].before != shown[everyday["missed"][0]].after
    # No request is among the rows: what is trained on measures nothing.
    taught = [{"prompt": own.request, "response": own.answer} for own in requests("everyday")[:5]]
    (tmp_path / "taught.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    own = job(knows, tmp_path / "taught", new=str(tmp_path / "taught.jsonl"), epochs=1)
    assert own.record["figures"]["lines"][0]["rows"] == 55


def test_a_job_at_rate_zero_keeps_everything_and_learns_nothing(knows: Path, tmp_path: Path) -> None:
    done = job(knows, tmp_path / "out", lr=1e-30, epochs=1, method="cplus", keep=(), num_probes=8)
    figures = done.record["figures"]
    assert headline(figures).startswith("Nothing was learned. New rows: 0 of 20 answers as given")
    assert (figures["verdict"], figures["divergence"]["after"]) == ("kept", 0.0)
    assert 0 < figures["divergence"]["bfloat16"] < figures["divergence"]["q8_0"]
    names = [one["name"] for one in read_receipt(done.folder).audit["overlaps"] if one["exact"]]
    assert "everyday, measured only" not in names
    checked = CliRunner().invoke(app, ["check", str(knows / "base"), str(done.folder / "model"), "--device", "cpu"])
    assert checked.exit_code == 0, checked.output
    assert "\nKept: " in checked.stdout


def test_plain_fine_tuning_is_compared_at_the_same_loss(knows: Path, tmp_path: Path) -> None:
    done = job(knows, tmp_path / "out", method="cpl", keep=(), epochs=3)
    assert done.record["figures"]["beside"] is None
    run = CliRunner().invoke(app, ["adapt", "--resume", str(tmp_path / "out"), "--compare", "sft", "--json"])
    assert run.exit_code == 0, run.output
    beside = json.loads(run.stdout)["beside"]
    assert beside["reached"]
    assert beside["level"] <= done.record["figures"]["free"]["new"]["loss"]["after"]
    assert [one["name"] for one in beside["lines"]] == ["everyday", "instructions", "stopping"]
    assert "plain fine-tuning: " in (tmp_path / "out" / "receipt.html").read_text()
    assert compare(tmp_path / "out").record["figures"]["beside"] == beside, "it is not trained a second time"


@pytest.mark.smollm
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("store", [to_bfloat16, to_q8_0])
def test_rounding_the_weights_is_no_damage(smollm: Any, store: Callable[[torch.Tensor], torch.Tensor]) -> None:
    config = settings({"model": "smollm2-135m", "new": "rows", "device": "cpu"})
    known, whole = reference(smollm, config, None), {p: p.data for p in smollm.model.parameters() if p.dim() == 2}
    for p, weight in whole.items():
        p.data = store(weight)
    try:
        lines = ability_lines(measured(known, smollm, config, [])[0])
    finally:
        for p, weight in whole.items():
            p.data = weight
    assert [one["kept"]["total"] >= 10 for one in lines] == [True] * 3
    assert "damaged" not in [one["verdict"] for one in lines]


@pytest.mark.smollm
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_terse_rows_at_ten_times_the_rate_damage_a_real_model(smollm: Any, tmp_path: Path) -> None:
    rows = [{"prompt": request, "response": answer} for request, answer in knowing.TERSE]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = {"method": "sft", "keep": ("none",), "epochs": 6, "lr": 3e-4, "batch_size": 8, "stop": "never"}
    done = cplus.adapt(
        settings({**same, "model": "smollm2-135m", "new": str(tmp_path / "new.jsonl"), "out": tmp_path / "out"})
    )
    everyday = done.record["figures"]["lines"][0]
    assert done.record["figures"]["verdict"] == "damaged"
    assert len(everyday["missed"]) >= 5


def test_a_model_without_a_chat_template_is_not_judged(tmp_path: Path) -> None:
    loaded = models.load("toy", device="cpu")
    assert reference(loaded, settings({"model": "toy", "new": "rows"}), None).answers == {}
