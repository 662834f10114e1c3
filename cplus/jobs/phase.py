"""The training phase of a job: built anew or taken up from a checkpoint, watched, saved and stopped."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cplus import files, models
from cplus.data.examples import fingerprint
from cplus.jobs import banks
from cplus.jobs.checkpoint import Checkpoints
from cplus.jobs.interruption import Interrupted, Interruption
from cplus.jobs.lora import with_adapters
from cplus.jobs.measure import Answers, look, says_every_token
from cplus.jobs.precision import in_precision
from cplus.jobs.ready import Job, row_of
from cplus.jobs.tracking import Tracker
from cplus.jobs.training import Training, scheduler, updates_an_epoch
from cplus.jobs.view import say, training_view
from cplus.loop import EpochEnded, Refreshed, Stepped, prepare
from cplus.methods import Material
from cplus.probes.bank import Bank
from cplus.run import OPTIMIZERS


def begun(job: Job, bank: Bank | None) -> Training:
    """The base model, its optimizer and the guard, before the first update or a checkpoint."""
    config, anchors = job.config, job.rows.anchors
    _, spec = row_of(config)
    model = job.base.model
    if config.lora is not None:
        model = with_adapters(model, config.lora, seed=config.seed)
    past = banks.past(
        [] if anchors is None else anchors.encoded(),
        [] if bank is None or anchors is None else [anchors.interface.encode(e) for e in bank.examples],
        len(job.rows.new.examples),
    )
    material = Material(new=job.rows.new.encoded(), past=(past,))
    optimizer = OPTIMIZERS[config.optimizer](model, spec)
    method = in_precision(job.method, config.compute_dtype, job.base.device)
    torch.manual_seed(config.seed)  # dropout, where a model has it
    prepared = prepare(method, optimizer, model, material, seed=config.seed)
    course = scheduler(optimizer, config, updates_an_epoch(material.new, config.batch_size))
    return Training(model=model, optimizer=optimizer, scheduler=course, prepared=prepared)


def train(
    job: Job, before: Mapping[str, Answers], bank: Bank | None, interruption: Interruption, tracked: Tracker
) -> Training:
    """Train from the last checkpoint, or the beginning, to the end; every stop on the way is one to go on from."""
    config = job.config
    training = begun(job, bank)
    rows = [job.rows.new.examples, () if job.rows.anchors is None else job.rows.anchors.examples]
    identity = files.fingerprint(
        [job.base.fingerprint, *map(fingerprint, rows), bank and bank.manifest["probes_sha256"]]
    )
    kept = Checkpoints(
        job.folder.checkpoint, identity, minutes=config.checkpoint_minutes, steps=config.checkpoint_steps
    )
    if kept.load(training):
        say(f"resumed after update {kept.step}")
    updates = updates_an_epoch(job.rows.new.examples, config.batch_size)
    begins = "training" if training.prepared.guard is None else "taking evidence"
    view = training_view(epochs=config.epochs, updates=updates, done=training.ledger.cursor.step, begins=begins)
    with interruption.patient(), view as shown:
        watch = _Watch(job, before, training)
        try:
            for event in training.run(config, watch.look, watch.done):
                ended = isinstance(event, EpochEnded)
                point = training.ledger.curve[-1] if ended else None
                if isinstance(event, Stepped) and event.step % 10 == 0:
                    training.tally()
                shown.show(event, training.admitted, point)
                _log(tracked, training, event, point)
                if isinstance(event, Refreshed):
                    continue  # a state in which the evidence is newer than the cursor is not one to go on from
                if interruption.received is not None:
                    kept.save(training)
                    step, total = training.ledger.cursor.step, config.epochs * updates
                    raise Interrupted(interruption.received, f"stopped after update {step} of {total}, and saved")
                if training.ledger.done or kept.due(training.ledger.cursor.step):
                    kept.save(training)
        except FloatingPointError as error:
            if training.finite():  # the step that failed changed nothing
                kept.save(training)
            last = f"update {kept.step} is kept in {job.folder.checkpoint}" if kept.step else "no update was good"
            raise FloatingPointError(f"{error}; {last}") from error
        if kept.step != training.ledger.cursor.step or not training.ledger.done:
            kept.save(training)
    return training


class _Watch:
    """Looks on the way, and whether everything is learned."""

    def __init__(self, job: Job, before: Mapping[str, Answers], training: Training) -> None:
        self._config, self._training, self._before = job.config, training, dict(before)
        self._device = job.base.device
        self._new, *kept = [group for group in job.groups if group.part != "external"]
        self._kept = [group.drawn(job.config.evaluate_rows, job.config.seed) for group in kept]
        self._encoded = training.prepared.material.new

    def look(self, epoch: int) -> dict[str, float]:
        """What is learned (of all new rows, where that decides the end) and lost."""
        every, decides = self._config.evaluate_every, self._config.stop == "learned" and self._new.closed
        due = every > 0 and epoch % every == 0
        new = self._new if decides else self._new.drawn(self._config.evaluate_rows, self._config.seed)
        groups = [*([new] if due or decides else []), *(self._kept if due else [])]
        with models.computing(self._config.compute_dtype, self._device):
            return look(self._training.model, groups, self._before)

    def done(self, point: Mapping[str, float]) -> bool:
        """Whether the training may end: every new row is answered rightly, or every response would be repeated."""
        if self._config.stop == "never":
            return False
        if self._new.closed:
            return point.get("acquisition", 100.0) == 100.0
        with models.computing(self._config.compute_dtype, self._device):
            return says_every_token(self._training.model, self._encoded)


def _log(tracked: Tracker, training: Training, event: object, point: Mapping[str, float] | None) -> None:
    if isinstance(event, Stepped):
        rate = float(training.optimizer.param_groups[0]["lr"])
        tracked.log({"train/loss": event.loss, "train/learning_rate": rate}, event.step)
    elif isinstance(event, Refreshed):
        tracked.log({f"evidence/{name}": loss for name, loss in event.losses.items()}, event.step)
    elif isinstance(event, EpochEnded) and point is not None:
        tracked.log({f"epoch/{name}": value for name, value in point.items()}, event.step)
