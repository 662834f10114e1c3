"""`cplus repair` from its settings to its folder, and the repair at the end of `cplus adapt --repair`."""

from __future__ import annotations

import copy
import datetime
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from cplus import models
from cplus.base import files
from cplus.base.environment import environment
from cplus.base.files import canonical_json
from cplus.core.rows import Encoded
from cplus.data.examples import Example, lines, to_row
from cplus.distributed.processes import Interrupted, Interruption
from cplus.evaluation.changes import acquisition, flips
from cplus.evaluation.judges import judge
from cplus.jobs.folder import (
    FinishedJob,
    Folder,
    begin_folder,
    check_free,
    claimed,
    discard,
    read_finished,
    read_values,
    row_hashes,
)
from cplus.jobs.keep import Written, job_bank, with_written
from cplus.jobs.memory import ModelSize, available, disk_free, giga, model_size
from cplus.jobs.merge import MERGE_ROWS, Blend, merge
from cplus.jobs.outputs import answer, base_answers, measured, reference, write_model, write_record
from cplus.jobs.progress import recorded, recorded_seconds, say
from cplus.jobs.rows import bind_rows, check_requirements, evaluated, load, located, read
from cplus.jobs.settings import MAX_ROWS, AdaptConfig, RepairConfig, repair_settings
from cplus.methods import repair as methods
from cplus.methods.adapters import merged_from
from cplus.methods.repair import Check, Repaired, Unrepairable, loss_check, moved_weights, repair_model
from cplus.methods.table import METHODS
from cplus.models import Loaded
from cplus.models.loading import without_bars
from cplus.models.names import origin
from cplus.models.scoring import log_likelihoods, predict
from cplus.probes.audit import audit
from cplus.probes.bank import Bank
from cplus.receipts.contents import ModelId, Receipt, Repair, TunedSet, compare
from cplus.receipts.page import bank_audit
from cplus.training.measure import GroupAnswers, changes, evaluate, kept, learned, loss_of
from cplus.training.rows import Group, PastTask, Rows

# What the tuned model reached; its free text is generated only for a judge.


def tuned_set(model: nn.Module, group: Group, before: GroupAnswers, config: AdaptConfig) -> TunedSet:
    """What the tuned model reached on a group, from its answers or from losses alone."""
    what, chosen = f"tuned: {group.name}", judge(config.judge)
    if not group.closed and (chosen is None or any(p.correct is None for p in before.predictions)):
        return TunedSet(name=group.name, nll=max(0.0, loss_of(log_likelihoods(model, group.encoded(), what=what))))
    answers = evaluate(model, group, judge=chosen, max_new_tokens=config.max_new_tokens, what=what)
    table = flips(before.predictions, answers.predictions)
    return TunedSet(
        name=group.name,
        right=100 * sum(p.right for p in answers.predictions) / len(answers.predictions),
        retention=kept(table),
        acquisition=learned(table),
        nll=None if group.closed else max(0.0, loss_of(answers.scores)),
    )


# The repair itself, on a job's rows: what must stay known, the rows of importance, and the repaired model.


def trial_rows(group: Group, max_rows: int) -> int:
    """The number of a group's rows that every trial of a share evaluates."""
    return min(len(group.examples), max_rows if group.closed else min(max_rows, methods.LOSS_ROWS))


