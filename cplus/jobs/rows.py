"""The rows of a job by their part, from files with weights, and what is required of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cplus import models
from cplus.base.files import cache_folder
from cplus.data import interfaces
from cplus.data.examples import Choice, Example, FreeForm, to_row
from cplus.data.prompts import read_template
from cplus.data.readers import weighted
from cplus.data.tasks import Task, cached_split, draw_anchors, load_task, stack
from cplus.evaluation.judges import judge
from cplus.evaluation.requirements import Measured, require_possible
from cplus.jobs.folder import Folder
from cplus.jobs.progress import say
from cplus.jobs.settings import AdaptConfig
from cplus.methods.table import Method
from cplus.models import Loaded
from cplus.models.scoring import fitting, predict
from cplus.probes.labels import own_answers
from cplus.probes.settings import input_key
from cplus.training.measure import GroupAnswers
from cplus.training.rows import Group, Part, Rows, Source, overlap

# New rows from several files, each with a weight: how often an epoch trains on its rows.


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The rows of all files as one task, how often an epoch uses each, and the file it comes from, both by id."""

    task: Task
    files: tuple[tuple[str, float, Task], ...]
    times: Mapping[str, int]
    origin: Mapping[str, int]

    def applied(self, rows: Rows) -> Rows:
        """The job's rows with the copies that an epoch trains on, and each file's share."""
        new = rows.new.examples
        most = max(self.times[example.id] for example in new)
        copies = tuple(example for k in range(1, most) for example in new if self.times[example.id] > k)
        sources = tuple(
            Source(
                name=name,
                weight=weight,
                rows=len(task.examples),
                trained=sum(self.origin[example.id] == number for example in new),
                per_epoch=sum(self.times[example.id] for example in new if self.origin[example.id] == number),
            )
            for number, (name, weight, task) in enumerate(self.files)
        )
        return replace(rows, copies=copies, sources=sources)


def mix(files: Sequence[tuple[str, float, Task]], seed: int) -> Mixture:
    """Every row as often as its file's weight: whole parts repeat it, a fraction draws rows once, by the seed.

    One file of weight 1 is returned as it is.
    """
    names = [name for name, _, _ in files]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"new: {twice[0]} is given twice; give it once with a weight, as in {twice[0]}=2")
    (first, _, task), *others = files
    for name, _, other in others:
        if _kind(other) != _kind(task):
            raise ValueError(
                f"new: expected files with rows of one kind, but {first} has {_kind(task)} and {name} has "
                f"{_kind(other)}; learn them in two jobs"
            )
    examples: list[Example] = []
    times: dict[str, int] = {}
    origin: dict[str, int] = {}
    for number, (name, weight, own) in enumerate(files):
        count = len(own.examples)
        drawn = set(random.Random(f"{seed}/new/{number}").sample(range(count), round(weight % 1 * count)))
        used = [(example, int(weight) + (i in drawn)) for i, example in enumerate(own.examples)]
        if not any(often for _, often in used):
            raise ValueError(f"new: a weight of {weight:g} leaves none of the {count} rows of {name}; raise it")
        for example, often in used:
            if often:
                row = replace(example, id=f"{name}: {example.id}") if example.id in times else example
                examples.append(row)
                times[row.id], origin[row.id] = often, number
    if len(files) > 1 or len(examples) < len(task.examples):
        task = replace(task, name=" + ".join(names), examples=tuple(examples), detected="")
    return Mixture(task=task, files=tuple(files), times=times, origin=origin)


def _kind(task: Task) -> str:
    """What decides the interface of a task's rows, in words."""
    row = task.examples[0]
    if isinstance(row, Choice):
        return f"multiple choice ({task.interface}, {task.wording} wording)"
    assert isinstance(row, FreeForm)
    return "plain text" if row.is_text else "free text"


# The rows of a job by their part: new rows, anchors, past rows, external tasks.


_TAKEN = ("new", "validation", "past", "anchors")
SHORT = 32
"""Tokens that every answer in free text may have."""
SAMPLE = 64
"""New rows in free text that are evaluated where nobody judges them."""
HELD_OUT_FROM = 50
"""Minimum number of new rows of which a tenth is held out of training."""


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """What is read from files, before any model is loaded; the new rows are a `mixture` of files."""

    mixture: Mixture | None
    anchors: Task | None
    past: Task | None
    validation: Task | None
    split: Task | None
    external: tuple[Task, ...]
    kept: tuple[Task, ...] = ()

    @property
    def new(self) -> Task | None:
        """The rows of all files of new rows."""
        return None if self.mixture is None else self.mixture.task


