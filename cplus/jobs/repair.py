"""`cplus repair` from its settings to its folder, and the repair at the end of `cplus adapt --repair`."""

from __future__ import annotations

import copy
import datetime
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from cplus import models
from cplus.base import files
from cplus.base.environment import environment
from cplus.base.files import canonical_json
from cplus.core.rows import Encoded
from cplus.data.examples import Example, fingerprint, lines, to_row
from cplus.distributed.processes import Interrupted, Interruption
from cplus.evaluation.changes import acquisition, flips
from cplus.evaluation.judges import judge
from cplus.jobs.checkpoint import read_state
from cplus.jobs.folder import FinishedJob, Folder, begin_folder, check_free, claimed, discard, read_values, row_hashes
from cplus.jobs.keep import Written, job_bank, with_written, written_bank
from cplus.jobs.memory import ModelSize, available, disk_free, giga, model_size
from cplus.jobs.outputs import Before, answer, base_answers, card, read_stored, row_set, write_model
from cplus.jobs.prepare import bind_rows, load
from cplus.jobs.progress import recorded, recorded_seconds, say
from cplus.jobs.rows import Tasks, check_requirements, located, read
from cplus.jobs.settings import MAX_ROWS, AdaptConfig, RepairConfig, repair_settings
from cplus.methods.adapters import merged_from
from cplus.methods.repair import (
    BYTES_PER_PARAMETER,
    FALL,
    LOSS_ROWS,
    POINTS,
    By,
    Check,
    Repaired,
    Sums,
    Unrepairable,
    check_weights,
    loss_check,
    repair_model,
)
from cplus.methods.table import METHODS, Method
from cplus.models import Loaded
from cplus.models.loading import without_bars
from cplus.models.names import origin
from cplus.models.scoring import log_likelihoods, predict
from cplus.probes.audit import ComparedRows, audit
from cplus.probes.bank import Bank
from cplus.receipts.page import ModelId, Receipt, Repair, TunedSet, bank_audit, write_receipt
from cplus.training.measure import GroupAnswers, changes, evaluate, kept, learned, loss_of
from cplus.training.rows import Group, PastTask, Rows

# The outputs of a repair: model, card, receipt of base, tuned and repaired model, and, last of all, the record.


SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RepairOutcome:
    """Everything the outputs are written from."""

    config: RepairConfig
    base: Loaded
    tuned: Loaded
    after_fingerprint: str
    rows: Rows
    groups: Sequence[Group]
    before: Before
    tuned_sets: Sequence[TunedSet]
    after: Mapping[str, GroupAnswers]
    bank: Bank
    repaired: Repaired
    notes: Sequence[str]
    seconds: Mapping[str, float]


def tuned_set(group: Group, before: GroupAnswers, answers: GroupAnswers) -> TunedSet:
    """What the tuned model reached on a group, from its answers or from losses alone."""
    nll = None if group.closed else max(0.0, loss_of(answers.scores))
    if not answers.predictions or any(p.correct is None for p in (*before.predictions, *answers.predictions)):
        return TunedSet(name=group.name, nll=nll)
    table = flips(before.predictions, answers.predictions)
    right = 100 * sum(p.right for p in answers.predictions) / len(answers.predictions)
    return TunedSet(name=group.name, right=right, retention=kept(table), acquisition=learned(table), nll=nll)


def write_outputs(folder: Folder, done: RepairOutcome) -> dict[str, Any]:
    """Write receipt, card and record."""
    shown = write_receipt(receipt(done), folder.root)
    name, licence = origin(done.config.model)
    record = {
        "schema": SCHEMA,
        "settings": done.config.shown(),
        "model": {
            "name": done.config.model,
            "id": name,
            "license": licence,
            "before": done.base.fingerprint,
            "tuned": done.tuned.fingerprint,
            "after": done.after_fingerprint,
        },
        "figures": shown["figures"],
        "repair": done.repaired.row(),
        "rows": row_hashes(done.groups),
        "counts": counts(done),
        "actual": {"seconds": dict(done.seconds)},
        "bank": dict(done.bank.manifest),
        "notes": shown["notes"],
        "receipt": shown["sha256"],
        "environment": shown["environment"],
        "created": shown["created"],
    }
    files.write_text(folder.card, card(record, "repair_card.md"))
    record = files.sealed(record)
    files.write_json(folder.record, record)
    return record


