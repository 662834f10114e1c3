"""Plain fine-tuning of the same base on the same rows, up to the loss that a finished job reached."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cplus import models
from cplus.base import files
from cplus.base.terminal import progress
from cplus.data.examples import fingerprint
from cplus.distributed import processes
from cplus.distributed.processes import Interrupted, Interruption
from cplus.jobs import outputs
from cplus.jobs.checkpoint import Checkpoints
from cplus.jobs.folder import FinishedJob, Folder, claimed, read_finished, read_settings
from cplus.jobs.prepare import Job, prepare, stored, with_own_rows
from cplus.jobs.progress import TrainingView
from cplus.probes.bank import Bank
from cplus.receipts.contents import Beside
from cplus.receipts.contents import compare as compare_rows
from cplus.training import measure
from cplus.training.driver import begin
from cplus.training.loop import Stepped, updates_per_epoch
from cplus.training.sharding import PLACES

PER_EPOCH = 4
"""How often in an epoch plain fine-tuning is evaluated, so that it ends near that loss."""


OF_METHOD = ("num_probes", "bank", "anchor_weight", "beta", "ema", "strength")
"""Settings of the job's method, which plain fine-tuning has no use for."""


def compare(out: Path, *, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Train plain fine-tuning beside a finished job, and write both into its receipt."""
    folder = Folder(out)
    with Interruption().watching() as interruption:
        config, home = read_settings(folder, repeated or {})
        if not folder.record.is_file():
            raise ValueError(
                f"{out}: expected a finished job to compare with; finish it with: cplus adapt --resume {out}"
            )
        with claimed(folder):
            record = read_finished(folder)
            if record["receipt"].get("beside") is None:
                try:
                    record = compared(with_own_rows(prepare(config, folder, home)), record, interruption)
                except Interrupted as stop:
                    more = f"Continue with: cplus adapt --resume {out} --compare sft"
                    raise Interrupted(stop.number, f"{stop}. {more}", agreed=stop.agreed) from stop
            return FinishedJob(folder=out, record=record)


def compared(job: Job, record: Mapping[str, Any], interruption: Interruption) -> dict[str, Any]:
    """Plain fine-tuning up to the job's loss of held-out, else trained, rows; of multiple choice, its Acquisition."""
    begun, base, figures, place = time.monotonic(), job.base, record["figures"], job.folder.beside
    config = job.config.model_copy(update={"method": "sft", "repair": False, **dict.fromkeys(OF_METHOD)})
    if {"method", "lr"} <= {own.name for own in stored(job.folder.settings)} and config.lr is not None:
        config = config.model_copy(update={"lr": config.lr / 2})  # a rate chosen for the method is not SFT's
    new, group = job.rows.new, job.rows.validation or job.rows.new
    asked = {own.name: own for own in (new, group)}
    share, loss, _ = measure.FIGURES[group.part]
    part = figures["free"]["new" if group is new else "validation"]
    rate = figures[share]
    goal = -part["loss"]["after"] if part and part["loss"] else rate["percent"] if rate else math.inf
    bank = Bank.load(job.folder.bank) if job.folder.bank.exists() else None
    known = outputs.reference(base, config, job.rows.past)
    with models.computing(config.compute_dtype, base.device):
        before = {name: outputs.answer(base.model, own, config, "before") for name, own in asked.items()}
    training = begin(config, base, job.rows.trained, [], PLACES[config.sharding])
    updates = updates_per_epoch(len(job.rows.trained.examples), config.batch_size)
    every = max(1, updates // PER_EPOCH)

    def reached() -> float:
        with models.computing(config.compute_dtype, base.device), training.whole() as model:
            found = measure.curve_figures(model, [group], before)
        return -found[loss] if loss in found else found.get(share, 100.0)

    identity = files.fingerprint([base.fingerprint, fingerprint(job.rows.trained.examples)])
    kept = Checkpoints(place / "checkpoint.pt", identity, minutes=config.checkpoint_minutes, steps=None)
    resumed = kept.load(training)
    spent, done = training.log.seconds, training.log.cursor.step
    level = reached() if resumed and done % every == 0 else -math.inf  # evaluated where it is without an interruption
    with interruption.patient(), progress() as bars:
        shown = TrainingView(bars, epochs=config.epochs, updates=updates, done=done, begins="plain fine-tuning")
        for event in training.run() if level < goal else ():
            shown.show(event, None, None)
            if isinstance(event, Stepped) and event.step % every == 0:
                level = reached()
            signal, due = processes.largest([interruption.received or 0, kept.due(event.step)])
            if level >= goal or signal or due:
                kept.save(training)
            if level >= goal:
                break
            if signal:
                raise Interrupted(signal, "stopped and saved; the job is finished, its comparison not", agreed=True)
    steps, model = training.log.cursor.step, training.finish()
    with models.computing(config.compute_dtype, base.device):
        after = outputs.answer(model, new, config, "after")
    sets, moved = outputs.measured(known, replace(base, model=model), config, job.seen(bank))
    beside = Beside(
        method="sft",
        level=abs(level),
        reached=level >= goal,
        updates=steps,
        seconds=spent + time.monotonic() - begun,
        sets=(compare_rows(new, before[new.name], after, judge=config.judge), *sets),
        divergence=moved,
    )
    found = outputs.rewritten(job.folder, beside)
    shutil.rmtree(place, ignore_errors=True)
    return found


def compare_seconds(record: Mapping[str, Any]) -> float:
    """About how long `compare` takes for this job: its training without evidence, and half of its evaluation."""
    seconds, percent = record.get("seconds"), record["figures"]["preservation_percent"] or 0.0
    seconds = record["actual"]["seconds"] if seconds is None else seconds
    return float(seconds["training"] / (1 + percent / 100) + seconds["evaluating"] / 2)
