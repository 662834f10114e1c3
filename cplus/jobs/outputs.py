"""A job's answers before and after training, and what it writes: model, card, receipt and, last, the record."""

from __future__ import annotations

import copy
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cplus import models
from cplus.base import files
from cplus.base.cost import cost_row
from cplus.base.environment import environment, versions
from cplus.data import examples, interfaces
from cplus.data.examples import Example, Prediction, fingerprint
from cplus.data.interfaces import Interface, tokens_by_role
from cplus.distributed import processes
from cplus.evaluation.abilities import ABILITIES, requests
from cplus.evaluation.changes import KINDS
from cplus.evaluation.judges import judge
from cplus.evaluation.task import Answer, ability_answers, rounded, to_bfloat16, to_q8_0
from cplus.jobs.folder import Folder, row_hashes
from cplus.jobs.prepare import Job
from cplus.jobs.progress import say
from cplus.jobs.settings import AdaptConfig
from cplus.methods.repair import Repaired, repair_row
from cplus.models import Loaded
from cplus.models.loading import without_bars
from cplus.models.names import origin
from cplus.models.scoring import Score, log_likelihoods
from cplus.probes.audit import ComparedRows, audit
from cplus.probes.bank import Bank
from cplus.probes.settings import input_key
from cplus.receipts.contents import (
    Beside,
    Divergence,
    GateShare,
    ModelId,
    Point,
    Receipt,
    RowComparison,
    RowSet,
    compare,
)
from cplus.receipts.page import PARTS, bank_audit, from_json, to_json, write_record
from cplus.receipts.verdict import headline, sentences
from cplus.training.driver import TrainingLog
from cplus.training.gateshares import LayerShare
from cplus.training.loop import updates_per_epoch
from cplus.training.measure import BaseRow, GroupAnswers, base_rows, divergence, evaluate, evaluate_texts, loss_of
from cplus.training.rows import Group

# A job's answers before and after training; the base model's are stored, so that a resumed job can read them.


DECODED = 64
"""New rows in free text that are answered after training where nobody judges them; the others have their loss."""


def answer(model: nn.Module, group: Group, config: AdaptConfig, when: str) -> GroupAnswers:
    """A group's answers; the processes of a job answer a share of the rows each, and all of them get all answers.

    Answers that nobody judges are not asked for where they are known: new rows before training, the model's own texts.
    """
    what, judged = f"{when}: {group.name}", judge(config.judge)
    unjudged = not group.closed and judged is None
    learned = group.part in ("acquisition", "validation")

    def spread(own: Group, answered: Callable[[Group], GroupAnswers]) -> GroupAnswers:
        def some(places: Sequence[int]) -> list[tuple[Prediction | None, Score | None]]:
            known = tuple(own.known[i] for i in places if own.known)
            found = answered(replace(own, examples=tuple(own.examples[i] for i in places), known=known))
            return list(zip_longest(found.predictions, found.scores))

        rows = processes.spread(range(len(own.examples)), some)
        return GroupAnswers(
            predictions=tuple(row for row, _ in rows if row is not None),
            scores=tuple(score for _, score in rows if score is not None),
        )

    def scored(own: Group) -> GroupAnswers:
        return GroupAnswers(predictions=(), scores=tuple(log_likelihoods(model, own.encoded(), what=what)))

    def told(own: Group) -> GroupAnswers:
        # The base model's own answers were written with the limit of their ability.
        limit = own.max_new_tokens if own.by_base else None
        limit = limit or min(config.max_new_tokens, own.max_new_tokens or config.max_new_tokens)
        return evaluate(model, own, judge=judged, max_new_tokens=limit, what=what)

    if group.known and when == "before":
        found = GroupAnswers(predictions=group.known) if group.closed else spread(group, scored)
        return replace(found, predictions=group.known)
    if group.texts or (unjudged and learned and when == "before"):
        return spread(group, scored)
    if unjudged and group.by_base and when == "before":
        return spread(group, lambda own: evaluate_texts(model, own, what=what))
    few = group.drawn(DECODED, config.seed) if unjudged and learned else group
    found = spread(few, told)
    return found if few is group else replace(spread(group, scored), predictions=found.predictions)


