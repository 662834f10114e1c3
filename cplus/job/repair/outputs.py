"""The outputs of a repair: model, card, receipt of base, tuned and repaired model, and, last of all, the record."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cplus import files
from cplus.environment import environment
from cplus.evaluation import flips
from cplus.experiment.measure import GroupAnswers, kept, learned, loss_of
from cplus.experiment.rows import Group, Rows
from cplus.job.answers import Before
from cplus.job.folder import Folder
from cplus.job.other_jobs import row_hashes
from cplus.job.outputs import card, row_set
from cplus.job.repair.settings import RepairConfig
from cplus.models import Loaded
from cplus.models.names import origin
from cplus.probes.audit import ComparedRows, audit
from cplus.probes.bank import Bank
from cplus.receipts.receipt import ModelId, Receipt, Repair, TunedSet, bank_audit, write_receipt
from cplus.repairing.search import Repaired

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RepairOutcome:
    """Everything the outputs are written from."""

    config: RepairConfig
    base: Loaded
    tuned: Loaded
    after_fingerprint: str
    rows: Rows
    groups: Sequence[Group]
    before: Before
    tuned_sets: Sequence[TunedSet]
    after: Mapping[str, GroupAnswers]
    bank: Bank
    repaired: Repaired
    notes: Sequence[str]
    seconds: Mapping[str, float]


def tuned_set(group: Group, before: GroupAnswers, answers: GroupAnswers) -> TunedSet:
    """What the tuned model reached on a group, from its answers or from losses alone."""
    nll = None if group.closed else max(0.0, loss_of(answers.scores))
    if not answers.predictions or any(p.correct is None for p in (*before.predictions, *answers.predictions)):
        return TunedSet(name=group.name, nll=nll)
    table = flips(before.predictions, answers.predictions)
    right = 100 * sum(p.right for p in answers.predictions) / len(answers.predictions)
    return TunedSet(name=group.name, right=right, retention=kept(table), acquisition=learned(table), nll=nll)


def write_outputs(folder: Folder, done: RepairOutcome) -> dict[str, Any]:
    """Write receipt, card and record."""
    shown = write_receipt(receipt(done), folder.root)
    name, licence = origin(done.config.model)
    record = {
        "schema": SCHEMA,
        "settings": done.config.shown(),
        "model": {
            "name": done.config.model,
            "id": name,
            "license": licence,
            "before": done.base.fingerprint,
            "tuned": done.tuned.fingerprint,
            "after": done.after_fingerprint,
        },
        "figures": shown["figures"],
        "repair": done.repaired.row(),
        "rows": row_hashes(done.groups),
        "counts": counts(done),
        "actual": {"seconds": dict(done.seconds)},
        "bank": dict(done.bank.manifest),
        "notes": shown["notes"],
        "receipt": shown["sha256"],
        "environment": shown["environment"],
        "created": shown["created"],
    }
    files.write_text(folder.card, card(record, "repair_card.md"))
    record = files.sealed(record)
    files.write_json(folder.record, record)
    return record


def counts(done: RepairOutcome) -> dict[str, int]:
    """The numbers of rows, probes and parameters."""
    rows = {"new": done.rows.new, "anchors": done.rows.anchors, "past": done.rows.past}
    sizes = {name: 0 if group is None else len(group.examples) for name, group in rows.items()}
    return {**sizes, "probes": len(done.bank.probes), "parameters": done.repaired.parameters}


def receipt(done: RepairOutcome) -> Receipt:
    """The repair as a receipt: before is the base, after the repaired model, the tuned one is beside them."""
    config = done.config
    groups = [group for group in (done.rows.anchors, done.rows.new, done.rows.past) if group is not None]
    sources = [ComparedRows(name=group.name, examples=group.examples) for group in groups]
    return Receipt(
        title=f"{config.tuned} repaired towards {config.model}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=ModelId(name=config.model, fingerprint=done.base.fingerprint),
        after=ModelId(name=f"{config.out.name}/model", fingerprint=done.after_fingerprint),
        method="repair",
        sets=tuple(
            row_set(config, group, done.before.answers[group.name], done.after[group.name]) for group in done.groups
        ),
        repair=Repair(
            tuned=ModelId(name=config.tuned, fingerprint=done.tuned.fingerprint),
            undone=done.repaired.undone,
            moved=done.repaired.moved,
            sets=tuple(done.tuned_sets),
        ),
        noise_floor=done.before.noise_floor,
        settings=config.shown(),
        environment=environment(threads=torch.get_num_threads(), device=str(done.base.device)),
        audit=bank_audit(audit(done.bank, sources)),
        cost={"seconds": sum(done.seconds.values())},
        requirements=config.requirements,
        notes=(*done.rows.notes, *done.notes),
    )
