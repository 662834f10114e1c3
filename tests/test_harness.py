"""The harness's task names are taken wherever tasks are named; a stand-in has tasks of every kind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cplus.data.examples import Choice, FreeForm
from cplus.data.interfaces import build
from cplus.data.tasks import load_task
from cplus.evaluation.task import evaluate_task
from cplus.integrations.lm_eval import evaluate_harness_task

DOCS = [
    {"q": "Is ice cold?", "options": ["yes", "no"], "gold": 0},
    {"q": "Is fire cold?", "options": ["yes", "no"], "gold": 1},
]


class Stored:
    """A task with the parts of the harness's that are read."""

    def __init__(self, name: str, kind: str = "multiple_choice", multiple_input: int = 0) -> None:
        self.task_name, self.kind, self.multiple_input = name, kind, multiple_input
        self.eval_docs = DOCS

    def get_config(self, key: str) -> str:
        assert key == "output_type"
        return self.kind

    def doc_to_text(self, doc: dict[str, Any]) -> str:
        return f"Question: {doc['q']}\nAnswer:"

    def doc_to_choice(self, doc: dict[str, Any]) -> list[str]:
        return list(doc["options"])

    def doc_to_target(self, doc: dict[str, Any]) -> Any:
        if self.task_name == "wordings":
            return [f" {doc['options'][doc['gold']]} ", "as you like"]
        return doc["options"][doc["gold"]] if self.kind == "generate_until" or doc["gold"] else doc["gold"]


TASKS = {
    "ice": [Stored("ice")],
    "told": [Stored("told", "generate_until")],
    "both": [Stored("first"), Stored("second")],
    "gaps": [Stored("gaps", multiple_input=2)],
    "stream": [Stored("stream", "loglikelihood_rolling")],
    "wordings": [Stored("wordings", "generate_until")],
    "away": [],
}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    class TaskManager:
        all_tasks = tuple(TASKS)

        def load(self, names: list[str]) -> dict[str, Any]:
            if "away" in names:
                raise ConnectionError("the hub is out of reach")
            return {"tasks": {task.task_name: task for name in names for task in TASKS[name]}}

    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.tasks"].TaskManager = TaskManager  # type: ignore[attr-defined]


@pytest.mark.usefixtures("harness")
def test_a_task_of_the_harness_is_a_task() -> None:
    task = load_task("lm-eval:ice")
    assert (task.name, task.interface) == ("lm-eval:ice", "cloze")
    assert task.examples == (
        Choice(id="ice-0001", question="Is ice cold?", choices=("yes", "no"), answer=0),
        Choice(id="ice-0002", question="Is fire cold?", choices=("yes", "no"), answer=1),
    )
    for name in ("told", "wordings"):
        free = load_task(f"lm-eval:{name}")
        assert free.interface == "freeform"
        assert [row.response for row in free.examples if isinstance(row, FreeForm)] == ["yes", "no"]
    assert len(load_task("lm-eval:both").examples) == 4


@pytest.mark.usefixtures("harness")
def test_what_is_no_row_of_question_and_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, sentence: str, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=sentence):
            load_task(name)

    refused("lm-eval:icy", "knows no task 'icy'; did you mean ice")
    refused("lm-eval:q", "knows no task 'q'; 'lm-eval ls tasks' lists what there is")
    refused("lm-eval:away", "could not read the data of lm-eval:away: the hub is out of reach; check the")
    refused("lm-eval:gaps", "its choices differ in the question; the harness itself can ask it")
    refused("lm-eval:stream", r"output type is loglikelihood_rolling.*--task lm-eval:stream --through lm-eval")
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    extra = r"lm-eval:ice: this needs lm-evaluation-harness: pip install 'cplus\[lm-eval\]'"
    refused("lm-eval:ice", extra, ImportError)
    refused("icebergs", r"unknown task 'icebergs'.*or lm-eval:NAME")


def test_the_real_harness_reads_and_asks_a_task_of_its_own(tmp_path: Path, tiny_llama: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    place = tmp_path / "ice.yaml"
    place.write_text(
        f"task: ice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {rows}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "Question: {{q}}\\nAnswer:"\ndoc_to_choice: options\n'
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    task = load_task(f"lm-eval:{place}")
    assert [row.question for row in task.examples if isinstance(row, Choice)] == ["Is ice cold?", "Is fire cold?"]
    assert [row.answer for row in task.examples if isinstance(row, Choice)] == [0, 1]
    found = evaluate_harness_task(tiny_llama.model, tiny_llama.tokenizer, str(place))
    assert found["rows"] == 2
    assert found["harness"]["acc"] == found["accuracy"]["percent"]
    bound = build("cloze", tiny_llama.tokenizer)
    ours = evaluate_task(tiny_llama.model, bound, task.examples, judge=None, name="ice")[1]["by_other_rules"]
    assert found["harness"]["acc"] == pytest.approx(ours["sum"])
    assert found["harness"]["acc_norm"] == pytest.approx(ours["per_character"])
