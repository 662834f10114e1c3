"""`cplus study`: answer a question of the paper by running its experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cplus.lab import Result, Spec, Summary
    from cplus.lab.runner import EndedRun, Executor


# `cplus study --dry-run`: the missing runs, here or on a described machine, with their time, devices and memory.


def say_whose_rows(specs: Sequence[Spec]) -> None:
    """One line for each of the paper's sets whose rows at hand are others; nothing is fetched."""
    from cplus.base.terminal import clean, console
    from cplus.lab.paper_sets import at_hand, paper_sets

    used = {task for spec in specs for task in _tasks(spec)}
    for name in paper_sets():
        if name in used and not (found := at_hand(name)).same:
            console.print(clean(str(found)), markup=False, soft_wrap=True)


def _tasks(spec: Spec) -> tuple[str, ...]:
    from cplus.training.settings import RunSpec

    return (spec.task, spec.anchor_task) if isinstance(spec, RunSpec) else spec.tasks


def dry_list(specs: Sequence[Spec], folder: Path, *, workers: int, machine: str | None, json: bool) -> None:
    """The missing runs with their estimated time here, or with their place on a described machine."""
    from cplus.base.terminal import output, print_json
    from cplus.lab.estimate import seconds
    from cplus.lab.runner import finished, path_of, queue
    from cplus.lab.study import run_title

    known, missing = finished(specs, folder), queue(specs, folder)
    if machine is not None:
        _on_machine(missing, machine, num_runs=len(specs), json=json)
        return
    speed, basis = _speed(missing, known)
    times = [seconds(spec, known, speed) for spec in missing]
    hours = sum(times) / 3600 / workers
    if json:
        runs = [
            {"run": run_title(spec), "file": path_of(spec, folder).name, "seconds": round(time, 3)}
            for spec, time in zip(missing, times, strict=True)
        ]
        report = {"runs": len(specs), "there": len(known), "missing": runs, "hours": hours, "workers": workers}
        print_json({**report, "basis": basis})
        return
    for spec, time in zip(missing, times, strict=True):
        output.print(f"{time:8.1f} s  {run_title(spec)}  {path_of(spec, folder).name}", markup=False, soft_wrap=True)
    output.print(
        f"{len(missing)} of {len(specs)} runs missing, about {hours:.2f} hours with {workers} workers ({basis})",
        soft_wrap=True,
    )


def _speed(missing: Sequence[Spec], known: Sequence[Result]) -> tuple[float | None, str]:
    """The speed of this device, measured where a run has no similar finished one, and the basis of the times."""
    from cplus.lab.estimate import similar

    if all(similar(spec, known) for spec in missing):
        return None, "from finished runs"
    from cplus.lab.throughput import measured_speed

    speed, device = measured_speed()
    some = "finished runs, others from " if any(similar(spec, known) for spec in missing) else ""
    return speed, f"from {some}{speed / 1e9:,.0f} GFLOP per second, measured on {device}"


def _on_machine(missing: Sequence[Spec], text: str, *, num_runs: int, json: bool) -> None:
    """Every missing run with its devices, memory and time on a described machine."""
    from cplus.base.terminal import output, print_json
    from cplus.lab.estimate import STATED, Machine, Placed, hours, listed
    from cplus.lab.study import run_title

    described = Machine.read(text)
    found = listed(missing, described)
    refused = [(spec, each) for spec, each in found if isinstance(each, str)]
    speed = (
        f"{STATED['flops'] / 1e12:g} TFLOP/s, {STATED['bandwidth'] / 1e12:g} TB/s of memory and "
        f"{STATED['bus'] / 1e9:g} GB/s of bus, stated and not measured"
    )
    total = hours(found, described)
    if json:
        rows = [
            {"run": run_title(spec), **(each.row() if isinstance(each, Placed) else {"refused": each})}
            for spec, each in found
        ]
        report = {"machine": text, "runs": num_runs, "missing": rows, "refused": len(refused), "hours": total}
        print_json({**report, "speed": speed})
        return
    for spec, each in found:
        shown = f"refused: {each}" if isinstance(each, str) else str(each)
        output.print(f"{shown}  {run_title(spec)}", markup=False, soft_wrap=True)
    runs = f"{len(found)} of {num_runs} runs missing, {len(refused)} refused"
    output.print(f"{runs}, about {total:,.0f} hours on {text} at {speed}", markup=False, soft_wrap=True)


