"""Data: tasks by name, the hub, splits, anchors, and rows that fit the window."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cplus import models
from cplus.cli.app import app
from cplus.core.rows import Encoded, fit
from cplus.data import tasks
from cplus.data.examples import Choice, FreeForm, Prediction
from cplus.data.readers import read_file
from cplus.data.tasks import TASKS, Split, cached_split, draw_anchors, draw_mixture, load_task, read_split, split, stack

ROW = {"id": "q1", "question": "Is ice cold?", "choices": ["yes", "no"], "answer": 0}


def predicted(example: Choice, answer: int) -> Prediction:
    return Prediction(
        id=example.id, answer=answer, correct=answer == example.answer, confidence=1.0, scores=(), num_tokens=()
    )


# Tasks


def test_task_from_folder_file_and_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "medqa.jsonl").write_text(json.dumps(ROW))
    monkeypatch.setenv("CPLUS_DATA", str(tmp_path))
    task = load_task("medqa")
    assert (task.interface, task.wording, len(task.examples)) == ("letter", "medqa", 1)
    assert load_task("medqa", tmp_path).fingerprint == task.fingerprint
    toy = load_task("harbours")
    assert (toy.interface, toy.detected) == ("cloze", "")
    assert len({example.id for example in toy.examples}) == len(toy.examples) > 100


def test_requests_for_json_are_built_in_and_right(tmp_path: Path) -> None:
    task = load_task("json_requests", tmp_path)  # a folder of data does not hide it
    assert (len({example.id for example in task.examples}), task.interface) == (96, "freeform")
    for example in task.examples:
        assert isinstance(example, FreeForm)
        said = json.loads(example.response)
        thing = next(key for key in said if key != "name")
        assert example.messages[-1].content.endswith(f"{said['name']} has {said[thing]} {thing}.")


def test_missing_and_unknown_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"csqa\.jsonl: task 'csqa' is not there.*data_dir or CPLUS_DATA.*hub"):
        load_task("csqa", tmp_path)
    monkeypatch.delenv("CPLUS_DATA", raising=False)
    with pytest.raises(ValueError, match=r"the hub: task 'instruct' is not there.*instruct\.jsonl, .*with data_dir"):
        load_task("instruct")
    with pytest.raises(ValueError, match="unknown task 'cqsa'; did you mean csqa"):
        load_task("cqsa")
    with pytest.raises(ValueError, match=r"mine\.jsonl: there is no such file"):
        load_task("./mine.jsonl")


HUB_ROWS: dict[str, dict[str, Any]] = {
    "csqa": {"id": "x", "question": "q", "choices": {"label": ["A", "B"], "text": ["a", "right"]}, "answerKey": "B"},
    "arc_c": {"id": "x", "question": "q", "choices": {"label": ["1", "2"], "text": ["a", "right"]}, "answerKey": "2"},
    "mmlu": {"question": "q", "choices": ["a", "right"], "answer": 1},
    "medqa": {"question": "q", "options": {"A": "a", "B": "right"}, "answer_idx": "B"},
    "hellaswag": {"activity_label": "x", "ctx": "q", "endings": ["a", "right"], "label": "1"},
    "piqa": {"goal": "q", "sol1": "a", "sol2": "right", "label": 1},
    "winogrande": {"sentence": "q", "option1": "a", "option2": "right", "answer": "2"},
    "openbookqa": {"question_stem": "q", "choices": {"label": ["A", "B"], "text": ["a", "right"]}, "answerKey": "B"},
    "boolq": {"passage": "p", "question": "q", "answer": False},
    "social_iqa": {"context": "c", "question": "q", "answerA": "a", "answerB": "right", "answerC": "c", "label": "2"},
    "sciq": {"question": "q", "correct_answer": "right", "distractor1": "a", "distractor2": "b", "distractor3": "c"},
    "truthfulqa": {"question": "q", "mc1_targets": {"choices": ["right", "a", "b"], "labels": [1, 0, 0]}},
    "copa": {"premise": "p", "question": "cause", "choice1": "a", "choice2": "right", "label": 1},
    "gsm8k": {"question": "q", "answer": "right"},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in of the hub: what each data set holds, by its place; any other is out of reach."""
    sets: dict[str, Any] = {}

    def load_dataset(path: str, config: str | None, split: str | None) -> Any:
        place = f"{path}{':' if config else ''}{config or ''}{'@' if split else ''}{split or ''}"
        if place not in sets:
            raise ConnectionError("no network")
        return sets[place]

    errors = types.SimpleNamespace(DatasetsError=RuntimeError)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, exceptions=errors))
    monkeypatch.delenv("CPLUS_DATA", raising=False)
    return sets


