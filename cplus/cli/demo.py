"""`cplus demo`: see on your machine that CPLUS keeps what plain fine-tuning forgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from cplus import models
from cplus.base.files import write_json
from cplus.base.terminal import console, output, print_json, print_table, progress
from cplus.cli.options import Json
from cplus.evaluation.statistics import estimate
from cplus.lab import SCALES
from cplus.lab.frontier import CHOSEN, run_of
from cplus.lab.records import RunResult, save_result
from cplus.methods.table import METHODS
from cplus.methods.table import method as method_row
from cplus.receipts.figures import label
from cplus.training.settings import RunSpec

METRICS = ("retention", "acquisition", "external", "updates")
Summary: TypeAlias = dict[str, dict[str, dict[str, float]]]
"""`mean` and, for more than one seed, `se` by row (`sft`, `sft, tuned`) and metric."""


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; each draws its own rows and bank.")] = 3,
    methods: Annotated[
        str, typer.Option(help="Methods to compare, separated by commas; 'all' for every row of 'cplus methods'.")
    ] = "sft,replay,cpl,cplus",
    tuned: Annotated[
        str,
        typer.Option(help="Methods to show once more at their own best rate, from 'cplus study frontier'; or 'none'."),
    ] = "sft,freeze-layers,cplus-repair",
    out: Annotated[Path, typer.Option(help="Folder for demo.json and the run records.")] = Path("runs/demo"),
    json: Json = False,
) -> None:
    """Adapt the built-in language model with several methods and show what each learned and lost."""
    results = compare(named(methods), seeds, out, tuned=named_tuned(tuned))
    table = summary(results)
    report = {"rows": [row(result) for result in results], "summary": table}
    write_json(out / "demo.json", report)
    print_json(report) if json else show(results, table)
    console.print(f"written: {out}/demo.json and the records of its runs")


def base_spec(method: str, seed: int) -> RunSpec:
    """The desk's base setting: the first domain's unknown facts are new rows, its known facts are past rows."""
    base = SCALES["desk"].base
    return replace(base, method=method, seed=seed, external=tuple(name for name in base.external if name != base.task))


def tuned_spec(method: str, seed: int) -> RunSpec:
    """The same rows at the rate and schedule that the frontier chose for the method, until everything is learned."""
    plain, tuned = base_spec(method, seed), run_of(SCALES["desk"], method, CHOSEN[method], seed)
    return replace(tuned, num_anchors=plain.num_anchors, num_probes=plain.num_probes, external=plain.external)


def named_tuned(methods: str) -> list[str]:
    """The methods to show at their own best rate."""
    asked = [] if methods == "none" else [method_row(name.strip()).name for name in methods.split(",")]
    if unknown := [name for name in asked if name not in CHOSEN]:
        raise ValueError(f"no rate was chosen for {unknown[0]}; expected some of {', '.join(CHOSEN)}, or none")
    return asked


def entry(spec: RunSpec) -> str:
    """The name of a row: the method, and whether its rate was tuned."""
    return spec.method if spec.stop_at is None else f"{spec.method}, tuned"


def named(methods: str) -> list[str]:
    """The chosen methods; SFT and CPLUS are always included, because the verdict compares them."""
    if methods == "all":
        return list(METHODS)
    asked = [method_row(name.strip()).name for name in methods.split(",")]
    return list(dict.fromkeys(["sft", *asked, "cplus"]))


def compare(methods: Sequence[str], seeds: int, out: Path, tuned: Sequence[str] = ()) -> list[RunResult]:
    """Every method on the same split, anchors, bank and seeds, with progress; each run is saved when it ends."""
    import torch

    from cplus.lab import runs

    torch.set_num_threads(1)  # threads waiting for each other cost a model this small more than they gain
    base = models.load("toy")
    first = base_spec("sft", 0)
    console.print(f"base model: toy; new and past facts: {first.task}; other domains: {', '.join(first.external)}")
    split = runs.split_task(base, first.task, first.interface)
    console.print(f"it answers {len(split[1].past)} of {len(split[1].predictions)} questions correctly")
    results = []
    with progress() as bars:
        bar = bars.add_task("adapting", total=seeds * (len(methods) + len(tuned)))
        for seed in range(seeds):
            bars.update(bar, description=f"seed {seed}: the frozen model writes {first.num_probes} probes")
            given = runs.set_up(base_spec("sft", seed), base, split, out / "banks")
            specs = [*(base_spec(method, seed) for method in methods), *(tuned_spec(method, seed) for method in tuned)]
            for spec in specs:
                bars.update(bar, description=f"seed {seed}: {entry(spec)}")
                results.append(runs.run(spec, given))
                save_result(results[-1], out / "records")
                bars.advance(bar)
    return results


def row(result: RunResult) -> dict[str, Any]:
    """One run in the demo's JSON."""
    return {
        "method": result.spec.method,
        "tuned": result.spec.stop_at is not None,
        "updates": result.counts["updates"],
        "seed": result.spec.seed,
        "retention": result.retention,
        "acquisition": result.acquisition,
        "external": result.external_kept,
        "seconds": result.seconds,
    }


