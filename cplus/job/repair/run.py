"""`cplus repair` from its settings to its folder: evaluate base and tuned model, repair, evaluate again, write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cplus import files, models
from cplus.data.examples import lines
from cplus.experiment.material import PastTask
from cplus.job.answers import answer, base_answers
from cplus.job.bank import job_bank, written_bank
from cplus.job.folder import Folder, begin, check_free, claimed, discard, read_values
from cplus.job.interruption import Interrupted, Interruption
from cplus.job.outputs import write_model
from cplus.job.progress import say
from cplus.job.repair.answers import tuned_sets
from cplus.job.repair.outputs import RepairOutcome, write_outputs
from cplus.job.repair.prepare import Given, prepare
from cplus.job.repair.settings import RepairConfig, repair_settings
from cplus.job.repair.step import repair_groups, trial_rows
from cplus.job.requirements import check_requirements
from cplus.job.rows import located
from cplus.job.run import FinishedJob
from cplus.job.usage import recorded, recorded_seconds
from cplus.probes.bank import Bank
from cplus.repairing.checks import Unrepairable

FORMAT = "cplus-repair/1"


def repair(config: RepairConfig, *, force: bool = False) -> FinishedJob:
    """Undo the part of a fine-tuning that past behaviour needs most; write model, bank, record, card and receipt."""
    folder, home = Folder(config.out), Path.cwd()
    check_free(folder, force=force)
    with Interruption().watching() as interruption:
        given = prepare(config, home)
        with claimed(folder):
            check_free(folder, force=force)
            begin(folder, config, home, FORMAT)
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
