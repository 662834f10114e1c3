"""`cplus adapt` from its settings to its folder: read, load, answer, probe, train, answer again, write."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cplus import models
from cplus.base import files
from cplus.base.cost import cost_row
from cplus.base.environment import environment
from cplus.base.terminal import progress
from cplus.data.examples import Example, fingerprint, lines
from cplus.data.interfaces import tokens_by_role
from cplus.distributed import processes
from cplus.distributed.processes import Interrupted, Interruption
from cplus.evaluation.abilities import requests
from cplus.jobs import folder as folders
from cplus.jobs import outputs
from cplus.jobs.checkpoint import Checkpoints, KeptWeights
from cplus.jobs.compare import compare, compared
from cplus.jobs.folder import FinishedJob, Folder, check_free, check_seen, claimed, read_finished, read_settings
from cplus.jobs.prepare import Job, prepare, stored, with_own_rows
from cplus.jobs.progress import TrainingView, record, recorded, recorded_seconds, say, tracker
from cplus.jobs.repair import repair_groups
from cplus.jobs.rows import check_requirements
from cplus.jobs.settings import AdaptConfig
from cplus.methods.repair import Unrepairable, repair_row
from cplus.models import loading
from cplus.models.names import origin
from cplus.probes.audit import audit
from cplus.probes.bank import Bank
from cplus.receipts.contents import Divergence, GateShare, ModelId, Point, Receipt, RowSet
from cplus.receipts.contents import compare as compare_rows
from cplus.receipts.page import bank_audit
from cplus.training import measure
from cplus.training.driver import Ending, Training, TrainingLog, begin
from cplus.training.gateshares import layer_shares
from cplus.training.loop import EpochEnded, Event, Refreshed, Stepped, updates_per_epoch
from cplus.training.measure import Exploded, GroupAnswers
from cplus.training.sharding import PLACES


def adapt(config: AdaptConfig, *, force: bool = False, starting: float = 0.0) -> FinishedJob:
    """Fine-tune a model on new rows, protect what it could do, and write model, bank, record, card and receipt.

    `starting` is how long the program took to get here. Processes that torchrun or Accelerate started work together.
    """
    folder, home, begun = Folder(config.out), Path.cwd(), time.perf_counter() - starting
    replacing = folder.settings.is_file()

    def start(job: Job) -> None:
        processes.shared(lambda: folders.begin_folder(folder, job.config, home, chosen=job.chosen))
        check_seen(folder)
        record(folder.seconds, {"starting": starting} if starting else {})

    with processes.joined(), resumable(folder), Interruption().watching() as interruption:
        processes.shared(lambda: check_free(folder, force=force))
        job = prepare(config, folder, home, begun)
        with claimed(folder):
            processes.shared(lambda: check_free(folder, force=force))  # another job may have begun there
            if replacing:  # what is to be replaced stays until the new job is known to work
                job = with_own_rows(job)
                start(job)
                return work(job, interruption)
            try:
                start(job)
                job = with_own_rows(job)
            except ValueError:  # the job cannot work, so it leaves nothing behind
                if processes.first():
                    folders.discard(folder)
                raise
            return work(job, interruption)


@contextmanager
def resumable(folder: Folder) -> Iterator[None]:
    """Say how a job that is stopped or loses a process is continued."""
    try:
        yield
    except Interrupted as stop:
        more = f"Continue with: cplus adapt --resume {folder.root}"
        more += f" (or --finish {folder.root})" if folder.has_checkpoint else ""
        if not folder.settings.is_file():
            more = "Nothing was begun; give the same command again"
        raise Interrupted(stop.number, f"{stop}. {more}", agreed=stop.agreed) from stop
    except RuntimeError as error:
        if processes.size() > 1:
            error.add_note(f"continue with: cplus adapt --resume {folder.root}")
        raise


def work(job: Job, interruption: Interruption, *, train_on: bool = True) -> FinishedJob:
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
            bank = processes.in_turn(job.bank)
        processes.agree("their bank", None if bank is None else bank.manifest["probes_sha256"])
        training = train(job, before, bank, interruption, tracked, train_on=train_on)
        outcome = _finish(job, before, bank, training)
    finally:
        if tracked is not None:
            tracked.finish()
    say(f"written to {folder.root}: model/, receipt.html, record.json, README.md")
    if config.compare is not None:
        outcome = compared(replace(job, base=job.base_again()), outcome, interruption)
    return FinishedJob(folder=folder.root, record=outcome)


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
    past, moved = job.past_tasks(bank), []
    if config.evaluate_every > 0:  # while it is still the base model
        few = job.rows.new.drawn(measure.ROWS, config.seed).encoded()
        with models.computing(config.compute_dtype, job.base.device), recorded(folder.seconds, "evaluating"):
            moved = measure.base_rows(job.base.model, few)
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
                if isinstance(event, Stepped):
                    rate = float(training.optimizer.param_groups[0]["lr"])
                    told = {"train/loss": event.loss, "train/learning_rate": rate}
                elif isinstance(event, Refreshed):
                    told = {f"evidence/{name}": loss for name, loss in event.losses.items()}
                else:
                    told = {f"epoch/{name}": value for name, value in (point or {}).items()}
                if tracked is not None:
                    tracked.log(told, step=event.step)
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
        past = [(own, few) for own, few in zip(others, self._others, strict=True) if own.part == "retention"]
        scores = [score for own, few in past if not own.closed for score in outputs.scores_of(own, few, before)]
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


# The model answers again, and everything is written.


def _finish(job: Job, before: Mapping[str, GroupAnswers], bank: Bank | None, training: Training) -> dict[str, Any]:
    """Evaluate again, then write; the record comes last, and then the work folder is removed."""
    config, folder, rows, log = job.config, job.folder, job.rows, training.log
    layers = layer_shares(training.prepared.guard)
    best = KeptWeights(folder.best).restore(training) if keeps_best(job) else None
    good = KeptWeights(folder.good).restore(training) if log.lost and best is None else None
    parameters = loading.num_weights(training.model)
    trainable = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    model = training.finish()
    repaired = training.repaired
    training.optimizer.state.clear()  # its memory is needed now, and the last checkpoint holds it
    if config.repair:
        new = [group for group in (rows.new, rows.validation) if group is not None]
        with recorded(folder.seconds, "repairing"):
            try:
                repaired = repair_groups(model, job.base_again(), new, before, job.past_tasks(bank), config)
            except Unrepairable as error:
                repaired = str(error)
    if isinstance(repaired, str):
        say(f"repair: {repaired}")
    with recorded(folder.seconds, "evaluating"):
        with models.computing(config.compute_dtype, job.base.device):
            after = {group.name: outputs.answer(model, group, config, "after") for group in job.groups}
        abilities, divergence, unmeasured = _abilities(job, bank, model)

    def written() -> dict[str, Any]:
        with recorded(folder.seconds, "saving"):
            outputs.write_model(folder, model, job.base.tokenizer, config.save_dtype)
            hash_after = models.fingerprint(model)
        planned = config.epochs * updates_per_epoch(len(rows.trained.examples), config.batch_size)
        unfinished = None if log.done else {"updates": log.cursor.step, "planned": planned}
        works = cost_row(parameters, training=log.training, preservation=log.preservation)
        cost = {**works, "seconds": log.seconds, "extra_bytes": log.extra_bytes}
        compared = [group for group in (rows.anchors, rows.new, rows.past) if group is not None]
        sources: dict[str, Sequence[Example]] = {group.name: group.examples for group in compared}
        for name in config.measured:
            sources[f"{name}, measured only"] = [request.example for request in requests(name)]
        notes = list(log.watch.said)
        if job.chosen:
            values = ", ".join(own.named for own in job.chosen)
            notes.append(f"Chosen, because they were not given: {values}; record.json has the reasons.")
        if unfinished is not None:
            notes.append(f"UNFINISHED: training was ended after update {log.cursor.step} of {planned}.")
        if best is not None:
            which = "which has the lowest loss of held-out" if rows.validation else "the best on past and"
            notes.append(f"The weights are those of epoch {best}, {which} new rows.")
        ended = f"Training ended after epoch {len(log.curve)}:"
        if log.lost:
            notes.append(f"{ended} past rows lost more than {config.lost_limit:g}.")
        if good:
            notes.append(f"The weights are those of epoch {good}, the last one evaluated before that.")
        elif good == 0:
            notes.append(
                "The weights are the base model's, because the first evaluation lost too much; reduce the rate."
            )
        if log.learned and len(log.curve) < config.epochs:
            notes.append(f"{ended} every new row was learned.")
        if repaired is not None:
            notes.append(f"{'NOT REPAIRED' if isinstance(repaired, str) else 'Repair after training'}: {repaired}.")
        if config.load == loading.NAME:
            notes.append(
                "The base model was loaded in 4 bits (NF4): the figures before and after are of that model, not of the "
                "one in full precision."
            )
        if trainable < parameters:
            share = 100 * trainable / parameters
            notes.append(f"Only adapters were trained: {trainable:,} weights, {share:.2f} % of the model.")
        receipt = Receipt(
            title=f"{config.model} adapted by {config.method}" + (" (unfinished)" if unfinished else ""),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            before=ModelId(name=config.model, fingerprint=job.base.fingerprint),
            after=ModelId(name=f"{config.out.name}/model", fingerprint=hash_after),
            method=config.method,
            sets=tuple(compare_rows(own, before[own.name], after[own.name], judge=config.judge) for own in job.groups)
            + abilities,
            followed={g.name: min(len(g.examples), config.evaluate_rows) for g in job.groups if g.part != "external"},
            divergence=divergence,
            settings=config.model_dump(mode="json"),
            environment=environment(threads=torch.get_num_threads(), device=str(job.base.device)),
            curve=_curve(job, before, log),
            gate=tuple(
                GateShare(name=e.name, coordinates=e.coordinates, admitted_share=e.admitted, energy_share=e.energy)
                for e in layers
            ),
            audit=None if bank is None else bank_audit(audit(bank, sources)),
            cost=cost,
            requirements=config.requirements,
            notes=(*rows.notes, *notes, *unmeasured),
        )
        groups = {"new": rows.new, "anchors": rows.anchors, "past": rows.past, "validation": rows.validation}
        counts = {name: 0 if group is None else len(group.examples) for name, group in groups.items()}
        counts |= {"probes": 0 if bank is None else len(bank.probes), "parameters": parameters, "trainable": trainable}
        id, license = origin(config.model)
        model_row = {"name": config.model, "id": id, "license": license}
        # By the names of the plan; the time to write receipt and record is still to come.
        seconds, epochs = recorded_seconds(folder.seconds), max(1, len(log.curve))
        first = seconds.pop("first_update", None)
        seconds["evaluating"] += log.evaluation_seconds
        seconds["training"] += log.seconds
        own = {
            "kind": "adapt",
            "model": {**model_row, "before": job.base.fingerprint, "after": hash_after},
            "chosen": [asdict(own) for own in job.chosen],
            "rows": folders.row_hashes(job.groups),
            "counts": counts,
            "sources": [asdict(source) for source in rows.sources],
            "tokens_by_role": tokens_by_role(rows.new.interface, rows.new.examples),
            "cost": cost,
            "seconds": {**seconds, "first_update": first},
            "actual": {
                "total_seconds": sum(seconds.values()),
                "training_tokens_per_epoch": log.training.padded / epochs,
                "evidence_tokens_per_epoch": log.preservation.padded / epochs,
                "peak_bytes": job.memory.peak(),
            },
            "steps": log.cursor.step,
            "epochs": len(log.curve),
            "unfinished": unfinished,
            "repair": repair_row(repaired),
            "curve": log.curve,
            "bank": None if bank is None else dict(bank.manifest),
        }
        outcome = outputs.write_record(folder, receipt, own)
        folder.clear_work()
        return outcome

    return processes.shared(written)


def _curve(job: Job, before: Mapping[str, GroupAnswers], log: TrainingLog) -> tuple[Point, ...]:
    """The base model's point on the rows evaluated during training, nothing lost or learned, and the later ones."""
    start = {"epoch": 0.0}
    for group in job.groups:
        if group.part == "external":
            continue
        share, loss, _ = measure.FIGURES[group.part]
        if group.closed:
            start[share] = 100.0 if group.part == "retention" else 0.0
        else:
            few = group.drawn(job.config.evaluate_rows, job.config.seed)
            start[loss] = max(0.0, measure.loss_of(outputs.scores_of(group, few, before)))
    start |= {"divergence": 0.0} if any("divergence" in point for point in log.curve) else {}
    known = Point.__dataclass_fields__.keys()
    return tuple(Point(**{name: row[name] for name in known & row.keys()}) for row in (start, *log.curve))


