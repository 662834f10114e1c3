"""`cplus evaluate`: how well a model answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cplus import models
from cplus.base.terminal import clean, output, print_json, print_table
from cplus.cli import options as names
from cplus.cli.options import EVALUATION, Json, Model, given, with_settings
from cplus.data.readers import PREFIX
from cplus.data.tasks import load_task, save_split, stack
from cplus.data.tasks import split as divide
from cplus.evaluation import judges
from cplus.evaluation.changes import average_task_accuracy, permuted
from cplus.jobs.settings import settings


@with_settings(("interface", "judge"), EVALUATION)
def evaluate(
    model: Model,
    task: Annotated[
        list[str],
        typer.Option(
            help="A named task, a file, owner/name on the hub or lm-eval:NAME; repeatable.", autocompletion=names.tasks
        ),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first rows of each task.")] = None,
    permute_options: Annotated[
        bool, typer.Option("--permute-options", help="Letters: also evaluate every cyclic permutation of the options.")
    ] = False,
    split: Annotated[
        Path | None, typer.Option(help="Write the rows answered correctly (past) and incorrectly (new) as JSON here.")
    ] = None,
    through: Annotated[
        Literal["cplus", "lm-eval"],
        typer.Option(
            help="lm-eval: let lm-evaluation-harness evaluate its own tasks, lm-eval:NAME, with its own metrics."
        ),
    ] = "cplus",
    json: Json = False,
    **options: Any,
) -> None:
    """Evaluate a model on one or more tasks: accuracy with intervals, and the answers given."""
    config = settings({"judge": "exact", **given(options, EVALUATION), "model": model, "split": task[0]})
    names.check({"model": model, "task": task})
    if split and len(task) > 1:
        raise ValueError(f"--split is about the answers to one task, got {len(task)} tasks")
    theirs = task if through == "lm-eval" else []
    if theirs and (split or permute_options or not all(name.startswith(PREFIX) for name in theirs)):
        raise ValueError(
            f"--through lm-eval evaluates the harness's own tasks, {PREFIX}NAME, and reports accuracies only; leave it "
            "out, or --split and --permute-options"
        )
    judged = judges.chosen(config.judge)
    found = [load_task(name, config.data_dir) for name in task if name not in theirs]

    from cplus.evaluation.task import evaluate_task
    from cplus.jobs.check import given_rows
    from cplus.models.scoring import predict

    loaded = models.load(model, device=config.device)
    summaries = []
    with models.computing(config.compute_dtype, loaded.device):
        for each, rows in zip(found, given_rows(found, limit, config)(loaded, ()), strict=True):
            predictions, summary = evaluate_task(
                loaded.model,
                rows.interface,
                rows.examples,
                judge=judged,
                name=rows.name,
                max_new_tokens=config.max_new_tokens,
            )
            summary["excluded"] = len(each.examples[:limit]) - len(rows.examples)
            if permute_options:
                choose = partial(predict, loaded.model, rows.interface, what=f"{rows.name}: permuted")
                summary["permuted"] = permuted(choose, rows.examples, rows.interface.name)
            if split is not None:
                made = divide(rows.examples, predictions)
                where = stack(device=loaded.device.type, compute_dtype=config.compute_dtype)
                save_split(
                    made, split, model_fingerprint=loaded.fingerprint, interface=rows.interface.name, stack=where
                )
                counts = {"past": len(made.past), "new": len(made.new)}
                summary["split"] = {**counts, "data_fingerprint": made.data_fingerprint, "out": str(split)}
            summaries.append(summary)
        for name in theirs:
            from cplus.integrations.lm_eval import evaluate_harness_task

            own = name.removeprefix(PREFIX)
            summaries.append(evaluate_harness_task(loaded.model, loaded.tokenizer, own, limit=limit))
    accuracies = {each["task"]: each["accuracy"]["percent"] for each in summaries}
    report = {
        "model": model,
        "model_fingerprint": loaded.fingerprint,
        "compute_dtype": config.compute_dtype,
        "scored_by": through,
        "tasks": summaries,
        "average": average_task_accuracy(accuracies),
    }
    print_json(report) if json else _show(report)


def _show(report: dict[str, Any]) -> None:
    rows = []
    for each in report["tasks"]:
        rate, excluded = each["accuracy"], f" ({each['excluded']} too long)" if each["excluded"] else ""
        interval = f"{rate['low']:.1f} to {rate['high']:.1f}"
        macro = f"{each['macro']:.1f}" if "macro" in each else ""
        answers = " ".join(f"{label} {count}" for label, count in each.get("answers", {}).items())
        shown = (f"{each['rows']}{excluded}", f"{rate['percent']:.1f}", interval, macro, answers)
        rows.append((clean(each["task"]), each["interface"], *shown))
    output.print(clean(report["model"]))
    columns = ("task", "interface", "rows", "accuracy", "95 %", "macro", "answers")
    print_table(columns, rows, left=("interface", "answers"))
    if len(report["tasks"]) > 1:
        output.print(f"average over tasks {report['average']:.1f}")
    for each in report["tasks"]:
        for name, text in _DETAILS.items():
            if name in each:
                output.print(text.format_map(each[name]))
        if "harness" in each:
            own = ", ".join(f"{key} {value:.1f}" for key, value in each["harness"].items())
            output.print(f"lm-evaluation-harness: {own}")


_DETAILS = {
    "by_other_rules": "choices compared by mean per token; by sum the accuracy is {sum:.1f}, by sum per character "
    "{per_character:.1f}",
    "permuted": "options permuted: accuracy {mean:.1f}, the same option every time in {consistent[percent]:.1f} % of "
    "the questions, averaged over permutations {averaged[percent]:.1f}",
    "responses": "given responses: {log_likelihood_per_token:.3f} nats per token (perplexity {perplexity:.1f}, "
    "{tokens:,} tokens)",
    "split": "past (correct) {past}, new (incorrect) {new}; written to {out}",
}
