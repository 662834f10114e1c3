"""`cplus adapt` from its settings to its folder: read, load, answer, probe, train, answer again, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from cplus import models
from cplus.base import files
from cplus.core.health import Exploded
from cplus.data.examples import fingerprint, lines
from cplus.distributed import processes
from cplus.distributed.processes import Interrupted, Interruption
from cplus.jobs.checkpoint import Best, Checkpoints, LastGood, is_there
from cplus.jobs.choices import (
    adapted_for_a_test,
    as_rows,
    is_open,
    range_test,
    stored,
    with_chosen,
)
from cplus.jobs.folder import FinishedJob, Folder, begin_folder, check_free, check_seen, claimed, read_settings, rewrite
from cplus.jobs.keep import earlier_bank, job_bank, written_bank
from cplus.jobs.outputs import Before, Finished, answer, base_answers, push, write_model, write_outputs
from cplus.jobs.prepare import Job, load, prepare, uses_bank
from cplus.jobs.progress import PeakMemory, Tracker, record, recorded, recorded_seconds, say, tracker, training_view
from cplus.jobs.repair import repair_groups
from cplus.jobs.rows import check_requirements, located
from cplus.jobs.settings import AdaptConfig
from cplus.methods.repair import Repaired, Unrepairable
from cplus.models import loading
from cplus.probes.bank import Bank
from cplus.training.driver import Ending, Training, TrainingLog, begin, rows_of
from cplus.training.gateshares import layer_shares
from cplus.training.loop import EpochEnded, Event, Refreshed, Stepped, updates_per_epoch
from cplus.training.measure import (
    ROWS,
    BaseRow,
    GroupAnswers,
    base_rows,
    curve_figures,
    divergence,
    loss_of,
    repeats_every_token,
)
from cplus.training.rows import Group, PastTask
from cplus.training.sharding import PLACES

# The training phase of a job: started or restored from a checkpoint, evaluated, saved and stopped.


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


def train(
    job: Job, before: Before, bank: Bank | None, interruption: Interruption, tracked: Tracker, *, train_on: bool = True
) -> Training:
    """Train from the last checkpoint, or the beginning, to the end; an interrupted training can be resumed."""
    config = job.config
    past, moved = past_tasks(job, bank), _reference(job)
    with recorded(job.folder.seconds, "training"):
        training = begin(job.settings, job.base, job.rows.trained, past, PLACES[config.sharding])
    rows = [job.rows.trained.examples, *(part for task in past for part in (task.anchors, task.probes))]
    identity = files.fingerprint([job.base.fingerprint, *map(fingerprint, rows)])
    kept = Checkpoints(
        job.folder.checkpoint, identity, minutes=config.checkpoint_minutes, steps=config.checkpoint_steps
    )
    if kept.load(training):
        say(f"resumed after update {kept.step}")
        if training.log.cursor.epoch <= config.epochs and not (training.log.learned or training.log.lost):
            training.log.done = False  # resumed with more epochs than it ended with
    if not train_on:
        return training
    best = Best(job.folder.best) if config.keep_best else None
    good = LastGood(job.folder.good) if config.lost_limit is not None else None
    if good is not None and training.log.cursor.step == 0:
        good.keep(training, 0)
    updates = updates_per_epoch(len(job.rows.trained.examples), config.batch_size)
    begins = "training" if training.prepared.guard is None else "computing evidence"
    view = training_view(epochs=config.epochs, updates=updates, done=training.log.cursor.step, begins=begins)
    with interruption.patient(), view as shown:
        evaluations, reported = _Evaluations(job, before, training, moved), len(training.log.watch.said)
        try:
            for event in training.run(evaluations.figures, evaluations.done):
                _check(training, event)
                ended = isinstance(event, EpochEnded)
                point = training.log.curve[-1] if ended else None
                if point is not None and not training.log.lost:
                    if best is not None:
                        best.offer(training, point)
                    if good is not None and evaluations.lost(point) is not None:
                        good.keep(training, int(point["epoch"]))
                if isinstance(event, Stepped) and event.step % 10 == 0:
                    training.tally()
                shown.show(event, training.admitted, point)
                reported = _report(training.log.watch.said, reported)
                _log(tracked, training, event, point)
                if isinstance(event, Refreshed):
                    continue  # the evidence is newer than the cursor here, so training could not resume from this state
                signal, due = processes.largest([interruption.received or 0, kept.due(training.log.cursor.step)])
                if signal:
                    kept.save(training)
                    step, total = training.log.cursor.step, config.epochs * updates
                    raise Interrupted(signal, f"stopped after update {step} of {total}, and saved", agreed=True)
                if training.log.done or due:
                    with recorded(job.folder.seconds, "saving"):
                        kept.save(training)
        except FloatingPointError as error:
            if training.finite():  # the step that failed changed nothing
                kept.save(training)
            raise FloatingPointError(f"{error}; {_last(kept, job)}") from error
        except Exploded as error:  # the weights are finite, but useless
            raise Exploded(f"{error}; {_last(kept, job)}") from error
        if kept.step != training.log.cursor.step or not kept.done:
            with recorded(job.folder.seconds, "saving"):
                kept.save(training)
    return training


def _reference(job: Job) -> list[BaseRow]:
    """The base model's expectations on a few new rows, computed while it is still the base model."""
    if job.config.evaluate_every == 0:
        return []
    rows = job.rows.new.drawn(ROWS, job.config.seed).encoded()
    with models.computing(job.config.compute_dtype, job.base.device), recorded(job.folder.seconds, "evaluating"):
        return base_rows(job.base.model, rows)