def counts(done: RepairOutcome) -> dict[str, int]:
    """The numbers of rows, probes and parameters."""
    rows = {"new": done.rows.new, "anchors": done.rows.anchors, "past": done.rows.past}
    sizes = {name: 0 if group is None else len(group.examples) for name, group in rows.items()}
    return {**sizes, "probes": len(done.bank.probes), "parameters": done.repaired.parameters}


def receipt(done: RepairOutcome) -> Receipt:
    """The repair as a receipt: before is the base, after the repaired model, the tuned one is beside them."""
    config = done.config
    groups = [group for group in (done.rows.anchors, done.rows.new, done.rows.past) if group is not None]
    sources = [ComparedRows(name=group.name, examples=group.examples) for group in groups]
    return Receipt(
        title=f"{config.tuned} repaired towards {config.model}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=ModelId(name=config.model, fingerprint=done.base.fingerprint),
        after=ModelId(name=f"{config.out.name}/model", fingerprint=done.after_fingerprint),
        method="repair",
        sets=tuple(
            row_set(config, group, done.before.answers[group.name], done.after[group.name]) for group in done.groups
        ),
        repair=Repair(
            tuned=ModelId(name=config.tuned, fingerprint=done.tuned.fingerprint),
            undone=done.repaired.undone,
            moved=done.repaired.moved,
            sets=tuple(done.tuned_sets),
        ),
        noise_floor=done.before.noise_floor,
        settings=config.shown(),
        environment=environment(threads=torch.get_num_threads(), device=str(done.base.device)),
        audit=bank_audit(audit(done.bank, sources)),
        cost={"seconds": sum(done.seconds.values())},
        requirements=config.requirements,
        notes=(*done.rows.notes, *done.notes),
    )


# The tuned model's figures, stored for a resumed repair; its free text is generated only for a judge.


def tuned_sets(
    path: Path, tuned: Loaded, groups: Sequence[Group], before: Before, config: AdaptConfig
) -> list[TunedSet]:
    """The tuned model's figures on every group, from the file or measured now and written to it."""
    identity = files.fingerprint([tuned.fingerprint, *(fingerprint(group.examples) for group in groups)])
    if (stored := read_stored(path)) is not None:
        if stored["identity"] != identity:
            raise ValueError("the tuned model or the rows changed since the repair began; start a new repair")
        return [TunedSet(**own) for own in stored["sets"]]
    found = [tuned_set(group, before.answers[group.name], _answers(tuned.model, group, config)) for group in groups]
    files.write_json(path, files.sealed({"identity": identity, "sets": [asdict(own) for own in found]}))
    return found


def _answers(model: nn.Module, group: Group, config: AdaptConfig) -> GroupAnswers:
    what, chosen = f"tuned: {group.name}", judge(config.judge)
    if group.closed or chosen is not None:
        return evaluate(model, group, judge=chosen, max_new_tokens=config.max_new_tokens, what=what)
    return GroupAnswers(predictions=(), scores=tuple(log_likelihoods(model, group.encoded(), what=what)))


# Importance sums on disk, so that a stopped repair continues with the next row.


SUMS_FORMAT = "cplus-importance/1"