def study(
    name: Annotated[str, typer.Argument(help="A study (e01 to e14), 'all', or 'list'.")],
    scale: Annotated[str, typer.Option(help="smoke, desk, desk-real or paper.")] = "desk",
    out: Annotated[Path, typer.Option(help="The folder of results, one subfolder per scale.")] = Path("results"),
    workers: Annotated[int, typer.Option(min=1, help="Number of parallel processes; fewer if memory is short.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads per process.")] = 1,
    also: Annotated[
        list[str] | None,
        typer.Option(help="A further method, run wherever cplus is run: a name or python:module:ROW; may be repeated."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only runs with this setting, e.g. method=cplus or task=csqa; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the missing runs and their estimated time.")] = False,
    machine: Annotated[
        str | None,
        typer.Option(help="With --dry-run: devices and memory of each run on this machine, e.g. 8x80 (80 GB each)."),
    ] = None,
    executor: Annotated[str, typer.Option(help="local or slurm.")] = "local",
    slurm: Annotated[
        list[str] | None, typer.Option(help="A submitit parameter, e.g. slurm_partition=gpu, or a YAML file of them.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Do the missing runs of a study and answer its question from the results."""
    from cplus.base.terminal import print_json
    from cplus.lab import matching, runs_of, scale_named, studies_named, with_further_methods
    from cplus.lab.runner import finished
    from cplus.lab.study import run_title

    if name == "list":
        _list(json=json)
        return
    chosen, size = studies_named(name), scale_named(scale)
    folder = out / size.name
    extra = _method_names(also or [])
    runs = {each.name: matching(with_further_methods(runs_of(each, size), extra), only or ()) for each in chosen}
    specs = list(dict.fromkeys(spec for own in runs.values() for spec in own))
    if executor == "local":
        workers = _workers_that_fit(workers, specs)
    make = _executor(executor, workers=workers, threads=threads, logs=folder / "slurm", slurm=slurm or [])
    if machine is not None and not dry_run:
        raise ValueError("--machine describes a machine for --dry-run; add --dry-run, or leave it out")
    if size.name == "paper":
        say_whose_rows(specs)
    if dry_run:
        dry_list(specs, folder, workers=workers, machine=machine, json=json)
        return
    done, failed = _perform(specs, folder, make)
    summaries = {each.name: each.summary(finished(runs[each.name], folder)) for each in chosen if runs[each.name]}
    report = {
        "scale": size.name,
        "runs": len(specs),
        "done": done,
        "studies": {each: found.row() for each, found in summaries.items()},
        "failed": [{"run": run_title(ended.spec), "error": ended.failed} for ended in failed],
    }
    print_json(report) if json else _show(summaries)
    if failed:
        raise ValueError(f"{len(failed)} of {len(specs)} runs failed; the others are kept. First: {failed[0].failed}")


def _method_names(names: Sequence[str]) -> list[str]:
    """The names of further methods; an unknown one is an error."""
    if not names:
        return []
    from cplus.methods.table import method

    return [method(name).name for name in names]


def _workers_that_fit(workers: int, specs: Sequence[Spec]) -> int:
    """The number of workers for which memory suffices: the devices', or the host's where there are none."""
    import psutil  # type: ignore[import-untyped]

    from cplus.base.terminal import console
    from cplus.lab.estimate import devices, largest_team, workers_that_fit

    if specs and (own := devices()):
        found = largest_team(own, workers, specs)
    else:
        found = workers_that_fit(workers, specs, psutil.virtual_memory().available)
    if found < workers:
        console.print(f"memory suffices for {found} of {workers} workers")
    return found


def _executor(name: str, *, workers: int, threads: int, logs: Path, slurm: Sequence[str]) -> Executor:
    from cplus.lab.estimate import devices
    from cplus.lab.runner import Cluster, Processes

    if name == "local":
        if slurm:
            raise ValueError("--slurm requires the slurm executor; add --executor slurm")
        return Processes(workers=workers, threads=threads, devices=devices())
    if name != "slurm":
        raise ValueError(f"executor must be local or slurm, got {name!r}")
    return Cluster(logs=logs, parameters=_parameters(slurm))


def _parameters(texts: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE and YAML files; later ones override earlier ones."""
    from cplus.jobs.settings import read_yaml

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and not text.endswith((".yaml", ".yml")):
            raise ValueError(f"--slurm must be NAME=VALUE or a YAML file, got {text}")
        found |= {name: int(value) if value.isdigit() else value} if equals else read_yaml(Path(text))
    return found


def _perform(specs: Sequence[Spec], folder: Path, executor: Executor) -> tuple[int, list[EndedRun]]:
    """Do the missing runs; returns the number of runs done and those that failed."""
    from cplus.base.terminal import clean, console, progress
    from cplus.lab.runner import perform, queue
    from cplus.lab.study import run_title

    missing, done, failed = len(queue(specs, folder)), 0, []
    console.print(f"{len(specs)} runs, {len(specs) - missing} already done: {folder}", markup=False)
    with progress() as bars:
        bar = bars.add_task("runs", total=missing)
        for ended in perform(specs, folder, executor):
            bars.update(bar, advance=1, description=run_title(ended.spec))
            done += ended.outcome == "done"
            if ended.failed is not None:
                failed.append(ended)
                console.print(f"failed: {run_title(ended.spec)}: {clean(ended.failed)}", markup=False)
    return done, failed


def _list(*, json: bool) -> None:
    from rich.table import Table

    from cplus.base.terminal import output, print_json
    from cplus.lab import SCALES, STUDIES, runs_of

    rows: list[dict[str, Any]] = [
        {
            "name": each.name,
            "title": each.title,
            "question": each.question,
            "paper": each.paper,
            "runs": {scale.name: len(runs_of(each, scale)) for scale in SCALES.values()},
        }
        for each in STUDIES.values()
    ]
    if json:
        print_json({"studies": rows, "scales": {scale.name: scale.summary for scale in SCALES.values()}})
        return
    grid = Table(box=None, header_style="bold")
    for column in ("study", "question", "paper", *SCALES):
        grid.add_column(column, overflow="fold", justify="right" if column in SCALES else "left")
    for row in rows:
        counts = [str(row["runs"][scale]) for scale in SCALES]
        grid.add_row(row["name"], row["question"], row["paper"], *counts)
    output.print(grid)
    for scale in SCALES.values():
        output.print(f"{scale.name}: {scale.summary}")


def _show(summaries: dict[str, Summary]) -> None:
    from cplus.base.terminal import output
    from cplus.lab import STUDIES
    from cplus.lab.study import judged
    from cplus.lab.summaries import shown

    for name, found in summaries.items():
        output.print(f"\n{name}  {STUDIES[name].question}", style="bold", markup=False)
        output.print(found.answer, markup=False)
        for claim in found.claims:
            interval = "" if claim.interval is None else f" [{claim.interval[0]:+.1f}, {claim.interval[1]:+.1f}]"
            where = claim.paper or "our own"
            line = f"  {claim.verdict:8} {claim.says}: {shown(claim.margin, sign=True)}{interval} ({where})"
            output.print(line, markup=False)
        output.print(f"{judged(found.claims)}.", markup=False)
