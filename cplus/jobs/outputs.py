"""A job's answers before and after training, and what it writes: model, card, receipt and, last, the record."""

from __future__ import annotations

import copy
import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from torch import nn

from cplus.base import files
from cplus.base.cost import cost_row
from cplus.base.environment import environment
from cplus.data import examples
from cplus.data.examples import Prediction, fingerprint
from cplus.data.interfaces import tokens_by_role
from cplus.distributed import processes
from cplus.evaluation.judges import judge
from cplus.evaluation.statistics import noise_floor
from cplus.evaluation.task import score_answers
from cplus.jobs.choices import Chosen
from cplus.jobs.folder import Folder, row_hashes
from cplus.jobs.progress import say
from cplus.jobs.settings import AdaptConfig
from cplus.methods.repair import Repaired, repair_row
from cplus.models import Loaded
from cplus.models.decoding import LocalEngine, Request, Sampling, request_seed
from cplus.models.loading import without_bars
from cplus.models.names import origin
from cplus.models.scoring import Score, log_likelihoods
from cplus.probes.audit import ComparedRows, audit
from cplus.probes.bank import Bank
from cplus.probes.labels import without_stop
from cplus.receipts.page import (
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
from cplus.training.driver import TrainingLog
from cplus.training.gateshares import LayerShare
from cplus.training.loop import updates_per_epoch
from cplus.training.measure import GroupAnswers, evaluate, evaluate_texts, loss_of
from cplus.training.rows import Group, Rows

# A job's answers before and after training; the base model's are stored, so that a resumed job can read them.


FLOOR_ROWS = 16
FLOOR_TOKENS = 96


@dataclass(frozen=True, kw_only=True)
class Before:
    """The base model's answers by group, and the difference in loss that sampling its answers alone explains."""

    answers: Mapping[str, GroupAnswers]
    noise_floor: float | None = None


def answer(
    model: nn.Module, group: Group, config: AdaptConfig, when: str, base: Sequence[Prediction] | None = None
) -> GroupAnswers:
    """A group's answers; free text also has the scores of the base model's answers, `base`, by default its own.

    The processes of a job answer a share of the rows each, and all of them get all answers.
    """
    rank, size, count = processes.rank(), processes.size(), len(group.examples)
    own = replace(group, examples=group.examples[rank::size], known=group.known[rank::size])
    found = GroupAnswers(predictions=())
    if own.examples or size == 1:
        found = _answer(model, own, config, when, None if base is None else base[rank::size])
    if size == 1:
        return found
    parts = processes.gathered(found)
    return GroupAnswers(
        predictions=tuple(processes.interleaved([part.predictions for part in parts], count)),
        scores=tuple(processes.interleaved([part.scores for part in parts], count if parts[0].scores else 0)),
        base_answers=tuple(
            processes.interleaved([part.base_answers for part in parts], count if parts[0].base_answers else 0)
        ),
    )


def _answer(
    model: nn.Module, group: Group, config: AdaptConfig, when: str, base: Sequence[Prediction] | None
) -> GroupAnswers:
    what = f"{when}: {group.name}"
    if group.texts and group.part == "retention":
        return evaluate_texts(model, group, what=what)
    if group.known and when == "before":
        scores = () if group.closed else tuple(log_likelihoods(model, group.encoded(), what=what))
        found = GroupAnswers(predictions=group.known, scores=scores)
    elif group.by_base and when == "before" and judge(config.judge) is None:
        found = evaluate_texts(model, group, what=what)
    else:
        # The base model's own answers were written with the limit of their ability.
        limit = group.max_new_tokens if group.by_base else None
        limit = limit or min(config.max_new_tokens, group.max_new_tokens or config.max_new_tokens)
        found = evaluate(model, group, judge=judge(config.judge), max_new_tokens=limit, what=what)
    if group.closed:
        return found
    if group.by_base and judge(config.judge) is None:  # the responses are the base model's answers
        return replace(found, base_answers=found.scores)
    texts = [str(prediction.answer) for prediction in (base or found.predictions)]
    own = score_answers(model, group.interface, group.examples, texts, what=f"{what}: the base model's answers")
    return replace(found, base_answers=tuple(own))


def base_answers(path: Path, base: Loaded, groups: Sequence[Group], config: AdaptConfig) -> Before:
    """The base model's answers to every group, from the file or computed now and written to it."""
    identity = {group.name: fingerprint(group.examples) for group in groups} | {"model": base.fingerprint}
    stored = processes.shared(lambda: read_stored(path))
    if stored is not None:
        if stored["identity"] != identity:
            changed = [name for name in identity if stored["identity"].get(name) != identity[name]]
            raise ValueError(f"the {' and '.join(changed)} changed since the job began; start a new job")
        answers = {name: _from_row(row) for name, row in stored["answers"].items()}
        return Before(answers=answers, noise_floor=stored["noise_floor"])
    answers = {group.name: answer(base.model, group, config, "before") for group in groups}
    past = [group for group in groups if group.part == "retention" and not group.closed and not group.texts]
    noisy = past and judge(config.judge) is None
    floor = sampling_noise(base, past[0], config) if noisy else None
    if processes.first():
        rows = {name: _to_row(own) for name, own in answers.items()}
        files.write_json(path, files.sealed({"identity": identity, "answers": rows, "noise_floor": floor}))
    return Before(answers=answers, noise_floor=floor)


def read_stored(path: Path) -> dict[str, Any] | None:
    """What an earlier process of this job measured and sealed; None where it has to be measured now."""
    if not path.is_file():
        return None
    try:
        return files.read_sealed(path)
    except ValueError as error:
        say(f"{error}; so it is measured again")
        return None


def sampling_noise(base: Loaded, group: Group, config: AdaptConfig) -> float | None:
    """The noise floor of the past loss: two sampled answers of the base model to each of a few rows, compared.

    None where fewer than two rows are answered twice.
    """
    few = group.drawn(FLOOR_ROWS, config.seed)
    limit = min(config.max_new_tokens, few.max_new_tokens or FLOOR_TOKENS, FLOOR_TOKENS)
    sampling = Sampling(temperature=config.temperature, max_new_tokens=limit, stop=few.interface.answer_stop)
    engine = LocalEngine(base.model, base.tokenizer)

    def draw(number: int) -> list[Score | None]:
        requests = [
            Request(index=i, prompt=few.interface.prompt(example), seed=request_seed(config.seed + number, i))
            for i, example in enumerate(few.examples)
        ]
        texts = {sample.index: without_stop(sample.text, sampling.stop) for sample in engine.sample(requests, sampling)}
        own = [texts[i] for i in range(len(few.examples))]
        return score_answers(base.model, few.interface, few.examples, own, what="noise floor")

    # Each draw is one batch in one process, whatever their number, so the floor has the same bits.
    drawn = processes.spread((0, 1), lambda numbers: [draw(number) for number in numbers])
    pairs = [(one, other) for one, other in zip(*drawn, strict=True) if one is not None and other is not None]
    if len(pairs) < 2:
        return None
    first, second = zip(*pairs, strict=True)
    return noise_floor([(s.total, s.num_tokens) for s in first], [(s.total, s.num_tokens) for s in second])


def _to_row(answers: GroupAnswers) -> dict[str, Any]:
    return {
        "predictions": [examples.prediction_to_row(prediction) for prediction in answers.predictions],
        "scores": [[score.total, score.num_tokens] for score in answers.scores],
        "base_answers": [None if own is None else [own.total, own.num_tokens] for own in answers.base_answers],
    }


def _from_row(row: dict[str, Any]) -> GroupAnswers:
    return GroupAnswers(
        predictions=tuple(examples.prediction_from_row(own) for own in row["predictions"]),
        scores=tuple(Score(total, count) for total, count in row["scores"]),
        base_answers=tuple(None if own is None else Score(*own) for own in row["base_answers"]),
    )


# The outputs of a finished job: the model, its card, the receipt and, last of all, the record.


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
        loader=PackageLoader("cplus.jobs"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
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


# A finished job on the hub: the model, its card and the receipt, in a repository that is private by default.


BESIDE = ("README.md", "receipt.html", "receipt.json", "record.json")
"""What goes to the hub beside the model's own files."""
_FAILURES: tuple[type[BaseException], ...] = (OSError, *HfHubHTTPError.__bases__)  # the HTTP library's own errors too


def check_push(config: AdaptConfig) -> None:
    """Refuse a job that could not be uploaded at its end: without a token, or with one that the hub does not take."""
    if config.push_to_hub is None:
        return
    if get_token() is None:
        raise ValueError(
            f"push_to_hub {config.push_to_hub} needs a token with write access, and none was found; run 'hf auth "
            "login' or set HF_TOKEN, or leave out push_to_hub"
        )
    try:
        HfApi().whoami()
    except _FAILURES as error:
        raise ValueError(
            f"push_to_hub {config.push_to_hub}: the hub cannot be reached or does not take the token "
            f"({type(error).__name__}); log in again with 'hf auth login', or leave out push_to_hub"
        ) from error


def push(folder: Folder, config: AdaptConfig) -> str:
    """Upload the model, then its card and receipt, and return the address."""
    assert config.push_to_hub is not None
    name, api = config.push_to_hub, HfApi()
    say(f"uploading to {name}, {'public' if config.public else 'private'}")
    try:
        where = api.create_repo(name, private=not config.public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder.model, commit_message="Upload the model")
        api.upload_folder(
            repo_id=name, folder_path=folder.root, allow_patterns=list(BESIDE), commit_message="Upload card and receipt"
        )
    except _FAILURES as error:
        raise ValueError(
            f"{folder.root}: the job is finished, but the upload to {name} failed ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}); repeat it with: hf upload {name} "
            f"{folder.model}"
        ) from error
    return str(where)