def group_check(group: Group, before: GroupAnswers, tolerance: float | None, max_rows: int, seed: int) -> Check | None:
    """What of a group of new rows must stay known; None for held-out rows that the base model answers correctly."""
    held_out = group.part == "validation"
    if not group.closed:
        few = group.drawn(trial_rows(group, max_rows), seed)
        return loss_check(
            few.encoded(),
            name=group.name,
            tolerance=methods.FALL if tolerance is None else tolerance,
            held_out=held_out,
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

    points = methods.POINTS if tolerance is None else 100 * tolerance
    return Check(name=group.name, unit="% not known", measure=measure, tolerance=points, held_out=held_out)


def ranked_by(new: Group) -> methods.By:
    """How weights are ranked, as measured: facts by importance, free text by blame (docs/repair.md)."""
    return "importance" if new.closed else "blame"


def past_rows(tasks: Sequence[PastTask], max_rows: int, seed: int) -> list[Encoded]:
    """Every anchor, and probes drawn by the seed, up to the maximum."""
    found: list[Encoded] = []
    for kind in ("anchors", "probes"):
        rows = [task.interface.encode(example) for task in tasks for example in getattr(task, kind)]
        count = min(len(rows), max_rows - len(found))
        chosen = random.Random(f"{seed}/repair").sample(range(len(rows)), count)
        found += [rows[i] for i in sorted(chosen)]
    return found


def repair_groups(
    model: Any,
    base: Loaded,
    new: Sequence[Group],
    before: Mapping[str, GroupAnswers],
    past: Sequence[PastTask],
    config: AdaptConfig,
    *,
    tolerance: float | None = None,
    max_rows: int = MAX_ROWS,
    blend: Blend | None = None,
) -> Repaired:
    """Repair a tuned model in place; `new` are the groups to keep known, the rows trained on first.

    With a blend, the base model is the same one in memory, and the tuned one is merged with it.
    """
    found = [group_check(group, before[group.name], tolerance, max_rows, config.seed) for group in new]
    checks, rows = [check for check in found if check is not None], past_rows(past, max_rows, config.seed)
    trained = new[0].drawn(max_rows, config.seed).encoded()
    if blend is not None:
        with models.computing(config.compute_dtype, base.device):
            done = merge(blend, model, checks, rows[:MERGE_ROWS], len(trained))
    else:
        done = repair_model(
            model,
            dict(base.model.named_parameters()),
            rows,
            trained,
            checks=checks,
            by=ranked_by(new[0]),
            computing=lambda: models.computing(config.compute_dtype, base.device),
            notify=say,
        )
    say(f"repair: {done}")
    return done


# The tuned model of a repair: loaded, its adapters merged, and checked against the base.


_COMPUTES = ("model_type", "hidden_act", "num_attention_heads", "num_key_value_heads", "rope_theta", "rope_parameters")
"""Settings of an architecture that change what the same weights compute."""
_TEXTS = 64


def load_tuned(config: RepairConfig, base: Loaded, home: Path) -> Loaded:
    """The tuned model in float32; a folder of adapters is merged into a copy of the base."""
    place = Path(located(config.tuned, home)).expanduser()
    if not (place / "adapter_config.json").is_file():
        name = str(place) if place.exists() else config.tuned
        return models.load(name, device=config.device, trust_remote_code=config.trust_remote_code)
    with without_bars():
        model: Any = merged_from(place, copy.deepcopy(base.model))
    tokenizer = base.tokenizer
    if (place / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    return replace(models.of(model.eval(), tokenizer), name=str(place), device=base.device)


def check_pair(base: Loaded, tuned: Loaded, texts: Sequence[Example]) -> None:
    """Refuse a tuned model that was not trained from the base: another tokenizer, other weights or architecture."""
    expected = "expected the model that the tuned one was trained from"
    was, now = base.tokenizer.get_vocab(), tuned.tokenizer.get_vocab()
    if was != now:
        changed = len(dict(was.items() ^ now.items()))
        raise ValueError(f"the vocabularies of base and tuned model differ in {changed:,} tokens; {expected}")
    for example in texts[:_TEXTS]:
        text = canonical_json(to_row(example))
        if base.tokenizer.encode(text) != tuned.tokenizer.encode(text):
            raise ValueError(
                f"the tokenizers of base and tuned model split the row {example.id!r} into different tokens; {expected}"
            )
    if tuned.model is base.model:  # of a merge, which compares the files
        return
    own, others = (dict(one.model.named_parameters()) for one in (base, tuned))
    moved_weights(own, others)
    for name in _COMPUTES:
        first, second = (getattr(one.model.config.get_text_config(), name, None) for one in (base, tuned))
        if first != second:
            raise ValueError(
                f"base and tuned model are not of one architecture: {name} is {first!r} in the base and {second!r} in "
                f"the tuned model; {expected}"
            )


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
    blend: Blend | None = None
    """The weights of both models on disk, where only one model is in memory: that of `base` and of `tuned`."""

    @property
    def new(self) -> list[Group]:
        """The groups that must stay known: the rows trained on, and those held out, if there are any."""
        return [self.rows.new, *([] if self.rows.validation is None else [self.rows.validation])]


def prepare(config: RepairConfig, home: Path) -> Given:
    """Check, load and bind everything; whatever can be refused without an evaluation is refused here."""
    _check_places(config, home)
    tasks = read(config, METHODS[config.method], home)
    size = model_size(config, METHODS[config.method], models.resolve(located(config.model, home)))
    need = needed(config, size)
    say(f"{config.model}: {size.parameters:,} parameters; {config.tuned} is repaired towards it")
    base = load(config, home)
    blend = None
    if config.by == "merge":
        first, second = (Path(models.resolve(located(name, home))) for name in (config.model, config.tuned))
        blend = Blend(base.model, first, second)
        tuned = replace(base, name=config.tuned, tokenizer=AutoTokenizer.from_pretrained(second, local_files_only=True))
    else:
        tuned = load_tuned(config, base, home)
    notes = _one_template(config, base, tuned)
    assert tasks.new is not None
    check_pair(base, tuned, tasks.new.examples)
    with models.computing(config.compute_dtype, base.device):
        rows, written = with_written(config, METHODS[config.method], bind_rows(config, tasks, base), base)
    for note in (*rows.notes, *notes):
        say(f"note: {note}")
    groups = evaluated(config, rows)
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
        blend=blend,
    )


def _check_places(config: RepairConfig, home: Path) -> None:
    """Refuse an output folder that holds one of the models: replacing it would remove the model."""
    out = config.out.resolve()
    for name in (config.model, config.tuned):
        path = Path(located(name, home)).expanduser()
        if path.exists() and path.resolve().is_relative_to(out):
            raise ValueError(f"{config.out}: expected a folder of its own for the repaired model, but it holds {name}")


def needed(config: RepairConfig, size: ModelSize) -> Need:
    """The bytes of a repair; one that cannot work is refused."""
    each, what = methods.BYTES_PER_PARAMETER, "both models and the importance"
    if config.by == "merge":
        each, what = 4, "the model"
    held = each * size.parameters
    found = Need(
        held=held,
        peak=held + size.activation_bytes,
        available=available(models.choose_device(config.device)),
        disk=4 * size.parameters + (64 << 20),
        free=disk_free(config.out),
    )
    if found.held > found.available:
        raise ValueError(
            f"repairing {config.model} needs {giga(found.held)} GB for {what}, but {giga(found.available)} GB are "
            "free; use a machine with more memory"
        )
    if found.disk > found.free:
        raise ValueError(
            f"{config.out}: the repaired model needs {giga(found.disk)} GB, but {giga(found.free)} GB are free; make "
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
    with Interruption().watching():
        given = prepare(config, home)
        with claimed(folder):
            check_free(folder, force=force)
            begin_folder(folder, config, home, FORMAT)
            return _work(given, folder)


def resume(out: Path, *, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Continue a stopped repair with what was written of it: answers and bank. A finished one is read."""
    folder = Folder(out)
    values, home = read_values(folder, FORMAT, repeated or {})
    config = repair_settings(values, where=str(folder.settings))
    if folder.record.is_file():
        say(f"{out}: this repair is finished")
        return FinishedJob(folder=out, record=read_finished(folder))
    with Interruption().watching():
        given = prepare(config, home)
        with claimed(folder):
            return _work(given, folder)


def _work(given: Given, folder: Folder) -> FinishedJob:
    try:
        record = _repaired(given, folder)
    except Unrepairable:
        discard(folder)
        raise
    except Interrupted as stop:
        raise Interrupted(stop.number, f"{stop}. Continue with: cplus repair --resume {folder.root}") from stop
    say(f"written to {folder.root}: model/, receipt.html, record.json, README.md")
    return FinishedJob(folder=folder.root, record=record)


def _repaired(given: Given, folder: Folder) -> dict[str, Any]:
    config, base, tuned, rows = given.config, given.base, given.tuned, given.rows
    assert rows.anchors is not None
    files.write_text(folder.anchors, lines(rows.anchors.examples))
    with models.computing(config.compute_dtype, base.device), recorded(folder.seconds, "evaluating"):
        before = base_answers(folder.answers, base, given.groups, config)
        check_requirements(config, given.groups, before)
        known, seen = reference(base, config, rows.past), [row for group in rows.groups for row in group.examples]
    with recorded(folder.seconds, "writing probes"):
        bank = _bank(given, folder)
    if given.blend is not None:  # from here on the one model in memory is the tuned one
        given.blend.set(dict.fromkeys(given.blend.blocks, 1.0))
        tuned = replace(tuned, fingerprint=models.fingerprint(tuned.model))
    tuned_id = ModelId(name=config.tuned, fingerprint=tuned.fingerprint)  # it is repaired in place
    with models.computing(config.compute_dtype, base.device), recorded(folder.seconds, "evaluating"):
        tuned_sets = [tuned_set(tuned.model, group, before[group.name], config) for group in given.groups]
        tuned_sets += [
            TunedSet(name=own.name, right=100 * sum(r.kind in ("kept", "gained") for r in own.rows) / len(own.rows))
            for own in measured(known, tuned, config, seen)[0]
        ]
    with recorded(folder.seconds, "repairing"):
        past = PastTask(
            name="past", interface=rows.anchors.interface, anchors=rows.anchors.examples, probes=bank.examples
        )
        done = repair_groups(
            tuned.model,
            base,
            given.new,
            before,
            [past],
            config,
            tolerance=config.tolerance,
            max_rows=config.max_rows,
            blend=given.blend,
        )
    with models.computing(config.compute_dtype, base.device), recorded(folder.seconds, "evaluating"):
        after = {group.name: answer(tuned.model, group, config, "repaired") for group in given.groups}
        abilities, moved = measured(known, tuned, config, [*seen, *bank.examples])
    if given.blend is None:
        write_model(folder, tuned.model, tuned.tokenizer, config.save_dtype)
    else:
        given.blend.write(folder.model, config.model, config.tuned)
    repaired_id = ModelId(name=f"{config.out.name}/model", fingerprint=models.fingerprint(tuned.model))
    seconds = recorded_seconds(folder.seconds)
    sources = [group for group in (rows.anchors, rows.new, rows.past) if group is not None]
    receipt = Receipt(
        title=f"{config.tuned} repaired towards {config.model}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=ModelId(name=config.model, fingerprint=base.fingerprint),
        after=repaired_id,
        method="repair",
        sets=tuple(compare(group, before[group.name], after[group.name], judge=config.judge) for group in given.groups)
        + abilities,
        repair=Repair(tuned=tuned_id, undone=done.undone, moved=done.moved, sets=tuple(tuned_sets)),
        divergence=moved,
        settings=config.shown(),
        environment=environment(threads=torch.get_num_threads(), device=str(base.device)),
        audit=bank_audit(audit(bank, {own.name: own.examples for own in sources})),
        cost={"seconds": sum(seconds.values())},
        requirements=config.requirements,
        notes=(*rows.notes, *given.notes, *_notes(given)),
    )
    name, licence = origin(config.model)
    sizes = {"new": rows.new, "anchors": rows.anchors, "past": rows.past}
    job = {
        "kind": "repair",
        "model": {
            "name": config.model,
            "id": name,
            "license": licence,
            "before": base.fingerprint,
            "tuned": tuned_id.fingerprint,
            "after": repaired_id.fingerprint,
        },
        "repair": done.row(),
        "rows": row_hashes(given.groups),
        "counts": {
            **{name: 0 if group is None else len(group.examples) for name, group in sizes.items()},
            "probes": len(bank.probes),
            "parameters": done.parameters,
        },
        "seconds": seconds,
        "bank": dict(bank.manifest),
    }
    record = write_record(folder, receipt, job, "repair_card.md")
    folder.clear_work()
    return record


def _bank(given: Given, folder: Folder) -> Bank:
    assert given.rows.anchors is not None
    settings = given.config.settings(len(given.rows.new.examples)).probes
    own = None if given.config.bank is None else Path(located(str(given.config.bank), given.home))
    return job_bank(folder.bank, settings, given.base, given.rows.anchors, own, given.written)


def _notes(given: Given) -> list[str]:
    most = given.config.max_rows
    return [
        f"The share to undo was found with {few} of {len(group.examples)} {group.name} rows; the figures are of all."
        for group in given.new
        if len(group.examples) > (few := trial_rows(group, most))
    ]
