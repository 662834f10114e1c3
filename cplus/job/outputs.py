"""The outputs of a finished job: the model, its card, the receipt and, last of all, the record."""

from __future__ import annotations

import copy
import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cplus import files
from cplus.cost import cost_row
from cplus.diagnostics.gateshares import LayerShare
from cplus.environment import environment
from cplus.experiment.driver import TrainingLog
from cplus.experiment.measure import GroupAnswers, loss_of
from cplus.experiment.rows import Group, Rows
from cplus.experiment.schedule import updates_per_epoch
from cplus.interfaces import tokens_by_role
from cplus.job.answers import Before
from cplus.job.choices import Chosen
from cplus.job.folder import Folder
from cplus.job.other_jobs import row_hashes
from cplus.job.settings import AdaptConfig
from cplus.models import Loaded
from cplus.models.loading import without_bars
from cplus.models.names import origin
from cplus.probes.audit import ComparedRows, audit
from cplus.probes.bank import Bank
from cplus.receipts.receipt import (
    ComparedRun,
    GateShare,
    Losses,
    ModelId,
    Point,
    Receipt,
    RowSet,
    bank_audit,
    rows,
    write_receipt,
)
from cplus.receipts.verdict import headline, sentences
from cplus.repairing.search import Repaired, repair_row
from cplus.scoring import Score

SCHEMA = 1
_STARTS = {
    "acquisition": ("acquisition", "new_nll", 0.0),
    "validation": ("validation", "validation_nll", 0.0),
    "retention": ("retention", "past_nll", 100.0),
}
"""A group's share and loss in the curve, and the share of the base model."""
_POINT = tuple(f.name for f in dataclasses.fields(Point))


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Everything the outputs are written from."""

    config: AdaptConfig
    base: Loaded
    after_fingerprint: str
    rows: Rows
    groups: Sequence[Group]
    before: Before
    after: Mapping[str, GroupAnswers]
    log: TrainingLog
    bank: Bank | None
    layers: Sequence[LayerShare]
    comparisons: Mapping[str, ComparedRun]
    parameters: int
    trainable: int
    planned: Mapping[str, Any]
    actual: Mapping[str, Any]
    best_epoch: int | None = None
    repaired: Repaired | str | None = None
    """What the repair did, or why there was none; None where it was not asked for."""
    chosen: tuple[Chosen, ...] = ()
    """The settings that were not given."""
    good_epoch: int | None = None
    """The epoch whose weights are written because a later one lost too much; 0 is the base model."""

    @property
    def unfinished(self) -> dict[str, int] | None:
        """The updates done and planned, where training was ended before its last epoch and not by learning all."""
        if self.log.done:
            return None
        planned = self.config.epochs * updates_per_epoch(len(self.rows.trained.examples), self.config.batch_size)
        return {"updates": self.log.cursor.step, "planned": planned}

    @property
    def cost(self) -> dict[str, int | float]:
        """Rows, tokens and FLOPs of training and of the evidence, seconds and the gate's bytes."""
        log = self.log
        works = cost_row(self.parameters, training=log.training, preservation=log.preservation)
        return {**works, "seconds": log.seconds, "extra_bytes": log.extra_bytes}


def write_model(folder: Folder, model: Any, tokenizer: Any, dtype: str) -> None:
    """Safetensors and tokenizer, for plain transformers; the model in memory keeps its precision."""
    written = model if dtype == "float32" else copy.deepcopy(model).to(getattr(torch, dtype))
    with files.replacing_folder(folder.model) as part, without_bars():
        written.save_pretrained(part)
        tokenizer.save_pretrained(part)


