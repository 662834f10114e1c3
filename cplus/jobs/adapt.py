"""`cplus adapt` from its settings to its folder: read, load, answer, probe, train, answer again, write."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from cplus import models
from cplus.base import files
from cplus.base.terminal import progress
from cplus.data.examples import Example, fingerprint, lines
from cplus.distributed import processes
from cplus.distributed.processes import Interrupted, Interruption
from cplus.jobs import folder as folders
from cplus.jobs import outputs
from cplus.jobs.checkpoint import Checkpoints, KeptWeights, index_of
from cplus.jobs.choices import Chosen, stored
from cplus.jobs.folder import (
    FinishedJob,
    Folder,
    check_free,
    check_seen,
    claimed,
    read_finished,
    read_settings,
    rewrite,
)
from cplus.jobs.keep import earlier_bank, job_bank, written_bank
from cplus.jobs.prepare import Job, prepare, uses_bank
from cplus.jobs.progress import PeakMemory, TrainingView, record, recorded, recorded_seconds, say, tracker
from cplus.jobs.repair import repair_groups
from cplus.jobs.rows import check_requirements, load, located
from cplus.jobs.settings import AdaptConfig
from cplus.methods.repair import Repaired, Unrepairable
from cplus.models import Loaded, loading
from cplus.probes.bank import Bank
from cplus.receipts.contents import Beside, Divergence, RowSet
from cplus.receipts.contents import compare as compare_rows
from cplus.training import measure
from cplus.training.driver import Ending, Training, TrainingLog, begin
from cplus.training.gateshares import layer_shares
from cplus.training.loop import EpochEnded, Event, Refreshed, Stepped, updates_per_epoch
from cplus.training.measure import Exploded, GroupAnswers
from cplus.training.rows import PastTask
from cplus.training.sharding import PLACES

# A job from its settings to its folder: load, evaluate, build the bank, train, evaluate again, write.


def adapt(config: AdaptConfig, *, force: bool = False, starting: float = 0.0) -> FinishedJob:
    """Fine-tune a model on new rows, protect what it could do, and write model, bank, record, card and receipt.

    `starting` is how long the program took to get here. Processes that torchrun or Accelerate started work together.
    """
    folder, home, begun = Folder(config.out), Path.cwd(), time.perf_counter() - starting
    replacing, mine = folder.settings.is_file(), False

    def begin(config: AdaptConfig, chosen: Sequence[Chosen]) -> None:
        held.enter_context(claimed(folder))
        if not replacing:  # what is to be replaced stays until the new job is known to work
            start(config, chosen)

    def start(config: AdaptConfig, chosen: Sequence[Chosen]) -> None:
        nonlocal mine

        def first() -> None:
            check_free(folder, force=force)
            folders.begin_folder(folder, config, home, chosen=chosen)

        processes.shared(first)
        mine = True
        check_seen(folder)
        record(folder.seconds, {"starting": starting} if starting else {})

    with processes.joined(), resumable(folder):
        processes.shared(lambda: check_free(folder, force=force))
        memory = PeakMemory(models.choose_device(config.device))
        with Interruption().watching() as interruption, ExitStack() as held:
            try:
                job = prepare(config, folder, home, begun, begin)
            except ValueError:  # the job cannot work, so it leaves nothing behind
                if mine and processes.first():
                    folders.discard(folder)
                raise
            if replacing:
                start(job.config, job.chosen)
            return work(job, interruption, memory)


@contextmanager
def resumable(folder: Folder) -> Iterator[None]:
    """Say how a job that is stopped or loses a process is continued."""
    try:
        yield
    except Interrupted as stop:
        more = f"Continue with: cplus adapt --resume {folder.root}"
        more += f" (or --finish {folder.root})" if _has_checkpoint(folder) else ""
        if not folder.settings.is_file():
            more = "Nothing was begun; give the same command again"
        raise Interrupted(stop.number, f"{stop}. {more}", agreed=stop.agreed) from stop
    except RuntimeError as error:
        if processes.size() > 1:
            error.add_note(f"continue with: cplus adapt --resume {folder.root}")
        raise


def _has_checkpoint(folder: Folder) -> bool:
    return folder.checkpoint.is_file() or index_of(folder.checkpoint).is_file()


def work(job: Job, interruption: Interruption, memory: PeakMemory, *, train_on: bool = True) -> FinishedJob:
    """Everything after the job is prepared; without `train_on` the last checkpoint is the result."""
    config, folder = job.config, job.folder
    record(folder.seconds, job.seconds)
    tracked = tracker(config.report_to, folder.root, config.model_dump(mode="json"))
    try:
        with models.computing(config.compute_dtype, job.base.device), recorded(folder.seconds, "evaluating"):
            before = outputs.base_answers(folder.answers, job.base, job.groups, config)
        check_requirements(config, job.groups, before)
        if processes.first():  # the rows to keep, for later jobs
            if job.rows.anchors is not None:
                files.write_text(folder.anchors, lines(job.rows.anchors.examples))
            if config.written and job.rows.past is not None and config.past is None:
                files.write_text(folder.past, lines(job.rows.past.examples))
        with recorded(folder.seconds, "writing probes"):
            bank = processes.in_turn(lambda: _bank(job))
        processes.agree("their bank", None if bank is None else bank.manifest["probes_sha256"])
        training = train(job, before, bank, interruption, tracked, train_on=train_on)
        outcome = _finish(job, before, bank, training, memory)
    finally:
        if tracked is not None:
            tracked.finish()
    say(f"written to {folder.root}: model/, receipt.html, record.json, README.md")
    if config.compare is not None:
        outcome = _compared(replace(job, base=_base_again(job)), outcome, interruption)
    return FinishedJob(folder=folder.root, record=outcome)


# The bank, and what is protected.


def _bank(job: Job) -> Bank | None:
    """The sealed probes of a job that uses them: given, from the cache, or written now."""
    if not uses_bank(job.config, job.method) or job.rows.anchors is None:
        return None
    if job.written is not None:
        return written_bank(job.folder.bank, job.written, job.settings.probes, job.base, job.rows.anchors)
    given = None if job.config.bank is None else Path(located(str(job.config.bank), job.home))
    return job_bank(job.folder.bank, job.settings.probes, job.base, job.rows.anchors, given)


def past_tasks(job: Job, bank: Bank | None) -> list[PastTask]:
    """The job's own anchors and bank, and those of the earlier jobs it protects."""
    places = [Path(located(str(place), job.home)) for place in job.config.kept]
    wanted = uses_bank(job.config, job.method)
    found = [(job.rows.anchors, bank)] if job.rows.anchors is not None else []
    found += [
        (group, earlier_bank(place, group) if wanted else None)
        for place, group in zip(places, job.rows.kept, strict=True)
    ]
    return [
        PastTask(
            name=anchors.name,
            interface=anchors.interface,
            anchors=anchors.examples,
            probes=() if own is None else own.examples,
            written_by="" if own is None else str(own.manifest["model"]["fingerprint"]),
        )
        for anchors, own in found
    ]


