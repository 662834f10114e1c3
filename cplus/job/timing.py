"""Seconds of a job, estimated from timed samples on the real model and rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise

from cplus import models
from cplus.data.examples import FreeForm
from cplus.experiment.driver import start
from cplus.experiment.material import past_rows
from cplus.experiment.precision import in_precision
from cplus.experiment.rows import Group, Rows
from cplus.job.answers import FLOOR_ROWS, FLOOR_TOKENS, answer
from cplus.job.settings import AdaptConfig
from cplus.job.workload import Tokens
from cplus.job.written import interface_of, writing_settings
from cplus.loop import Stepped
from cplus.methods import Material, Method, Past
from cplus.models import Loaded
from cplus.probes.bank import Probe
from cplus.probes.engine import Request, Sampling
from cplus.probes.general import SelfWritten
from cplus.probes.generate import write_probes
from cplus.probes.local import LocalEngine
from cplus.probes.settings import MAX_NEW_TOKENS, ProbeSettings, plan
from cplus.scoring import log_likelihoods

_STEPS = 3
_EVIDENCE = 16
_SAMPLES = (4, 16)
_TOKENS = 16
_YIELDS = (0.4, 0.9)
_SELF_WRITTEN = 8
"""Range of the share of requests that give a probe."""


@dataclass(frozen=True)
class Range:
    """A lower and an upper estimate.

    >>> Range(1.0, 2.0) + Range(0.5, 4.0)
    Range(low=1.5, high=6.0)
    """

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds per padded token, in training with the gate's share, and in a refresh."""

    training: Range
    evidence: float


def pace(config: AdaptConfig, method: Method, base: Loaded, material: Material) -> Pace:
    """Time three updates after a first one, and one refresh; this changes the model."""
    past = material.past[0]
    short = Material(
        new=(list(material.new) * (_STEPS + 1))[: (_STEPS + 1) * config.batch_size],
        past=(_few(past),),
    )
    method = replace(in_precision(method, config.compute_dtype, base.device), parts=1)
    settings = replace(config.settings(), epochs=1, order="file")
    training = start(settings, method, base.model, short)
    prepared, marks, padded = training.prepared, [], []
    for event in training.run():
        if isinstance(event, Stepped):
            marks.append(time.perf_counter())
            padded.append(event.work.padded)
    spent = [b - a for a, b in pairwise(marks)]
    evidence = 0.0
    if prepared.guard is not None and method.evidence:
        begun = time.perf_counter()
        found = prepared.guard.refresh()
        evidence = (time.perf_counter() - begun) / max(1, found.work.padded)
    if prepared.guard is not None:
        prepared.guard.detach()
    base.model.eval()
    paces = [s / p for s, p in zip(spent, padded[1:], strict=True)]
    return Pace(training=Range(min(paces), max(paces)), evidence=evidence)


def _few(past: Past) -> Past:
    probes = past.probes[:_EVIDENCE]
    return past_rows(past.name, anchors=past.anchors[:_EVIDENCE], probes=probes, synthetic=probes)


@dataclass(frozen=True, kw_only=True)
class EvaluationTime:
    """Seconds per row of one group: to answer it before and after training, and to evaluate it during training."""

    answering: Range
    during: Range


def evaluating(config: AdaptConfig, base: Loaded, group: Group) -> EvaluationTime:
    """Time small and larger samples; free text is taken to be as long as the given responses, or twice as long."""
    length = answer_length(config, base, group)
    tokens = max(1, min(_TOKENS, round(length.low)))
    short = config.model_copy(update={"max_new_tokens": tokens})
    answered, scored = [], []
    with models.computing(config.compute_dtype, base.device):
        _timed(base, replace(group, examples=group.examples[:1], known=()), short)  # the first pass is slower
        for count in _SAMPLES:
            few = replace(group, examples=group.examples[:count], known=())
            answered.append(_timed(base, few, short) / len(few.examples))
            begun = time.perf_counter()
            if not group.closed:
                log_likelihoods(base.model, few.encoded(), what="timing")
            scored.append((time.perf_counter() - begun) / len(few.examples))
    if group.closed:
        spent = Range(min(answered), max(answered))
        return EvaluationTime(answering=spent, during=spent)
    return EvaluationTime(
        answering=Range(min(answered) * length.low / tokens, max(answered) * length.high / tokens),
        during=Range(min(scored), max(scored)),
    )


def _timed(base: Loaded, group: Group, config: AdaptConfig) -> float:
    begun = time.perf_counter()
    answer(base.model, group, config, "timing")
    return time.perf_counter() - begun


