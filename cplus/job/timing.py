"""Seconds of a job's parts, estimated from timed samples on the real model and rows."""

from __future__ import annotations

import importlib
import math
import random
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path

import torch
from scipy.special import stdtrit

from cplus import files, models
from cplus.data.batching import MAX_TOKENS
from cplus.data.encoded import Encoded
from cplus.experiment.driver import STATE_BYTES, start
from cplus.experiment.material import past_rows
from cplus.experiment.precision import in_precision
from cplus.experiment.rows import Group
from cplus.experiment.schedule import updates_per_epoch
from cplus.job.memory import Footprint, ModelSize
from cplus.job.settings import AdaptConfig
from cplus.job.workload import Tokens
from cplus.loop import Stepped
from cplus.methods import Material, Method, Past
from cplus.models import Loaded
from cplus.scoring import log_likelihoods

_STEPS = 5
_BLOB = 32 << 20
_YARD_ROWS = 8
_YARD_SECONDS = 0.1
_FOR_PAGES = ("scipy.stats", "jinja2")
AGAIN = 1.1
"""The least factor between two runs of the same work: what the same pass differs by on a quiet machine."""
PAGE = (0.1, 1.5)
"""Seconds to write receipt, card and record, without what they import: from a few rows to some hundreds."""


@dataclass(frozen=True)
class Range:
    """A lower and an upper estimate.

    >>> Range(1.0, 2.0) + Range(0.5, 4.0)
    Range(low=1.5, high=6.0)
    >>> Range(1.0, 2.0) * Range(0.5, 2.0)
    Range(low=0.5, high=4.0)
    """

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Range) -> Range:
        return Range(self.low * other.low, self.high * other.high)

    @staticmethod
    def around(*values: float) -> Range:
        """From the smallest to the largest."""
        return Range(min(values), max(values))


def spread(seconds: Sequence[float]) -> Range:
    """The factors on a measured time between which the same work, done again, stays in nine of ten cases.

    The prediction interval of one more sample, in logarithms because a busy machine multiplies times; at least AGAIN.

    >>> spread([1.0, 1.0, 1.0])
    Range(low=0.9090909090909091, high=1.1)
    >>> spread([1.0, 2.0, 1.0, 2.0]).high > 2
    True
    """
    logs, half = [math.log(s) for s in seconds], math.log(AGAIN)
    if len(logs) > 1:
        quantile = float(stdtrit(len(logs) - 1, 0.95))
        half = max(half, quantile * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs)))
    return Range(1 / math.exp(half), math.exp(half))