# The training: started or restored from a checkpoint, evaluated, saved and stopped.


def train(
    job: Job,
    before: Mapping[str, GroupAnswers],
    bank: Bank | None,
    interruption: Interruption,
    tracked: Any,
    *,
    train_on: bool = True,
) -> Training:
    """Train from the last checkpoint, or the beginning, to the end; an interrupted training can be resumed."""
    config, folder = job.config, job.folder
    past, moved = past_tasks(job, bank), _reference(job)
    with recorded(folder.seconds, "training"):
        training = begin(job.settings, job.base, job.rows.trained, past, PLACES[config.sharding])
    rows = [job.rows.trained.examples, *(part for task in past for part in (task.anchors, task.probes))]
    identity = files.fingerprint([job.base.fingerprint, *map(fingerprint, rows)])
    kept = Checkpoints(folder.checkpoint, identity, minutes=config.checkpoint_minutes, steps=config.checkpoint_steps)
    log = training.log
    if kept.load(training):
        say(f"resumed after update {kept.step}")
        log = training.log
        if log.cursor.epoch <= config.epochs and not (log.learned or log.lost):
            log.done = False  # resumed with more epochs than it ended with
    if not train_on:
        return training
    best = KeptWeights(folder.best) if keeps_best(job) else None
    good = KeptWeights(folder.good) if config.lost_limit is not None else None
    if good is not None and log.cursor.step == 0:
        good.keep(training, 0)
    updates = updates_per_epoch(len(job.rows.trained.examples), config.batch_size)
    begins = "training" if training.prepared.guard is None else "computing evidence"
    read_after = sum(len(row) + 2 * len(row.target) for group in job.groups for row in group.encoded())
    with interruption.patient(), progress() as bars:
        shown = TrainingView(bars, epochs=config.epochs, updates=updates, done=log.cursor.step, begins=begins)
        evaluations, reported = _Evaluations(job, before, training, moved), len(log.watch.said)
        try:
            for event in training.run(evaluations.figures, evaluations.done):
                point = log.curve[-1] if isinstance(event, EpochEnded) else None
                _check(training, event)
                if point is not None and not log.lost:
                    if best is not None:
                        best.offer(training, point)
                    if good is not None and evaluations.lost(point) is not None:
                        good.keep(training, int(point["epoch"]))
                if log.cursor.step == 1 and "first_update" not in recorded_seconds(folder.seconds):
                    record(folder.seconds, {"first_update": time.perf_counter() - job.begun})
                if isinstance(event, Stepped) and event.step % 10 == 0:
                    training.tally()
                trained = log.training.padded + log.preservation.padded
                # A token is read in a third of the time that training on it takes, and decoded in about twice that.
                shown.show(event, training.admitted, point, read_after * log.seconds / (3 * max(1, trained)))
                for sentence in log.watch.said[reported:]:
                    say(f"warning: {sentence}")
                reported = len(log.watch.said)
                if tracked is not None:
                    tracked.log(_tracked(training, event, point), step=event.step)
                if isinstance(event, Refreshed):
                    continue  # the evidence is newer than the cursor here, so training could not resume from this state
                signal, due = processes.largest([interruption.received or 0, kept.due(log.cursor.step)])
                if signal:
                    kept.save(training)
                    total = config.epochs * updates
                    sentence = f"stopped after update {log.cursor.step} of {total}, and saved"
                    raise Interrupted(signal, sentence, agreed=True)
                if log.done or due:
                    with recorded(folder.seconds, "saving"):
                        kept.save(training)
        except (FloatingPointError, Exploded) as error:
            # A step that failed changed nothing; weights of an exploding loss are finite, but useless.
            if isinstance(error, FloatingPointError) and training.finite():
                kept.save(training)
            last = f"update {kept.step} is kept in {folder.checkpoint}" if kept.step else "no update was kept"
            raise type(error)(f"{error}; {last}") from error
        if kept.step != log.cursor.step or not kept.done:
            with recorded(folder.seconds, "saving"):
                kept.save(training)
    return training