class SumsOnDisk:
    """One file per set of rows; another repair's sums are refused."""

    def __init__(self, folder: Path, identity: str, minutes: float, interruption: Interruption) -> None:
        self._folder, self._identity, self._minutes = folder, identity, minutes
        self._interruption, self._written = interruption, time.monotonic()

    def load(self, name: str, params: Sequence[Tensor]) -> Sums | None:
        """The sums kept under this name, on the device of the parameters."""
        path = self._path(name)
        if not path.is_file():
            return None
        kept = read_state(path, "remove it to compute it anew")
        if kept.get("format") != SUMS_FORMAT or kept["identity"] != self._identity:
            raise ValueError(f"{path}: the models, the rows or the version changed since; start a new repair")
        say(f"repair: continued after {kept['rows']} {name.split()[0]} rows")
        tensors = [own.to(p.device, copy=True) for own, p in zip(kept["tensors"], params, strict=True)]
        return Sums(tensors=tensors, rows=kept["rows"])

    def save(self, name: str, sums: Sums, *, complete: bool) -> None:
        """Write complete sums, and others when minutes have passed or the repair is to stop."""
        due = time.monotonic() - self._written >= 60 * self._minutes
        if complete or due or self._interruption.received is not None:
            body = {"format": SUMS_FORMAT, "identity": self._identity, "rows": sums.rows, "tensors": sums.tensors}
            files.write_state(self._path(name), body)
            self._written = time.monotonic()
        self.check(f"stopped after {sums.rows} {name.split()[0]} rows, and saved")

    def check(self, sentence: str) -> None:
        """Stop here if a signal came."""
        if self._interruption.received is not None:
            raise Interrupted(self._interruption.received, sentence)

    def _path(self, name: str) -> Path:
        return self._folder / f"importance-{name.replace(' ', '-')}.pt"


# The repair itself, on a job's rows: what must stay known, the rows of importance, and the repaired model.


def trial_rows(group: Group, max_rows: int) -> int:
    """The number of a group's rows that every trial of a share evaluates."""
    return min(len(group.examples), max_rows if group.closed else min(max_rows, LOSS_ROWS))


def group_check(group: Group, before: GroupAnswers, tolerance: float | None, max_rows: int, seed: int) -> Check | None:
    """What of a group of new rows must stay known; None for held-out rows that the base model answers correctly."""
    held_out = group.part == "validation"
    if not group.closed:
        few = group.drawn(trial_rows(group, max_rows), seed)
        return loss_check(
            few.encoded(), name=group.name, tolerance=FALL if tolerance is None else tolerance, held_out=held_out
        )
    wrong = {prediction.id for prediction in before.predictions if not prediction.right}
    examples = [example for example in group.drawn(max_rows, seed).examples if example.id in wrong]
    if not examples and held_out:
        return None
    if not examples:
        raise Unrepairable(
            f"the base model already answers every one of {len(group.examples)} {group.name} rows correctly, so the "
            "tuned model has learned nothing from them; give the rows it was trained on"
        )
    known = [prediction for prediction in before.predictions if prediction.id in wrong]

    def measure(model: nn.Module) -> float:
        answers = predict(model, group.interface, examples, what=f"repair: {group.name}")
        return 100 - acquisition(changes(known, answers)).percent

    points = POINTS if tolerance is None else 100 * tolerance
    return Check(name=group.name, unit="% not known", measure=measure, tolerance=points, held_out=held_out)


def ranked_by(new: Group) -> By:
    """How weights are ranked, as measured: facts by importance, free text by blame (docs/repair.md)."""
    return "importance" if new.closed else "blame"


def past_rows(tasks: Sequence[PastTask], max_rows: int, seed: int) -> list[Encoded]:
    """Every anchor, and probes drawn by the seed, up to the maximum."""
    anchors = [task.interface.encode(example) for task in tasks for example in task.anchors]
    probes = [task.interface.encode(example) for task in tasks for example in task.probes]
    return [*_drawn(anchors, max_rows, seed), *_drawn(probes, max(0, max_rows - len(anchors)), seed)]