def read(config: AdaptConfig, method: Method, home: Path) -> Tasks:
    """Read every file and task, and print the formats; a method without the rows it needs is refused here."""
    if not (config.split or config.anchors or config.kept or config.written) and set(method.needs) != {"new"}:
        raise ValueError(
            f"method {method.name!r} needs anchors: rows the model should keep; provide some as anchors or keep general"
        )

    def load(name: str, *, requests: bool = False) -> Task:
        place = located(name, home)
        columns = config.columns if Path(place).exists() else None
        return load_task(place, config.data_dir, columns=columns, requests=requests)

    own = config.own_answers
    new = (config.new,) if isinstance(config.new, str) else config.new or ()
    given = [weighted(text, home) for text in new]
    mixture = mix([(name, weight, load(name)) for name, weight in given], config.seed) if given else None
    split = None if config.split is None else load(config.split)
    anchors = None if config.anchors is None else load(config.anchors, requests=own)
    past = None if config.past is None else load(config.past, requests=own)
    validation = None if config.validation in (None, "none") else load(config.validation)
    external = tuple(load_task(located(name, home), config.data_dir) for name in config.external)
    names = [task.name for task in external]
    if len({*names, *_TAKEN}) != len(names) + len(_TAKEN):
        raise ValueError(f"expected external tasks of different names, none called {', '.join(_TAKEN)}, got {names}")
    folders = [Folder(Path(located(str(place), home))) for place in config.kept]
    for folder in folders:
        if not folder.anchors.is_file():
            raise ValueError(f"{folder.root}: expected the folder of a job with anchors; it holds no anchors.jsonl")
    learned = () if mixture is None else mixture.files
    named = [(f"new: {task.name}" if len(learned) > 1 else "new", task) for _, _, task in learned]
    for name, task in (*named, ("validation", validation), ("anchors", anchors), ("past", past)):
        if task is not None and task.detected:
            say(f"{name}: {task.detected}")
    return Tasks(
        mixture=mixture,
        anchors=anchors,
        past=past,
        validation=validation,
        split=split,
        external=external,
        kept=tuple(load_task(str(folder.anchors)) for folder in folders),
    )


def located(name: str, home: Path) -> str:
    """The path, from here, of a file named relative to `home`; other names are returned unchanged."""
    path = home / Path(name).expanduser()
    return str(path) if home != Path.cwd() and path.exists() else name


def bind_rows(config: AdaptConfig, tasks: Tasks, base: Loaded) -> Rows:
    """Bind the rows to the model: interfaces, rows that fit its window, its own answers where it is asked for them."""
    with models.computing(config.compute_dtype, base.device):
        if tasks.split is not None:
            rows = _split_rows(config, tasks.split, base)
        else:
            assert tasks.mixture is not None
            known = {
                name: None if task is None else group_of(config, task, base, name=name, part="retention")
                for name, task in (("anchors", tasks.anchors), ("past", tasks.past))
            }
            new = group_of(config, tasks.mixture.task, base, name="new", part="acquisition")
            new, validation = _held_out(config, tasks.validation, base, new)
            rows = Rows(new=new, anchors=known["anchors"], past=known["past"], validation=validation)
            rows = tasks.mixture.applied(rows)
        external = tuple(group_of(config, task, base, name=task.name, part="external") for task in tasks.external)
        if config.external_limit is not None:
            external = tuple(group.drawn(config.external_limit, config.seed) for group in external)
        kept = tuple(
            group_of(config, task, base, name=f"kept {number}", part="retention")
            for number, task in enumerate(tasks.kept, start=1)
        )
        rows = replace(rows, external=external, kept=kept)
        rows = replace(rows, notes=notes(config, rows))
        if config.own_answers:
            rows = _with_own_answers(config, rows, base)
        return rows


def _with_own_answers(config: AdaptConfig, rows: Rows, base: Loaded) -> Rows:
    """The rows to keep with the base model's own greedy answers; a row that its answer makes too long is left out."""
    limit = config.max_length or base.window
    for name, group in (("anchors", rows.anchors), ("past", rows.past)):
        if group is None or group.closed:
            continue
        count = len(group.examples)
        say(f"the base model answers the {count} {name} rows; its answers are cached")
        answers = own_answers(base, group.interface, group.examples, name=name)
        examples = tuple(fitting(group.interface, answers, limit, "exclude"))
        if not examples:
            raise ValueError(
                f"none of the {count} {name} rows fits {limit} tokens with the model's own answer; raise max_length, "
                "or supply other rows"
            )
        note = f"The {name} rows hold the base model's own answers"
        if lost := count - len(examples):
            note += f"; left out without a complete answer: {lost}"
        changed: Any = {name: replace(group, examples=examples), "notes": (*rows.notes, f"{note}.")}
        rows = replace(rows, **changed)
    return rows