def _reference(job: Job) -> list[measure.BaseRow]:
    """The base model's expectations on a few new rows, computed while it is still the base model."""
    if job.config.evaluate_every == 0:
        return []
    rows = job.rows.new.drawn(measure.ROWS, job.config.seed).encoded()
    with models.computing(job.config.compute_dtype, job.base.device), recorded(job.folder.seconds, "evaluating"):
        return measure.base_rows(job.base.model, rows)


def _check(training: Training, event: Event) -> None:
    """Check the numbers: an exploding loss ends the job, other problems become warnings."""
    seen = training.log.watch
    if isinstance(event, Stepped):
        seen.stepped(event.step, event.loss)
    elif isinstance(event, EpochEnded):
        seen.evaluated(training.log.curve[-1])
    elif event.norm is not None:
        seen.refreshed(event.norm)


class _Evaluations:
    """Evaluates the model during training and decides whether everything is learned."""

    def __init__(
        self, job: Job, before: Mapping[str, GroupAnswers], training: Training, moved: Sequence[measure.BaseRow]
    ) -> None:
        self._config, self._training, self._before = job.config, training, dict(before)
        self._device, self._moved = job.base.device, moved
        self._new, *others = [group for group in job.groups if group.part != "external"]
        self._others = [group.drawn(job.config.evaluate_rows, job.config.seed) for group in others]
        self._encoded = training.prepared.material.new
        past = [group for group in self._others if group.part == "retention" and not group.closed]
        scores = [score for group in past for score in outputs.group_scores(job, group, before)]
        self._start = measure.loss_of(scores) if scores else None
        if job.config.lost_limit is not None and not any(group.part == "retention" for group in self._others):
            raise ValueError(f"stop {job.config.stop} needs past rows to measure on; provide past, anchors or keep")

    def figures(self, epoch: int) -> dict[str, float]:
        """What is learned and lost after an epoch; all new rows are evaluated where that decides when to stop."""
        every, decides = self._config.evaluate_every, self._config.stop != "never" and self._new.closed
        due = every > 0 and epoch % every == 0
        new = self._new if decides else self._new.drawn(self._config.evaluate_rows, self._config.seed)
        groups = [*([new] if due or decides else []), *(self._others if due else [])]
        with models.computing(self._config.compute_dtype, self._device), self._training.whole() as model:
            moved = {"divergence": measure.divergence(model, self._moved)} if due and self._moved else {}
            return measure.curve_figures(model, groups, self._before) | moved

    def lost(self, point: Mapping[str, float]) -> float | None:
        """What past rows have lost: the rise of their loss in nats per token, or the share lost of Retention."""
        found = [1 - point["retention"] / 100] if "retention" in point else []
        if self._start is not None and "past_nll" in point:
            found.append(point["past_nll"] - self._start)
        return max(found, default=None)

    def done(self, point: Mapping[str, float]) -> Ending | None:
        """Why training stops: too much is lost, every new row is correct, or every response would be repeated."""
        limit, lost = self._config.lost_limit, self.lost(point)
        if limit is not None and lost is not None and lost > limit:
            say(f"stopped: past rows lost {lost:.3f}, more than {limit:g}; the last state before is written")
            return "lost"
        if self._config.stop == "never":
            return None
        if self._new.closed:
            return "learned" if point.get("acquisition", 100.0) == 100.0 else None
        with models.computing(self._config.compute_dtype, self._device), self._training.whole() as model:
            return "learned" if measure.repeats_every_token(model, self._encoded) else None