def answer_length(config: AdaptConfig, base: Loaded, group: Group) -> Range:
    """Tokens per generated answer: the mean of the given responses, and twice that, within the limit."""
    texts = [example.response for example in group.examples if isinstance(example, FreeForm)]
    if not texts:
        return Range(1.0, 1.0)
    tokens = [len(base.tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts]
    mean, limit = sum(tokens) / len(tokens), config.max_new_tokens
    return Range(min(mean, limit), min(2 * mean, limit))


def noise_floor(config: AdaptConfig, base: Loaded, group: Group, found: EvaluationTime) -> Range:
    """Seconds to measure the noise floor of a group: two sampled answers to each of a few rows."""
    length, rows = answer_length(config, base, group), 2 * min(FLOOR_ROWS, len(group.examples))
    longest = max(1.0, min(FLOOR_TOKENS, config.max_new_tokens) / length.high)
    return Range(rows * found.answering.low, rows * found.answering.high * longest)


def writing(base: Loaded, anchors: Group, settings: ProbeSettings, labelling: EvaluationTime) -> Range:
    """Seconds to write a bank; probes are taken to be as long as the anchors, or twice as long."""
    interface, shown = anchors.interface, anchors.examples
    few = _SAMPLES[0]
    plans = [plan(index, shown, settings) for index in range(few)]
    requests = [Request(index=p.index, prompt=interface.request(p.shots, p.topic), seed=p.index) for p in plans]
    limit = settings.max_new_tokens or MAX_NEW_TOKENS[interface.name]
    tokens = min(limit, _TOKENS)
    sampling = Sampling(temperature=settings.temperature, max_new_tokens=tokens, stop=interface.stop(shown))
    begun = time.perf_counter()
    list(LocalEngine(base.model, base.tokenizer).sample(requests, sampling))
    per_token = (time.perf_counter() - begun) / few / tokens
    mean = sum(map(len, anchors.encoded())) / len(shown)
    worst, best = _YIELDS
    return Range(
        settings.num_probes * (per_token * min(limit, mean) / best + labelling.answering.low),
        settings.num_probes * (per_token * min(limit, 2 * mean) + labelling.answering.high) / worst,
    )


def self_writing(config: AdaptConfig, base: Loaded, ability: str) -> tuple[list[Probe], Range]:
    """A few rows that the base model writes itself, and the seconds per row: as measured, or twice that."""
    settings = writing_settings(config, ability, _SELF_WRITTEN)
    begun = time.perf_counter()
    found = write_probes(base, interface_of(config, base), (), settings)
    # A block is written at least, whatever the number of rows taken from it.
    spent = (time.perf_counter() - begun) / max(len(found), SelfWritten.block * _YIELDS[1])
    return found, Range(spent, 2 * spent)


def training_seconds(config: AdaptConfig, tokens: Tokens, high: Tokens, found: Pace) -> Range:
    """Seconds of the updates and refreshes: of one epoch where training may stop early, to all epochs."""
    first = 1 if config.stop != "never" else config.epochs
    return Range(
        first * (tokens.training * found.training.low + tokens.evidence * found.evidence),
        config.epochs * (high.training * found.training.high + high.evidence * found.evidence),
    )


def evaluation_seconds(config: AdaptConfig, base: Loaded, rows: Rows) -> Range:
    """Seconds to evaluate before, during and after training."""
    spent = Range(0.0, 0.0)
    for group in rows.evaluated(config.max_asked, config.seed):
        found, count = evaluating(config, base, group), len(group.examples)
        during = _rows_during(config, group)
        answered = 1 if config.split is not None else 2  # a split's answers before are known
        spent += Range(
            answered * count * found.answering.low + during.low * found.during.low,
            2 * count * found.answering.high + during.high * found.during.high,
        )
        if group.part == "retention" and not group.closed and not group.texts and config.judge == "none":
            spent += noise_floor(config, base, group, found)
    return spent


def _rows_during(config: AdaptConfig, group: Group) -> Range:
    """Rows of a group evaluated during training; new rows are evaluated each epoch where they decide when to stop."""
    first = 1 if config.stop != "never" else config.epochs
    count, every = len(group.examples), config.evaluate_every
    few = 0 if group.part == "external" or not every else min(count, config.evaluate_rows)
    drawn = Range(few * (first // every), few * (config.epochs // every)) if every else Range(0, 0)
    if group.part != "acquisition" or config.stop == "never":
        return drawn
    return Range(count, count * config.epochs) if group.closed else drawn + Range(0, count * config.epochs)