def _held_out(config: AdaptConfig, task: Task | None, base: Loaded, new: Group) -> tuple[Group, Group | None]:
    """New rows to train on and new rows held out: those of the setting, or a tenth drawn by the seed."""
    if task is not None:
        held = group_of(config, task, base, name="validation", part="validation")
        known = {input_key(example, options=False) for example in new.examples}
        if both := [example.id for example in held.examples if input_key(example, options=False) in known]:
            raise ValueError(
                f"{task.name}: {len(both)} of {len(held.examples)} validation rows are also new rows, the first is "
                f"{both[0]!r}; remove them from one of the two files"
            )
        return new, held
    count = len(new.examples) // 10
    if config.validation == "none" or config.preset == "paper" or len(new.examples) < HELD_OUT_FROM:
        return new, None
    held = new.drawn(count, config.seed)
    # A row that occurs twice would be trained on by its other copy.
    drawn = {input_key(example, options=False) for example in held.examples}
    copies = [example for example in new.examples if input_key(example, options=False) in drawn]
    ids = {example.id for example in copies}
    trained = tuple(example for example in new.examples if example.id not in ids)
    return replace(new, examples=trained), replace(new, name="validation", part="validation", examples=tuple(copies))


def notes(config: AdaptConfig, rows: Rows) -> tuple[str, ...]:
    """Notes on the rows that a reader of the figures must know."""
    groups = (rows.new, rows.validation, rows.anchors, rows.past, *rows.external, *rows.kept)
    lines = list(dict.fromkeys(group.note for group in groups if group is not None and group.note))
    if len(rows.sources) > 1 or any(source.weight != 1 for source in rows.sources):
        shares = (f"{own.per_epoch} from {own.name} (weight {own.weight:g}, {own.rows} rows)" for own in rows.sources)
        lines.append(f"New rows per epoch: {'; '.join(shares)}.")
    found = [input_key(example, options=True) for example in rows.new.examples]
    if copies := len(found) - len(set(found)):
        lines.append(f"{copies} of {len(found)} new rows ask what another one asks.")
    for some, others, what in (
        (rows.anchors, rows.new, "anchors are also new rows: training changes what they protect"),
        (rows.past, rows.anchors, "past rows are anchors, which the method has seen"),
        (rows.past, rows.new if config.split is None else None, "past rows are also new rows"),
    ):
        if some is not None and others is not None and (both := overlap(some, others)):
            lines.append(f"{both} of {len(some.examples)} {what}.")
    if rows.past is None and rows.anchors is not None:
        count = len(rows.anchors.examples)
        lines.append(
            f"Retention is measured on the {count} anchors alone, which the method has seen; provide past rows."
        )
    if rows.validation is not None:
        held, count = len(rows.validation.examples), len(rows.new.examples)
        lines.append(f"{held} new rows are held out to measure learning; {count} are trained on.")
    if rows.kept:
        count = sum(len(group.examples) for group in rows.kept)
        lines.append(f"{len(rows.kept)} earlier past tasks are protected as well, with {count} anchors in total.")
    for group in evaluated(config, rows):
        whole = {"new": rows.new, "past": rows.past}.get(group.name)
        if whole is not None and len(group.examples) < len(whole.examples):
            lines.append(f"{len(group.examples)} of {len(whole.examples)} {group.name} rows were evaluated.")
    return tuple(lines)


def evaluated(config: AdaptConfig, rows: Rows) -> tuple[Group, ...]:
    """The groups evaluated before and after training; of free-text new rows that nobody judges a sample."""
    groups = rows.evaluated(config.max_asked, config.seed)
    few = not groups[0].closed and config.judge == "none"
    return (groups[0].drawn(SAMPLE, config.seed) if few else groups[0], *groups[1:])


