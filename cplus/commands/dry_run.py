"""`cplus study --dry-run`: the missing runs, here or on a described machine, with their time, devices and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cplus.studies import Result, Spec


def say_whose_rows(specs: Sequence[Spec]) -> None:
    """One line for each of the paper's sets whose rows at hand are others; nothing is fetched."""
    from cplus.data.building import at_hand
    from cplus.data.paper_sets import paper_sets
    from cplus.terminal import clean, console

    used = {task for spec in specs for task in _tasks(spec)}
    for name in paper_sets():
        if name in used and not (found := at_hand(name)).same:
            console.print(clean(str(found)), markup=False, soft_wrap=True)


def _tasks(spec: Spec) -> tuple[str, ...]:
    from cplus.experiment.settings import RunSpec

    return (spec.task, spec.anchor_task) if isinstance(spec, RunSpec) else spec.tasks


def dry_list(specs: Sequence[Spec], folder: Path, *, workers: int, machine: str | None, json: bool) -> None:
    """The missing runs with their estimated time here, or with their place on a described machine."""
    from cplus.studies.durations import seconds
    from cplus.studies.results import finished, path_of
    from cplus.studies.runner import queue
    from cplus.studies.study import run_title
    from cplus.terminal import output, print_json

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
    from cplus.studies.durations import similar

    if all(similar(spec, known) for spec in missing):
        return None, "from finished runs"
    from cplus.experiment.throughput import measured_speed

    speed, device = measured_speed()
    some = "finished runs, others from " if any(similar(spec, known) for spec in missing) else ""
    return speed, f"from {some}{speed / 1e9:,.0f} GFLOP per second, measured on {device}"


def _on_machine(missing: Sequence[Spec], text: str, *, num_runs: int, json: bool) -> None:
    """Every missing run with its devices, memory and time on a described machine."""
    from cplus.studies.machine import STATED, Machine, Placed, hours, listed
    from cplus.studies.study import run_title
    from cplus.terminal import output, print_json

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
