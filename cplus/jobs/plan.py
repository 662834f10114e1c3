"""The plan of a job or a repair as text and JSON: size, memory, disk, and a range for the time from timed samples."""

from __future__ import annotations

import importlib
import math
import random
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from scipy.special import stdtrit

from cplus import models
from cplus.base import files
from cplus.core.rows import MAX_TOKENS, Encoded
from cplus.data.examples import Example, FreeForm
from cplus.data.interfaces import Interface
from cplus.jobs.choices import (
    Chosen,
    Tokens,
    assumed_material,
    assumed_rows,
    evidence_tokens,
    is_open,
    range_test,
    tokens_per_epoch,
    with_chosen,
)
from cplus.jobs.keep import interface_of, is_cached, portions, split_up, stand_in, with_written, writing_settings
from cplus.jobs.memory import DevicePlan, Footprint, ModelSize, device_plan, giga, has_weights
from cplus.jobs.outputs import FLOOR_ROWS, FLOOR_TOKENS, answer
from cplus.jobs.prepare import Preflight, TooLarge, announce, bind_rows, load, preflight, row_of
from cplus.jobs.progress import PeakMemory, duration, say
from cplus.jobs.repair import Given, prepare, ranked_by, trial_rows
from cplus.jobs.rows import located
from cplus.jobs.settings import MAX_ROWS, AdaptConfig, RepairConfig
from cplus.methods.repair import BYTES_PER_PARAMETER, TRIALS, By, Sums, add_gradients
from cplus.methods.table import Material, Method, Past
from cplus.models import Loaded
from cplus.models.decoding import ROWS, LocalEngine
from cplus.models.scoring import log_likelihoods
from cplus.probes.abilities import SelfWritten
from cplus.probes.bank import Probe
from cplus.probes.build import bank_folder
from cplus.probes.settings import BLOCK, MAX_NEW_TOKENS, ProbeSettings
from cplus.probes.writing import Block, Tally, generate, labeller_of
from cplus.training.driver import STATE_BYTES, adapted, in_precision, start
from cplus.training.loop import Stepped, updates_per_epoch
from cplus.training.measure import GroupAnswers
from cplus.training.rows import Group, Rows, Source, past_rows

# Seconds of a job's parts, estimated from timed samples on the real model and rows.


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


def measured_pace(config: AdaptConfig, method: Method, base: Loaded, material: Material) -> Pace:
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


# Seconds of a model's answers: before, during and after training, and of the probes that it writes.


_FEW, _MANY = 4, 16
_REQUESTS = (8, 32)
_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class EvaluationTime:
    """Seconds per row of one group: to answer it and to evaluate it during training; and the base's answers' lengths.

    `length` is the mean, `longest` the maximum, in tokens; both are 0 where nothing is generated.
    """

    answering: Range
    during: Range
    length: float = 0.0
    longest: int = 0