def group_of(config: AdaptConfig, task: Task, base: Loaded, *, name: str, part: Part) -> Group:
    """A task's rows, bound to the model, cut or left out where they are too long, with a note of what was done."""
    limit, given, first = config.max_length or base.window, task.examples, task.examples[0]
    kind = task.interface  # freeform for free text, else that of the settings or the task's own
    if isinstance(first, Choice):
        if config.interface == "freeform":
            raise ValueError(f"{task.name} has multiple-choice rows; expected the interface letter or cloze for them")
        kind = config.interface or kind
    chat = not config.plain and not (isinstance(first, FreeForm) and first.is_text)
    bound = interfaces.build(
        kind, base.tokenizer, wording=task.wording, chat=chat, turns=config.turns, thinking=config.thinking
    )
    examples = fitting(bound, given, limit, config.too_long)
    if not examples:
        raise ValueError(f"{task.name}: none of {len(given)} rows fits the limit of {limit} tokens")
    found = []
    if left := len(given) - len(examples):
        found.append(f"{left} of {len(given)} {name} rows are longer than {limit} tokens and are left out.")
    elif cut := sum(new is not old for new, old in zip(examples, given, strict=True)):
        found.append(
            f"{cut} of {len(given)} {name} rows are longer than {limit} tokens: their prompts lost the beginning."
        )
    # A row with texts that the tokenizer reads as its special tokens can pretend to be another turn.
    texts = [json.dumps(to_row(example), ensure_ascii=False) for example in examples]
    if held := [marks for text in texts if (marks := [m for m in base.tokenizer.all_special_tokens if m in text])]:
        found.append(
            f"{len(held)} of {len(texts)} {name} rows hold special tokens of the model in their text, such as "
            f"{held[0][0]}, which it reads as such; remove them if they are not meant."
        )
    longest = None
    answers = [example.response for example in examples if isinstance(example, FreeForm) and not example.is_text]
    if answers and part in ("acquisition", "validation") and config.judge == "none":
        # Answers that nobody judges need not be longer than twice the longest response that is learned.
        lengths = (len(base.tokenizer.encode(answer, add_special_tokens=False)) for answer in answers)
        longest = max(SHORT, 2 * max(lengths))
    return Group(
        name=name, part=part, interface=bound, examples=tuple(examples), note=" ".join(found), max_new_tokens=longest
    )


def _split_rows(config: AdaptConfig, task: Task, base: Loaded) -> Rows:
    """The rows that the base model answers correctly and incorrectly, cached per model, task and machine."""
    whole = group_of(config, task, base, name=task.name, part="external")
    if not whole.closed:
        raise ValueError(f"{task.name} is free text; a split needs multiple choice: provide new and anchors as files")
    found = cached_split(
        cache_folder() / "splits",
        whole.examples,
        lambda: predict(
            base.model, whole.interface, whole.examples, judge=judge(config.judge), what="what the model knows"
        ),
        model_fingerprint=base.fingerprint,
        interface=whole.interface.name,
        stack=stack(device=base.device.type, compute_dtype=config.compute_dtype),
    )
    wrong = list(found.new)
    if config.num_new is not None:
        if config.num_new > len(wrong):
            raise ValueError(f"num_new is {config.num_new}, but the model answers only {len(wrong)} rows incorrectly")
        wrong = random.Random(f"{config.seed}/new").sample(wrong, config.num_new)
    if not wrong or not found.past:
        raise ValueError(
            f"{task.name}: the model answers {len(found.past)} of {len(found.predictions)} rows correctly; a split "
            "needs both correct and incorrect ones"
        )
    by_id = {prediction.id: prediction for prediction in found.predictions}

    def known(name: str, part: Part, examples: Sequence[Example]) -> Group:
        answers = tuple(by_id[example.id] for example in examples)
        return replace(whole, name=name, part=part, examples=tuple(examples), known=answers)

    return Rows(
        new=known("new", "acquisition", wrong),
        anchors=known("anchors", "retention", draw_anchors(found, config.num_anchors, config.seed)),
        past=known("past", "retention", found.past),
    )


# Requirements of a job, checked against its rows before any training.


def check_requirements(config: AdaptConfig, groups: tuple[Group, ...], before: Mapping[str, GroupAnswers]) -> None:
    """Refuse a requirement that these rows cannot judge or no result could meet, before the training."""
    parts = [
        Measured(
            kind=group.part,
            rows=len(group.examples),
            right=None
            if not group.closed and judge(config.judge) is None
            else sum(p.right for p in before[group.name].predictions),
            scored=0 if group.closed else len(group.examples),
            anchors=group.name == "anchors",
        )
        for group in groups
    ]
    require_possible(config.requirements, parts)


# The base model and the rows bound to it.


def load(config: AdaptConfig, home: Path) -> Loaded:
    """The base model in the precision and with the chat template of the settings."""
    loaded = models.load(
        located(config.model, home),
        dtype=config.load,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
    )
    if (written := template(config, home)) is not None:
        loaded.tokenizer.chat_template = written
    return loaded


def template(config: AdaptConfig, home: Path) -> str | None:
    """The chat template of the settings."""
    place = config.chat_template
    return None if place is None else read_template(Path(located(str(place), home)))