def base_answers(path: Path, base: Loaded, groups: Sequence[Group], config: AdaptConfig) -> dict[str, GroupAnswers]:
    """The base model's answers to every group, from the file or computed now and written to it."""
    identity = {group.name: fingerprint(group.examples) for group in groups} | {"model": base.fingerprint}
    stored = processes.shared(lambda: read_stored(path))
    if stored is not None:
        if stored["identity"] != identity:
            changed = [name for name in identity if stored["identity"].get(name) != identity[name]]
            raise ValueError(f"the {' and '.join(changed)} changed since the job began; start a new job")
        return {
            name: GroupAnswers(
                predictions=tuple(examples.prediction_from_row(own) for own in row["predictions"]),
                scores=tuple(Score(total, count) for total, count in row["scores"]),
            )
            for name, row in stored["answers"].items()
        }
    answers = {group.name: answer(base.model, group, config, "before") for group in groups}
    if processes.first():
        rows = {
            name: {
                "predictions": [dataclasses.asdict(prediction) for prediction in own.predictions],
                "scores": [[score.total, score.num_tokens] for score in own.scores],
            }
            for name, own in answers.items()
        }
        files.write_json(path, files.sealed({"identity": identity, "answers": rows}))
    return answers


def read_stored(path: Path) -> dict[str, Any] | None:
    """What an earlier process measured and sealed; None where it has to be measured now."""
    if not path.is_file():
        return None
    try:
        return files.read_sealed(path)
    except ValueError as error:
        say(f"{error}; so it is measured again")
        return None


# Abilities, and how far a model has moved, against a base model that is in memory only for as long as this takes.


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A base model's answers by ability, and its expectations at held-out past rows with the scale of rounding."""

    interface: Interface | None
    answers: Mapping[str, Sequence[Answer]]
    rows: Sequence[BaseRow] = ()
    bfloat16: float = 0.0
    q8_0: float = 0.0


def reference(base: Loaded, config: AdaptConfig, held: Group | None) -> Reference:
    """What a base model answers and expects; its answers are cached by the fingerprint of its weights."""
    with models.computing(config.compute_dtype, base.device):
        bound = ability_interface(base.tokenizer, config)
        asked = {} if bound is None else {name: _base_answers(base, bound, config, name) for name in config.measured}
        if held is None or held.closed or held.part != "retention":
            return Reference(interface=bound, answers=asked)
        rows = base_rows(base.model, held.encoded())
        scale = []
        for store in (to_bfloat16, to_q8_0):
            with rounded(base.model, store):
                scale.append(divergence(base.model, rows))
    return Reference(interface=bound, answers=asked, rows=rows, bfloat16=scale[0], q8_0=scale[1])


def ability_interface(tokenizer: Any, config: AdaptConfig) -> Interface | None:
    """How abilities are asked for: through the chat template; without one they are not."""
    if config.plain or not config.measured or not getattr(tokenizer, "chat_template", None):
        return None
    return interfaces.build("freeform", tokenizer, chat=True)


def why_unmeasured(config: AdaptConfig) -> str:
    """Why no ability is measured where `ability_interface` is None."""
    if not config.measured:
        return "none was asked for"
    return "plain prompts were chosen" if config.plain else "the model has no chat template"


def _base_answers(base: Loaded, bound: Interface, config: AdaptConfig, name: str) -> list[Answer]:
    prompts = [bound.prompt(request.example) for request in requests(name)]
    key = files.fingerprint(
        [base.fingerprint, config.compute_dtype, versions(), ABILITIES[name].max_new_tokens, prompts]
    )
    path = files.cache_folder() / "answers" / f"{key[:32]}.json"
    stored = processes.shared(lambda: read_stored(path))
    if stored is not None:
        return [Answer(*row) for row in stored["answers"]]
    found = ability_answers(base.model, bound, name, what="base model")
    if processes.first():
        files.write_json(path, files.sealed({"model": base.fingerprint, "answers": [[a.text, a.ended] for a in found]}))
    return found


def measured(
    known: Reference, after: Loaded, config: AdaptConfig, given: Iterable[Example]
) -> tuple[tuple[RowSet, ...], Divergence | None]:
    """The requests of every ability as base and model answer them, and how far the model has moved.

    Requests among the rows `given`, which are trained on or evidence, measure nothing and are left out.
    """
    seen = {input_key(example, options=False) for example in given}
    sets = []
    with models.computing(config.compute_dtype, after.device):
        for name, before in known.answers.items():
            bound = ability_interface(after.tokenizer, config) or known.interface
            assert bound is not None
            now = ability_answers(after.model, bound, name, what="after")
            rows = tuple(
                RowComparison(
                    id=request.id,
                    kind=KINDS[request.right(old.text), request.right(new.text)],
                    input=request.request,
                    gold=request.answer,
                    before=old.text,
                    after=new.text,
                    confidence_before=0.0,
                    confidence_after=0.0,
                    ended_before=old.ended,
                    ended_after=new.ended,
                )
                for request, old, new in zip(requests(name), before, now, strict=True)
                if input_key(request.example, options=False) not in seen
            )
            sets.append(RowSet(name=name, kind="ability", interface="freeform", rows=rows, judge="rules"))
        if not known.rows:
            return tuple(sets), None
        moved = divergence(after.model, known.rows)
    return tuple(sets), Divergence(rows=len(known.rows), after=moved, bfloat16=known.bfloat16, q8_0=known.q8_0)


