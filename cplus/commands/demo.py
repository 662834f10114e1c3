"""`cplus demo`: see on your own machine that CPLUS keeps what plain fine-tuning forgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cplus.experiment.record import RunResult
    from cplus.experiment.settings import RunSpec


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run; each draws its own rows and bank.")] = 3,
    methods: Annotated[
        str, typer.Option(help="Methods to compare, separated by commas; 'all' takes every row of 'cplus methods'.")
    ] = "sft,replay,cpl,cplus",
    out: Annotated[Path, typer.Option(help="Where the picture and the run records go.")] = Path("runs/demo"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Adapt the built-in language model by several methods and show what each learned and lost."""
    from cplus.files import write_json
    from cplus.plotting import retention_bars
    from cplus.terminal import console, print_json

    results = compare(named(methods), seeds, out)
    table = summary(results)
    report = {"rows": [row(result) for result in results], "summary": table}
    write_json(out / "demo.json", report)
    pictures = retention_bars(table, out / "demo")
    if json:
        print_json(report)
    else:
        show(results, table)
    console.print(f"records and picture: {out}/demo.json, {pictures[1]}", markup=False)


def base_spec(method: str, seed: int) -> RunSpec:
    """The demo's setting: the first domain's unknown facts are taught, its known facts are the past."""
    from cplus.experiment.settings import RunSpec
    from cplus.toy.world import DOMAINS

    domain, *others = DOMAINS
    return RunSpec(
        model="toy",
        task=domain,
        interface="cloze",
        method=method,
        seed=seed,
        num_anchors=8,
        num_probes=128,
        num_new=96,
        lr=1.5e-3,
        weight_decay=0.0,
        epochs=12,
        batch_size=32,
        order="shuffled",
        external=tuple(others),
        external_limit=400,
    )


def named(methods: str) -> list[str]:
    """The methods asked for; SFT and CPLUS are always among them, because the verdict compares them."""
    from cplus.methods import METHODS
    from cplus.selection import method

    if methods == "all":
        return list(METHODS)
    asked = [method(name.strip()).name for name in methods.split(",")]
    return list(dict.fromkeys(["sft", *asked, "cplus"]))


def compare(methods: Sequence[str], seeds: int, out: Path) -> list[RunResult]:
    """Every method on the same split, anchors, bank and seeds, with live progress; each run is kept when it ends."""
    import torch

    from cplus import models
    from cplus.experiment import run
    from cplus.experiment.comparison import set_up
    from cplus.experiment.record import save_result
    from cplus.experiment.task_split import split_task
    from cplus.loop import EpochEnded, Event
    from cplus.terminal import console, progress

    torch.set_num_threads(1)  # a model this small loses more to threads that wait for each other than it gains
    base = models.load("toy")
    first = base_spec("sft", 0)
    console.print(f"base model: toy; new facts and past facts: {first.task}; outside: {', '.join(first.external)}")
    found = split_task(base, first.task, first.interface)
    console.print(f"it answers {len(found[1].past)} of {len(found[1].predictions)} questions correctly")
    results = []
    with progress() as bars:
        bar = bars.add_task("adapting", total=seeds * len(methods) * first.epochs)
        for seed in range(seeds):
            bars.update(bar, description=f"seed {seed}: the frozen model writes {first.num_probes} probes")
            given = set_up(base_spec("sft", seed), base, found, out / "banks")
            for method in methods:
                bars.update(bar, description=f"seed {seed}: {method}")

                def advance(event: Event) -> None:
                    if isinstance(event, EpochEnded):
                        bars.advance(bar)

                results.append(run.run(base_spec(method, seed), given, watch=advance))
                save_result(results[-1], out / "records")
    return results


def row(result: RunResult) -> dict[str, Any]:
    """One run in the demo's JSON."""
    return {
        "method": result.spec.method,
        "seed": result.spec.seed,
        "retention": result.retention,
        "acquisition": result.acquisition,
        "external": result.external_kept,
        "seconds": result.seconds,
    }


def summary(results: Sequence[RunResult]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and standard error over the seeds, by method."""
    from cplus.evaluation import estimate

    table: dict[str, dict[str, dict[str, float]]] = {}
    for method in dict.fromkeys(result.spec.method for result in results):
        mine = [row(result) for result in results if result.spec.method == method]
        table[method] = {}
        for metric in ("retention", "acquisition", "external"):
            found = estimate([float(r[metric]) for r in mine])
            table[method][metric] = {"mean": found.mean, "se": found.error or 0.0}
    return table


def show(results: Sequence[RunResult], table: dict[str, dict[str, dict[str, float]]]) -> None:
    """The table and the sentence a person reads."""
    from rich.table import Table

    from cplus.evaluation import estimate
    from cplus.plotting import label
    from cplus.terminal import output

    grid = Table(box=None, header_style="bold")
    for column in ("method", "Retention %", "Acquisition %", "other domains %", "seconds", "extra memory"):
        grid.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for method, metrics in table.items():
        mine = [result for result in results if result.spec.method == method]
        cells = [f"{metrics[m]['mean']:.1f} ± {metrics[m]['se']:.1f}" for m in ("retention", "acquisition", "external")]
        seconds = estimate([result.seconds for result in mine]).mean
        style = "bold" if method == "cplus" else None
        extra = f"{mine[0].extra_bytes / mine[0].counts['parameters']:.0f} bytes/param"
        grid.add_row(label(method), *cells, f"{seconds:.1f}", extra, style=style)
    output.print(grid)
    counts, seeds = results[0].counts, len({result.spec.seed for result in results})
    overlap = estimate([result.counts["overlap"] for result in results]).mean
    output.print(
        f"\nMean ± standard error over {seeds} seed{'s' * (seeds > 1)}; {counts['new']} new facts, {counts['past']} "
        f"past facts, {counts['anchors']} anchors, {counts['probes']} probes; on average {overlap:.0f} past facts "
        "stand in the bank."
    )
    output.print(verdict(table), style="bold")


def verdict(table: dict[str, dict[str, dict[str, float]]]) -> str:
    """What the table says, in one sentence."""
    slowest = min(table, key=lambda method: table[method]["acquisition"]["mean"])
    learned = table[slowest]["acquisition"]["mean"]
    lost = {method: 100 - table[method]["retention"]["mean"] for method in ("sft", "cplus")}
    start = "Every method learned the new facts" if learned >= 99 else f"{slowest} learned only {learned:.1f} %"
    return (
        f"{start}; plain fine-tuning lost {lost['sft']:.1f} % of what the model knew, CPLUS {lost['cplus']:.1f} %: "
        f"{lost['sft'] - lost['cplus']:+.1f} points kept."
    )
