"""`cplus study`: answer the paper's questions by running its experiments, on its rows, and report the answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from cplus import lab
from cplus.base.environment import free_memory
from cplus.base.terminal import clean, console, output, print_json, print_table, progress
from cplus.cli.options import Command, Group, Json
from cplus.jobs.settings import read_yaml
from cplus.lab import SCALES, STUDIES, Spec, Summary, estimate, paper_sets
from cplus.lab.records import record_name
from cplus.lab.report import collect, markdown, write_report
from cplus.lab.runner import Cluster, EndedRun, Processes, finished, perform, queue
from cplus.lab.study import judged, run_title
from cplus.lab.summaries import shown
from cplus.methods.table import method
from cplus.training.settings import RunSpec


class Studies(Group):
    """The verbs of the laboratory; a study alone was a verb once."""

    moved: ClassVar = {name: f"cplus study run {name}" for name in (*STUDIES, "all")}


study = typer.Typer(cls=Studies, no_args_is_help=True, help="Answer the paper's questions: list, run, report, data.")
_DIFFERENT = 2


@study.command("list", cls=Command)
def list_studies(json: Json = False) -> None:
    """List the studies: their questions, and the number of their runs at each scale."""
    told = ("name", "title", "question", "paper")
    rows: list[dict[str, Any]] = [
        {name: getattr(each, name) for name in told}
        | {"runs": {scale.name: len(lab.runs_of(each, scale)) for scale in SCALES.values()}}
        for each in STUDIES.values()
    ]
    if json:
        print_json({"studies": rows, "scales": {scale.name: scale.summary for scale in SCALES.values()}})
        return
    print_table(
        ("study", "question", "paper", *SCALES),
        [(row["name"], row["question"], row["paper"], *map(str, row["runs"].values())) for row in rows],
        left=("question", "paper"),
    )
    for scale in SCALES.values():
        output.print(f"{scale.name}: {scale.summary}")


@study.command(cls=Command)
def run(
    name: Annotated[str, typer.Argument(help="A study (e01 to e14, frontier, chat, facts) or 'all'.")],
    scale: Annotated[str, typer.Option(help="smoke, desk, desk-real or paper.")] = "desk",
    out: Annotated[Path, typer.Option(help="The folder of results, one subfolder per scale.")] = Path("results"),
    workers: Annotated[int, typer.Option(min=1, help="Number of parallel processes; fewer if memory is short.")] = 2,
    also: Annotated[
        list[str] | None,
        typer.Option(help="A further method, run wherever cplus is run: a name or python:module:ROW; may be repeated."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only runs with this setting, e.g. method=cplus or task=csqa; may be repeated."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Repeat the study's chosen runs on other seeds, e.g. 201,202,203 (chat).")
    ] = None,
    new: Annotated[str | None, typer.Option(help="With --seeds: other new rows, a file or a named task.")] = None,
    past: Annotated[str | None, typer.Option(help="With --seeds: other requests to keep the answers to.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the missing runs and their estimated time.")] = False,
    machine: Annotated[
        str | None,
        typer.Option(help="With --dry-run: devices and memory of each run on this machine, e.g. 8x80 (80 GB each)."),
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(help="Submit to Slurm: a submitit parameter, e.g. slurm_partition=gpu, or a YAML file of them."),
    ] = None,
    json: Json = False,
) -> None:
    """Do the missing runs of a study and answer its question from the results."""
    if machine is not None and not dry_run:
        raise ValueError("--machine describes a machine for --dry-run; add --dry-run, or leave it out")
    chosen, size = lab.studies_named(name), lab.scale_named(scale)
    folder = out / size.name
    extra = [method(each).name for each in also or ()]
    runs = {each.name: lab.runs_of(each, size) for each in chosen}
    if seeds or new or past:
        runs = {each.name: lab.repeated(each, size, seeds or "", new=new, past=past) for each in chosen}
    runs = {each: lab.matching(lab.with_further_methods(own, extra), only or ()) for each, own in runs.items()}
    specs = list(dict.fromkeys(spec for own in runs.values() for spec in own))
    if slurm:
        executor: Cluster | Processes = Cluster(logs=folder / "slurm", parameters=_parameters(slurm))
    else:
        devices, wanted = estimate.devices(), workers
        if devices and specs:
            workers = max(len(places) for _, places in estimate.teams(devices, workers, specs))
        else:
            workers = estimate.workers_that_fit(workers, specs, free_memory())
        if workers < wanted:
            console.print(f"memory suffices for {workers} of {wanted} workers")
        executor = Processes(workers=workers, devices=devices)
    if size.name == "paper":
        _say_whose_rows(specs)
    if dry_run:
        _dry_run(specs, folder, workers=workers, machine=machine, json=json)
        return
    missing, done, failed = len(queue(specs, folder)), 0, list[EndedRun]()
    console.print(f"{len(specs)} runs, {len(specs) - missing} already done: {folder}")
    with progress() as bars:
        bar = bars.add_task("runs", total=missing)
        for ended in perform(specs, folder, executor):
            bars.update(bar, advance=1, description=run_title(ended.spec))
            done += ended.outcome == "done"
            if ended.failed is not None:
                failed.append(ended)
                console.print(f"failed: {run_title(ended.spec)}: {clean(ended.failed)}")
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


def _parameters(texts: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE and YAML files; later ones override earlier ones."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and not text.endswith((".yaml", ".yml")):
            raise ValueError(f"--slurm must be NAME=VALUE or a YAML file, got {text}")
        found |= {name: int(value) if value.isdigit() else value} if equals else read_yaml(Path(text))
    return found


def _say_whose_rows(specs: Sequence[Spec]) -> None:
    """One line for each of the paper's sets whose rows at hand are others; nothing is fetched."""
    sets = (((spec.task, spec.anchor_task) if isinstance(spec, RunSpec) else spec.tasks) for spec in specs)
    used = set(chain.from_iterable(sets))
    for name in paper_sets.paper_sets():
        if name in used and not (found := paper_sets.at_hand(name)).same:
            console.print(clean(str(found)), soft_wrap=True)


