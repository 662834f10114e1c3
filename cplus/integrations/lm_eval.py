"""lm-evaluation-harness in the same process: its own tasks, prompts and metrics on a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from cplus.data.readers import MISSING, PREFIX, task_manager
from cplus.evaluation.statistics import Rate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run_tasks(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], *, limit: int | None = None
) -> dict[str, Any]:
    """The harness's results for its own tasks on a loaded model, zero-shot."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(MISSING) from error
    wrapped, finder = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16), task_manager(tasks)
    found = simple_evaluate(
        model=wrapped, tasks=list(tasks), task_manager=finder, limit=limit, num_fewshot=0, bootstrap_iters=0
    )
    assert found is not None, "only a worker process of a distributed run gets no results"
    return dict(found)


def evaluate_harness_task(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, *, limit: int | None = None
) -> dict[str, Any]:
    """A task as the harness itself evaluates it; the accuracy is its `acc`, or else its `exact_match`."""
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
