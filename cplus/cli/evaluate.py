"""`cplus evaluate`: how well a model answers, and what changed since."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cplus.cli import options

if TYPE_CHECKING:
    from cplus.evaluation.task import BoundTask
    from cplus.models import Loaded


def evaluate(
    model: options.Model,
    task: Annotated[
        list[str],
        typer.Option(
            help="A named task, a file, owner/name on the hub or lm-eval:NAME; repeatable.",
            autocompletion=options.tasks,
        ),
    ],
    interface: options.InterfaceName = None,
    data_dir: options.DataDir = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first rows of each task.")] = None,
    permute_options: Annotated[
        bool, typer.Option("--permute-options", help="Letters: also evaluate every cyclic permutation of the options.")
    ] = False,
    judge: options.Judge = "exact",
    max_new_tokens: options.MaxNewTokens = 256,
    against: Annotated[
        Path | None, typer.Option(help="Predictions stored by 'cplus split': print what was kept, lost and gained.")
    ] = None,
    through: Annotated[
        Literal["cplus", "lm-eval"],
        typer.Option(
            help="lm-eval: score cloze and letters with lm-evaluation-harness, and lm-eval:NAME with its own metrics."
        ),
    ] = "cplus",
    plain: options.Plain = False,
    too_long: options.TooLong = "refuse",
    device: options.Device = "auto",
    compute_dtype: options.ComputeDtype = "float32",
    json: options.Json = False,
) -> None:
    """Evaluate a model on one or more tasks: accuracy with intervals, answers given and changes."""
    options.check({"model": model, "task": task})

    from cplus import models
    from cplus.base.terminal import print_json
    from cplus.data import interfaces, readers
    from cplus.data.tasks import load_task
    from cplus.evaluation import judges
    from cplus.evaluation.changes import average_task_accuracy
    from cplus.evaluation.task import BoundTask
    from cplus.models.scoring import fitting

    if against is not None and len(task) > 1:
        raise ValueError(f"--against compares one task with stored predictions of it, got {len(task)} tasks")
    if through == "lm-eval" and (against is not None or permute_options):
        raise ValueError("--through lm-eval reports accuracies only; leave out --against and --permute-options")
    judged = judges.chosen(judge)
    own = [name for name in task if through == "lm-eval" and name.startswith(readers.PREFIX)]
    found = [load_task(name, data_dir) for name in task if name not in own]
    loaded = models.load(model, device=device)
    summaries = []
    with models.computing(compute_dtype, loaded.device):
        for each in found:
            bound = interfaces.build(
                interface or each.interface, loaded.tokenizer, wording=each.wording, chat=not plain
            )
            rows = each.examples[:limit]
            kept = tuple(fitting(bound, rows, loaded.window, too_long))
            if not kept:
                raise ValueError(
                    f"{each.name}: none of {len(rows)} rows fits the model's window of {loaded.window} tokens"
                )
            asked = BoundTask(name=each.name, interface=bound, examples=kept, judge=judged)
            summary = _summary(loaded, asked, through, permute_options, against, max_new_tokens)
            summaries.append({**summary, "excluded": len(rows) - len(kept)})
        for name in own:
            summaries.append(_asked_by_harness(loaded, name, limit))
    accuracies = {each["task"]: each["accuracy"]["percent"] for each in summaries}
    report = {
        "model": model,
        "model_fingerprint": loaded.fingerprint,
        "compute_dtype": compute_dtype,
        "scored_by": through,
        "tasks": summaries,
        "average": average_task_accuracy(accuracies),
    }
    print_json(report) if json else _show(report)


def _asked_by_harness(loaded: Loaded, name: str, limit: int | None) -> dict[str, Any]:
    from cplus.data.readers import PREFIX
    from cplus.integrations.lm_eval import evaluate_harness_task

    return evaluate_harness_task(loaded.model, loaded.tokenizer, name.removeprefix(PREFIX), limit=limit)


def _summary(
    loaded: Loaded, asked: BoundTask, through: str, permute: bool, before: Path | None, max_new_tokens: int
) -> dict[str, Any]:
    from cplus.evaluation.task import against, evaluate_permuted, evaluate_task

    if through == "lm-eval":
        from cplus.integrations.lm_eval import evaluate_with_harness

        return evaluate_with_harness(loaded.model, asked)[1]
    predictions, summary = evaluate_task(loaded.model, asked, max_new_tokens=max_new_tokens)
    if permute:
        summary["permuted"] = evaluate_permuted(loaded.model, asked)
    if before is not None:
        summary["against"] = against(before, asked, predictions)
    return summary


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    from cplus.base.terminal import clean, output

    table = Table(title=clean(report["model"]), title_justify="left")
    for column in ("task", "interface", "rows", "accuracy", "95 %", "macro", "answers"):
        table.add_column(column, justify="left" if column in ("task", "interface", "answers") else "right")
    for each in report["tasks"]:
        rate = each["accuracy"]
        table.add_row(
            clean(each["task"]),
            each["interface"],
            str(each["rows"]) + (f" ({each['excluded']} too long)" if each["excluded"] else ""),
            f"{rate['percent']:.1f}",
            f"{rate['low']:.1f} to {rate['high']:.1f}",
            f"{each['macro']:.1f}" if "macro" in each else "",
            " ".join(f"{label} {count}" for label, count in each.get("answers", {}).items()),
        )
    output.print(table)
    if len(report["tasks"]) > 1:
        output.print(f"average over tasks {report['average']:.1f}")
    for each in report["tasks"]:
        _show_details(each)


def _show_details(each: dict[str, Any]) -> None:
    from cplus.base.terminal import clean, output

    if "by_other_rules" in each:
        other = each["by_other_rules"]
        output.print(
            f"choices compared by mean per token; by sum the accuracy is {other['sum']:.1f}, "
            f"by sum per character {other['per_character']:.1f}"
        )
    if "permuted" in each:
        permuted = each["permuted"]
        output.print(
            f"options permuted: accuracy {permuted['mean']:.1f}, the same option every time in "
            f"{permuted['consistent']['percent']:.1f} % of the questions, averaged over permutations "
            f"{permuted['averaged']['percent']:.1f}"
        )
    if "responses" in each:
        output.print(
            f"given responses: {each['responses']['log_likelihood_per_token']:.3f} nats per token "
            f"(perplexity {each['responses']['perplexity']:.1f}, {each['responses']['tokens']:,} tokens)"
        )
    if "harness" in each:
        rules = {"acc": " (sum)", "acc_norm": " (per character)"} if each["interface"] == "cloze" else {}
        own = ", ".join(f"{key} {value:.1f}{rules.get(key, '')}" for key, value in each["harness"].items())
        output.print(f"lm-evaluation-harness: {own}", markup=False)
    if "against" in each:
        changed = each["against"]
        for name in ("retention", "acquisition"):
            rate = changed[name]
            if rate is not None:
                output.print(
                    f"{name} {rate['percent']:.1f} ({rate['right']} of {rate['total']}, "
                    f"{rate['low']:.1f} to {rate['high']:.1f})"
                    + (f", macro over labels {rate['macro']:.1f}" if "macro" in rate else "")
                )
        counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in changed["counts"].items())
        output.print(f"{counts}; exact McNemar p = {changed['mcnemar_p']:.3g}")
        lost = [flip for flip in changed["flips"] if flip["kind"] == "lost"]
        for flip in lost[:10]:
            output.print(
                f"  lost {flip['id']}: {clean(str(flip['before']))} -> {clean(str(flip['after']))}", markup=False
            )
