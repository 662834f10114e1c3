"""The training phase of a job: started or restored from a checkpoint, evaluated, saved and stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cplus import files, models, world
from cplus.data.examples import fingerprint
from cplus.experiment.divergence import ROWS, BaseRow, base_rows, divergence
from cplus.experiment.driver import Ending, Training, begin
from cplus.experiment.material import PastTask
from cplus.experiment.measure import GroupAnswers, curve_figures, loss_of, repeats_every_token
from cplus.experiment.rows import Group
from cplus.experiment.schedule import updates_per_epoch
from cplus.experiment.sharding import PLACES
from cplus.health import Exploded
from cplus.job.answers import Before
from cplus.job.bank import earlier_bank
from cplus.job.best import Best, LastGood
from cplus.job.checkpoint import Checkpoints
from cplus.job.interruption import Interrupted, Interruption
from cplus.job.preflight import uses_bank
from cplus.job.prepare import Job
from cplus.job.progress import say, training_view
from cplus.job.rows import located
from cplus.job.tracking import Tracker
from cplus.job.usage import recorded
from cplus.loop import EpochEnded, Event, Refreshed, Stepped
from cplus.probes.bank import Bank


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
                signal, due = world.largest([interruption.received or 0, kept.due(training.log.cursor.step)])
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