@pytest.mark.parametrize("name", HUB_ROWS)
def test_hub_rows_in_our_schema(name: str, hub: dict[str, Any]) -> None:
    hub[TASKS[name]] = [HUB_ROWS[name]]
    (example,) = load_task(name).examples
    said = example.response if isinstance(example, FreeForm) else example.right
    assert said == ("no" if name == "boolq" else "right")


def test_a_set_of_the_hub_or_a_folder_of_files(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub |= {"some/set": {"train": [ROW], "test": [ROW]}, "some/one": {"train": [ROW]}, f"{tmp_path}@test": [ROW]}
    for place in ("some/one", f"{tmp_path}@test"):
        assert [example.id for example in load_task(place).examples] == ["q1"]
    with pytest.raises(ValueError, match=r"has the splits train, test; choose one, e\.g\. some/set@train"):
        load_task("some/set")
    hub["some/set@test"] = [{"label": "a"}]
    with pytest.raises(ValueError, match=r"some/set: row 1: expected the keys"):
        load_task("some/set@test")
    with pytest.raises(ValueError, match="could not read the data set 'far/away': no network; check"):
        load_task("far/away")
    hub[TASKS["piqa"]] = [HUB_ROWS["piqa"], {"goal": "q", "sol1": "a", "solution2": "b", "label": 1}]
    with pytest.raises(ValueError, match=r"row 2: not in the known form .*'sol2'.*; it has the keys goal, label, sol1"):
        load_task("piqa")


def test_a_folder_with_a_damaged_file_and_a_hub_without_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.json").write_text('{"question": ')
    with pytest.raises(ValueError, match=r"could not read the data set .*: JSON parse error.*; check its name"):
        load_task(str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delenv("CPLUS_DATA", raising=False)
    with pytest.raises(ValueError, match=r"needs the datasets package: pip install 'cplus\[data\]'"):
        load_task("csqa")


@pytest.mark.real
def test_every_named_set_reads(data_dir: Path) -> None:
    sizes = {name: len(load_task(name, data_dir).examples) for name in TASKS}
    assert (sizes["csqa"], sizes["arc_c"], sizes["mmlu"], sizes["medqa"]) == (1096, 1266, 1553, 1272)
    assert sum(sizes[name] for name in tasks.EXTERNAL) == 9880
    assert sizes["instruct_short"] == 300


# Split and anchors

EXAMPLES = [Choice(id=f"q{i}", question=f"Question {i}?", choices=("a", "b"), answer=i % 2) for i in range(40)]


def always_a() -> Split:
    return split(EXAMPLES, [predicted(example, 0) for example in EXAMPLES])


def test_a_split_is_stored_once_for_each_model_data_interface_and_stack(tmp_path: Path) -> None:
    asked = []

    def cached(examples: Sequence[Choice] = EXAMPLES, **changes: Any) -> Split:
        def predict() -> list[Prediction]:
            asked.append(1)
            return [predicted(example, 0) for example in examples]

        setting = {"model_fingerprint": "f" * 64, "interface": "letter", "stack": stack()}
        return cached_split(tmp_path, examples, predict, **(setting | changes))

    made = cached()
    assert made == cached() == always_a()
    assert [example.id for example in made.past] == [f"q{i}" for i in range(0, 40, 2)]
    assert [example.id for example in made.new] == [f"q{i}" for i in range(1, 40, 2)]
    assert len(asked) == 1
    [path] = tmp_path.glob("split-*.json")
    for changes in ({"model_fingerprint": "0" * 64}, {"interface": "cloze"}, {"stack": stack(compute_dtype="bf16")}):
        cached(**changes)
    cached(EXAMPLES[::-1])
    assert len(asked) == 5
    with pytest.raises(ValueError, match="one prediction for each of 39 examples, got 40"):
        read_split(path, EXAMPLES[1:])
    path.write_text('{"model_fingerprint": 1}')
    with pytest.raises(ValueError, match=r"expected a stored split, but it does not read .*; split again"):
        cached()


def test_anchors_are_nested_and_seeded_and_mixtures_share_their_prefixes() -> None:
    made = always_a()
    budgets = [draw_anchors(made, size, seed=3) for size in (4, 8, 16)]
    assert budgets[2][:8] == budgets[1]
    assert budgets[1][:4] == budgets[0]
    assert set(budgets[2]) <= set(made.past)
    assert len(set(draw_anchors(made, 20, seed=3))) == 20
    assert draw_anchors(made, 16, seed=4) != budgets[2]
    with pytest.raises(ValueError, match="asked for 21 initially correct examples as anchors, but there are 20; draw"):
        draw_anchors(made, 21, seed=3)
    six = draw_mixture(made, correct=6, wrong=2, seed=3)
    assert six[:6] == budgets[1][:6]
    assert draw_mixture(made, correct=0, wrong=8, seed=3)[:2] == six[6:]
    assert set(six[6:]) <= set(made.new)


def test_the_command_stores_a_split(tiny_llama: Any, tmp_path: Path) -> None:
    models.save(tiny_llama.model, tiny_llama.tokenizer, tmp_path / "m")
    given = [{**ROW, "id": f"q{i}", "question": f"Is it {i}?", "answer": i % 2} for i in range(12)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, [*given, {**ROW, "id": "long", "question": "why " * 600}])))
    arguments = ["evaluate", str(tmp_path / "m"), "--task", str(rows), "--split", str(tmp_path / "split.json")]
    refused = CliRunner().invoke(app, arguments)
    assert "1 of 13 rows are longer than the limit of 512" in str(refused.exception)
    assert not (tmp_path / "split.json").exists()
    done = CliRunner().invoke(app, [*arguments, "--set", "too_long=exclude", "--json"])
    [found] = json.loads(done.stdout)["tasks"]
    report = found["split"]
    assert (report["past"] + report["new"], found["excluded"], found["interface"]) == (12, 1, "letter")
    stored = read_split(tmp_path / "split.json", read_file(rows)[:-1])
    assert len(stored.past) == report["past"] == sum(p.right for p in stored.predictions)
    assert json.loads((tmp_path / "split.json").read_text())["stack"]["compute_dtype"] == "float32"


# Tokens and the window


def test_rows_that_teach_nothing_are_refused_and_those_longer_than_the_window_counted() -> None:
    for prompt, target, counts in (((), (1,), "0 and 1"), ((1, 2), (), "2 and 0")):
        with pytest.raises(ValueError, match=f"at least one prompt token and one target token, got {counts}"):
            Encoded(prompt, target)
    for scored in ((True,), (False, False)):
        with pytest.raises(ValueError, match="expected to score some of 2 target tokens, got"):
            Encoded((1,), (2, 3), scored)
    assert Encoded((1,), (2, 3)).labels == (2, 3)
    assert Encoded((1,), (2, 3), (False, True)).labels == (-100, 3)
    rows = [Encoded((1,) * 5, (2,)), Encoded((1,) * 9, (2,)), Encoded((1,) * 4, (2, 2))]
    assert fit(rows, window=9) == [0, 1, 2]
    assert fit(rows, window=5, policy="exclude") == [0, 2]
    with pytest.raises(ValueError, match=r"1 of 3 rows .* limit of 5 tokens \(the longest has 9; the first is row 2\)"):
        fit(rows, window=5)
