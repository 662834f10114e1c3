"""Seconds of a model's answers: before, during and after training, and of the probes that it writes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cplus import models
from cplus.data.examples import Example, FreeForm
from cplus.experiment.measure import GroupAnswers
from cplus.experiment.rows import Group, Rows
from cplus.interfaces import Interface
from cplus.job.answers import FLOOR_ROWS, FLOOR_TOKENS, answer
from cplus.job.settings import AdaptConfig
from cplus.job.timing import Range
from cplus.job.written import interface_of, writing_settings
from cplus.models import Loaded
from cplus.probes.bank import Probe
from cplus.probes.general import SelfWritten
from cplus.probes.generate import Block, Tally, generate, labeller_of
from cplus.probes.local import ROWS, LocalEngine
from cplus.probes.settings import BLOCK, MAX_NEW_TOKENS, ProbeSettings
from cplus.scoring import log_likelihoods

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


def writing(base: Loaded, anchors: Group, settings: ProbeSettings) -> Range:
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