def summary(results: Sequence[RunResult]) -> Summary:
    """Mean and standard error over the seeds; one seed has no error."""
    table: Summary = {}
    for method in dict.fromkeys(entry(result.spec) for result in results):
        mine = [row(result) for result in results if entry(result.spec) == method]
        found = {name: estimate([float(r[name]) for r in mine]) for name in METRICS}
        table[method] = {
            name: {"mean": one.mean} | ({} if one.error is None else {"se": one.error}) for name, one in found.items()
        }
    return table


def show(results: Sequence[RunResult], table: Summary) -> None:
    """Print the table and the verdict."""
    lines = []
    for method, metrics in table.items():
        mine = [result for result in results if entry(result.spec) == method]
        kept = [metrics[name] for name in METRICS[:3]]
        shown = [f"{one['mean']:.1f}" + (f" ± {one['se']:.1f}" if "se" in one else "") for one in kept]
        seconds = estimate([result.seconds for result in mine]).mean
        extra = mine[0].extra_bytes / mine[0].counts["parameters"]
        lines.append((label(method), *shown, f"{metrics['updates']['mean']:.0f}", f"{seconds:.1f}", f"{extra:.0f}"))
    print_table(("method", "Retention %", "learned %", "others %", "updates", "s", "bytes"), lines)
    counts, seeds = results[0].counts, len({result.spec.seed for result in results})
    overlap = estimate([result.counts["overlap"] for result in results]).mean
    output.print(
        f"\n{f'Mean ± standard error over {seeds} seeds' if seeds > 1 else 'One seed'}; {counts['new']} new facts, "
        f"{counts['past']} past facts, {counts['anchors']} anchors, {counts['probes']} probes; others: "
        f"what is kept of the other domains; the bank contains "
        f"{overlap:.0f} of the past facts on average."
    )
    output.print(verdict(table), style="bold")


def verdict(table: Summary) -> str:
    """The result in one sentence: at the demo's rate, and at each method's own best."""
    slowest = min(table, key=lambda method: table[method]["acquisition"]["mean"])
    learned = table[slowest]["acquisition"]["mean"]
    lost = {method: 100 - own["retention"]["mean"] for method, own in table.items()}
    start = "Every method learned the new facts" if learned >= 99 else f"{slowest} learned only {learned:.1f} %"
    tuned = ""
    if {"sft, tuned", "cplus-repair, tuned"} <= table.keys():
        plain, ours = lost["sft, tuned"], lost["cplus-repair, tuned"]
        tuned = f" With every method at its own best rate it lost {plain:.1f} %, CPLUS with repair {ours:.1f} %."
    return (
        f"{start}; at an aggressive rate plain fine-tuning lost {lost['sft']:.1f} % of what the model knew, CPLUS "
        f"{lost['cplus']:.1f} %: {lost['sft'] - lost['cplus']:+.1f} points kept.{tuned}"
    )
