"""Tasks of lm-evaluation-harness, by the harness's own names, as rows in this project's schema."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cplus.data.readers import Found, collect

PREFIX = "lm-eval:"
MISSING = "this needs lm-evaluation-harness: pip install 'cplus[lm-eval]'"


def read(name: str) -> Found:
    """The rows that the harness evaluates for a task, a group or a task's YAML file; zero-shot, in its order."""
    rows = ((f"{PREFIX}{task.task_name}: row {i}", row) for task in _tasks(name) for i, row in _rows(task))
    return collect(rows, name=Path(name).stem, source=f"{PREFIX}{name}")


def question(text: str) -> str:
    r"""The bare question: the words around it are the interfaces' own.

    >>> question("Question: Is ice cold?\nAnswer:")
    'Is ice cold?'
    """
    return text.strip().removeprefix("Question:").removesuffix("Answer:").strip()


def task_manager(tasks: Sequence[str | dict[str, Any]]) -> Any:
    """The harness's finder of tasks; it reads the harness's own task files only where a task may refer to them."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False) if all(map(_self_contained, tasks)) else _with_defaults(TaskManager)


def _self_contained(task: str | dict[str, Any]) -> bool:
    """Whether a task is a configuration or a file that is no group and includes no other file."""
    if isinstance(task, dict):
        return not task.keys() & {"group", "include"}
    return Path(task).is_file() and not re.search(r"^(group|include)\s*:", Path(task).read_text(), re.MULTILINE)


@cache
def _with_defaults(manager: type[Any]) -> Any:
    """Once per process: reading the harness's thousands of task files takes 10 s of CPU time."""
    return manager()


def _tasks(name: str) -> list[Any]:
    try:
        manager = task_manager([name])
    except ImportError as error:
        raise ImportError(f"{PREFIX}{name}: {MISSING}") from error
    if name not in manager.all_tasks and not Path(name).is_file():
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "'lm-eval ls tasks' lists what there is"
        raise ValueError(f"lm-evaluation-harness knows no task {name!r}; {hint}")
    try:
        return list(manager.load([name])["tasks"].values())
    except OSError as error:
        raise ValueError(f"could not read the data of {PREFIX}{name}: {error}; check the network") from error


def _rows(task: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """A task's questions with choices, or its prompts with responses; what is neither is refused."""
    kind = task.get_config("output_type")
    if kind not in ("multiple_choice", "generate_until") or getattr(task, "multiple_input", False):
        reason = "its choices differ in the question" if kind == "multiple_choice" else f"its output type is {kind}"
        raise ValueError(
            f"{PREFIX}{task.task_name} has no rows of one question and its answers: {reason}; the harness itself can "
            f"ask it: cplus evaluate MODEL --task {PREFIX}{task.task_name} --through lm-eval"
        )
    rewrite = _choice if kind == "multiple_choice" else _response
    for number, doc in enumerate(task.eval_docs, start=1):
        yield number, rewrite(task, doc)


def _choice(task: Any, doc: Any) -> Mapping[str, Any]:
    choices, answer = [str(choice).strip() for choice in task.doc_to_choice(doc)], task.doc_to_target(doc)
    if isinstance(answer, str) and answer.strip() in choices:
        answer = choices.index(answer.strip())
    return {"question": question(str(task.doc_to_text(doc))), "choices": choices, "answer": answer}


def _response(task: Any, doc: Any) -> Mapping[str, Any]:
    target = task.doc_to_target(doc)
    if isinstance(target, list) and target:  # several wordings of the right answer: the first is the usual one
        target = target[0]
    response = target.strip() if isinstance(target, str) else target
    return {"prompt": str(task.doc_to_text(doc)).strip(), "response": response}