def write_outputs(folder: Folder, done: Finished) -> dict[str, Any]:
    """Write receipt, card and record, and return the record: its presence marks the job as finished."""
    shown = write_receipt(receipt(done), folder.root)
    record = {
        "schema": SCHEMA,
        "kind": "adapt",
        "settings": done.config.model_dump(mode="json"),
        "model": {
            "name": done.config.model,
            "id": origin(done.config.model)[0],
            "license": origin(done.config.model)[1],
            "before": done.base.fingerprint,
            "after": done.after_fingerprint,
        },
        "chosen": [dataclasses.asdict(own) for own in done.chosen],
        "figures": shown["figures"],
        "rows": row_hashes(done.groups),
        "counts": counts(done),
        "sources": [dataclasses.asdict(source) for source in done.rows.sources],
        "tokens_by_role": tokens_by_role(done.rows.new.interface, done.rows.new.examples),
        "cost": done.cost,
        "planned": dict(done.planned),
        "actual": dict(done.actual),
        "steps": done.log.cursor.step,
        "epochs": len(done.log.curve),
        "unfinished": done.unfinished,
        "repair": repair_row(done.repaired),
        "curve": done.log.curve,
        "bank": None if done.bank is None else dict(done.bank.manifest),
        "notes": shown["notes"],
        "receipt": shown["sha256"],
        "environment": shown["environment"],
        "created": shown["created"],
    }
    files.write_text(folder.card, card(record))
    record = files.sealed(record)
    files.write_json(folder.record, record)
    return record


def counts(done: Finished) -> dict[str, int]:
    """The numbers of rows, probes and parameters."""
    groups = {
        "new": done.rows.new,
        "anchors": done.rows.anchors,
        "past": done.rows.past,
        "validation": done.rows.validation,
    }
    sizes = {name: 0 if group is None else len(group.examples) for name, group in groups.items()}
    probes = 0 if done.bank is None else len(done.bank.probes)
    return {**sizes, "probes": probes, "parameters": done.parameters, "trainable": done.trainable}


def receipt(done: Finished) -> Receipt:
    """The job as a receipt."""
    config = done.config
    return Receipt(
        title=f"{config.model} adapted by {config.method}" + (" (unfinished)" if done.unfinished else ""),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=ModelId(name=config.model, fingerprint=done.base.fingerprint),
        after=ModelId(name=f"{config.out.name}/model", fingerprint=done.after_fingerprint),
        method=config.method,
        sets=tuple(
            row_set(config, group, done.before.answers[group.name], done.after[group.name]) for group in done.groups
        ),
        followed=_followed(done),
        noise_floor=done.before.noise_floor,
        settings=config.model_dump(mode="json"),
        environment=environment(threads=torch.get_num_threads(), device=str(done.base.device)),
        curve=(_start(done), *(_point(point) for point in done.log.curve)),
        comparisons=dict(done.comparisons),
        gate=tuple(
            GateShare(
                name=layer.name,
                coordinates=layer.coordinates,
                admitted_share=layer.admitted,
                energy_share=layer.energy,
            )
            for layer in done.layers
        ),
        audit=None if done.bank is None else bank_audit(audit(done.bank, _sources(done))),
        cost=done.cost,
        requirements=config.requirements,
        notes=(*done.rows.notes, *_notes(done)),
    )


def _notes(done: Finished) -> list[str]:
    notes = list(done.log.watch.said)
    if done.chosen:
        values = ", ".join(own.named for own in done.chosen)
        notes.append(f"Chosen, because they were not given: {values}; record.json has the reasons.")
    if (cut := done.unfinished) is not None:
        notes.append(f"UNFINISHED: training was ended after update {cut['updates']} of {cut['planned']}.")
    if done.best_epoch is not None:
        notes.append(f"The weights are those of epoch {done.best_epoch}, the best on past and new rows.")
    if done.log.lost:
        limit = done.config.lost_limit
        notes.append(f"Training ended after epoch {len(done.log.curve)}: past rows lost more than {limit:g}.")
    if done.good_epoch:
        notes.append(f"The weights are those of epoch {done.good_epoch}, the last one evaluated before that.")
    elif done.good_epoch == 0:
        notes.append("The weights are the base model's, because the first evaluation lost too much; reduce the rate.")
    if done.log.learned and len(done.log.curve) < done.config.epochs:
        notes.append(f"Training ended after epoch {len(done.log.curve)}: every new row was learned.")
    if (moved := _moved(done)) is not None:
        notes.append(
            f"The model has moved {moved:.3f} nats per token from its base on new rows (KL of the next token, a known "
            "predictor of forgetting)."
        )
    if isinstance(done.repaired, str):
        notes.append(f"NOT REPAIRED: {done.repaired}.")
    elif done.repaired is not None:
        notes.append(f"Repair after training: {done.repaired}.")
    if done.config.load == "4bit":
        notes.append(
            "The base model was loaded in 4 bits (NF4): the figures before and after are of that model, not of the one "
            "in full precision."
        )
    if done.trainable < done.parameters:
        share = 100 * done.trainable / done.parameters
        notes.append(f"Only adapters were trained: {done.trainable:,} weights, {share:.2f} % of the model.")
    return notes


