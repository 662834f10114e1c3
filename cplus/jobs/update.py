"""Repeated updates: one stage more from the last stage's model, each sealed to the one before it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cplus import models
from cplus.base import files
from cplus.data.examples import Choice, Example, lines
from cplus.data.readers import read_file, weighted
from cplus.data.tasks import Task, load_task
from cplus.distributed.processes import Interrupted
from cplus.evaluation.changes import Kind
from cplus.evaluation.statistics import average_accuracy, backward_transfer
from cplus.jobs.adapt import adapt, resume
from cplus.jobs.folder import FinishedJob, Folder, claimed
from cplus.jobs.progress import say
from cplus.jobs.settings import DECIDED, AdaptConfig, check_repeated, settings
from cplus.probes.bank import Bank
from cplus.receipts.contents import RowSet
from cplus.receipts.page import read_receipt

# The ledger file: the hash of every file of each stage, and the stage it followed. It does not import torch.


FORMAT = "cplus-ledger/1"
NAME = "ledger.json"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One complete stage; `before` and `after` are model fingerprints, `previous` is the seal of the previous entry."""

    stage: int
    task: str
    before: str
    after: str
    files: dict[str, str]
    created: str
    previous: str | None

    @property
    def seal(self) -> str:
        """The hash of the entry's content."""
        return files.fingerprint(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The stages so far, in order; `head` is the seal of the last one according to the file."""

    root: Path
    entries: tuple[Entry, ...] = ()
    head: str | None = None

    def place(self, stage: int) -> StageFolder:
        """The folder of a stage, which need not exist."""
        return StageFolder(self.root / "stages" / f"{stage:03d}")

    @property
    def job(self) -> Folder | None:
        """The finished job of `cplus adapt` that the ledger continues, where its folder is that of one."""
        found = Folder(self.root)
        return found if found.record.is_file() else None


class StageFolder:
    """The paths of one stage."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.arguments = root / "asked.json"  # resuming requires the same ones
        self.new = root / "new.jsonl"
        self.past = root / "past.jsonl"  # first stage: held-out rows on which the base model is evaluated
        self.anchors = root / "anchors.jsonl"  # of the previous task, or of the base model
        self.watched = root / "watched.jsonl"  # the rows that this stage evaluated, for later stages
        self.base = root / "base.jsonl"  # first stage: rows for what the base model could do
        self.flips = root / "flips.json"  # every evaluated row, by set: kept, lost, gained or still wrong
        self.job = root / "job"  # the output of `cplus adapt`
        self.model = self.job / "model"
        self.record = self.job / "record.json"


def read(root: Path) -> Ledger:
    """Read a ledger without verifying it; `problems` does that."""
    if not (root / NAME).is_file():
        raise ValueError(f"{root}: expected a ledger with {NAME}; start one with 'cplus update {root} --model ...'")
    raw = files.read_json(root / NAME)
    try:
        if raw["format"] == FORMAT:
            return Ledger(root=root, entries=tuple(Entry(**entry) for entry in raw["stages"]), head=raw["head"])
    except (KeyError, TypeError):
        pass
    raise ValueError(f"{root / NAME}: expected the format {FORMAT}; it was written by another version")


def append(ledger: Ledger, *, task: str, before: str, after: str, created: str) -> Ledger:
    """Seal the next stage's folder into the ledger; the ledger file is replaced atomically."""
    entry = Entry(
        stage=len(ledger.entries) + 1,
        task=task,
        before=before,
        after=after,
        files={name: files.sha256_file(path) for name, path in contents(ledger.place(len(ledger.entries) + 1).root)},
        created=created,
        previous=ledger.entries[-1].seal if ledger.entries else None,
    )
    grown = replace(ledger, entries=(*ledger.entries, entry), head=entry.seal)
    body: dict[str, Any] = {"format": FORMAT, "stages": [asdict(e) for e in grown.entries], "head": grown.head}
    files.write_json(ledger.root / NAME, body)
    return grown


def contents(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file of a stage with its relative path, sorted; lock files do not count."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            yield path.relative_to(folder).as_posix(), path


def problems(ledger: Ledger, *, models: bool = True) -> list[str]:
    """Every deviation from the seals, one sentence each; without `models` only the last stage's model is checked."""
    found: list[str] = []
    before: Entry | None = None
    for number, entry in enumerate(ledger.entries, start=1):
        if entry.stage != number:
            found.append(f"entry {number} is marked as stage {entry.stage}: an entry was removed or moved")
        if entry.previous != (before.seal if before else None):
            found.append(f"stage {number} does not follow the entry that it was sealed after: an entry was changed")
        if before is not None and entry.before != before.after:
            found.append(f"stage {number} started from a model other than the one stage {number - 1} ended with")
        before = entry
    if ledger.head != (before.seal if before else None):
        found.append("the last entry is not the one that was sealed")
    for entry in ledger.entries:
        present = dict(contents(ledger.place(entry.stage).root))
        for name, sealed in entry.files.items():
            read_it = models or entry is before or not name.startswith("job/model/")
            if name not in present:
                found.append(f"stage {entry.stage}: {name} is missing")
            elif read_it and files.sha256_file(present[name]) != sealed:
                found.append(f"stage {entry.stage}: {name} was changed")
        found += [f"stage {entry.stage}: {name} was added" for name in sorted(present.keys() - entry.files)]
    return found


# A ledger in figures: each task's accuracy after each stage. Imports no torch.


BASE = "base"
"""The rows on which the base model is evaluated; they are not a task of the sequence."""


def set_name(stage: int) -> str:
    """The name of a task's rows in the flips: the stage that learned them, because task names may repeat.

    >>> set_name(2)
    'stage 2'
    """
    return f"stage {stage}"


BEFORE, AFTER = ("kept", "lost"), ("kept", "gained")
"""The outcomes of a row that was right before the stage, and after it."""


def report(ledger: Ledger) -> dict[str, Any]:
    """The ledger's figures as plain JSON values.

    Accuracy is by stage (the base model first) and task; None if a task was not evaluated. A task is also evaluated
    just before its own stage, which gives its accuracy for the previous stage.

    Paper: App. E.9 (average task accuracy).
    """
    # The outcome of each row, by set and row id.
    found: list[dict[str, dict[str, Kind]]] = [
        files.read_json(ledger.place(entry.stage).flips) for entry in ledger.entries
    ]
    cells: list[list[float | None]] = [[None] * len(found) for _ in range(len(found) + 1)]
    stages = []
    for number, (entry, table) in enumerate(zip(ledger.entries, found, strict=True), start=1):
        for task in range(1, number + 1):
            cells[number][task - 1] = _share(table[set_name(task)], AFTER)
        cells[number - 1][number - 1] = _share(table[set_name(number)], BEFORE)
        record = files.read_json(ledger.place(number).record)
        stages.append(
            {
                "stage": number,
                "task": entry.task,
                "method": record["settings"]["method"],
                "rows": len(table[set_name(number)]),
                "acquisition": record["figures"]["acquisition"],
                "retention": record["figures"]["retention"],
                "model": entry.after,
                "created": entry.created,
            }
        )
    return {
        "ledger": str(ledger.root),
        "head": ledger.head,
        "tasks": [entry.task for entry in ledger.entries],
        "accuracy": cells,
        "average_accuracy": [average_accuracy(cells, number) for number in range(1, len(found) + 1)],
        "backward_transfer": backward_transfer(cells),
        "base": [_share(table.get(BASE, {}), AFTER) for table in found],
        "stages": stages,
    }


def _share(rows: Mapping[str, Kind], right: Collection[str]) -> float | None:
    return 100 * sum(kind in right for kind in rows.values()) / len(rows) if rows else None


# One more stage: `cplus adapt` from the last stage's model, with each earlier task as a separate past task.


OF_ONE_STAGE = {
    *DECIDED, "model", "new", "anchors", "past", "validation", "external", "require", "report_to", "revision", "preset",
    "own_answers",
}  # fmt: skip
"""Settings that belong to one stage; the others default to those of the previous stage."""


def update(root: Path, given: Mapping[str, Any], *, force: bool = False) -> tuple[Ledger, FinishedJob]:
    """Append one stage, or resume it if the same update was interrupted; `force` starts it again."""
    for name in DECIDED:
        if name in given:
            raise ValueError(f"an update sets {name!r} itself; leave it out")
    if given.get("new") is None:
        raise ValueError("expected new: the rows to learn in this stage, a file or a named task")
    # Rows are copied into the ledger, where they have no weights.
    several = given["new"] if isinstance(given["new"], list | tuple) else [given["new"]]
    names = [str(name) for name in several if isinstance(name, str | Path)]
    if len(names) != 1 or weighted(names[0])[0] != names[0]:
        raise ValueError(
            f"expected one file of new rows without a weight for a stage, got {given['new']}; join the files"
        )
    given = {**given, "new": names[0]}
    if (root / NAME).is_file() or Ledger(root=root).job is not None:
        if given.get("model") is not None:
            raise ValueError(f"{root}: an update continues from the last model here; leave the model out")
    elif root.exists() and not (
        root.is_dir() and all(entry.name == "stages" or files.is_left(entry.name) for entry in root.iterdir())
    ):
        raise ValueError(f"{root} exists and has no {NAME}, so it is not a ledger; choose another folder")
    elif given.get("model") is None:
        raise ValueError(f"{root}: there is no ledger yet; give the first update the model to start from")
    with claimed(Folder(root)):
        files.tidy(root)
        ledger = read(root) if (root / NAME).is_file() else Ledger(root=root)
        if wrong := problems(ledger, models=False):
            raise ValueError(f"{root}: {wrong[0]}; a ledger that was changed cannot be updated")
        place = ledger.place(len(ledger.entries) + 1)
        files.tidy(place.root)
        config = _started(ledger, place, given, force=force)
        outcome = _worked(config, place, given)
        return _sealed(ledger, place, names[0], outcome), outcome


def _started(ledger: Ledger, place: StageFolder, given: Mapping[str, Any], *, force: bool) -> AdaptConfig:
    """The stage's settings; writes its rows and then its arguments, which mark the stage as started."""
    values = dict(given)
    before = [own.record for own in (ledger.job, *map(ledger.place, range(1, len(ledger.entries) + 1))) if own]
    if before and "preset" not in given:
        last = files.read_json(before[-1])["settings"]
        values = {
            name: value for name, value in last.items() if name in AdaptConfig.model_fields.keys() - OF_ONE_STAGE
        } | values
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
    """The anchors and past rows, by their path in the stage; the last task's anchors are drawn where none are given."""
    stage, found = len(ledger.entries), dict[Path, tuple[Example, ...]]()
    if stage and (values.get("past") is not None or values.get("own_answers")):
        raise ValueError(
            "past and own_answers belong to the first update; later updates are evaluated on the rows of earlier tasks"
        )
    for path, name in ((place.anchors, "anchors"), (place.past, "past")):
        if values.get(name) is not None:
            found[path] = load_task(str(values[name]), values.get("data_dir")).examples
    if stage and place.anchors not in found:
        known = files.read_json(ledger.place(stage).flips)[set_name(stage)]
        right = [row for row in read_file(ledger.place(stage).watched) if known.get(row.id) in AFTER]
        count = int(values.get("num_anchors") or AdaptConfig.model_fields["num_anchors"].default)
        if not right:
            raise ValueError(f"stage {stage} answers none of its rows correctly, so there are no anchors; give some")
        if len(right) < count:
            say(f"note: stage {stage} answers {len(right)} of its rows correctly; all of them become anchors")
        drawn = random.Random(int(values.get("seed") or 0)).sample(right, min(count, len(right)))
        found[place.anchors] = tuple(drawn)
    if not stage and place.past not in found and ledger.job is not None and ledger.job.past.is_file():
        found[place.past] = tuple(read_file(ledger.job.past))
    return found


def _config(
    ledger: Ledger, place: StageFolder, values: Mapping[str, Any], new: Task, present: Collection[Path]
) -> AdaptConfig:
    """The stage as a job: the previous task is the past task, earlier ones are preserved and evaluated as well."""
    number = len(ledger.entries)
    last = ledger.place(number)
    external = [path for _, path in _external(ledger)]
    kept = [ledger.place(stage).job for stage in range(1, number + 1)]
    first = ledger.job.model if ledger.job is not None else values.get("model")
    if ledger.job is not None:
        kept = [ledger.root, *kept]
    own = new.interface if isinstance(new.examples[0], Choice) else None
    config = settings(
        {
            "judge": "exact",  # a ledger counts right answers
            **values,
            "model": str(last.model if number else first),
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
    base = ledger.place(1).base
    tasks = [(set_name(stage), ledger.place(stage).watched) for stage in range(1, len(ledger.entries))]
    return [*([(BASE, base)] if base.is_file() else []), *tasks]


def _worked(config: AdaptConfig, place: StageFolder, given: Mapping[str, Any]) -> FinishedJob:
    """The stage's job, begun or resumed; one that finished before its stage was sealed must match its record."""
    job = Folder(place.job)
    if not job.record.is_file():
        try:
            return resume(place.job, repeated=given) if job.settings.is_file() else adapt(config)
        except Interrupted as stop:
            sentence = str(stop).rpartition(". ")[0]  # without the advice to resume the job by itself
            raise Interrupted(stop.number, f"{sentence}. Resume it with the same command") from stop
    outcome, wrong = resume(place.job, repeated=given), None
    record = outcome.record
    try:
        bank = record["bank"]
        if bank is not None and Bank.load(job.bank).manifest["probes_sha256"] != bank["probes_sha256"]:
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
    # The receipt's row sets under the ledger's names; its own external sets come first, those the user added are left.
    own = {"acquisition": set_name(number), "retention": set_name(number - 1) if number > 1 else BASE}
    found = read_receipt(place.job).sets
    sets = {own[group.kind]: group for group in found if group.kind in own}
    external = [group for group in found if group.kind == "external"]
    sets |= dict(zip([name for name, _ in _external(ledger)], external, strict=False))
    files.write_text(place.watched, lines(_evaluated(place.new, sets[set_name(number)])))
    if number == 1 and BASE in sets:
        source = place.past if place.past.is_file() else place.anchors
        files.write_text(place.base, lines(_evaluated(source, sets[BASE])))
    # Rows without a judgement are omitted.
    outcomes = {name: {row.id: row.kind for row in one.rows if row.kind is not None} for name, one in sets.items()}
    files.write_json(place.flips, outcomes)
    model = outcome.record["model"]
    grown = append(ledger, task=task, before=model["before"], after=model["after"], created=outcome.record["created"])
    say(f"stage {number} sealed {str(grown.head)[:12]}")
    return grown


def _evaluated(path: Path, evaluated: RowSet) -> list[Example]:
    """The rows of a file that a job evaluated; free text with the response it was judged by, maybe the model's own."""
    gold = {row.id: row.gold for row in evaluated.rows}
    rows = [row for row in read_file(path) if row.id in gold]
    return [row if isinstance(row, Choice) else replace(row, response=gold[row.id]) for row in rows]
