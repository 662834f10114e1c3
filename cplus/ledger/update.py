"""One more stage: `cplus adapt` from the last stage's model, with each earlier task as a separate past task."""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cplus import files, models
from cplus.data.examples import Choice, Example, lines
from cplus.data.readers import read_file, weighted
from cplus.data.tasks import Task, load_task
from cplus.job.folder import Folder, claimed
from cplus.job.interruption import Interrupted
from cplus.job.progress import say
from cplus.job.resume import resume
from cplus.job.run import FinishedJob, adapt
from cplus.job.settings import AdaptConfig, check_repeated, settings
from cplus.ledger import DECIDED
from cplus.ledger.chain import NAME, Ledger, StageFolder, append, exists, problems, read
from cplus.ledger.history import BASE, answered, flips, is_right, set_name, tables
from cplus.probes.bank import Bank
from cplus.receipts.receipt import RowSet

OF_ONE_STAGE = frozenset(
    {
        *DECIDED,
        "model",
        "new",
        "anchors",
        "past",
        "validation",
        "external",
        "require",
        "report_to",
        "revision",
        "preset",
        "own_answers",
    }
)
"""Settings that belong to one stage; the others default to those of the previous stage."""


@dataclass(frozen=True, kw_only=True)
class Updated:
    """A ledger with its new stage, and the outcome of the stage's job."""

    ledger: Ledger
    outcome: FinishedJob


def update(root: Path, given: Mapping[str, Any], *, force: bool = False) -> Updated:
    """Append one stage, or resume it if the same update was interrupted; `force` starts it again."""
    for name in DECIDED:
        if name in given:
            raise ValueError(f"an update sets {name!r} itself; leave it out")
    if given.get("new") is None:
        raise ValueError("expected new: the rows to learn in this stage, a file or a named task")
    given = {**given, "new": _one_file(given["new"])}
    _check_place(root, given)
    with claimed(Folder(root)):
        files.tidy(root)
        ledger = _verified(read(root)) if exists(root) else Ledger(root=root)
        place = ledger.next
        files.tidy(place.root)
        config = _started(ledger, place, given, force=force)
        outcome = _worked(config, place, given)
        return Updated(ledger=_sealed(ledger, place, str(given["new"]), outcome), outcome=outcome)


def _one_file(new: object) -> str:
    """The stage's file: its rows are copied into the ledger, where they have no weights."""
    given = new if isinstance(new, list | tuple) else [new]
    names = [str(name) for name in given if isinstance(name, str | Path)]
    if len(names) != 1 or weighted(names[0])[0] != names[0]:
        raise ValueError(f"expected one file of new rows without a weight for a stage, got {new}; join the files")
    return names[0]


def _check_place(root: Path, given: Mapping[str, Any]) -> None:
    if exists(root):
        if given.get("model") is not None:
            raise ValueError(f"{root}: the ledger continues from its last stage's model; leave the model out")
        return
    if root.exists() and (
        not root.is_dir() or any(entry.name != "stages" and not files.is_left(entry.name) for entry in root.iterdir())
    ):
        raise ValueError(f"{root} exists and has no {NAME}, so it is not a ledger; choose another folder")
    if given.get("model") is None:
        raise ValueError(f"{root}: there is no ledger yet; give the first update the model to start from")


def _verified(ledger: Ledger) -> Ledger:
    wrong = problems(ledger, models=False)
    if wrong:
        raise ValueError(f"{ledger.root}: {wrong[0]}; a ledger that was changed cannot be updated")
    return ledger


def _started(ledger: Ledger, place: StageFolder, given: Mapping[str, Any], *, force: bool) -> AdaptConfig:
    """The stage's settings; writes its rows and then its arguments, which mark the stage as started."""
    values = {**({} if "preset" in given else _inherited(ledger)), **given}
    check_repeated(values, given, ledger.root)
    new = load_task(str(given["new"]), values.get("data_dir"))
    arguments = {name: str(value) for name, value in sorted(given.items())} | {"rows": new.fingerprint}
    if Folder(place.job).settings.is_file() and not force:
        if files.read_json(place.arguments) != arguments:
            raise ValueError(
                f"{place.root}: an update with other settings or rows was interrupted here; repeat that command to "
                "resume it, or use --force to replace it"
            )
        present = {path for path in (place.anchors, place.past) if path.is_file()}
        return _config(ledger, place, values, new, present)
    rows = _rows(ledger, place, values) | {place.new: new.examples}
    config = _config(ledger, place, values, new, set(rows))
    if place.root.exists():
        shutil.rmtree(place.root)
    for path, examples in rows.items():
        files.write_text(path, lines(examples))
    files.write_json(place.arguments, arguments)
    return config


def _rows(ledger: Ledger, place: StageFolder, values: Mapping[str, Any]) -> dict[Path, tuple[Example, ...]]:
    """The anchors and past rows, by their path in the stage."""
    if ledger.entries and (values.get("past") is not None or values.get("own_answers")):
        raise ValueError(
            "past and own_answers belong to the first update; later updates are evaluated on the rows of earlier tasks"
        )
    anchors = _anchors(ledger, values)
    found = {place.anchors: anchors} if anchors else {}
    if values.get("past") is not None:
        found[place.past] = load_task(str(values["past"]), values.get("data_dir")).examples
    return found


def _inherited(ledger: Ledger) -> dict[str, Any]:
    if not ledger.entries:
        return {}
    last = files.read_json(ledger.place(len(ledger.entries)).record)["settings"]
    return {name: value for name, value in last.items() if name not in OF_ONE_STAGE}