def _drawn(rows: Sequence[Encoded], count: int, seed: int) -> list[Encoded]:
    if len(rows) <= count:
        return list(rows)
    chosen = random.Random(f"{seed}/repair").sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def repair_groups(
    model: Any,
    base: Loaded,
    new: Sequence[Group],
    before: Mapping[str, GroupAnswers],
    past: Sequence[PastTask],
    config: AdaptConfig,
    folder: Path,
    interruption: Interruption,
    *,
    tolerance: float | None = None,
    rounds: int = 1,
    max_rows: int = MAX_ROWS,
) -> Repaired:
    """Repair a tuned model in place; `new` are the groups to keep known, the rows trained on first."""
    found = [group_check(group, before[group.name], tolerance, max_rows, config.seed) for group in new]
    rows = past_rows(past, max_rows, config.seed)
    trained = new[0].drawn(max_rows, config.seed).encoded()
    tuned = models.fingerprint(model)
    by = ranked_by(new[0])
    identity = files.fingerprint([base.fingerprint, tuned, config.compute_dtype, by, *map(_tokens, (rows, trained))])
    store = SumsOnDisk(folder, identity, config.checkpoint_minutes, interruption)

    def notify(sentence: str) -> None:
        say(sentence)
        store.check("stopped while searching for the share; the importance is saved")

    weights: dict[str, Tensor] = dict(base.model.named_parameters())
    with interruption.patient():
        done = repair_model(
            model,
            weights,
            rows,
            trained,
            checks=[check for check in found if check is not None],
            by=by,
            rounds=rounds,
            computing=lambda: models.computing(config.compute_dtype, base.device),
            store=store,
            notify=notify,
        )
    say(f"repair: {done}")
    return done


def _tokens(rows: Sequence[Encoded]) -> list[list[int]]:
    return [[*row.prompt, -1, *row.labels] for row in rows]


# The tuned model of a repair: loaded, its adapters merged, and checked against the base.


_COMPUTES = ("model_type", "hidden_act", "num_attention_heads", "num_key_value_heads", "rope_theta", "rope_parameters")
"""Settings of an architecture that change what the same weights compute."""
_TEXTS = 64


def load_tuned(config: RepairConfig, base: Loaded, home: Path) -> Loaded:
    """The tuned model in float32; a folder of adapters is merged into a copy of the base."""
    place = Path(located(config.tuned, home)).expanduser()
    if (place / "adapter_config.json").is_file():
        return _merged(place, base)
    name = str(place) if place.exists() else config.tuned
    return models.load(name, device=config.device, trust_remote_code=config.trust_remote_code)