def _tracked(training: Training, event: Event, point: Mapping[str, float] | None) -> dict[str, float]:
    """What a tracker is told about an event."""
    if isinstance(event, Stepped):
        rate = float(training.optimizer.param_groups[0]["lr"])
        return {"train/loss": event.loss, "train/learning_rate": rate}
    if isinstance(event, Refreshed):
        return {f"evidence/{name}": loss for name, loss in event.losses.items()}
    return {f"epoch/{name}": value for name, value in (point or {}).items()}


# The model answers again, and everything is written.


def _finish(
    job: Job,
    before: Mapping[str, GroupAnswers],
    bank: Bank | None,
    training: Training,
    memory: PeakMemory,
) -> dict[str, Any]:
    """Evaluate again, then write; the record comes last, and then the work folder is removed."""
    config, folder = job.config, job.folder
    layers = layer_shares(training.prepared.guard)
    best = KeptWeights(folder.best).restore(training) if keeps_best(job) else None
    good = KeptWeights(folder.good).restore(training) if training.log.lost and best is None else None
    parameters = loading.num_weights(training.model)
    trainable = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    model = training.finish()
    repaired = training.repaired
    if isinstance(repaired, str):
        say(f"repair: {repaired}")
    training.optimizer.state.clear()  # its memory is needed now, and the last checkpoint holds it
    if config.repair:
        with recorded(folder.seconds, "repairing"):
            repaired = _repaired(job, before, bank, model)
    with recorded(folder.seconds, "evaluating"):
        with models.computing(config.compute_dtype, job.base.device):
            after = {group.name: outputs.answer(model, group, config, "after") for group in job.groups}
        abilities, divergence, notes = _abilities(job, bank, model)

    def written() -> dict[str, Any]:
        with recorded(folder.seconds, "saving"):
            outputs.write_model(folder, model, job.base.tokenizer, config.save_dtype)
            after_fingerprint = models.fingerprint(model)
        outcome = outputs.write_outputs(
            outputs.Finished(
                job=job,
                before=before,
                after=after,
                abilities=abilities,
                divergence=divergence,
                notes=notes,
                fingerprint=after_fingerprint,
                log=training.log,
                bank=bank,
                layers=layers,
                parameters=parameters,
                trainable=trainable,
                actual=actual_usage(job, training.log, memory),
                best_epoch=best,
                good_epoch=good,
                repaired=repaired,
            )
        )
        folder.clear_work()
        return outcome

    return processes.shared(written)


def _repaired(job: Job, before: Mapping[str, GroupAnswers], bank: Bank | None, model: nn.Module) -> Repaired | str:
    """Repair the trained model in place against the base, read again; the reason where there is nothing to repair."""
    base = _base_again(job)
    new = [group for group in (job.rows.new, job.rows.validation) if group is not None]
    try:
        return repair_groups(model, base, new, before, past_tasks(job, bank), job.config)
    except Unrepairable as error:
        say(f"repair: {error}")
        return str(error)