def _check(training: Training, event: Event) -> None:
    """Check the numbers: an exploding loss ends the job, other problems become warnings."""
    seen = training.log.watch
    if isinstance(event, Stepped):
        seen.stepped(event.step, event.loss)
    elif isinstance(event, EpochEnded):
        seen.evaluated(training.log.curve[-1])
    elif event.norm is not None:
        seen.refreshed(event.norm)


def _report(warnings: Sequence[str], reported: int) -> int:
    """Print the warnings that are not reported yet."""
    for sentence in warnings[reported:]:
        say(f"warning: {sentence}")
    return len(warnings)


def _last(kept: Checkpoints, job: Job) -> str:
    return f"update {kept.step} is kept in {job.folder.checkpoint}" if kept.step else "no update was kept"


class _Evaluations:
    """Evaluates the model during training and decides whether everything is learned."""

    def __init__(self, job: Job, before: Before, training: Training, moved: Sequence[BaseRow]) -> None:
        self._config, self._training, self._before = job.config, training, dict(before.answers)
        self._device, self._moved = job.base.device, moved
        self._new, *others = [group for group in job.groups if group.part != "external"]
        self._others = [group.drawn(job.config.evaluate_rows, job.config.seed) for group in others]
        self._encoded = training.prepared.material.new
        self._start = past_loss([*self._others], self._before)
        if job.config.lost_limit is not None and not any(group.part == "retention" for group in self._others):
            raise ValueError(f"stop {job.config.stop} needs past rows to measure on; provide past, anchors or keep")

    def figures(self, epoch: int) -> dict[str, float]:
        """What is learned and lost after an epoch; all new rows are evaluated where that decides when to stop."""
        every, decides = self._config.evaluate_every, self._config.stop != "never" and self._new.closed
        due = every > 0 and epoch % every == 0
        new = self._new if decides else self._new.drawn(self._config.evaluate_rows, self._config.seed)
        groups = [*([new] if due or decides else []), *(self._others if due else [])]
        with models.computing(self._config.compute_dtype, self._device), self._training.whole() as model:
            moved = {"divergence": divergence(model, self._moved)} if due and self._moved else {}
            return curve_figures(model, groups, self._before) | moved

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
            return "learned" if repeats_every_token(model, self._encoded) else None


def past_loss(groups: Sequence[Group], before: Mapping[str, GroupAnswers]) -> float | None:
    """The base model's loss on these rows of the past groups, in free text; None without such rows."""
    scores = []
    for group in groups:
        seen = {example.id for example in group.examples}
        if group.part == "retention" and not group.closed:
            known = before[group.name]
            scores += [s for p, s in zip(known.predictions, known.scores, strict=True) if p.id in seen]
    return loss_of(scores) if scores else None


def _log(tracked: Tracker, training: Training, event: object, point: Mapping[str, float] | None) -> None:
    if isinstance(event, Stepped):
        rate = float(training.optimizer.param_groups[0]["lr"])
        tracked.log({"train/loss": event.loss, "train/learning_rate": rate}, event.step)
    elif isinstance(event, Refreshed):
        tracked.log({f"evidence/{name}": loss for name, loss in event.losses.items()}, event.step)
    elif isinstance(event, EpochEnded) and point is not None:
        tracked.log({f"epoch/{name}": value for name, value in point.items()}, event.step)


# A job from its settings to its folder: load, evaluate, build the bank, train, evaluate again, write.