def _dry_run(specs: Sequence[Spec], folder: Path, *, workers: int, machine: str | None, json: bool) -> None:
    """The missing runs with their estimated time here, or with their place on a described machine."""
    known, missing = finished(specs, folder), queue(specs, folder)
    if machine is None:
        times, basis = estimate.here(missing, known)
        rows: list[dict[str, Any]] = [{"seconds": round(time, 3)} for time in times]
        hours, where = sum(times) / 3600 / workers, f"{workers} workers"
    else:
        rows, hours = estimate.on_machine(missing, estimate.described(machine))
        flops, bandwidth = (estimate.STATED[name] / 1e12 for name in ("flops", "bandwidth"))
        where, basis = machine, f"{flops:g} TFLOP/s and {bandwidth:g} TB/s of memory, stated and not measured"
    rows = [{"run": run_title(spec), "file": record_name(spec), **row} for spec, row in zip(missing, rows, strict=True)]
    refused = sum("refused" in row for row in rows)
    if json:
        counted = {"runs": len(specs), "there": len(known), "missing": rows, "refused": refused}
        print_json({**counted, "hours": hours, "where": where, "basis": basis})
        return
    for row in rows:
        place = f"{row['devices']} x {row['bytes'] / 1e9:5.1f} GB  " if "devices" in row else ""
        time = f"refused: {row['refused']}" if "refused" in row else f"{place}{row['seconds']:8.1f} s"
        output.print(f"{time}  {row['run']}  {row['file']}", soft_wrap=True)
    counts = f"{len(rows)} of {len(specs)} runs missing" + (f", {refused} refused" if refused else "")
    output.print(f"{counts}, about {hours:,.2f} hours on {where} (from {basis})", soft_wrap=True)


def _show(summaries: dict[str, Summary]) -> None:
    for name, found in summaries.items():
        output.print(f"\n{name}  {STUDIES[name].question}", style="bold")
        output.print(found.answer)
        for claim in found.claims:
            interval = "" if claim.interval is None else f" [{claim.interval[0]:+.1f}, {claim.interval[1]:+.1f}]"
            where = claim.paper or "our own"
            line = f"  {claim.verdict:8} {claim.says}: {shown(claim.margin, sign=True)}{interval} ({where})"
            output.print(line)
        output.print(f"{judged(found.claims)}.")


@study.command(cls=Command)
def report(
    results: Annotated[Path, typer.Option(help="A folder of results, named after its scale.")] = Path("results/desk"),
    out: Annotated[Path, typer.Option(help="The folder for index.html and its figures.")] = Path("report"),
    readme: Annotated[
        bool, typer.Option("--readme", help="Print the summary as a Markdown table, and write nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Write all studies as one page: question, answer, figures, tables with the published numbers, and cost."""
    if readme and json:
        raise ValueError("expected only one of --readme and --json")
    found = collect(results)
    if readme:
        print(markdown(found), end="")
    else:
        record = write_report(found, out)
        there = sum(bool(own.results) for own in found.studies.values())
        said = f"{there} of {len(found.studies)} studies: {record['page']}"
        print_json(record) if json else output.print(said, soft_wrap=True)
    for sentence in found.refused:
        console.print(f"refused: {clean(sentence)}", soft_wrap=True)
    if found.refused:
        raise ValueError(f"{len(found.refused)} results were refused, the others are shown. First: {found.refused[0]}")


@study.command(cls=Command)
def data(
    action: Annotated[
        Literal["list", "build", "verify"],
        typer.Argument(help="list: rows, hashes, where they are. build: select, check and cache. verify: compare."),
    ] = "list",
    sets: Annotated[list[str] | None, typer.Argument(help="csqa, arc_c, mmlu or medqa; by default all four.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with csqa.jsonl and so on; by default CPLUS_DATA, then the hub.")
    ] = None,
    json: Json = False,
) -> None:
    """List, build or verify the rows of the paper's four multiple-choice sets.

    Exit code of verify 0: the rows at hand are the paper's. 2: others or none.
    """
    known = paper_sets.paper_sets()
    if wrong := [name for name in sets or () if name not in known]:
        raise ValueError(f"expected some of {', '.join(known)}, got {wrong[0]!r}; 'cplus study data' lists them")
    found = [(paper_sets.build if action == "build" else paper_sets.at_hand)(name, data_dir) for name in sets or known]
    same = all(each.same for each in found)
    if json:
        print_json({"sets": [each.row() for each in found], "same": same})
    for each in () if json else found:
        rows = f"{each.name:6} {len(known[each.name].rows):5,} rows  sha256 {known[each.name].sha256}"
        line = f"{rows}  {each.where or 'not at hand'}" if action == "list" else clean(str(each))
        output.print(line, soft_wrap=True)
    if action == "verify" and not same:
        raise typer.Exit(_DIFFERENT)