def _base_again(job: Job) -> Loaded:
    """The base model, read again, because training changed the weights of the one in memory."""
    base = load(job.config, job.home)
    if base.fingerprint != job.base.fingerprint:
        raise ValueError(f"{job.config.model}: the base model changed while the job ran; start a new job")
    return base


def _seen(job: Job, bank: Bank | None) -> list[Example]:
    """Every row that is trained on, protected or measured as a row of the job, and every probe."""
    return [*(row for group in job.rows.groups for row in group.examples), *(() if bank is None else bank.examples)]


def _abilities(
    job: Job, bank: Bank | None, model: nn.Module
) -> tuple[tuple[RowSet, ...], Divergence | None, Sequence[str]]:
    """The abilities of base and trained model; what keeps them from being measured is said, and loses nothing."""
    held = job.rows.past
    if outputs.ability_interface(job.base.tokenizer, job.config) is None and (held is None or held.closed):
        return (), None, [f"Abilities were not measured: {outputs.why_unmeasured(job.config)}."]
    try:
        base = _base_again(job)
    except (ValueError, OSError) as error:
        return (), None, [f"Abilities were not measured: {error}."]
    known = outputs.reference(base, job.config, held)
    found = outputs.measured(known, replace(base, model=model), job.config, _seen(job, bank))
    return *found, () if found[0] else [f"Abilities were not measured: {outputs.why_unmeasured(job.config)}."]


def keeps_best(job: Job) -> bool:
    """Whether the best epoch is written: as set, else where free text is held out to find it by."""
    held = job.rows.validation
    return held is not None and not held.closed if job.config.keep_best is None else job.config.keep_best


# Plain fine-tuning of the same base on the same rows, up to the loss that the finished job reached.


PER_EPOCH = 4
"""How often in an epoch plain fine-tuning is evaluated, so that it ends near that loss."""


