"""lm-evaluation-harness in the same process: our rows and prompt scored by it, and its own tasks on a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from torch import nn

from cplus.data.examples import Choice, Prediction, to_row
from cplus.data.interfaces import Letter
from cplus.data.prompts import Chat
from cplus.data.readers import MISSING, PREFIX, task_manager
from cplus.evaluation.changes import answered
from cplus.evaluation.statistics import Rate
from cplus.models.scoring import Score, chosen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cplus.evaluation.task import BoundTask


def harness(model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 16, begun: bool = False) -> Any:
    """The harness's wrapper of a loaded model; with `begun` prompts hold their special tokens already."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(MISSING) from error
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, add_bos_token=False if begun else None)


def run_tasks(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str | dict[str, Any]],
    *,
    limit: int | None = None,
    begun: bool = False,
) -> dict[str, Any]:
    """The harness's results for its own task names, or for tasks given as configurations."""
    wrapped = harness(model, tokenizer, begun=begun)
    from lm_eval import simple_evaluate

    finder = task_manager(tasks)
    found = simple_evaluate(
        model=wrapped, tasks=list(tasks), task_manager=finder, limit=limit, num_fewshot=0, bootstrap_iters=0
    )
    assert found is not None, "only a worker process of a distributed run gets no results"
    return dict(found)


def cloze_task(name: str, examples: Sequence[Choice]) -> dict[str, Any]:
    """Rows as a task of the harness, with the prompt of the cloze interface."""
    rows = [to_row(example) for example in examples]
    return _multiple_choice(name, rows, text="Question: {{question}}\nAnswer:", choice="choices", delimiter=" ")


def letter_task(name: str, interface: Letter, examples: Sequence[Choice]) -> dict[str, Any]:
    """Rows as a task of the harness, each with the letter interface's own prompt and the letters as its choices.

    The harness tokenises prompt and letter as one text; where that gives other tokens it would score another prompt.
    """
    for example in examples:
        joint = interface.form.tokens(interface.text(example) + interface.form.lead + "A")
        if joint != interface.prompt(example) + interface.candidates(example)[0]:
            raise ValueError(
                f"{example.id}: expected the tokens of the prompt and then of the letter, but the harness tokenises "
                "both as one text, which this tokenizer splits differently; leave out --through lm-eval"
            )
    rows = [
        {
            **to_row(example),
            "asked": interface.text(example),
            "letters": list(ascii_uppercase[: len(example.choices)]),
        }
        for example in examples
    ]
    return _multiple_choice(name, rows, text="{{asked}}", choice="letters", delimiter=interface.form.lead)


def _multiple_choice(
    name: str, rows: list[dict[str, Any]], *, text: str, choice: str, delimiter: str
) -> dict[str, Any]:
    from datasets import Dataset

    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": text,
        "doc_to_choice": choice,
        "doc_to_target": "answer",
        "target_delimiter": delimiter,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def evaluate_with_harness(model: nn.Module, task: BoundTask) -> tuple[list[Prediction], dict[str, Any]]:
    """A multiple-choice task scored by the harness: answers by our rule from its log-likelihoods, and a summary."""
    interface, name, begun = task.interface, f"cplus_{task.name}", False
    examples = [example for example in task.examples if isinstance(example, Choice)]
    if isinstance(interface, Letter):
        asked, begun = letter_task(name, interface, examples), isinstance(interface.form, Chat)
    elif interface.name == "cloze":
        asked = cloze_task(name, examples)
    else:
        raise ValueError(f"the harness can score the interfaces cloze and letter, got {interface.name}")
    found = run_tasks(model, interface.tokenizer, [asked], begun=begun)
    predictions = _predictions(task, examples, found["samples"][name])
    own = {key.partition(",")[0]: 100 * value for key, value in found["results"][name].items() if ",none" in key}
    summary: dict[str, Any] = {"task": task.name, "interface": interface.name}
    summary |= answered(predictions, examples)
    return predictions, {**summary, "harness": {key: own[key] for key in ("acc", "acc_norm")}}


def evaluate_harness_task(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, *, limit: int | None = None
) -> dict[str, Any]:
    """A task as the harness itself evaluates it, zero-shot; the accuracy is its `acc`, or else its `exact_match`."""
    found = run_tasks(model, tokenizer, [name], limit=limit)
    samples = [sample for own in found["samples"].values() for sample in own if sample["filter"] == own[0]["filter"]]
    metric = next((key for key in ("acc", "exact_match") if all(key in sample for sample in samples)), None)
    if metric is None:
        reported = ", ".join(sorted({str(key) for sample in samples for key in sample["metrics"]}))
        raise ValueError(f"{PREFIX}{name}: expected acc or exact_match for each row, but the task reports {reported}")
    numbers = [key for key in samples[0]["metrics"] if all(isinstance(s.get(key), int | float) for s in samples)]
    means = {key: [float(sample[key]) for sample in samples] for key in numbers}
    return {
        "task": f"{PREFIX}{name}",
        "interface": "lm-eval",
        "rows": len(samples),
        "accuracy": Rate(round(sum(means[metric])), len(samples)).row(),
        "harness": {key: 100 * sum(values) / len(values) for key, values in means.items()},
        "excluded": 0,
    }


def _predictions(task: BoundTask, examples: Sequence[Choice], samples: Sequence[dict[str, Any]]) -> list[Prediction]:
    """Our rule, the mean over tokens, applied to the harness's sums."""
    sums = {sample["doc"]["id"]: [float(response[0][0]) for response in sample["resps"]] for sample in samples}
    return [
        chosen(
            example,
            tuple(
                Score(total, len(tokens))
                for total, tokens in zip(sums[example.id], task.interface.candidates(example), strict=True)
            ),
        )
        for example in examples
    ]