def _anchors(ledger: Ledger, values: Mapping[str, Any]) -> tuple[Example, ...]:
    """The anchors of the last task: given, or drawn from its rows that are now right."""
    if values.get("anchors") is not None:
        return load_task(str(values["anchors"]), values.get("data_dir")).examples
    if not ledger.entries:
        return ()
    number = len(ledger.entries)
    known = tables(ledger)[-1][set_name(number)]
    right = [row for row in read_file(ledger.place(number).watched) if is_right(known.get(row.id, "lost"))]
    count = int(values.get("num_anchors") or AdaptConfig.model_fields["num_anchors"].default)
    if not right:
        raise ValueError(f"stage {number} answers none of its rows correctly, so there are no anchors; give some")
    if len(right) < count:
        say(f"note: stage {number} answers {len(right)} of its rows correctly; all of them become anchors")
    return tuple(random.Random(int(values.get("seed") or 0)).sample(right, min(count, len(right))))


def _config(
    ledger: Ledger, place: StageFolder, values: Mapping[str, Any], new: Task, present: Collection[Path]
) -> AdaptConfig:
    """The stage as a job: the previous task is the past task, earlier ones are preserved and evaluated as well."""
    number = len(ledger.entries)
    last = ledger.place(number)
    external = [path for _, path in _external(ledger)]
    kept = [ledger.place(stage).job for stage in range(1, number + 1)]
    own = new.interface if isinstance(new.examples[0], Choice) else None
    config = settings(
        {
            "judge": "exact",  # a ledger counts right answers
            **values,
            "model": str(last.model) if number else values["model"],
            "out": place.job,
            "new": str(place.new),
            "anchors": str(place.anchors) if place.anchors in present else None,
            "past": str(last.watched) if number else str(place.past) if place.past in present else None,
            "kept": [str(job) for job in kept if Folder(job).anchors.is_file()],
            "external": [*map(str, external), *(values.get("external") or ())],
            "external_limit": None,
            "keep": ("none",),  # a ledger keeps rows that it can follow by right and wrong
            # The rows are copies under other names, so the interface cannot be derived from the name later.
            "interface": values.get("interface") or own,
        },
        where="update",
    )
    if config.lora is not None and not config.lora.merge:
        raise ValueError("a later stage must start from a merged model; leave out merge=false")
    return config


def _external(ledger: Ledger) -> list[tuple[str, Path]]:
    """What a stage evaluates besides its own and the last task's rows: the base model's rows and earlier tasks."""
    if not ledger.entries:
        return []
    first = ledger.place(1)
    base = first.base if first.base.is_file() else None
    tasks = [(set_name(stage), ledger.place(stage).watched) for stage in range(1, len(ledger.entries))]
    return [*([] if base is None else [(BASE, base)]), *tasks]


def _worked(config: AdaptConfig, place: StageFolder, given: Mapping[str, Any]) -> FinishedJob:
    if Folder(place.job).record.is_file():
        return _whole(resume(place.job, repeated=given), place)
    try:
        begun = Folder(place.job).settings.is_file()
        return resume(place.job, repeated=given) if begun else adapt(config)
    except Interrupted as stop:
        sentence = str(stop).rpartition(". ")[0]  # without the advice to resume the job by itself
        raise Interrupted(stop.number, f"{sentence}. Resume it with the same command") from stop


def _whole(outcome: FinishedJob, place: StageFolder) -> FinishedJob:
    """The outcome of a job that finished before its stage was sealed, if its model and bank still match its record."""
    record, job = outcome.record, Folder(place.job)
    wrong = None
    try:
        if (
            record["bank"] is not None
            and Bank.load(job.bank).manifest["probes_sha256"] != record["bank"]["probes_sha256"]
        ):
            wrong = f"{job.bank} is not the bank of the job"
        elif models.load(place.model, device="cpu").fingerprint != record["model"]["after"]:
            wrong = f"{place.model} is not the model of the job"
    except (ValueError, OSError) as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"{wrong}; the stage is not sealed: remove {place.root} and repeat the update")
    return outcome


def _sealed(ledger: Ledger, place: StageFolder, task: str, outcome: FinishedJob) -> Ledger:
    """Write the outcome of each row, then the ledger entry, which completes the stage."""
    number = len(ledger.entries) + 1
    kept = set_name(number - 1) if number > 1 else BASE
    sets = answered(place, set_name(number), kept, [name for name, _ in _external(ledger)])
    files.write_text(place.watched, lines(_evaluated(place.new, sets[set_name(number)])))
    if number == 1 and BASE in sets:
        source = place.past if place.past.is_file() else place.anchors
        files.write_text(place.base, lines(_evaluated(source, sets[BASE])))
    files.write_json(place.flips, flips(sets))
    model = outcome.record["model"]
    grown = append(ledger, task=task, before=model["before"], after=model["after"], created=outcome.record["created"])
    say(f"stage {number} sealed {str(grown.head)[:12]}")
    return grown


def _evaluated(path: Path, evaluated: RowSet) -> list[Example]:
    """The rows of a file that a job evaluated; free text with the response it was judged by, maybe the model's own."""
    gold = {row.id: row.gold for row in evaluated.rows}
    rows = [row for row in read_file(path) if row.id in gold]
    return [row if isinstance(row, Choice) else replace(row, response=gold[row.id]) for row in rows]
