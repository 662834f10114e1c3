"""From settings to a finished folder: load, ask, build the bank, train, ask again, write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cplus import files, models
from cplus.config import AdaptConfig
from cplus.data.examples import fingerprint
from cplus.jobs import banks, footprint
from cplus.jobs.checkpoint import Checkpoints
from cplus.jobs.folder import Folder, asked, begin, check_free, claimed
from cplus.jobs.gateshares import layer_shares
from cplus.jobs.interruption import Interrupted, Interruption
from cplus.jobs.lora import merged, with_adapters
from cplus.jobs.measure import Answers, ask, ask_once, look, says_every_token
from cplus.jobs.outputs import Finished, write_model, write_outputs
from cplus.jobs.precision import in_precision
from cplus.jobs.rows import Group, Rows, gather, located, read
from cplus.jobs.tracking import Tracker, tracker
from cplus.jobs.training import Training, scheduler, updates_an_epoch
from cplus.jobs.view import say, training_view
from cplus.loop import EpochEnded, Refreshed, Stepped, prepare
from cplus.methods import Material, Method, Past
from cplus.models import Loaded
from cplus.probes.bank import Bank
from cplus.records import RunSpec
from cplus.run import OPTIMIZERS, configured


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished job: where it lies and its record."""

    folder: Path
    record: Mapping[str, Any]

    @property
    def kept(self) -> bool:
        """Whether every requirement is met."""
        return all(requirement["met"] for requirement in self.record["figures"]["requirements"])


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A job ready to work: settings checked, model loaded, rows bound to it."""

    config: AdaptConfig
    home: Path
    folder: Folder
    method: Method
    base: Loaded
    rows: Rows
    groups: tuple[Group, ...]


def adapt(config: AdaptConfig, *, force: bool = False) -> Outcome:
    """Fine-tune a model on new rows, keep what it could do, and write model, bank, record, card and receipt."""
    folder, home = Folder(config.out), Path.cwd()
    check_free(folder, force=force)
    with Interruption().watching() as interruption:
        job = _ready(config, folder, home)
        with claimed(folder):
            check_free(folder, force=force)
            begin(folder, config, home)
            return _work(job, interruption)


def resume(out: Path) -> Outcome:
    """Go on with an interrupted job as if it had never stopped; a finished one is read."""
    folder = Folder(out)
    config, home = asked(folder)
    if folder.record.is_file():
        say(f"{out}: this job is finished")
        return Outcome(folder=out, record=files.read_json(folder.record))
    with Interruption().watching() as interruption:
        job = _ready(config, folder, home)
        with claimed(folder):
            return _work(job, interruption)


def row_of(config: AdaptConfig) -> tuple[Method, RunSpec]:
    """The method's row with the job's blend and smoothing, and the settings as the optimizers read them."""
    spec = RunSpec(
        model=config.model,
        task="",
        interface="",
        method=config.method,
        seed=config.seed,
        num_anchors=config.num_anchors,
        num_probes=config.num_probes or 0,
        anchor_weight=config.anchor_weight,
        beta=config.beta,
        optimizer=config.optimizer,
        lr=config.lr,
        weight_decay=config.weight_decay,
    )
    return configured(spec), spec


def _ready(config: AdaptConfig, folder: Folder, home: Path) -> _Job:
    """Everything that can be refused is refused here, before a byte is written."""
    method, _ = row_of(config)
    tasks = read(config, method, home)
    size, need = footprint.needs(config, method, tasks, home)
    for warning in footprint.check(need, size, config):
        say(f"warning: {warning}")
    say(f"{config.model}: {size.parameters:,} parameters, {size.trainable:,} trained; {method.name}: {method.summary}")
    base = load(config, home)
    with models.computing(config.compute_dtype, base.device):
        rows = gather(config, tasks, base)
    for note in rows.notes:
        say(f"note: {note}")
    return _Job(
        config=config, home=home, folder=folder, method=method, base=base, rows=rows, groups=rows.asked(config)
    )  # fmt: skip


def load(config: AdaptConfig, home: Path) -> Loaded:
    """The base model in float32."""
    return models.load(
        located(config.model, home),
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
    )


def _work(job: _Job, interruption: Interruption) -> Outcome:
    config, folder = job.config, job.folder
    tracked = tracker(config.report_to, folder.root, config.model_dump(mode="json"))
    try:
        with models.computing(config.compute_dtype, job.base.device):
            before = ask_once(folder.answers, job.base.model, job.groups, config, job.base.fingerprint)
        check_requirements(config, job.groups, before)
        bank = _bank(job)
        training = _train(job, before, bank, interruption, tracked)
        record = _finish(job, before, bank, training)
    except Interrupted as stop:
        sentence = str(stop) if stop.args[0] != "stopped" else "stopped; what was done so far is kept"
        raise Interrupted(stop.number, f"{sentence}. Go on with: cplus adapt --resume {folder.root}") from stop
    finally:
        tracked.finish()
    say(f"written to {folder.root}: model/, receipt.html, record.json, README.md")
    return Outcome(folder=folder.root, record=record)


def check_requirements(config: AdaptConfig, groups: tuple[Group, ...], before: Mapping[str, Answers]) -> None:
    """Refuse a requirement that no result could meet, before the training and not after it."""
    right = {
        part: [p.correct for g in groups if g.part == part for p in before[g.name].predictions]
        for part in ("retention", "acquisition")
    }
    for required in config.requirements:
        wanted = required.metric == "retention"
        if wanted not in right[required.metric]:
            state = "right" if wanted else "wrong"
            raise ValueError(
                f"{required.metric} is required, but none of {len(right[required.metric])} rows was answered {state}ly "
                f"by the base model (judge: {config.judge}); give other rows or another judge, or leave it out"
            )


def _bank(job: _Job) -> Bank | None:
    if "probes" not in job.method.needs or job.rows.anchors is None:
        return None
    given = None if job.config.bank is None else Path(located(str(job.config.bank), job.home))
    new = len(job.rows.new.examples)
    return banks.sealed(job.folder.bank, job.config, job.base, job.rows.anchors, new, given)


def _training(job: _Job, bank: Bank | None) -> Training:
    """The base model, its optimizer and the guard, before the first update or a checkpoint."""
    config, anchors = job.config, job.rows.anchors
    _, spec = row_of(config)
    model = job.base.model
    if config.lora is not None:
        model = with_adapters(model, config.lora, seed=config.seed)
    past = Past(
        name="past",
        anchors=[] if anchors is None else anchors.encoded(),
        probes=[] if bank is None or anchors is None else [anchors.interface.encode(e) for e in bank.examples],
    )
    material = Material(new=job.rows.new.encoded(), past=(past,))
    optimizer = OPTIMIZERS[config.optimizer](model, spec)
    method = in_precision(job.method, config.compute_dtype, job.base.device)
    torch.manual_seed(config.seed)  # dropout, where a model has it
    prepared = prepare(method, optimizer, model, material, seed=config.seed)
    course = scheduler(optimizer, config, updates_an_epoch(material.new, config.batch_size))
    return Training(model=model, optimizer=optimizer, scheduler=course, prepared=prepared)


def _train(
    job: _Job, before: Mapping[str, Answers], bank: Bank | None, interruption: Interruption, tracked: Tracker
) -> Training:
    config = job.config
    training = _training(job, bank)
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
    view = training_view(epochs=config.epochs, updates=updates, done=training.ledger.cursor.step)
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
            last = (
                "there is no checkpoint yet" if kept.step is None else f"the last good checkpoint is update {kept.step}"
            )
            raise FloatingPointError(f"{error}; {last} ({job.folder.checkpoint})") from error
        if kept.step != training.ledger.cursor.step or not training.ledger.done:
            kept.save(training)
    return training


class _Watch:
    """Looks on the way, and whether everything is learned."""

    def __init__(self, job: _Job, before: Mapping[str, Answers], training: Training) -> None:
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


def _finish(job: _Job, before: Mapping[str, Answers], bank: Bank | None, training: Training) -> dict[str, Any]:
    """Ask again, then write; the record comes last and the work folder goes after it."""
    config, folder, guard = job.config, job.folder, training.prepared.guard
    layers = layer_shares(guard)
    if guard is not None:
        guard.detach()
    parameters = sum(p.numel() for p in training.model.parameters())
    trainable = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    model = merged(training.model, config.lora).eval()
    with models.computing(config.compute_dtype, job.base.device):
        after = {group.name: ask(model, group, config, "after") for group in job.groups}
    write_model(folder, model, job.base.tokenizer)
    done = Finished(
        config=config,
        base=job.base,
        after_fingerprint=models.fingerprint(model),
        rows=job.rows,
        groups=job.groups,
        before=before,
        after=after,
        ledger=training.ledger,
        bank=bank,
        layers=layers,
        parameters=parameters,
        trainable=trainable,
    )
    record = write_outputs(folder, done)
    folder.clear_work()
    return record