def _moved(done: Finished) -> float | None:
    """The written model's divergence from its base, where the last evaluation during training was of that model."""
    other = done.repaired is not None or done.good_epoch is not None or done.unfinished is not None
    if other or not done.log.curve or done.best_epoch not in (None, len(done.log.curve)):
        return None
    return done.log.curve[-1].get("divergence")


def _sources(done: Finished) -> list[ComparedRows]:
    groups = (done.rows.anchors, done.rows.new, done.rows.past)
    return [ComparedRows(name=group.name, examples=group.examples) for group in groups if group is not None]


def row_set(config: AdaptConfig, group: Group, before: GroupAnswers, after: GroupAnswers) -> RowSet:
    """A group's rows before and after, for a receipt."""
    compared = rows(
        group.examples,
        before.predictions,
        after.predictions,
        interface=group.interface.name,
        losses=[_losses(was, now) for was, now in zip(before.scores, after.scores, strict=True)],
        answers=[
            None if was is None or now is None else _losses(was, now)
            for was, now in zip(before.base_answers, after.base_answers, strict=True)
        ],
    )
    return RowSet(
        name=group.name,
        kind=group.part,
        interface=group.interface.name,
        rows=compared,
        judge=None if group.closed else config.judge,
        anchors=group.name == "anchors",
    )


def _losses(before: Score, after: Score) -> Losses:
    # A likelihood of 1 may round to a loss below 0.
    return Losses(before=max(0.0, -before.mean), after=max(0.0, -after.mean), tokens=before.num_tokens)


def _followed(done: Finished) -> dict[str, int]:
    """The number of rows behind each point of the curve."""
    count, seed = done.config.evaluate_rows, done.config.seed
    return {g.name: len(g.drawn(count, seed).examples) for g in done.groups if g.part != "external"}


def _start(done: Finished) -> Point:
    """The base model's point of the curve, on the rows evaluated during training: nothing lost, nothing learned."""
    known: dict[str, float] = {}
    for group in done.groups:
        if group.part == "external":
            continue
        share, nll, start = _STARTS[group.part]
        if group.closed:
            known[share] = start
            continue
        seen = {example.id for example in group.drawn(done.config.evaluate_rows, done.config.seed).examples}
        scores = zip(group.examples, done.before.answers[group.name].scores, strict=True)
        loss = loss_of([score for example, score in scores if example.id in seen])
        known[nll] = max(0.0, loss)
    moved = {"divergence": 0.0} if any("divergence" in point for point in done.log.curve) else {}
    return _point({"epoch": 0.0, **known, **moved})


def _point(point: Mapping[str, float]) -> Point:
    known = {name: value for name, value in point.items() if name in _POINT}
    return Point(**{"epoch": point["epoch"], **known})


def card(record: Mapping[str, Any], template: str = "card.md") -> str:
    """The model card, from the record alone."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cplus.job"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    figures, lora = record["figures"], record["settings"].get("lora")
    shown = {
        "headline": headline(figures),
        "sentences": sentences(figures),
        "place": record["settings"].get("push_to_hub") or "model",
        "apart": lora is not None and not lora["merge"],
    }
    return environment.get_template(template).render({**record, **shown})
