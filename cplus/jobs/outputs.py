"""A job's answers before and after training, and what it writes: model, card, receipt and, last, the record."""

from __future__ import annotations

import copy
import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
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
from cplus.jobs.folder import Folder, row_hashes
from cplus.jobs.prepare import Job
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
from cplus.receipts.contents import GateShare, ModelId, Point, Receipt, compare
from cplus.receipts.page import bank_audit, to_json, write_record
from cplus.receipts.verdict import headline, sentences
from cplus.training.driver import TrainingLog
from cplus.training.gateshares import LayerShare
from cplus.training.loop import updates_per_epoch
from cplus.training.measure import GroupAnswers, evaluate, evaluate_texts, loss_of
from cplus.training.rows import Group

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

    def answered(places: Sequence[int]) -> list[tuple[Prediction, Score | None, Score | None]]:
        own = group
        if len(places) < len(group.examples):
            examples = tuple(group.examples[i] for i in places)
            own = replace(group, examples=examples, known=tuple(group.known[i] for i in places if group.known))
        found = _answer(model, own, config, when, None if base is None else [base[i] for i in places])
        return list(zip_longest(found.predictions, found.scores, found.base_answers))

    rows = processes.spread(range(len(group.examples)), answered)
    predictions, scores, own = zip(*rows, strict=True)
    return GroupAnswers(
        predictions=predictions, scores=() if group.closed else scores, base_answers=() if group.closed else own
    )


def _answer(
    model: nn.Module, group: Group, config: AdaptConfig, when: str, base: Sequence[Prediction] | None
) -> GroupAnswers:
    what, judged = f"{when}: {group.name}", judge(config.judge)
    if group.texts and group.part == "retention":
        return evaluate_texts(model, group, what=what)
    if group.known and when == "before":
        scores = () if group.closed else tuple(log_likelihoods(model, group.encoded(), what=what))
        found = GroupAnswers(predictions=group.known, scores=scores)
    elif group.by_base and when == "before" and judged is None:
        found = evaluate_texts(model, group, what=what)
    else:
        # The base model's own answers were written with the limit of their ability.
        limit = group.max_new_tokens if group.by_base else None
        limit = limit or min(config.max_new_tokens, group.max_new_tokens or config.max_new_tokens)
        found = evaluate(model, group, judge=judged, max_new_tokens=limit, what=what)
    if group.closed:
        return found
    if group.by_base and judged is None:  # the responses are the base model's answers
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
        "predictions": [dataclasses.asdict(prediction) for prediction in answers.predictions],
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
    before: Before
    after: Mapping[str, GroupAnswers]
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


def receipt(done: Finished) -> Receipt:
    """The job as a receipt."""
    job, config = done.job, done.job.config
    compared = [group for group in (job.rows.anchors, job.rows.new, job.rows.past) if group is not None]
    sources = [ComparedRows(name=group.name, examples=group.examples) for group in compared]
    followed = [group.drawn(config.evaluate_rows, config.seed) for group in job.groups if group.part != "external"]
    return Receipt(
        title=f"{config.model} adapted by {config.method}" + (" (unfinished)" if done.unfinished else ""),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=ModelId(name=config.model, fingerprint=job.base.fingerprint),
        after=ModelId(name=f"{config.out.name}/model", fingerprint=done.fingerprint),
        method=config.method,
        sets=tuple(
            compare(group, done.before.answers[group.name], done.after[group.name], judge=config.judge)
            for group in job.groups
        ),
        followed={group.name: len(group.examples) for group in followed},
        noise_floor=done.before.noise_floor,
        settings=config.model_dump(mode="json"),
        environment=environment(threads=torch.get_num_threads(), device=str(job.base.device)),
        curve=(_start(done, followed), *(_point(point) for point in done.log.curve)),
        comparisons=dict(job.comparisons),
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
        notes=(*job.rows.notes, *_notes(done)),
    )


def _notes(done: Finished) -> list[str]:
    config, log, notes = done.job.config, done.log, list(done.log.watch.said)
    if done.job.chosen:
        values = ", ".join(own.named for own in done.job.chosen)
        notes.append(f"Chosen, because they were not given: {values}; record.json has the reasons.")
    if (cut := done.unfinished) is not None:
        notes.append(f"UNFINISHED: training was ended after update {cut['updates']} of {cut['planned']}.")
    if done.best_epoch is not None:
        notes.append(f"The weights are those of epoch {done.best_epoch}, the best on past and new rows.")
    if log.lost:
        notes.append(f"Training ended after epoch {len(log.curve)}: past rows lost more than {config.lost_limit:g}.")
    if done.good_epoch:
        notes.append(f"The weights are those of epoch {done.good_epoch}, the last one evaluated before that.")
    elif done.good_epoch == 0:
        notes.append("The weights are the base model's, because the first evaluation lost too much; reduce the rate.")
    if log.learned and len(log.curve) < config.epochs:
        notes.append(f"Training ended after epoch {len(log.curve)}: every new row was learned.")
    other = done.repaired is not None or done.good_epoch is not None or cut is not None
    if not other and log.curve and done.best_epoch in (None, len(log.curve)) and "divergence" in log.curve[-1]:
        notes.append(
            f"The model has moved {log.curve[-1]['divergence']:.3f} nats per token from its base on new rows (KL of "
            "the next token, a known predictor of forgetting)."
        )
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
        known[nll] = max(0.0, loss_of(group_scores(group, done.before.answers[group.name])))
    moved = {"divergence": 0.0} if any("divergence" in point for point in done.log.curve) else {}
    return _point({**known, **moved})


def group_scores(group: Group, answers: GroupAnswers) -> list[Score]:
    """The base model's scores of these rows, drawn from those it answered."""
    seen = {example.id for example in group.examples}
    return [score for own, score in zip(answers.predictions, answers.scores, strict=True) if own.id in seen]


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


BESIDE = ("README.md", "receipt.html", "record.json")
"""What goes to the hub beside the model's own files."""
_FAILURES: tuple[type[BaseException], ...] = (OSError, *HfHubHTTPError.__bases__)  # the HTTP library's own errors too


def check_push(config: AdaptConfig) -> None:
    """Refuse a job that could not be uploaded at its end: without a token, or with one that the hub does not take."""
    if config.push_to_hub is None:
        return
    try:
        HfApi().whoami()
    except _FAILURES as error:
        raise ValueError(
            f"push_to_hub {config.push_to_hub}: the hub cannot be reached or does not take the token "
            f"({type(error).__name__}); run 'hf auth login' or set HF_TOKEN, or leave out push_to_hub"
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
