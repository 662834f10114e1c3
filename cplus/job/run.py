"""A job from its settings to its folder: load, evaluate, build the bank, train, evaluate again, write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from cplus import files, leader, models, world
from cplus.data.examples import lines
from cplus.diagnostics.gateshares import layer_shares
from cplus.experiment.driver import Training, TrainingLog, rows_of
from cplus.job.answers import Before, answer, base_answers
from cplus.job.bank import job_bank, written_bank
from cplus.job.best import Best, LastGood
from cplus.job.choices import as_rows, is_open, with_chosen
from cplus.job.folder import Folder, begin, check_free, check_seen, claimed, rewrite
from cplus.job.interruption import Interrupted, Interruption
from cplus.job.outputs import Finished, write_model, write_outputs
from cplus.job.plan import Plan
from cplus.job.preflight import load, uses_bank
from cplus.job.prepare import Job, prepare
from cplus.job.progress import say
from cplus.job.push import push
from cplus.job.range_test import adapted_for_a_test, range_test
from cplus.job.repair.step import repair_groups
from cplus.job.requirements import check_requirements
from cplus.job.rows import located
from cplus.job.settings import AdaptConfig
from cplus.job.tracking import tracker
from cplus.job.training import past_tasks, train
from cplus.job.usage import PeakMemory, record, recorded, recorded_seconds
from cplus.job.workload import assumed_material, tokens_per_epoch
from cplus.models import four_bit
from cplus.probes.bank import Bank
from cplus.repairing.checks import Unrepairable
from cplus.repairing.search import Repaired


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """The folder of a finished job and its record."""

    folder: Path
    record: Mapping[str, Any]

    def __repr__(self) -> str:
        from cplus.receipts.verdict import headline

        return f"FinishedJob({str(self.folder)!r}: {headline(self.record['figures'])})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, each set of rows before and after, and the receipt's path."""
        from cplus.receipts.summary import of_figures
        from cplus.receipts.verdict import headline

        links = {"receipt": str(self.folder / "receipt.html"), "model": str(self.folder / "model")}
        return of_figures(headline(self.record["figures"]), self.record["figures"], links)

    @property
    def kept(self) -> bool:
        """Whether every requirement is met."""
        return all(requirement["met"] for requirement in self.record["figures"]["requirements"])


def adapt(
    config: AdaptConfig, *, force: bool = False, planned: Plan | None = None, starting: float = 0.0
) -> FinishedJob:
    """Fine-tune a model on new rows, protect what it could do, and write model, bank, record, card and receipt.

    `planned` is the job's plan, if there is one; the record then holds its times beside the measured ones. `starting`
    is how long the program took to get here. Processes that torchrun or Accelerate started do the job together.
    """
    folder, home = Folder(config.out), Path.cwd()

    def begun(job: Job) -> None:
        check_free(folder, force=force)
        begin(folder, job.config, home, chosen=as_rows(job.chosen))

    with world.joined():
        world.shared(lambda: check_free(folder, force=force))
        memory = PeakMemory(models.choose_device(config.device))
        with Interruption().watching() as interruption:
            job = prepare(config, folder, home)
            with claimed(folder):
                world.shared(lambda: begun(job))
                check_seen(folder)
                record(folder.seconds, {"starting": starting} if starting else {})
                return work(job, interruption, memory, planned=planned)


def work(
    job: Job,
    interruption: Interruption,
    memory: PeakMemory,
    *,
    train_on: bool = True,
    planned: Plan | None = None,
) -> FinishedJob:
    """Everything after the job is prepared; without `train_on` the last checkpoint is the result."""
    config, folder = job.config, job.folder
    record(folder.seconds, job.seconds)
    tracked = tracker(config.report_to, folder.root, config.model_dump(mode="json"))
    try:
        with models.computing(config.compute_dtype, job.base.device), recorded(folder.seconds, "evaluating"):
            before = base_answers(folder.answers, job.base, job.groups, config)
        check_requirements(config, job.groups, before.answers)
        if world.first():
            _write_rows(job)
        with recorded(folder.seconds, "writing probes"):
            bank = leader.in_turn(lambda: _bank(job), (job.base.model, job.base.tokenizer))
        world.agree("their bank", None if bank is None else bank.manifest["probes_sha256"])
        if is_open(config):
            with recorded(folder.seconds, "choosing the rate"):
                job = with_tested_rate(job, bank)
        training = train(job, before, bank, interruption, tracked, train_on=train_on)
        outcome = _finish(job, before, bank, training, interruption, memory, planned)
    except Interrupted as stop:
        raise Interrupted(
            stop.number,
            f"{stop}. Continue with: cplus adapt --resume {folder.root} (or --finish {folder.root})",
            agreed=stop.agreed,
        ) from stop
    except RuntimeError as error:
        if world.size() > 1:
            error.add_note(f"continue with: cplus adapt --resume {folder.root}")
        raise
    finally:
        tracked.finish()
    say(f"written to {folder.root}: model/, receipt.html, record.json, README.md")
    if config.push_to_hub is not None:
        say(f"uploaded to {world.shared(lambda: push(folder, config))}")
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
    planned: Plan | None,
) -> dict[str, Any]:
    """Evaluate again, then write; the record comes last, and then the work folder is removed."""
    config, folder = job.config, job.folder
    layers = layer_shares(training.prepared.guard)
    best = Best(folder.best).restore(training) if config.keep_best else None
    good = LastGood(folder.good).restore(training) if training.log.lost and best is None else None
    parameters = four_bit.num_weights(training.model)
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
            planned=planned_usage(job, planned),
            actual=actual_usage(job, training.log, memory),
        )
        outcome = write_outputs(folder, done)
        folder.clear_work()
        return outcome

    return world.shared(written)


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


def planned_usage(job: Job, planned: Plan | None) -> dict[str, Any]:
    """Tokens and bytes as computed from the rows before training; seconds only where the job was planned before."""
    material, _ = assumed_material(job.config, job.method, job.rows, job.home)
    tokens = tokens_per_epoch(job.config, job.method, material)
    return {
        "seconds": None if planned is None else {part: asdict(spent) for part, spent in planned.seconds.items()},
        "total_seconds": None if planned is None else asdict(planned.total),
        "training_tokens_per_epoch": tokens.training,
        "evidence_tokens_per_epoch": tokens.evidence,
        "held_bytes": job.need.held,
        "peak_bytes": job.need.peak if planned is None else planned.peak,
    }


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