def evaluating(config: AdaptConfig, base: Loaded, group: Group) -> EvaluationTime:
    """Time a few rows and more; free text is generated to its end, so that lengths are those of real answers."""
    many = replace(group.drawn(_MANY, config.seed), known=())
    few = replace(many, examples=many.examples[:_FEW])
    with models.computing(config.compute_dtype, base.device):
        short = config.model_copy(update={"max_new_tokens": min(_TOKENS, config.max_new_tokens)})
        _timed(base, replace(many, examples=many.examples[:1]), short)  # the first pass is slower
        samples = [(len(own.examples), _timed(base, own, short)[0]) for own in (few, many)]
        per_row = Range.around(*(seconds / count for count, seconds in samples))
        if group.closed:
            return EvaluationTime(answering=per_row, during=per_row)
        scored = []
        for own in (few, many):
            begun = time.perf_counter()
            log_likelihoods(base.model, own.encoded(), what="timing")
            scored.append((time.perf_counter() - begun) / len(own.examples))
        if group.texts:
            return EvaluationTime(answering=per_row, during=Range.around(*scored))
        spent, found = _timed(base, many, config)
    texts = [str(prediction.answer) for prediction in found.predictions]
    tokens = [len(base.tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts]
    lengths = [min(own, config.max_new_tokens) for own in tokens]  # a text read again may be split more finely
    count = len(group.examples)
    whole = together(samples, spent, count)
    return EvaluationTime(
        answering=Range(whole.low / count, whole.high / count),
        during=Range.around(*scored),
        length=sum(lengths) / len(lengths),
        longest=max(lengths),
    )


def together(samples: Sequence[tuple[int, float]], spent: float, count: int) -> Range:
    """Seconds to generate `count` answers, from those of as many as the larger sample.

    A step of decoding costs a fixed part and a part per row, which the two samples give; at most ROWS are decoded
    together. Upper end: no gain from more rows at once.

    >>> together([(4, 2.0), (16, 2.0)], 3.0, 32)  # rows cost nothing
    Range(low=3.0, high=6.0)
    >>> together([(4, 2.0), (16, 8.0)], 3.0, 32)  # nothing is shared
    Range(low=6.0, high=6.0)
    """
    (few, quick), (many, slow) = samples
    if count <= many:
        return Range(spent * count / many, spent * count / many)
    each = min(max(0.0, (slow - quick) / (many - few)), slow / many) if many > few else slow / many
    fixed = slow - many * each
    width = min(count, ROWS)
    low = spent * (fixed + each * width) / slow * count / width
    return Range.around(low, spent * count / many)


def _timed(base: Loaded, group: Group, config: AdaptConfig) -> tuple[float, GroupAnswers]:
    begun = time.perf_counter()
    found = answer(base.model, group, config, "timing")
    return time.perf_counter() - begun, found


def response_length(config: AdaptConfig, base: Loaded, group: Group) -> float:
    """Mean tokens of the given responses, within the limit; 0 where there are none."""
    texts = [example.response for example in group.examples if isinstance(example, FreeForm)]
    tokens = [len(base.tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts]
    return min(sum(tokens) / len(tokens), config.max_new_tokens) if tokens else 0.0


def evaluation_seconds(config: AdaptConfig, base: Loaded, rows: Rows) -> Range:
    """Seconds to evaluate before, during and after training.

    The adapted model's answers are taken to be as long as the base model's, up to as long as the new responses.
    """
    spent = Range(0.0, 0.0)
    target = response_length(config, base, rows.new)
    for group in rows.evaluated(config.max_asked, config.seed):
        found, count = evaluating(config, base, group), len(group.examples)
        during = _rows_during(config, group)
        answers = Range(count * found.answering.low, count * found.answering.high)
        after = Range.around(1.0, target / found.length if found.length and target else 1.0)
        spent += answers * after + found.during * during
        if not (group.by_base and config.judge == "none"):
            spent += answers if config.split is None else Range(0.0, answers.high)  # a split's answers may be cached
        if group.part == "retention" and not group.closed and not group.texts and config.judge == "none":
            spent += noise_floor(config, group, found)
    return spent


def noise_floor(config: AdaptConfig, group: Group, found: EvaluationTime) -> Range:
    """Seconds to measure the noise floor of a group: two sampled answers to each of a few rows, within a limit."""
    rows = 2 * min(FLOOR_ROWS, len(group.examples))
    limit = min(FLOOR_TOKENS, config.max_new_tokens, group.max_new_tokens or FLOOR_TOKENS)
    share = limit / max(1, found.longest)
    return Range(rows * found.answering.low, rows * found.answering.high) * Range(min(1.0, share), share)


def _rows_during(config: AdaptConfig, group: Group) -> Range:
    """Rows of a group evaluated during training; new rows are evaluated each epoch where they decide when to stop."""
    first = 1 if config.stop != "never" else config.epochs
    count, every = len(group.examples), config.evaluate_every
    few = 0 if group.part == "external" or not every else min(count, config.evaluate_rows)
    drawn = Range(few * (first // every), few * (config.epochs // every)) if every else Range(0, 0)
    if group.part != "acquisition" or config.stop == "never":
        return drawn
    return Range(count, count * config.epochs) if group.closed else drawn + Range(0, count * config.epochs)


def writing_time(base: Loaded, anchors: Group, settings: ProbeSettings) -> Range:
    """Seconds to write a bank, from two small blocks of its requests, sampled, read and labelled as the job does."""
    interface, shown = anchors.interface, anchors.examples
    few, many = (_trial(base, interface, shown, settings, count) for count in _REQUESTS)
    samples = [(own.tried, own.seconds) for own in (few, many)]
    whole = together(samples, many.seconds, BLOCK)
    return whole * num_blocks(settings.num_probes, len(many.probes), many.tried, BLOCK, settings.min_yield)


def self_writing(config: AdaptConfig, base: Loaded, ability: str, total: int) -> tuple[list[Probe], Range]:
    """A few rows that the base model writes itself, and the seconds to write `total` of them."""
    settings, size = writing_settings(config, ability, total), SelfWritten.block
    trial = _trial(base, interface_of(config, base), (), settings, size)
    each = trial.seconds * size / trial.tried
    blocks = num_blocks(total, len(trial.probes), trial.tried, size, settings.min_yield)
    return trial.probes, Range(each, each) * blocks


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """Requests tried, the probes they gave, and the seconds it took."""

    tried: int
    probes: list[Probe]
    seconds: float


def _trial(
    base: Loaded, interface: Interface, anchors: Sequence[Example], settings: ProbeSettings, count: int
) -> _Trial:
    """Blocks of `count` requests until one gives a probe; a model that gives none is refused as in the job."""
    begun = time.perf_counter()
    engine, tally = LocalEngine(base.model, base.tokenizer), Tally(anchors, interface, settings)
    labeller = labeller_of(base, engine, interface, settings)
    for event in generate(engine, labeller, interface, anchors, settings, tally, block=count):
        if isinstance(event, Block) and tally.probes:
            break
    tried = sum(len(block.outcomes) for block in tally.blocks)
    return _Trial(tried=tried, probes=tally.probes, seconds=time.perf_counter() - begun)


def num_blocks(wanted: int, gained: int, tried: int, block: int, floor: float) -> Range:
    """Blocks of requests until there are enough probes, from the share that gave one; nine of ten shares lie within.

    >>> num_blocks(512, 24, 32, 128, 0.02)
    Range(low=5, high=7)
    >>> num_blocks(8, 24, 32, 128, 0.02)
    Range(low=1, high=1)
    """
    share = (gained + 1.35) / (tried + 2.7)  # Wilson's centre and half-width at 90 %
    half = 1.645 * math.sqrt(gained * (tried - gained) / tried + 0.68) / (tried + 2.7)
    best, worst = min(1.0, share + half), max(floor, share - half)
    return Range(math.ceil(wanted / (block * best)), math.ceil(wanted / (block * worst)))


def decoding_bytes(config: AdaptConfig, base: Loaded, rows: Rows, probes: int) -> int:
    """The bytes of the rows that the job decodes at once and the trial did not.

    `probes` is the number of probes that the job writes from anchors.
    """
    more = [0]
    for group in rows.evaluated(config.max_asked, config.seed):
        if not group.closed and not group.texts:
            longest = max(len(group.interface.prompt(example)) for example in group.examples)
            count = min(ROWS, len(group.examples)) - _MANY
            more.append(count * _row_bytes(base, longest, config.max_new_tokens))
    if probes and rows.anchors is not None:
        longest = config.shots * max(map(len, rows.anchors.encoded()))
        row = _row_bytes(base, longest, MAX_NEW_TOKENS[rows.anchors.interface.name])
        more.append((ROWS - _REQUESTS[-1]) * row)
    return max(more)


def _row_bytes(base: Loaded, prompt: int, written: int) -> int:
    """Bytes to decode one row: keys and values of all tokens, and what one layer holds while the prompt is read."""
    text = base.model.config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    column: int = 2 * 4 * text.num_hidden_layers * heads * head
    layer: int = 4 * (4 * text.hidden_size + 3 * inner)  # about four vectors of the width, three of the inner width
    return column * (prompt + written) + layer * prompt


# Seconds of a repair, estimated from a few timed rows on the real model.


_ROWS = 3
FEWEST = 2
"""Trials of free text, whose loss tells where to look next, in a good case."""


def repair_seconds(
    config: AdaptConfig,
    base: Loaded,
    new: Sequence[Encoded],
    past: Range,
    *,
    trial: Range,
    by: By,
    rounds: int = 1,
    max_rows: int,
) -> Range:
    """Gradients and a search; `past` counts the tokens of past rows, `trial` times one trial.

    Importance takes a gradient of each past row and, in each round, of each new row; blame one of each past row.
    """
    used = new[:max_rows]
    tokens = sum(map(len, used))
    backward, forward = _paces(config, base, used)
    low, high = (
        (rounds * past.low, rounds * past.high)
        if by == "blame"
        else (past.low + rounds * tokens, past.high + rounds * tokens)
    )
    importance = Range(backward.low * low, backward.high * high)
    passes, fewest = rounds + 2, FEWEST if by == "blame" else TRIALS
    return Range(
        importance.low + passes * forward.low * past.low + (fewest * rounds + 2) * trial.low,
        importance.high + passes * forward.high * past.high + (TRIALS * rounds + 2) * trial.high,
    )


def _paces(config: AdaptConfig, base: Loaded, rows: Sequence[Encoded]) -> tuple[Range, Range]:
    """Seconds per token of a row's squared gradient, and of its loss alone; the first pass is slower and left out."""
    params = list(base.model.parameters())
    sums, marks = Sums.zeros(params), [time.perf_counter()]
    add_gradients(
        base.model,
        (list(rows) * (_ROWS + 1))[: _ROWS + 1],
        params,
        sums,
        computing=lambda: models.computing(config.compute_dtype, base.device),
        after=lambda _: marks.append(time.perf_counter()),
    )
    timed = (list(rows) * (_ROWS + 1))[1 : _ROWS + 1]
    paces = [(b - a) / len(row) for a, b, row in zip(marks[1:], marks[2:], timed, strict=False)]
    begun = time.perf_counter()
    with models.computing(config.compute_dtype, base.device):
        log_likelihoods(base.model, timed, what="timing")
    forward = (time.perf_counter() - begun) / sum(map(len, timed))
    return Range(min(paces), max(paces)), Range(forward, forward)


# The plan of a job as text and JSON: size, memory, disk, the price of protection, and a range for the time.


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `--plan`; ranges are from the shortest likely job to the longest, on this machine as it is now."""

    config: AdaptConfig
    size: ModelSize
    need: Footprint
    tokens: Tokens
    tokens_high: Tokens
    updates: int
    new: int
    sources: tuple[Source, ...]
    anchors: int
    probes: int
    seconds: dict[str, Range]
    warnings: tuple[str, ...]
    devices: DevicePlan
    chosen: tuple[Chosen, ...] = ()
    trial_bytes: int | None = None
    """Memory of the process, or of the GPU, at the peak of the trial that was timed, with as many rows decoded at once
    as the job will; None where an earlier peak of the process hides it."""

    @property
    def peak(self) -> int:
        """Memory at the job's peak: as the trial measured it, else as computed."""
        return self.need.peak if self.trial_bytes is None else self.trial_bytes

    @property
    def total(self) -> Range:
        """Seconds of the whole job."""
        return sum(self.seconds.values(), Range(0.0, 0.0))

    @property
    def writes(self) -> dict[str, str]:
        """The files that the job will write."""
        out = self.config.out
        made = {
            f"{out}/model": f"the adapted model, {giga(4 * self.size.parameters)} GB",
            f"{out}/receipt.html": "what was learned and lost, row by row",
            f"{out}/record.json": "settings, figures, curve, cost",
            f"{out}/README.md": "the model card",
            f"{out}/work": "checkpoint and the base model's answers, removed at the end",
        }
        return made | ({f"{out}/bank": f"{self.probes} sealed probes"} if self.probes else {})

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "settings": self.config.model_dump(mode="json"),
            "chosen": [asdict(own) for own in self.chosen],
            "size": asdict(self.size),
            "need": asdict(self.need),
            **{key: value for key, value in self.devices.row().items() if key in ("bytes", "devices")},
            "trial_bytes": self.trial_bytes,
            "tokens_per_epoch": {**asdict(self.tokens), "percent_above_sft": self.tokens.percent},
            "tokens_per_epoch_high": {**asdict(self.tokens_high), "percent_above_sft": self.tokens_high.percent},
            "updates_per_epoch": self.updates,
            "counts": {"new": self.new, "anchors": self.anchors, "probes": self.probes},
            "sources": [asdict(source) for source in self.sources],
            "seconds": {part: asdict(spent) for part, spent in self.seconds.items()},
            "total_seconds": asdict(self.total),
            "warnings": list(self.warnings),
            "writes": self.writes,
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        need, tokens, high, size = self.need, self.tokens, self.tokens_high, self.size
        kept, step = need.kept_bytes_per_parameter, need.step_bytes_per_parameter
        times = ", ".join(f"{part} {shown_range(spent)}" for part, spent in self.seconds.items())
        base = "in float32" if self.config.load == "float32" else f"{size.packed:,} held in 4 bits"
        percent = f"{tokens.percent:+.0f}" + (f" to {high.percent:+.0f}" if high.percent > tokens.percent else "")
        return [
            f"model      {self.config.model}: {size.parameters:,} parameters, {size.trainable:,} trained, {base}",
            f"rows       {self.new} new, {self.anchors} anchors, {self.probes} probes",
            f"training   {self.config.epochs} epochs at most, {self.updates} updates each",
            *(f"chosen     {own}" for own in self.chosen),
            f"gate       {kept:.2f} bytes per trained parameter held, {step:.2f} more during an update",
            f"cost       {percent} % FLOPs against plain fine-tuning: {tokens.sft:,} tokens of new rows per epoch, "
            f"{tokens.training - tokens.sft:,} more trained on, {tokens.evidence:,} of evidence",
            f"memory     {giga(need.held)} GB held, about {giga(self.peak)} at the peak; {giga(need.available)} free",
            *self.devices.device_lines(),
            f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
            f"time       {shown_range(self.total)} here: {times}",
            *(f"warning    {warning}" for warning in self.warnings),
            *(f"writes     {path}: {what}" for path, what in self.writes.items()),
        ]


def shown_range(seconds: Range) -> str:
    """A range of seconds in words."""
    low, high = duration(seconds.low), duration(seconds.high)
    return low if low == high else f"{low} to {high}"


def plan_anywhere(config: AdaptConfig, *, starting: float = 0.0) -> Plan | DevicePlan:
    """The job's plan; for a model that is too large for this machine or has no weights here, what fits where."""
    home = Path.cwd()
    where = models.resolve(located(config.model, home))
    try:
        if has_weights(where):
            return plan(config, starting=starting)
        reason = f"{where} holds no weights, so nothing was timed"
    except TooLarge as error:
        reason = str(error)
    return device_plan(config, row_of(config), where, config.num_anchors, reason)


def plan(config: AdaptConfig, *, starting: float = 0.0) -> Plan:
    """Compute the job's size and try a little of each part; nothing is written but the cache.

    `starting` is how long the program took to get here, which the job will take again.
    """
    home, begun = Path.cwd(), time.perf_counter()
    memory = PeakMemory(models.choose_device(config.device))
    found = preflight(config, home)
    config = found.config
    announce(found)
    base = load(config, home)
    say("timing a sample of each part on this model and these rows")
    loading = time.perf_counter() - begun
    rows, writing, assumed = _rows(config, found, base)
    if writing is None and not config.own_answers:
        loading = time.perf_counter() - begun
    method, new = found.method, rows.new
    yardstick = Yardstick(base, new)
    material, probes = assumed_material(config, method, rows, home)
    longer, _ = assumed_material(config, method, rows, home, length=2)
    tokens, high = (tokens_per_epoch(config, method, own) for own in (material, longer))
    yardstick.measure()
    seconds = {"loading": Range(loading, loading)}
    if starting:
        seconds["starting"] = Range(starting, starting)
    seconds["evaluating"] = evaluation_seconds(config, base, rows)
    yardstick.measure()
    if writing is not None:
        seconds["writing probes"] = writing
    elif probes and not config.written:
        seconds |= _writing(config, base, rows.anchors, len(new.examples))
    decoding = memory.peak()
    if decoding is not None:
        decoding += decoding_bytes(config, base, rows, probes if "writing probes" in seconds else 0)
    if config.repair:
        seconds["repairing"] = _repairing(config, base, new, material, longer)
    updates = updates_per_epoch(len(material.new), config.batch_size)
    steps = Range(updates * (1 if config.stop != "never" else config.epochs), updates * config.epochs)
    seconds["saving"] = saving_seconds(config, found.size, found.need, base, steps)
    yardstick.measure()
    say("timing a few updates")
    base = replace(base, model=adapted(config.settings(), method, base.model))
    chosen = found.chosen
    if is_open(config):
        begun = time.perf_counter()
        held = [] if rows.past is None else rows.past.encoded()
        test = range_test(config, config.settings(len(new.examples)), method, base.model, material, held)
        seconds["choosing the rate"] = Range(*2 * [time.perf_counter() - begun])
        config, chosen = with_chosen(config, [test.chosen]), (*chosen, test.chosen)
    pace = measured_pace(config, method, base, material)
    once = Range(0.0, 0.0)
    if method.refresh == "once":
        once = Range(*(evidence_tokens(method, own) * pace.evidence for own in (material, longer)))
    seconds["training"] = training_seconds(config, tokens, high, len(material.new), pace) + once
    yardstick.measure()
    peak = memory.peak()
    return Plan(
        config=config,
        size=found.size,
        need=found.need,
        tokens=tokens,
        tokens_high=high,
        updates=updates,
        new=len(new.examples),
        sources=rows.sources,
        anchors=len(material.past[0].anchors),
        probes=probes,
        seconds={part: spent * yardstick.stretch() for part, spent in seconds.items()},
        warnings=(*found.warnings, *rows.notes, *assumed),
        devices=device_plan(
            config, method, models.resolve(located(config.model, home)), config.num_anchors, size=found.size
        ),
        chosen=chosen,
        trial_bytes=None if peak is None else max(peak, decoding or 0),
    )


def _rows(config: AdaptConfig, found: Preflight, base: Loaded) -> tuple[Rows, Range | None, list[str]]:
    """The rows, with stand-ins for those not known yet, the seconds to write them, and what was assumed."""
    if found.tasks.split is None:
        return self_written(config, found.method, bind_rows(config, found.tasks, base), base)
    rows, note = assumed_rows(config, found.tasks, base)
    return rows, None, [note]


def _repairing(config: AdaptConfig, base: Loaded, new: Group, short: Material, longer: Material) -> Range:
    """Seconds to repair the trained model."""
    during, count = evaluating(config, base, new).during, trial_rows(new, MAX_ROWS)
    tokens = [
        sum(len(row) for task in own.past for row in (*task.anchors, *task.probes)[:MAX_ROWS])
        for own in (short, longer)
    ]
    trial = Range(count * during.low, count * during.high)
    return repair_seconds(config, base, short.new, Range(*tokens), trial=trial, by=ranked_by(new), max_rows=MAX_ROWS)


def self_written(config: AdaptConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, Range | None, list[str]]:
    """The rows with self-written ones from the cache, else with a few stand-ins and the seconds to write them all."""
    asked = portions(config, method, len(rows.new.examples))
    if all(is_cached(config, base, portion) for portion in asked):
        return with_written(config, method, rows, base)[0], None, []
    bound, total = interface_of(config, base), sum(portion.total for portion in asked)
    with models.computing(config.compute_dtype, base.device):
        few, spent = self_writing(config, base, asked[0].ability, total)
    banks = [stand_in(few, portion.total) for portion in asked]
    rows, _ = split_up(config, method, rows, bound, asked, banks)
    note = f"the base model has not written its {total} rows yet: {len(few)} were written to estimate the rest"
    return rows, spent, [note]


def _writing(config: AdaptConfig, base: Loaded, anchors: Group | None, num_new: int) -> dict[str, Range]:
    """Seconds to write the bank; nothing where it is given, cached or not needed."""
    settings = config.settings(num_new).probes
    if config.bank is not None or anchors is None:
        return {}
    if bank_folder(base, anchors.interface, anchors.examples, settings).exists():
        return {}
    return {"writing probes": writing_time(base, anchors, settings)}


# The plan of a repair as text and JSON: rows, memory, disk, and a range for the time.


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """The result of `--plan`; ranges are from the shortest likely repair to the longest."""

    given: Given
    probes: int
    seconds: dict[str, Range]

    @property
    def total(self) -> Range:
        """Seconds of the whole repair, loading left out."""
        return sum(self.seconds.values(), Range(0.0, 0.0))

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of rows and probes."""
        rows = self.given.rows
        anchors = 0 if rows.anchors is None else len(rows.anchors.examples)
        return {"new": len(rows.new.examples), "anchors": anchors, "probes": self.probes}

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "settings": self.given.config.shown(),
            "size": asdict(self.given.size),
            "need": asdict(self.given.need),
            "counts": self.counts,
            "trials": TRIALS * self.given.config.rounds,
            "seconds": {part: asdict(spent) for part, spent in self.seconds.items()},
            "total_seconds": asdict(self.total),
            "warnings": [*self.given.rows.notes, *self.given.notes],
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        given, config, need, counts = self.given, self.given.config, self.given.need, self.counts
        times = ", ".join(f"{part} {shown_range(spent)}" for part, spent in self.seconds.items())
        tried = f"{TRIALS * config.rounds} evaluations of {trial_rows(given.rows.new, config.max_rows)} new rows"
        if ranked_by(given.rows.new) == "importance":
            used = f" and {min(counts['new'], config.max_rows)} new"
        else:
            used, tried = "", f"{FEWEST * config.rounds} to {tried}"
        past = min(counts["anchors"] + self.probes, config.max_rows)
        return [
            f"models     {config.tuned} towards {config.model}: {given.size.parameters:,} parameters, in float32",
            f"rows       {counts['new']} new, {counts['anchors']} anchors, {self.probes} probes",
            f"ranking    {past} past{used} rows, one backward pass each; {config.rounds} round(s)",
            f"search     {tried}",
            f"memory     {giga(need.held)} GB held ({BYTES_PER_PARAMETER} bytes per parameter), about "
            f"{giga(need.peak)} at the peak; {giga(need.available)} free",
            f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
            f"time       {shown_range(self.total)} here: {times}",
            *(f"warning    {note}" for note in (*given.rows.notes, *given.notes)),
            f"writes     {config.out}/model: the repaired model, {giga(4 * given.size.parameters)} GB",
            f"writes     {config.out}/receipt.html: base, tuned and repaired model, row by row",
            f"writes     {config.out}/record.json: settings and figures; {config.out}/README.md: the model card",
        ]


def plan_repair(config: RepairConfig) -> RepairPlan:
    """Check everything and time a few rows; nothing is written but the cache."""
    writing: list[Range | None] = []

    def stand_ins(config: RepairConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, None]:
        rows, spent, _ = self_written(config, method, rows, base)
        writing.append(spent)
        return rows, None

    given = prepare(config, Path.cwd(), stand_ins)
    base, rows, anchors = given.base, given.rows, given.rows.anchors
    assert anchors is not None
    settings = config.settings(len(rows.new.examples)).probes
    times = {group.name: evaluating(config, base, group) for group in (*given.groups, anchors)}
    seconds = {"evaluating": Range(0.0, 0.0)}
    for group in given.groups:
        found, count = times[group.name], len(group.examples)
        tuned = found.answering if group.closed or config.judge != "none" else found.during
        seconds["evaluating"] += Range(
            count * (2 * found.answering.low + tuned.low), count * (2 * found.answering.high + tuned.high)
        )
        if group.part == "retention" and not group.closed and config.judge == "none":
            seconds["evaluating"] += noise_floor(config, group, found)
    built = config.bank is not None or bank_folder(base, anchors.interface, anchors.examples, settings).exists()
    if writing[0] is not None:
        seconds["writing probes"] = writing[0]
    elif not built and not config.written:
        seconds["writing probes"] = writing_time(base, anchors, settings)
    probes, own = settings.num_probes, [len(row) for row in anchors.encoded()]
    mean, others = sum(own) / len(own), min(probes, max(0, config.max_rows - len(own)))
    during, count = times[rows.new.name].during, trial_rows(rows.new, config.max_rows)
    seconds["repairing"] = repair_seconds(
        config,
        base,
        rows.new.encoded(),
        Range(sum(own) + mean * others, sum(own) + 2 * mean * others),
        trial=Range(count * during.low, count * during.high),
        by=ranked_by(rows.new),
        rounds=config.rounds,
        max_rows=config.max_rows,
    )
    return RepairPlan(given=given, probes=probes, seconds=seconds)