def adapt(config: AdaptConfig, *, force: bool = False, starting: float = 0.0) -> FinishedJob:
    """Fine-tune a model on new rows, protect what it could do, and write model, bank, record, card and receipt.

    `starting` is how long the program took to get here. Processes that torchrun or Accelerate started work together.
    """
    folder, home = Folder(config.out), Path.cwd()

    def begun(job: Job) -> None:
        check_free(folder, force=force)
        begin_folder(folder, job.config, home, chosen=as_rows(job.chosen))

    with processes.joined():
        processes.shared(lambda: check_free(folder, force=force))
        memory = PeakMemory(models.choose_device(config.device))
        with Interruption().watching() as interruption:
            job = prepare(config, folder, home)
            with claimed(folder):
                processes.shared(lambda: begun(job))
                check_seen(folder)
                record(folder.seconds, {"starting": starting} if starting else {})
                return work(job, interruption, memory)


def work(
    job: Job,
    interruption: Interruption,
    memory: PeakMemory,
    *,
    train_on: bool = True,
) -> FinishedJob:
    """Everything after the job is prepared; without `train_on` the last checkpoint is the result."""
    config, folder = job.config, job.folder
    record(folder.seconds, job.seconds)
    tracked = tracker(config.report_to, folder.root, config.model_dump(mode="json"))
    try:
        with models.computing(config.compute_dtype, job.base.device), recorded(folder.seconds, "evaluating"):
            before = base_answers(folder.answers, job.base, job.groups, config)
        check_requirements(config, job.groups, before.answers)
        if processes.first():
            _write_rows(job)
        with recorded(folder.seconds, "writing probes"):
            bank = processes.led_in_turn(lambda: _bank(job), (job.base.model, job.base.tokenizer))
        processes.agree("their bank", None if bank is None else bank.manifest["probes_sha256"])
        if is_open(config):
            with recorded(folder.seconds, "choosing the rate"):
                job = with_tested_rate(job, bank)
        training = train(job, before, bank, interruption, tracked, train_on=train_on)
        outcome = _finish(job, before, bank, training, interruption, memory)
    except Interrupted as stop:
        raise Interrupted(
            stop.number,
            f"{stop}. Continue with: cplus adapt --resume {folder.root} (or --finish {folder.root})",
            agreed=stop.agreed,
        ) from stop
    except RuntimeError as error:
        if processes.size() > 1:
            error.add_note(f"continue with: cplus adapt --resume {folder.root}")
        raise
    finally:
        tracked.finish()
    say(f"written to {folder.root}: model/, receipt.html, record.json, README.md")
    if config.push_to_hub is not None:
        say(f"uploaded to {processes.shared(lambda: push(folder, config))}")
    return FinishedJob(folder=folder.root, record=outcome)


def with_tested_rate(job: Job, bank: Bank | None) -> Job:
    """The job at the learning rate that a short test on its rows found; a resumed job reads it from its settings."""
    settings, past = job.settings, past_tasks(job, bank)
    rows = rows_of(settings, job.base, job.rows.trained, past)
    held = [] if job.rows.past is None else job.rows.past.encoded()
    with adapted_for_a_test(settings, job.method, job.base.model) as model:
        test = range_test(job.config, settings, job.method, model, rows, held)
    say(f"chosen: {test.chosen}")
    chosen = (*job.chosen, test.chosen)
    job = replace(job, config=with_chosen(job.config, [test.chosen]), chosen=chosen)
    rewrite(job.folder, job.config, chosen=as_rows(chosen))
    return job


def _write_rows(job: Job) -> None:
    """The rows to keep, for later jobs."""
    if job.rows.anchors is not None:
        files.write_text(job.folder.anchors, lines(job.rows.anchors.examples))
    if job.config.written and job.rows.past is not None and job.config.past is None:
        files.write_text(job.folder.past, lines(job.rows.past.examples))


def _bank(job: Job) -> Bank | None:
    if not uses_bank(job.config, job.method) or job.rows.anchors is None:
        return None
    if job.written is not None:
        return written_bank(job.folder.bank, job.written, job.settings.probes, job.base, job.rows.anchors)
    given = None if job.config.bank is None else Path(located(str(job.config.bank), job.home))
    return job_bank(job.folder.bank, job.settings.probes, job.base, job.rows.anchors, given)