def _abilities(
    job: Job, bank: Bank | None, model: nn.Module
) -> tuple[tuple[RowSet, ...], Divergence | None, Sequence[str]]:
    """The abilities of base and trained model; what keeps them from being measured is said, and loses nothing."""
    held = job.rows.past
    problem = outputs.why_unmeasured(job.config, job.base)
    if problem is not None and (held is None or held.closed):
        return (), None, [f"Abilities were not measured: {problem}."]
    try:
        base = job.base_again()
    except (ValueError, OSError) as error:
        return (), None, [f"Abilities were not measured: {error}."]
    known = outputs.reference(base, job.config, held)
    found = outputs.measured(known, replace(base, model=model), job.config, job.seen(bank))
    return *found, known.notes if problem is None else [f"Abilities were not measured: {problem}."]


def keeps_best(job: Job) -> bool:
    """Whether the best epoch is written: as set, else where free text is held out to find it by."""
    held = job.rows.validation
    return held is not None and not held.closed if job.config.keep_best is None else job.config.keep_best


# Where an interrupted job continues: from its folder, to the end or with the last checkpoint as its result.


def resume(
    out: Path, *, epochs: int | None = None, repeated: Mapping[str, Any] | None = None, train_on: bool = True
) -> FinishedJob:
    """Continue an interrupted job as if it had never stopped, up to other `epochs` if given; read a finished one.

    Settings that run code, such as `method="python:..."`, must be `repeated`. Without `train_on` model and receipt are
    written from the last checkpoint.
    """
    folder, repeated = Folder(out), repeated or {}
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
        if not train_on and not folder.has_checkpoint:
            raise ValueError(f"{out}: nothing was trained yet, so there is nothing to finish; use --resume {out}")
        config = config.model_copy(update={} if epochs is None else {"epochs": epochs})
        # The settings hold the values that it chose when it began, and their reasons.
        chosen = stored(folder.settings)
        with resumable(folder), Interruption().watching() as interruption:
            job = replace(prepare(config, folder, home, time.perf_counter()), chosen=chosen)
            with claimed(folder):
                if train_on:
                    processes.shared(lambda: folders.rewrite(folder, job.config, chosen=chosen))
                return work(with_own_rows(job), interruption, train_on=train_on)


def finish(out: Path, *, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Write model and receipt from the last checkpoint of an interrupted job, without further training."""
    return resume(out, repeated=repeated, train_on=False)


def _finished(folder: Folder) -> FinishedJob | None:
    if not folder.record.is_file():
        return None
    say(f"{folder.root}: this job is finished")
    if folder.work.exists():  # the process was killed after the record was written
        with claimed(folder):
            folder.clear_work()
    return FinishedJob(folder=folder.root, record=read_finished(folder))
