"""How long things take here: a few updates, one refresh, a few requests and answers, on the real model and rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from cplus import models
from cplus.experiment.driver import start
from cplus.experiment.material import past_rows
from cplus.experiment.precision import in_precision
from cplus.experiment.rows import Group
from cplus.job.answers import answer
from cplus.job.settings import AdaptConfig
from cplus.loop import Stepped
from cplus.methods import Material, Method, Past
from cplus.models import Loaded
from cplus.probes.engine import Request, Sampling
from cplus.probes.local import LocalEngine
from cplus.probes.settings import MAX_NEW_TOKENS, Settings, plan

_STEPS = 3
_EVIDENCE = 4
_SAMPLED = 4
_TOKENS = 16
_YIELD = 0.5  # assumed share of requests that give a probe


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds per padded token, in training with the gate's share, and in a refresh."""

    training: float
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
    return Pace(training=median(s / p for s, p in zip(spent, padded[1:], strict=True)), evidence=evidence)


def _few(past: Past) -> Past:
    probes = past.probes[:_EVIDENCE]
    return past_rows(past.name, anchors=past.anchors[:_EVIDENCE], probes=probes, synthetic=probes)


def evaluating(config: AdaptConfig, base: Loaded, group: Group) -> float:
    """Seconds to evaluate a whole group once; answers in free text are taken to have the maximum length."""
    few = replace(group, examples=group.examples[:_SAMPLED], known=())
    tokens = min(config.max_new_tokens, _TOKENS)
    begun = time.perf_counter()
    with models.computing(config.compute_dtype, base.device):
        answer(base.model, few, config.model_copy(update={"max_new_tokens": tokens}), "timing")
    longer = 1.0 if group.closed else config.max_new_tokens / tokens
    return (time.perf_counter() - begun) * longer * len(group.examples) / len(few.examples)


def writing(base: Loaded, anchors: Group, settings: Settings) -> float:
    """Seconds to write a bank, if half of the requests give a probe."""
    interface, shown = anchors.interface, anchors.examples
    plans = [plan(index, shown, settings) for index in range(_SAMPLED)]
    requests = [Request(index=p.index, prompt=interface.request(p.shots, p.topic), seed=p.index) for p in plans]
    limit = settings.max_new_tokens or MAX_NEW_TOKENS[interface.name]
    tokens = min(limit, _TOKENS)
    sampling = Sampling(temperature=settings.temperature, max_new_tokens=tokens, stop=interface.stop(shown))
    begun = time.perf_counter()
    list(LocalEngine(base.model, base.tokenizer).sample(requests, sampling))
    return (time.perf_counter() - begun) / _SAMPLED * limit / tokens / 2 * settings.num_probes / _YIELD
