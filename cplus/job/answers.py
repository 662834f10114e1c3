"""A job's answers before and after training; the base model's are stored, so that a resumed job can read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from cplus import files, world
from cplus.data import predictions
from cplus.data.examples import fingerprint
from cplus.data.predictions import Prediction
from cplus.evaluation.answers import score_answers
from cplus.evaluation.judges import judge
from cplus.evaluation.statistics import noise_floor
from cplus.experiment.measure import GroupAnswers, evaluate, evaluate_texts
from cplus.experiment.rows import Group
from cplus.job.progress import say
from cplus.job.settings import AdaptConfig
from cplus.models import Loaded
from cplus.probes.engine import Request, Sampling, request_seed
from cplus.probes.label import without_stop
from cplus.probes.local import LocalEngine
from cplus.scoring import Score, log_likelihoods

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
    rank, size, count = world.rank(), world.size(), len(group.examples)
    own = replace(group, examples=group.examples[rank::size], known=group.known[rank::size])
    found = GroupAnswers(predictions=())
    if own.examples or size == 1:
        found = _answer(model, own, config, when, None if base is None else base[rank::size])
    if size == 1:
        return found
    parts = world.gathered(found)
    return GroupAnswers(
        predictions=tuple(world.interleaved([part.predictions for part in parts], count)),
        scores=tuple(world.interleaved([part.scores for part in parts], count if parts[0].scores else 0)),
        base_answers=tuple(
            world.interleaved([part.base_answers for part in parts], count if parts[0].base_answers else 0)
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
        limit = min(config.max_new_tokens, group.max_new_tokens or config.max_new_tokens)
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
    stored = world.shared(lambda: read_stored(path))
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
    if world.first():
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
    drawn = world.spread((0, 1), lambda numbers: [draw(number) for number in numbers])
    pairs = [(one, other) for one, other in zip(*drawn, strict=True) if one is not None and other is not None]
    if len(pairs) < 2:
        return None
    first, second = zip(*pairs, strict=True)
    return noise_floor([(s.total, s.num_tokens) for s in first], [(s.total, s.num_tokens) for s in second])


def _to_row(answers: GroupAnswers) -> dict[str, Any]:
    return {
        "predictions": [predictions.to_row(prediction) for prediction in answers.predictions],
        "scores": [[score.total, score.num_tokens] for score in answers.scores],
        "base_answers": [None if own is None else [own.total, own.num_tokens] for own in answers.base_answers],
    }


def _from_row(row: dict[str, Any]) -> GroupAnswers:
    return GroupAnswers(
        predictions=tuple(predictions.from_row(own) for own in row["predictions"]),
        scores=tuple(Score(total, count) for total, count in row["scores"]),
        base_answers=tuple(None if own is None else Score(*own) for own in row["base_answers"]),
    )