class Yardstick:
    """A tenth of a second of small passes, timed again and again while the plan is made: how the machine varies."""

    def __init__(self, base: Loaded, group: Group) -> None:
        self._base, self._rows, self._passes = base, group.encoded()[:_YARD_ROWS], 1
        self._samples: list[float] = []
        self._sample()  # the first pass is slower
        self._passes = max(1, min(100, math.ceil(_YARD_SECONDS / self._sample())))

    def measure(self) -> None:
        """Three more samples."""
        self._samples += [self._sample() for _ in range(3)]

    def _sample(self) -> float:
        begun = time.perf_counter()
        for _ in range(self._passes):
            log_likelihoods(self._base.model, self._rows, what="timing")
        return max(1e-6, time.perf_counter() - begun)

    def stretch(self) -> Range:
        """The factors on every time of the plan."""
        return spread(self._samples)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of an update of `padded` tokens, of a token of evidence, and of the start with the first update."""

    update: float
    padded: float
    evidence: float
    first: float


def pace(config: AdaptConfig, method: Method, base: Loaded, material: Material) -> Pace:
    """Time five updates after a first one with the longest rows, and a refresh; this changes the model."""
    draw = random.Random(config.seed)
    short = Material(new=_sample(material.new, config.batch_size, draw), past=(_few(material.past[0], draw),))
    method = replace(in_precision(method, config.compute_dtype, base.device), parts=1)
    settings = replace(config.settings(), epochs=1, order="file")
    begun = time.perf_counter()
    training = start(settings, method, base.model, short)
    last = time.perf_counter()
    starting = last - begun
    spent: list[float] = []
    padded: list[int] = []
    for event in training.run():
        if isinstance(event, Stepped):
            spent.append(time.perf_counter() - last)
            padded.append(event.work.padded)
        last = time.perf_counter()  # a refresh before an update is not the update's
    guard, evidence = training.prepared.guard, 0.0
    if guard is not None and method.evidence:
        begun = time.perf_counter()
        found = guard.refresh()
        evidence = (time.perf_counter() - begun) / max(1, found.work.padded)
    if guard is not None:
        guard.detach()
    base.model.eval()
    return Pace(
        update=statistics.mean(spent[1:]),
        padded=statistics.mean(padded[1:]),
        evidence=evidence,
        first=starting + spent[0],
    )


def _sample(rows: Sequence[Encoded], size: int, draw: random.Random) -> list[Encoded]:
    """A batch of the longest rows, then rows drawn by the seed, as often as needed."""
    longest = sorted(rows, key=len, reverse=True)
    drawn = draw.sample(list(rows), len(rows))
    cycled = [*drawn * (_STEPS * size // len(rows) + 1)]
    return [*islice(longest * (size // len(rows) + 1), size), *cycled[: _STEPS * size]]


def _few(past: Past, draw: random.Random) -> Past:
    """Rows for one full pass of each kind, so that a token costs what it costs in the job, in time and in memory."""

    def some(rows: Sequence[Encoded]) -> list[Encoded]:
        drawn = draw.sample(list(rows), len(rows))
        full = bisect_left(list(accumulate(map(len, drawn))), MAX_TOKENS) + 1
        return drawn[:full]

    probes = some(past.probes)
    return past_rows(past.name, anchors=some(past.anchors), probes=probes, synthetic=probes)


def training_seconds(config: AdaptConfig, tokens: Tokens, high: Tokens, num_new: int, found: Pace) -> Range:
    """Seconds of the updates and refreshes: of one epoch where training may stop early, to all epochs.

    An update whose batch is longer than the timed ones takes as long as they did, if its cost is fixed, up to as much
    longer as its tokens are more.
    """
    updates = updates_per_epoch(num_new, config.batch_size)
    first = 1 if config.stop != "never" else config.epochs
    longer = [own.training / updates / found.padded for own in (tokens, high)]
    factor = Range.around(1.0, *longer)
    each = updates * found.update
    return Range(
        found.first + first * (each * factor.low + tokens.evidence * found.evidence),
        found.first + config.epochs * (each * factor.high + high.evidence * found.evidence),
    )


def saving_seconds(config: AdaptConfig, size: ModelSize, need: Footprint, base: Loaded, steps: Range) -> Range:
    """Seconds of checkpoints, model and pages, from the time to write a few megabytes and to hash the weights.

    What the pages need is imported and timed here too: it belongs to the job's memory as well.
    """
    begun = time.perf_counter()
    models.fingerprint(base.model)
    for name in _FOR_PAGES:
        importlib.import_module(name)
    fixed = time.perf_counter() - begun
    states = STATE_BYTES[config.optimizer]
    checkpoint = size.trainable * (4 + states + need.kept_bytes_per_parameter)
    model = 4 * size.parameters
    per_byte = _writing_pace(round(min(_BLOB, checkpoint)))
    saved = Range(1.0, 1.0)
    if config.checkpoint_steps is not None:
        saved += Range(steps.low // config.checkpoint_steps, steps.high // config.checkpoint_steps)
    kept = 4 * size.trainable * (config.epochs if config.keep_best or config.lost_limit is not None else 0)
    return Range(
        fixed + per_byte.low * (saved.low * checkpoint + model) + PAGE[0],
        fixed + per_byte.high * (saved.high * checkpoint + model + kept) + PAGE[1],
    )


def _writing_pace(count: int) -> Range:
    """Seconds per byte to write a state durably, on the disk of the cache."""
    place, spent = files.cache_folder(), []
    place.mkdir(parents=True, exist_ok=True)
    blob = {"weights": torch.zeros(max(1, count // 4))}
    with tempfile.TemporaryDirectory(dir=place) as folder:
        for _ in range(3):
            begun = time.perf_counter()
            files.write_state(Path(folder) / "state.pt", blob)
            spent.append((time.perf_counter() - begun) / max(1, count))
    return Range.around(*spent[1:])