# The outputs of a finished job: the model, its card, the receipt and, last of all, the record.


_STARTS = {
    "acquisition": ("acquisition", "new_nll", 0.0),
    "validation": ("validation", "validation_nll", 0.0),
    "retention": ("retention", "past_nll", 100.0),
}
"""A group's share and loss in the curve, and the share of the base model."""
_POINT = tuple(f.name for f in dataclasses.fields(Point))


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A job and what became of it; `good_epoch` is 0 for the base model, `repaired` may be why there was no repair."""

    job: Job
    before: Mapping[str, GroupAnswers]
    after: Mapping[str, GroupAnswers]
    abilities: tuple[RowSet, ...]
    divergence: Divergence | None
    notes: Sequence[str]
    fingerprint: str
    log: TrainingLog
    bank: Bank | None
    layers: Sequence[LayerShare]
    parameters: int
    trainable: int
    actual: Mapping[str, Any]
    best_epoch: int | None
    good_epoch: int | None
    repaired: Repaired | str | None

    @property
    def unfinished(self) -> dict[str, int] | None:
        """The updates done and planned, where training was ended before its last epoch and not by learning all."""
        if self.log.done:
            return None
        config, count = self.job.config, len(self.job.rows.trained.examples)
        return {"updates": self.log.cursor.step, "planned": config.epochs * updates_per_epoch(count, config.batch_size)}

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


def write_outputs(done: Finished) -> dict[str, Any]:
    """Write receipt, card and record, and return the record: its presence marks the job as finished."""
    job, rows, config = done.job, done.job.rows, done.job.config
    groups = {"new": rows.new, "anchors": rows.anchors, "past": rows.past, "validation": rows.validation}
    id, license = origin(config.model)
    own = {
        "kind": "adapt",
        "model": {
            "name": config.model,
            "id": id,
            "license": license,
            "before": job.base.fingerprint,
            "after": done.fingerprint,
        },
        "chosen": [dataclasses.asdict(own) for own in job.chosen],
        "rows": row_hashes(job.groups),
        "counts": {
            **{name: 0 if group is None else len(group.examples) for name, group in groups.items()},
            "probes": 0 if done.bank is None else len(done.bank.probes),
            "parameters": done.parameters,
            "trainable": done.trainable,
        },
        "sources": [dataclasses.asdict(source) for source in rows.sources],
        "tokens_by_role": tokens_by_role(rows.new.interface, rows.new.examples),
        "cost": done.cost,
        "seconds": done.actual["seconds"],
        "actual": {name: value for name, value in done.actual.items() if name != "seconds"},
        "steps": done.log.cursor.step,
        "epochs": len(done.log.curve),
        "unfinished": done.unfinished,
        "repair": repair_row(done.repaired),
        "curve": done.log.curve,
        "bank": None if done.bank is None else dict(done.bank.manifest),
    }
    record = to_json(receipt(done), own)
    files.write_text(job.folder.card, card(record))
    return write_record(record, job.folder.root)


def rewritten(folder: Folder, beside: Beside) -> dict[str, Any]:
    """The record of a finished job with plain fine-tuning beside it, written with its page and its card."""
    record = files.read_sealed(folder.record)
    old = replace(from_json(record), beside=beside)
    job = {name: value for name, value in record.items() if name not in PARTS}
    found = to_json(old, job)
    files.write_text(folder.card, card(found))
    return write_record(found, folder.root)


def receipt(done: Finished) -> Receipt:
    """The job as a receipt."""
    job, config = done.job, done.job.config
    compared = [group for group in (job.rows.anchors, job.rows.new, job.rows.past) if group is not None]
    sources = [ComparedRows(name=group.name, examples=group.examples) for group in compared]
    sources += [
        ComparedRows(name=f"{name}, measured only", examples=[request.example for request in requests(name)])
        for name in config.measured
    ]
    followed = [group.drawn(config.evaluate_rows, config.seed) for group in job.groups if group.part != "external"]
    return Receipt(
        title=f"{config.model} adapted by {config.method}" + (" (unfinished)" if done.unfinished else ""),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=ModelId(name=config.model, fingerprint=job.base.fingerprint),
        after=ModelId(name=f"{config.out.name}/model", fingerprint=done.fingerprint),
        method=config.method,
        sets=tuple(
            compare(group, done.before[group.name], done.after[group.name], judge=config.judge) for group in job.groups
        )
        + done.abilities,
        followed={group.name: len(group.examples) for group in followed},
        divergence=done.divergence,
        settings=config.model_dump(mode="json"),
        environment=environment(threads=torch.get_num_threads(), device=str(job.base.device)),
        curve=(_start(done, followed), *(_point(point) for point in done.log.curve)),
        gate=tuple(
            GateShare(
                name=layer.name,
                coordinates=layer.coordinates,
                admitted_share=layer.admitted,
                energy_share=layer.energy,
            )
            for layer in done.layers
        ),
        audit=None if done.bank is None else bank_audit(audit(done.bank, sources)),
        cost=done.cost,
        requirements=config.requirements,
        notes=(*job.rows.notes, *_notes(done), *done.notes),
    )


def _notes(done: Finished) -> list[str]:
    config, log, notes = done.job.config, done.log, list(done.log.watch.said)
    if done.job.chosen:
        values = ", ".join(own.named for own in done.job.chosen)
        notes.append(f"Chosen, because they were not given: {values}; record.json has the reasons.")
    if (cut := done.unfinished) is not None:
        notes.append(f"UNFINISHED: training was ended after update {cut['updates']} of {cut['planned']}.")
    if done.best_epoch is not None:
        why = (
            "which has the lowest loss of held-out new rows"
            if done.job.rows.validation
            else "the best on past and new rows"
        )
        notes.append(f"The weights are those of epoch {done.best_epoch}, {why}.")
    if log.lost:
        notes.append(f"Training ended after epoch {len(log.curve)}: past rows lost more than {config.lost_limit:g}.")
    if done.good_epoch:
        notes.append(f"The weights are those of epoch {done.good_epoch}, the last one evaluated before that.")
    elif done.good_epoch == 0:
        notes.append("The weights are the base model's, because the first evaluation lost too much; reduce the rate.")
    if log.learned and len(log.curve) < config.epochs:
        notes.append(f"Training ended after epoch {len(log.curve)}: every new row was learned.")
    if isinstance(done.repaired, str):
        notes.append(f"NOT REPAIRED: {done.repaired}.")
    elif done.repaired is not None:
        notes.append(f"Repair after training: {done.repaired}.")
    if config.load == "4bit":
        notes.append(
            "The base model was loaded in 4 bits (NF4): the figures before and after are of that model, not of the one "
            "in full precision."
        )
    if done.trainable < done.parameters:
        share = 100 * done.trainable / done.parameters
        notes.append(f"Only adapters were trained: {done.trainable:,} weights, {share:.2f} % of the model.")
    return notes


def _start(done: Finished, followed: Sequence[Group]) -> Point:
    """The base model's point of the curve, on the rows evaluated during training: nothing lost, nothing learned."""
    known = {"epoch": 0.0}
    for group in followed:
        share, nll, start = _STARTS[group.part]
        if group.closed:
            known[share] = start
            continue
        known[nll] = max(0.0, loss_of(group_scores(done.job, group, done.before)))
    moved = {"divergence": 0.0} if any("divergence" in point for point in done.log.curve) else {}
    return _point({**known, **moved})


def group_scores(job: Job, group: Group, before: Mapping[str, GroupAnswers]) -> list[Score]:
    """The base model's scores of these rows, drawn from those it was evaluated on."""
    whole = next(own for own in job.groups if own.name == group.name)
    scores = dict(zip((example.id for example in whole.examples), before[group.name].scores, strict=True))
    return [scores[example.id] for example in group.examples]


def _point(point: Mapping[str, float]) -> Point:
    known = {name: value for name, value in point.items() if name in _POINT}
    return Point(**{"epoch": point["epoch"], **known})


def card(record: Mapping[str, Any], template: str = "card.md") -> str:
    """The model card, from the record alone."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cplus.jobs"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    figures, lora = record["figures"], record["settings"].get("lora")
    shown = {
        "headline": headline(figures),
        "sentences": sentences(figures),
        "apart": lora is not None and not lora["merge"],
    }
    return environment.get_template(template).render({**record, **shown})