def _merged(place: Path, base: Loaded) -> Loaded:
    with without_bars():
        model: Any = merged_from(place, copy.deepcopy(base.model))
    tokenizer = base.tokenizer
    if (place / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    return replace(models.of(model.eval(), tokenizer), name=str(place), device=base.device)


def check_pair(base: Loaded, tuned: Loaded, texts: Sequence[Example]) -> None:
    """Refuse a tuned model that was not trained from the base: other weights, architecture or tokenizer, or none."""
    check_tokenizers(base, tuned, texts)
    check_weights(_shapes(base.model), _shapes(tuned.model))
    for name in _COMPUTES:
        was, now = (getattr(one.model.config.get_text_config(), name, None) for one in (base, tuned))
        if was != now:
            raise ValueError(
                f"base and tuned model are not of one architecture: {name} is {was!r} in the base and {now!r} in the "
                "tuned model; expected the model that the tuned one was trained from"
            )
    own = dict(base.model.named_parameters())
    if all(torch.equal(own[name], p) for name, p in tuned.model.named_parameters()):
        raise Unrepairable("base and tuned model have the same weights, so there is nothing to undo")


def check_tokenizers(base: Loaded, tuned: Loaded, texts: Sequence[Example]) -> None:
    """Refuse tokenizers whose tokens differ, in the vocabulary or on these rows."""
    was, now = base.tokenizer.get_vocab(), tuned.tokenizer.get_vocab()
    if was != now:
        changed = sum(now.get(token) != number for token, number in was.items()) + len(now.keys() - was.keys())
        raise ValueError(
            f"the vocabularies of base and tuned model differ in {changed:,} tokens ({len(was):,} and {len(now):,}); "
            "expected the model that the tuned one was trained from"
        )
    for example in texts[:_TEXTS]:
        text = canonical_json(to_row(example))
        if base.tokenizer.encode(text) != tuned.tokenizer.encode(text):
            raise ValueError(
                f"the tokenizers of base and tuned model split the row {example.id!r} into different tokens; expected "
                "the model that the tuned one was trained from"
            )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


# A repair prepared: everything checked, both models loaded, rows bound; nothing is written yet.


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that a repair holds and writes; `held` is certain, `peak` adds an estimate of the activations."""

    held: int
    peak: int
    available: int
    disk: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Given:
    """What every phase of a repair needs; `groups` are the rows evaluated with base, tuned and repaired model."""

    config: RepairConfig
    home: Path
    size: ModelSize
    need: Need
    base: Loaded
    tuned: Loaded
    rows: Rows
    groups: tuple[Group, ...]
    notes: tuple[str, ...]
    written: Written | None = None
    """What the base model wrote itself of the rows to keep."""

    @property
    def new(self) -> list[Group]:
        """The groups that must stay known: the rows trained on, and those held out, if there are any."""
        return [self.rows.new, *([] if self.rows.validation is None else [self.rows.validation])]


Write: TypeAlias = Callable[[RepairConfig, Method, Rows, Loaded], tuple[Rows, Written | None]]


def prepare(config: RepairConfig, home: Path, write: Write = with_written) -> Given:
    """Check, load and bind everything; whatever can be refused without an evaluation is refused here.

    `write` gives the rows to keep that the base model writes itself; a plan has other means.
    """
    _check_places(config, home)
    tasks = read(config, METHODS[config.method], home)
    for line in tasks.formats:
        say(line)
    size = model_size(config, METHODS[config.method], models.resolve(located(config.model, home)))
    need = needed(config, size)
    say(f"{config.model}: {size.parameters:,} parameters; {config.tuned} is repaired towards it")
    base = load(config, home)
    tuned = load_tuned(config, base, home)
    notes = _one_template(config, base, tuned)
    with models.computing(config.compute_dtype, base.device):
        rows, written = write(config, METHODS[config.method], _bound(config, tasks, base, tuned), base)
    for note in (*rows.notes, *notes):
        say(f"note: {note}")
    groups = rows.evaluated(config.max_asked, config.seed)
    return Given(
        config=config,
        home=home,
        size=size,
        need=need,
        base=base,
        tuned=tuned,
        rows=rows,
        groups=groups,
        notes=tuple(notes),
        written=written,
    )


def _bound(config: RepairConfig, tasks: Tasks, base: Loaded, tuned: Loaded) -> Rows:
    assert tasks.new is not None
    check_pair(base, tuned, tasks.new.examples)
    return bind_rows(config, tasks, base)


def _check_places(config: RepairConfig, home: Path) -> None:
    """Refuse an output folder that holds one of the models: replacing it would remove the model."""
    out = config.out.resolve()
    for name in (config.model, config.tuned):
        path = Path(located(name, home)).expanduser()
        if path.exists() and path.resolve().is_relative_to(out):
            raise ValueError(f"{config.out}: expected a folder of its own for the repaired model, but it holds {name}")


def needed(config: RepairConfig, size: ModelSize) -> Need:
    """The bytes of a repair; one that cannot work is refused."""
    held = BYTES_PER_PARAMETER * size.parameters
    found = Need(
        held=held,
        peak=held + size.activation_bytes,
        available=available(models.choose_device(config.device)),
        disk=12 * size.parameters + (64 << 20),  # two files of sums and the model
        free=disk_free(config.out),
    )
    if found.held > found.available:
        raise ValueError(
            f"repairing {config.model} needs {giga(found.held)} GB for both models and the importance, but "
            f"{giga(found.available)} GB are free; use a machine with more memory"
        )
    if found.disk > found.free:
        raise ValueError(
            f"{config.out}: importance and model need {giga(found.disk)} GB, but {giga(found.free)} GB are free; make "
            "room or choose another out"
        )
    return found


def _one_template(config: RepairConfig, base: Loaded, tuned: Loaded) -> list[str]:
    """Use one chat template for both models: the file's, else the tuned model's, with which it will be used."""
    was, now = base.tokenizer.chat_template, tuned.tokenizer.chat_template
    if config.chat_template is not None:
        tuned.tokenizer.chat_template = was
        return []
    if was == now:
        return []
    base.tokenizer.chat_template = now
    return ["The chat templates of base and tuned model differ; the tuned model's was used for both."]


# `cplus repair` from its settings to its folder: evaluate base and tuned model, repair, evaluate again, write.


FORMAT = "cplus-repair/1"


def repair(config: RepairConfig, *, force: bool = False) -> FinishedJob:
    """Undo the part of a fine-tuning that past behaviour needs most; write model, bank, record, card and receipt."""
    folder, home = Folder(config.out), Path.cwd()
    check_free(folder, force=force)
    with Interruption().watching() as interruption:
        given = prepare(config, home)
        with claimed(folder):
            check_free(folder, force=force)
            begin_folder(folder, config, home, FORMAT)
            return _work(given, folder, interruption)


def resume(out: Path, *, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Continue a stopped repair; importance that was computed is not computed again. A finished one is read."""
    folder = Folder(out)
    values, home = read_values(folder, FORMAT, repeated or {})
    config = repair_settings(values, where=str(folder.settings))
    if folder.record.is_file():
        say(f"{out}: this repair is finished")
        return FinishedJob(folder=out, record=files.read_sealed(folder.record))
    with Interruption().watching() as interruption:
        given = prepare(config, home)
        with claimed(folder):
            return _work(given, folder, interruption)


def _work(given: Given, folder: Folder, interruption: Interruption) -> FinishedJob:
    try:
        record = _repaired(given, folder, interruption)
    except Unrepairable:
        discard(folder)
        raise
    except Interrupted as stop:
        raise Interrupted(stop.number, f"{stop}. Continue with: cplus repair --resume {folder.root}") from stop
    say(f"written to {folder.root}: model/, receipt.html, record.json, README.md")
    return FinishedJob(folder=folder.root, record=record)


def _repaired(given: Given, folder: Folder, interruption: Interruption) -> dict[str, Any]:
    config, base, tuned, rows = given.config, given.base, given.tuned, given.rows
    assert rows.anchors is not None
    with models.computing(config.compute_dtype, base.device), recorded(folder.seconds, "evaluating"):
        before = base_answers(folder.answers, base, given.groups, config)
        check_requirements(config, given.groups, before.answers)
        sets = tuned_sets(folder.work / "tuned.json", tuned, given.groups, before, config)
    files.write_text(folder.anchors, lines(rows.anchors.examples))
    with recorded(folder.seconds, "writing probes"):
        bank = _bank(given, folder)
    with recorded(folder.seconds, "repairing"):
        past = PastTask(
            name="past", interface=rows.anchors.interface, anchors=rows.anchors.examples, probes=bank.examples
        )
        done = repair_groups(
            tuned.model,
            base,
            given.new,
            before.answers,
            [past],
            config,
            folder.work,
            interruption,
            tolerance=config.tolerance,
            rounds=config.rounds,
            max_rows=config.max_rows,
        )
    with models.computing(config.compute_dtype, base.device), recorded(folder.seconds, "evaluating"):
        after = {
            group.name: answer(tuned.model, group, config, "repaired", before.answers[group.name].predictions)
            for group in given.groups
        }
    write_model(folder, tuned.model, tuned.tokenizer, config.save_dtype)
    record = write_outputs(
        folder,
        RepairOutcome(
            config=config,
            base=base,
            tuned=tuned,
            after_fingerprint=models.fingerprint(tuned.model),
            rows=rows,
            groups=given.groups,
            before=before,
            tuned_sets=sets,
            after=after,
            bank=bank,
            repaired=done,
            notes=(*given.notes, *_notes(given)),
            seconds=recorded_seconds(folder.seconds),
        ),
    )
    folder.clear_work()
    return record


def _bank(given: Given, folder: Folder) -> Bank:
    assert given.rows.anchors is not None
    settings = given.config.settings(len(given.rows.new.examples)).probes
    if given.written is not None:
        return written_bank(folder.bank, given.written, settings, given.base, given.rows.anchors)
    own = None if given.config.bank is None else Path(located(str(given.config.bank), given.home))
    return job_bank(folder.bank, settings, given.base, given.rows.anchors, own)


def _notes(given: Given) -> list[str]:
    most = given.config.max_rows
    return [
        f"The share to undo was found with {few} of {len(group.examples)} {group.name} rows; the figures are of all."
        for group in given.new
        if len(group.examples) > (few := trial_rows(group, most))
    ]