def _finish(
    job: Job,
    before: Before,
    bank: Bank | None,
    training: Training,
    interruption: Interruption,
    memory: PeakMemory,
) -> dict[str, Any]:
    """Evaluate again, then write; the record comes last, and then the work folder is removed."""
    config, folder = job.config, job.folder
    layers = layer_shares(training.prepared.guard)
    best = Best(folder.best).restore(training) if config.keep_best else None
    good = LastGood(folder.good).restore(training) if training.log.lost and best is None else None
    parameters = loading.num_weights(training.model)
    trainable = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    model = training.finish()
    repaired = training.repaired
    if isinstance(repaired, str):
        say(f"repair: {repaired}")
    if config.repair:
        training.optimizer.state.clear()  # its memory is needed now, and the last checkpoint holds it
        with recorded(folder.seconds, "repairing"):
            repaired = _repaired(job, before, bank, model, interruption)
    with models.computing(config.compute_dtype, job.base.device), recorded(folder.seconds, "evaluating"):
        after = {
            group.name: answer(model, group, config, "after", before.answers[group.name].predictions)
            for group in job.groups
        }

    def written() -> dict[str, Any]:
        with recorded(folder.seconds, "saving"):
            write_model(folder, model, job.base.tokenizer, config.save_dtype)
            after_fingerprint = models.fingerprint(model)
        done = Finished(
            config=config,
            base=job.base,
            after_fingerprint=after_fingerprint,
            rows=job.rows,
            groups=job.groups,
            before=before,
            after=after,
            log=training.log,
            bank=bank,
            layers=layers,
            comparisons=job.comparisons,
            parameters=parameters,
            trainable=trainable,
            best_epoch=best,
            repaired=repaired,
            chosen=job.chosen,
            good_epoch=good,
            actual=actual_usage(job, training.log, memory),
        )
        outcome = write_outputs(folder, done)
        folder.clear_work()
        return outcome

    return processes.shared(written)


def _repaired(
    job: Job, before: Before, bank: Bank | None, model: nn.Module, interruption: Interruption
) -> Repaired | str:
    """Repair the trained model in place against the base, read again; the reason where there is nothing to repair."""
    base = load(job.config, job.home)
    if base.fingerprint != job.base.fingerprint:
        raise ValueError(f"{job.config.model}: the base model changed while the job ran; start a new job")
    new = [group for group in (job.rows.new, job.rows.validation) if group is not None]
    try:
        return repair_groups(
            model, base, new, before.answers, past_tasks(job, bank), job.config, job.folder.work, interruption
        )
    except Unrepairable as error:
        say(f"repair: {error}")
        return str(error)


def actual_usage(job: Job, log: TrainingLog, memory: PeakMemory) -> dict[str, Any]:
    """What was measured, by the names of the plan; the time to write receipt and record is still to come."""
    seconds = recorded_seconds(job.folder.seconds)
    seconds["evaluating"] += log.evaluation_seconds
    seconds["training"] += log.seconds
    epochs = max(1, len(log.curve))
    return {
        "seconds": seconds,
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
    folder = Folder(out)
    with processes.joined():
        config, home = _read(folder, repeated)
        if (done := processes.shared(lambda: _finished(folder))) is not None:
            if epochs is not None and epochs != config.epochs:
                raise ValueError(
                    f"{out}: this job is finished, so its epochs cannot change; start a new job from its model"
                )
            return done
        if epochs is not None:
            config = config.model_copy(update={"epochs": epochs})
        memory = PeakMemory(models.choose_device(config.device))
        with Interruption().watching() as interruption:
            job = _with_reasons(prepare(config, folder, home))
            with claimed(folder):
                processes.shared(lambda: rewrite(folder, config, chosen=as_rows(job.chosen)))
                return work(job, interruption, memory)


def finish(out: Path, *, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Write model and receipt from the last checkpoint of an interrupted job, without further training."""
    folder = Folder(out)
    with processes.joined():
        config, home = _read(folder, repeated)
        if (done := processes.shared(lambda: _finished(folder))) is not None:
            return done
        if not is_there(folder.checkpoint):
            raise ValueError(f"{out}: no checkpoint has been written yet; continue with: cplus adapt --resume {out}")
        memory = PeakMemory(models.choose_device(config.device))
        with Interruption().watching() as interruption:
            job = _with_reasons(prepare(config, folder, home))
            with claimed(folder):
                return work(job, interruption, memory, train_on=False)


def _with_reasons(job: Job) -> Job:
    """The job with the reasons for what it chose when it began; its settings hold the values."""
    return replace(job, chosen=stored(job.folder.settings))


def _read(folder: Folder, repeated: Mapping[str, Any] | None) -> tuple[AdaptConfig, Path]:
    """The job's settings, in a folder that every process sees."""
    processes.shared(lambda: read_settings(folder, repeated or {}))
    check_seen(folder)
    return read_settings(folder, repeated or {})


def _finished(folder: Folder) -> FinishedJob | None:
    if not folder.record.is_file():
        return None
    say(f"{folder.root}: this job is finished")
    if folder.work.exists():  # the process was killed after the record was written
        with claimed(folder):
            folder.clear_work()
    return FinishedJob(folder=folder.root, record=files.read_sealed(folder.record))
