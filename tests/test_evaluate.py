"""What was kept, lost and learned, on tables small enough to count by hand and on the stored split of Qwen3-0.6B."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from cplus.base.files import read_json
from cplus.cli.evaluate import evaluate as command
from cplus.data.examples import Choice, Example, FreeForm, Prediction
from cplus.data.interfaces import build
from cplus.data.readers import read_file
from cplus.data.tasks import split
from cplus.evaluation import judges, requirements
from cplus.evaluation.changes import (
    acquisition,
    answers,
    average_task_accuracy,
    correction,
    flips,
    percent,
    permuted,
    recovery,
    retention,
)
from cplus.evaluation.requirements import Measured
from cplus.evaluation.statistics import Estimate, Rate, estimate, mcnemar, weighted
from cplus.evaluation.task import evaluate_task
from cplus.models import load, save
from cplus.models.scoring import predict


def said(id: str, answer: int | str, correct: bool | None, confidence: float = 0.5) -> Prediction:
    return Prediction(id=id, answer=answer, correct=correct, confidence=confidence, scores=(-1.0,), num_tokens=(1,))


BEFORE = [said(str(i), 0, i < 6) for i in range(10)]
AFTER = [said(str(i), 1, i in (0, 1, 2, 3, 8)) for i in reversed(range(10))]


def test_flips_rates_and_the_exact_test_by_hand() -> None:
    table = flips(BEFORE, AFTER)
    kinds = [kind for _, kind in table]
    assert kinds == ["kept"] * 4 + ["lost"] * 2 + ["still_wrong"] * 2 + ["gained", "still_wrong"]
    assert retention(table) == Rate(4, 6)
    assert acquisition(table) == Rate(1, 4)
    assert correction(table, anchors={"6", "8"}) == Rate(0, 2)
    assert percent(AFTER) == 50.0
    with pytest.raises(ValueError, match="10 and 9 with 9 ids in common"):
        flips(BEFORE, AFTER[:-1])
    with pytest.raises(ValueError, match="never judged"):
        flips([said("0", "x", None)], [said("0", "x", None)])


def test_statistics_against_published_values() -> None:
    # Wilson: 81 of 263, Newcombe 1998, table I. McNemar: 2 * (1 + 9 + 36) / 2**9.
    assert Rate(81, 263).interval() == pytest.approx((25.53, 36.62), abs=0.005)
    assert mcnemar(2, 7) == pytest.approx(2 * 46 / 512)
    assert estimate([78.0, 80.0, 82.0]) == Estimate(80.0, pytest.approx(2 / 3**0.5), 3)
    assert estimate([80.0]).error is None
    with pytest.raises(ValueError, match="at least one row"):
        Rate(0, 0)


def test_recovery_and_average_as_the_paper_defines_them() -> None:
    # Sequential table: SFT's four final accuracies average to 61.21.
    finals = {"csqa": 36.04, "arc_c": 53.78, "mmlu": 74.82, "medqa": 80.19}
    assert round(average_task_accuracy(finals), 2) == 61.21
    assert recovery(100.0, 40.0) == 100.0
    assert recovery(30.0, 40.0) == pytest.approx(-100 / 6)
    with pytest.raises(ValueError, match="below 100"):
        recovery(100.0, 100.0)


@pytest.mark.real
def test_qwen3s_stored_split_and_a_model_that_never_says_a(data_dir: Path) -> None:
    stored = read_json(data_dir / "qwen3-0.6b-csqa.json")
    examples = [example for example in read_file(data_dir / "csqa.jsonl") if isinstance(example, Choice)]
    given = {id: "ABCD".index(letter) for id, letter in stored["predicted"].items()}
    before = [said(e.id, given[e.id], given[e.id] == e.answer) for e in examples]
    halves = split(examples, before)
    assert (len(halves.past), len(halves.new)) == (413, 683)
    assert {e.id for e in halves.past} == set(stored["correct"])
    assert answers(before) == {"A": 898, "B": 90, "C": 35, "D": 73}
    # Right wherever the answer is not A, and B instead of A.
    after = [said(e.id, e.answer or 1, e.answer != 0) for e in examples]
    table = flips(before, after)
    assert round(retention(table).percent, 1) == 35.8


QUESTIONS: list[Example] = [
    Choice(id=str(i), question=f"q{i}", choices=("w", "x", "y", "z")[: 3 + i % 2], answer=i % 3) for i in range(12)
]


def asked_by(choose: Any) -> Any:
    """Answers of a rule, certain of itself."""

    def ask(rows: Sequence[Example]) -> list[Prediction]:
        made = []
        for row in rows:
            assert isinstance(row, Choice)
            answer, count = choose(row), len(row.choices)
            scores = tuple(0.0 if i == answer else -9.0 for i in range(count))
            one = said(row.id, answer, answer == row.answer, confidence=0.9)
            made.append(replace(one, scores=scores, num_tokens=(1,) * count))
        return made

    return ask


def test_permuted_options_unmask_a_letter_and_leave_knowledge_alone() -> None:
    always_a = permuted(asked_by(lambda row: 0), QUESTIONS, "letter")
    assert always_a["mean"] == pytest.approx(100 * 12 / 42)
    assert always_a["consistent"] == Rate(0, 12).row()
    assert always_a["answers"] == {"A": 42}
    knows = permuted(asked_by(lambda row: row.answer), QUESTIONS, "letter")
    assert (knows["mean"], knows["consistent"], knows["averaged"]) == (100.0, *[Rate(12, 12).row()] * 2)
    likes_w = permuted(asked_by(lambda row: row.choices.index("w")), QUESTIONS, "letter")
    assert likes_w["consistent"] == Rate(12, 12).row()
    right = sum(q.right == "w" for q in QUESTIONS if isinstance(q, Choice))
    assert likes_w["averaged"] == Rate(right, 12).row()


def judged_by(name: str, text: str, example: Example) -> bool:
    judge = judges.judge(name)
    assert judge is not None
    return judge(text, example)


def free(response: str) -> FreeForm:
    return FreeForm(id="f", messages=(), response=response)


ANY = free("The capital is Jakarta.")


@pytest.mark.parametrize(
    ("name", "response", "text", "right"),
    [
        ("exact", "The capital is Jakarta.", "the capital is  Jakarta", True),
        ("exact", "The capital is Jakarta.", "Jakarta", False),
        ("json", "", '{"city": "Jakarta"}', True),
        ("json", "", 'Sure: {"city": "Jakarta"}', False),
        (r"regex:^Jakarta$", "", "It is Jakarta.", False),
        ("normalised", "The capital is Jakarta.", "THE  capital, is: Jakarta", True),
        ("normalised", "The capital is Jakarta.", "The capital was Jakarta.", False),
        ("contains", "The capital is Jakarta.", "Well, the capital is Jakarta, of course.", True),
        ("contains", "The capital is Jakarta.", "The capital is Jakartas", False),
        ("number", "The total is 1,250.", "2 + 3 is not it; 1250.0 it is", True),
        ("number", "42", "42 or 43", False),
        ("number", "-3", "The result is 3", False),
        ("number", "0.5", "one half", False),
        ("number:0.01", "3.1416", "about 3.14", True),
        ("number", "3.1416", "about 3.14", False),
        ("choice", "B", "The answer is (B).", True),
        ("choice", "B: blue", "A: red", False),
        ("choice", "B", "A good question. The answer is B.", True),
        ("choice", "B", "none of them", False),
    ],
)
def test_judges(name: str, response: str, text: str, right: bool) -> None:
    assert judged_by(name, text, free(response)) is right


@pytest.mark.parametrize(
    ("name", "body", "refusal"),
    [
        ("number", "", r"row f: the judge number failed .*blue.*choose another judge"),
        ("choice", "", r"row f: the judge choice failed .*blue.*choose another judge"),
        ("python:own_checks:it", "return 1 / 0", "row f: the judge python:own_checks:it failed with ZeroDivisionError"),
        ("python:own_checks:it", "return None", "the judge python:own_checks:it to return True or False, got None"),
        ("python:own_checks:it", "return 'yes'", "to return True or False, got 'yes'"),
        ("python:own_checks:it", "return len(text) < len(example.response)", ""),
    ],
)
def test_a_judge_that_cannot_judge_names_the_row_and_the_remedy(
    name: str, body: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_checks.py").write_text(f"def it(text, example):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_checks", raising=False)
    if not refusal:
        assert (judged_by(name, "7", free("blue")), judged_by(name, "a long text", free("blue"))) == (True, False)
        return
    with pytest.raises(ValueError, match=refusal):
        judged_by(name, "7", free("blue"))


def test_the_interval_of_a_weighted_mean_is_that_of_a_bootstrap() -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(5, 80, 60)
    rises = draw.normal(0.3, 0.4, 60)
    found = weighted(rises.tolist(), tokens.tolist())
    assert found.mean == pytest.approx(np.average(rises, weights=tokens))
    drawn = draw.integers(0, 60, (20_000, 60))
    means = (rises[drawn] * tokens[drawn]).sum(1) / tokens[drawn].sum(1)
    assert found.error == pytest.approx(means.std(), rel=0.05)
    assert found.interval is not None
    assert found.interval == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.015)
    assert weighted([2.0], [3]).error is None
    with pytest.raises(ValueError, match="at least one value"):
        weighted([], [])


def test_requirements_are_read() -> None:
    for text, metric, bound in (
        ("retention>=0.9", "retention", 0.9),
        (" Acquisition >= 1 ", "acquisition", 1.0),
        ("past-loss<=+0.05", "past-loss", 0.05),
        ("past-loss <= -0.1", "past-loss", -0.1),
        ("new-loss<=1.", "new-loss", 1.0),
    ):
        found = requirements.parse(text)
        assert (found.metric, found.bound) == (metric, bound)
        assert requirements.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "retention",
        "retention>=1.1",
        "retention<=0.9",
        "past-loss>=0",
        "new-loss<=-1",
        "loss<=1",
        "past-loss<=1e999",
    ],
)
def test_other_requirements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected retention>=SHARE or acquisition>=SHARE"):
        requirements.parse(text)


CHOICES = Measured(kind="retention", rows=100, right=80)
SPOKEN = Measured(kind="retention", rows=14, scored=14)
ONE = Measured(kind="retention", rows=1, scored=1)


@pytest.mark.parametrize(
    ("text", "part", "said"),
    [
        ("retention>=0.9", CHOICES, None),
        ("past-loss<=0.05", SPOKEN, None),
        ("acquisition>=0.5", CHOICES, "needs new rows, and there are none"),
        ("past-loss<=0.05", CHOICES, "needs past rows in free text, and these are multiple choice; require retention"),
        ("retention>=0.9", SPOKEN, "needs judged answers, and no judge was chosen for free text"),
        ("past-loss<=0.05", ONE, "needs an interval, and there is one past row"),
        ("retention>=0.9", Measured(kind="retention", rows=9, right=0), "answered none of 9 rows correctly"),
        ("acquisition>=0.1", Measured(kind="acquisition", rows=9, right=9), "answered none of 9 rows incorrectly"),
        ("retention>=0.9", Measured(kind="retention", rows=8, right=8), "which is 0.676 when all 8 rows are right"),
    ],
)
def test_a_requirement_that_cannot_be_judged_is_named_before_training(
    text: str, part: Measured, said: str | None
) -> None:
    found = requirements.possible(requirements.parse(text), [part])
    assert (found is None) if said is None else (found is not None and said in found)
    # Held-out past rows count before the anchors.
    anchors = Measured(kind="retention", rows=200, right=200, anchors=True)
    needed, held_out = requirements.parse("retention>=0.9"), Measured(kind="retention", rows=8, right=8)
    assert requirements.possible(needed, [anchors]) is None
    assert "0.676 when all 8" in str(requirements.possible(needed, [anchors, held_out]))


def test_a_schema_judges_structure(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema", reason="the extra 'schema' is not installed")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object", "required": ["city"]}))
    fits = judges.judge(f"schema:{file}")
    assert fits is not None
    assert fits('{"city": 1}', ANY)
    assert not fits('{"town": 1}', ANY)
    assert not fits("city", ANY)
    file.write_text('{"type": "no such type"}')
    with pytest.raises(ValueError, match="valid JSON schema"):
        judges.judge(f"schema:{file}")


@pytest.mark.parametrize("name", ["none", "fuzzy", "regex:(", "python:json", "python:json:nothing", "number:-1"])
def test_unknown_judges_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        judges.chosen(name)


def test_a_task_is_summed_up_per_label(tiny_llama: Any) -> None:
    interface = build("letter", tiny_llama.tokenizer)
    predictions, summary = evaluate_task(tiny_llama.model, interface, QUESTIONS, judge=judges.exact_match, name="t")
    assert summary["gold"] == {"A": 4, "B": 4, "C": 4}
    assert sum(summary["answers"].values()) == summary["rows"] == 12
    assert summary["accuracy"]["right"] == sum(p.right for p in predictions)
    assert summary["macro"] == pytest.approx(sum(r["percent"] for r in summary["labels"].values()) / 3)
    turned = permuted(partial(predict, tiny_llama.model, interface), QUESTIONS, "letter")
    assert sum(turned["answers"].values()) == 42
    with pytest.raises(ValueError, match="letter interface, got cloze"):
        permuted(partial(predict, tiny_llama.model, interface), QUESTIONS, "cloze")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, make_tiny: Any) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny = make_tiny("llama")
    save(tiny.model, tiny.tokenizer, folder)
    return folder


def run(*arguments: object) -> dict[str, Any]:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout)) if "--json" in arguments else {"text": result.stdout}


def written(path: Path, examples: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in examples))
    return path


def test_the_command_reports_tasks_and_permutations(saved: Path, tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "choices": ["w", "x", "y"], "answer": i % 3} for i in range(9)]
    task = written(tmp_path / "task.jsonl", rows)
    loaded = load(saved)
    base = predict(loaded.model, build("letter", loaded.tokenizer), read_file(task))
    report = run(saved, "--task", task, "--permute-options", "--json")
    (found,) = report["tasks"]
    assert found["accuracy"]["right"] == sum(prediction.right for prediction in base)
    assert sum(found["permuted"]["answers"].values()) == 27
    assert report["average"] == found["accuracy"]["percent"]

    with pytest.raises(ValueError, match="evaluates the harness's own tasks"):
        run(saved, "--task", task, "--through", "lm-eval", "--split", tmp_path / "split.json")
    with pytest.raises(ValueError, match="one task"):
        run(saved, "--task", task, "--task", task, "--split", tmp_path / "split.json")


def test_the_command_scores_free_text_and_several_tasks(saved: Path, tmp_path: Path) -> None:
    free = written(tmp_path / "free.jsonl", [{"prompt": f"Say {i}.", "response": f"{i}."} for i in range(3)])
    choice = written(tmp_path / "choice.jsonl", [{"question": "q", "choices": ["w", "x"], "answer": 0}])
    options = "--judge regex:. --set max_new_tokens=4 --limit 2 --json"
    report = run(saved, "--task", free, "--task", choice, *options.split())
    first, second = report["tasks"]
    assert (first["interface"], first["rows"], second["interface"]) == ("freeform", 2, "letter")
    assert first["responses"]["log_likelihood_per_token"] < 0
    accuracies = [first["accuracy"]["percent"], second["accuracy"]["percent"]]
    assert report["average"] == pytest.approx(sum(accuracies) / 2)
    assert "nats per token" in run(saved, "--task", free, "--set", "max_new_tokens=4")["text"]


def test_more_choices_than_letters(saved: Path, tmp_path: Path) -> None:
    rows = [{"question": "q", "choices": [f"c {j}" for j in range(28)], "answer": answer} for answer in (26, 27)]
    task = written(tmp_path / "many.jsonl", rows)
    with pytest.raises(ValueError, match=r"many-0001: expected 2 to 26 choices .* got 28; use the cloze interface"):
        run(saved, "--task", task, "--interface", "letter")
    [found] = run(saved, "--task", task, "--interface", "cloze", "--json")["tasks"]
    assert set(found["labels"]) == {"27", "28"}