def compare(out: Path, *, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Train plain fine-tuning beside a finished job, and write both into its receipt."""
    folder, given = Folder(out), repeated or {}
    with Interruption().watching() as interruption:
        config, home = read_settings(folder, given)
        if not folder.record.is_file():
            raise ValueError(
                f"{out}: expected a finished job to compare with; finish it with: cplus adapt --resume {out}"
            )
        with claimed(folder):
            record = read_finished(folder)
            if record["receipt"].get("beside") is None:
                try:
                    record = _compared(prepare(config, folder, home), record, interruption)
                except Interrupted as stop:
                    more = f"Continue with: cplus adapt --resume {out} --compare sft"
                    raise Interrupted(stop.number, f"{stop}. {more}", agreed=stop.agreed) from stop
            return FinishedJob(folder=out, record=record)


def _compared(job: Job, record: Mapping[str, Any], interruption: Interruption) -> dict[str, Any]:
    """Plain fine-tuning up to the job's loss of held-out, else trained, rows; of multiple choice, its Acquisition."""
    begun, base, figures = time.monotonic(), job.base, record["figures"]
    config = job.config.model_copy(update={"method": "sft", "repair": False, "num_probes": None, "bank": None})
    group = job.rows.new if job.rows.validation is None else job.rows.validation
    part = figures["free"]["validation" if group.part == "validation" else "new"]
    rate = figures["validation" if group.part == "validation" else "acquisition"]
    goal = -part["loss"]["after"] if part and part["loss"] else rate["percent"] if rate else math.inf
    name = {"acquisition": ("new_nll", "acquisition"), "validation": ("validation_nll", "validation")}[group.part]
    bank = Bank.load(job.folder.bank) if job.folder.bank.exists() else None
    known = outputs.reference(base, config, job.rows.past)
    with models.computing(config.compute_dtype, base.device):
        before = {job.rows.new.name: outputs.answer(base.model, job.rows.new, config, "before")}
        before |= {group.name: outputs.answer(base.model, group, config, "before")}
    training, level = begin(config, base, job.rows.trained, [], PLACES[config.sharding]), -math.inf
    updates = updates_per_epoch(len(job.rows.trained.examples), config.batch_size)
    every = max(1, updates // PER_EPOCH)
    with interruption.patient(), progress() as bars:
        shown = TrainingView(bars, epochs=config.epochs, updates=updates, done=0, begins="plain fine-tuning")
        for event in training.run(lambda epoch: {}, lambda point: None):
            shown.show(event, None, None)
            if interruption.received:
                raise Interrupted(interruption.received, "stopped; the job is finished, its comparison begins again")
            if isinstance(event, Stepped) and event.step % every == 0:
                with models.computing(config.compute_dtype, base.device), training.whole() as model:
                    found = measure.curve_figures(model, [group], before)
                level = -found[name[0]] if name[0] in found else found.get(name[1], 100.0)
                if level >= goal:
                    break
    steps, model = training.log.cursor.step, training.finish()
    with models.computing(config.compute_dtype, base.device):
        after = outputs.answer(model, job.rows.new, config, "after")
    sets, moved = outputs.measured(known, replace(base, model=model), config, _seen(job, bank))
    beside = Beside(
        method="sft",
        level=abs(level),
        reached=level >= goal,
        updates=steps,
        seconds=time.monotonic() - begun,
        sets=(compare_rows(job.rows.new, before[job.rows.new.name], after, judge=config.judge), *sets),
        divergence=moved,
    )
    return outputs.rewritten(job.folder, beside)


def compare_seconds(record: Mapping[str, Any]) -> float:
    """About how long `compare` takes for this job: its training without evidence, and half of its evaluation."""
    seconds, percent = record.get("seconds"), record["figures"]["preservation_percent"] or 0.0
    seconds = record["actual"]["seconds"] if seconds is None else seconds
    return float(seconds["training"] / (1 + percent / 100) + seconds["evaluating"] / 2)


def actual_usage(job: Job, log: TrainingLog, memory: PeakMemory) -> dict[str, Any]:
    """What was measured, by the names of the plan; the time to write receipt and record is still to come."""
    seconds = recorded_seconds(job.folder.seconds)
    first = seconds.pop("first_update", None)
    seconds["evaluating"] += log.evaluation_seconds
    seconds["training"] += log.seconds
    epochs = max(1, len(log.curve))
    return {
        "seconds": {**seconds, "first_update": first},
        "total_seconds": sum(seconds.values()),
        "training_tokens_per_epoch": log.training.padded / epochs,
        "evidence_tokens_per_epoch": log.preservation.padded / epochs,
        "peak_bytes": memory.peak(),
    }


# Where an interrupted job continues: from its folder, to the end or with the last checkpoint as its result.


def resume(out: Path, *, epochs: int | None = None, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Continue an interrupted job as if it had never stopped, up to other `epochs` if given; read a finished one.

    Settings that run code, such as `method="python:..."`, must be `repeated`.
    """
    return _continued(Folder(out), repeated or {}, epochs, train_on=True)


def finish(out: Path, *, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Write model and receipt from the last checkpoint of an interrupted job, without further training."""
    return _continued(Folder(out), repeated or {}, None, train_on=False)


def _continued(folder: Folder, repeated: Mapping[str, Any], epochs: int | None, *, train_on: bool) -> FinishedJob:
    out = folder.root
    with processes.joined():
        processes.shared(lambda: read_settings(folder, repeated))
        check_seen(folder)
        config, home = read_settings(folder, repeated)
        if (done := processes.shared(lambda: _finished(folder))) is not None:
            if epochs not in (None, config.epochs):
                raise ValueError(
                    f"{out}: this job is finished, so its epochs cannot change; start a new job from its model"
                )
            return compare(out, repeated=repeated) if config.compare else done
        if not train_on and not _has_checkpoint(folder):
            raise ValueError(f"{out}: nothing was trained yet, so there is nothing to finish; use --resume {out}")
        config = config.model_copy(update={} if epochs is None else {"epochs": epochs})
        memory = PeakMemory(models.choose_device(config.device))
        # The settings hold the values that it chose when it began, and their reasons.
        kept = stored(folder.settings)

        def begin(config: AdaptConfig, chosen: Sequence[Chosen]) -> None:
            held.enter_context(claimed(folder))
            if train_on:
                processes.shared(lambda: rewrite(folder, config, chosen=kept))

        with resumable(folder), Interruption().watching() as interruption, ExitStack() as held:
            job = replace(prepare(config, folder, home, time.perf_counter(), begin), chosen=kept)
            return work(job, interruption, memory, train_on=train_on)


def _finished(folder: Folder) -> FinishedJob | None:
    if not folder.record.is_file():
        return None
    say(f"{folder.root}: this job is finished")
    if folder.work.exists():  # the process was killed after the record was written
        with claimed(folder):
            folder.clear_work()
    return FinishedJob(folder=folder.root, record=read_finished(folder))
