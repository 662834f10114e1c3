"""A model's answers: the likeliest candidate or decoded text, each with its log-likelihood, bounded in memory."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from cplus.base.terminal import progress
from cplus.core.losses import target_logits
from cplus.core.rows import Encoded, fit, length_sorted_batches, shared_prefix
from cplus.data.examples import Choice, Example, FreeForm, Prediction
from cplus.data.interfaces import Interface, longest_row, shortened
from cplus.models import window
from cplus.models.decoding import ROWS, LocalEngine

# Batches of rows of similar length, as large as the device and the memory for logits allow.


_MAX_ROWS = 256
_MAX_LOGITS = 2**28
# Scoring is compute-bound: on a CPU, batches larger than the caches are slower.
_SCORED_TOKENS = {"cpu": 512, "mps": 4096, "cuda": 16384}
# Decoding reads all weights for each token of a batch, so a batch is as large as the key-value cache allows.
_DECODED_TOKENS = {"cpu": 8192, "mps": 8192, "cuda": 65536}


def scored(model: nn.Module, lengths: Sequence[int], kept: Sequence[int], what: str) -> Iterator[list[int]]:
    """Indices of rows to score together; `kept` is the number of positions at which each row needs logits."""
    if not lengths:
        return
    share = max(positions / length for positions, length in zip(kept, lengths, strict=True))
    max_tokens = min(_SCORED_TOKENS[_device(model)], int(_MAX_LOGITS / (vocabulary(model) * share)))
    with progress() as bars:
        task = bars.add_task(what, total=len(lengths))
        for batch in length_sorted_batches(lengths, max_tokens=max_tokens, max_rows=_MAX_ROWS):
            yield batch
            bars.advance(task, len(batch))


def _device(model: nn.Module) -> str:
    kind = next(model.parameters()).device.type
    return kind if kind in _SCORED_TOKENS else "cpu"


def bare(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper: it includes the adapters, and its forward has named arguments."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def vocabulary(model: nn.Module) -> int:
    """The number of logits per position."""
    return int(bare(model).config.get_text_config().vocab_size)


def check_window(model: nn.Module, lengths: Sequence[int]) -> None:
    """Refuse rows with more tokens than the model's window."""
    limit = window(bare(model))
    over = [length for length in lengths if length > limit]
    if over:
        raise ValueError(
            f"{len(over)} of {len(lengths)} rows are longer than the model's window of {limit} tokens "
            f"(the longest has {max(over)}); shorten or exclude them"
        )


# A prompt and all its candidates packed into one row: the prompt and the common prefix are processed once.


Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A prompt followed by its candidates; the last token of each candidate is only predicted, not an input."""

    prompt: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]

    @property
    def kept(self) -> int:
        """The number of positions that need logits: the prompt's last, and all of a candidate's but its last."""
        return 1 + sum(len(candidate) - 1 for candidate in self.candidates)

    def __len__(self) -> int:
        return len(self.prompt) + self.kept - 1


def packed_scores(model: Any, rows: Sequence[PackedRow], offset: int, prefix: Any | None) -> list[list[float]]:
    """Each candidate's summed log-likelihood; `prefix` is the key-value cache of `offset` tokens before all rows."""
    device = next(model.parameters()).device
    ids, positions, segments, where = _lay_out(rows, offset)
    past = copy.deepcopy(prefix)
    if past is not None:
        past.batch_repeat_interleave(len(rows))
    logits = model(
        input_ids=ids.to(device),
        attention_mask=_block_mask(model, segments.to(device), offset),
        position_ids=positions.to(device),
        past_key_values=past,
        use_cache=past is not None,
        logits_to_keep=max(row.kept for row in rows),
    ).logits.float()
    row, column, token = torch.tensor(where, device=device).unbind(1)
    chosen = iter((logits[row, column, token] - logits.logsumexp(2)[row, column]).tolist())
    return [[sum(next(chosen) for _ in candidate) for candidate in row.candidates] for row in rows]


def takes_block_masks(model: Any, longest: int) -> bool:
    """Whether the model's attention accepts a custom mask for rows of up to `longest` tokens."""
    config = model.config
    arguments = inspect.signature(type(model).forward).parameters
    sliding = getattr(config, "sliding_window", None)
    return (
        {"position_ids", "past_key_values", "logits_to_keep"} <= set(arguments)
        and config._attn_implementation in ("sdpa", "eager")
        and not getattr(model, "_is_stateful", False)
        and not getattr(config, "alibi", False)
        # A block mask has no sliding window, so no row may be longer than it.
        and (sliding is None or longest <= sliding)
    )


def _lay_out(rows: Sequence[PackedRow], offset: int) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int, int]]]:
    """Left-padded tokens, their positions and their segments: 0 for a prompt, 1, 2, ... for candidates, -1 for padding.

    The list has (row, column among the kept, token) for every token to be predicted.
    """
    width, keep = max(map(len, rows)), max(row.kept for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions, segments, where = torch.zeros_like(ids), torch.full_like(ids, -1), []
    for i, row in enumerate(rows):
        column, begin = width - len(row), offset
        last = column + len(row.prompt) - 1
        for segment, tokens in enumerate((row.prompt, *(candidate[:-1] for candidate in row.candidates))):
            cells = slice(column, column + len(tokens))
            ids[i, cells] = torch.tensor(tokens, dtype=torch.long)
            positions[i, cells] = torch.arange(begin, begin + len(tokens))
            segments[i, cells] = segment
            if segment:
                columns = (last, *range(column, cells.stop))
                target = row.candidates[segment - 1]
                where += [(i, at - (width - keep), token) for at, token in zip(columns, target, strict=True)]
            column, begin = cells.stop, offset + len(row.prompt)
    return ids, positions, segments, where


def _block_mask(model: Any, segments: Tensor, offset: int) -> Tensor:
    """The causal attention mask: every token sees the prefix and the prompt, a candidate otherwise only itself."""
    rows, width = segments.shape
    own = segments[:, :, None] == segments[:, None, :]
    seen = (own | (segments[:, None, :] == 0)).tril()
    seen = torch.cat([seen.new_ones(rows, width, offset), seen], dim=2)[:, None]
    if model.config._attn_implementation == "sdpa":
        return seen
    # Eager attention adds the mask to its scores.
    return torch.zeros_like(seen, dtype=model.dtype).masked_fill_(~seen, torch.finfo(model.dtype).min)


# Log-likelihoods of answers: each prompt is processed once for all its candidates, with logits at answers only.


@dataclass(frozen=True, slots=True)
class Score:
    """One answer's log-likelihood: the sum over its tokens, and their number."""

    total: float
    num_tokens: int

    @property
    def mean(self) -> float:
        """The mean token log-likelihood, which allows comparing answers of different lengths."""
        return self.total / self.num_tokens


@torch.inference_mode()
def score_candidates(
    model: nn.Module, prompts: Sequence[Tokens], candidates: Sequence[Sequence[Tokens]], *, what: str = "scoring"
) -> list[tuple[Score, ...]]:
    """The scores of every candidate after its prompt."""
    rows = [PackedRow(tuple(p), tuple(map(tuple, own))) for p, own in zip(prompts, candidates, strict=True)]
    check_window(model, [len(row.prompt) + max(map(len, row.candidates)) - 1 for row in rows])
    if not takes_block_masks(bare(model), max(map(len, rows), default=0)):
        # Every candidate as a separate row, for attention that accepts no custom mask.
        separate = [Encoded(row.prompt, candidate) for row in rows for candidate in row.candidates]
        found = iter(log_likelihoods(model, separate, what=what))
        return [tuple(next(found) for _ in row.candidates) for row in rows]
    prefix = shared_prefix(prompts)
    rows = [PackedRow(row.prompt[len(prefix) :], row.candidates) for row in rows]
    past = None
    if prefix:
        ids = torch.tensor([prefix], device=next(model.parameters()).device)
        past = bare(model)(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    scores: list[tuple[Score, ...]] = [()] * len(rows)
    for batch in scored(model, [len(row) for row in rows], [row.kept for row in rows], what):
        totals = packed_scores(bare(model), [rows[i] for i in batch], len(prefix), past)
        for index, own in zip(batch, totals, strict=True):
            lengths = map(len, rows[index].candidates)
            scores[index] = tuple(Score(total, length) for total, length in zip(own, lengths, strict=True))
    return scores


@dataclass(frozen=True, slots=True)
class Reading:
    """A target after its prompt: its score, and whether each of its tokens is the most likely one at its position."""

    score: Score
    likeliest: bool


def log_likelihoods(model: nn.Module, rows: Sequence[Encoded], *, what: str = "scoring") -> list[Score]:
    """The score of each row's target."""
    return [reading.score for reading in read_targets(model, rows, what=what)]


@torch.inference_mode()
def read_targets(model: nn.Module, rows: Sequence[Encoded], *, what: str = "scoring") -> list[Reading]:
    """Each row's target in one pass; if every token is the most likely one, greedy decoding gives this target."""
    check_window(model, [len(row) - 1 for row in rows])
    readings = [Reading(Score(0.0, 1), False)] * len(rows)
    for batch in scored(model, [len(row) for row in rows], [len(row.target) for row in rows], what):
        logits, labels = target_logits(bare(model), [rows[i] for i in batch])
        tokens = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(2)
        totals = tokens.masked_fill(labels < 0, 0.0).sum(1).tolist()
        likeliest = ((logits.argmax(2) == labels) | (labels < 0)).all(1).tolist()
        for index, total, repeats in zip(batch, totals, likeliest, strict=True):
            readings[index] = Reading(Score(total, rows[index].num_scored), repeats)
    return readings


# A model's answers, example by example, through an interface.


Judge: TypeAlias = Callable[[str, Example], bool]
"""Whether a free-text answer to an example is right."""
Policy: TypeAlias = Literal["refuse", "exclude", "truncate"]


def predict(
    model: nn.Module,
    interface: Interface,
    examples: Sequence[Example],
    *,
    judge: Judge | None = None,
    max_new_tokens: int = 256,
    word_first: bool = False,
    what: str = "predicting",
) -> list[Prediction]:
    """The model's answers in the order of the examples: the most likely candidate, or greedy text if there are none.

    `word_first` is the rule by which a model's own answers are written: they begin with a word.

    Paper: h_theta in App. C.1; protocol section 1.
    """
    candidates = [interface.candidates(example) for example in examples]
    closed = [i for i, own in enumerate(candidates) if own]
    open_ = [i for i, own in enumerate(candidates) if not own]
    prompts = [interface.prompt(examples[i]) for i in closed]
    scores = score_candidates(model, prompts, [candidates[i] for i in closed], what=what)
    found = {i: chosen(examples[i], own) for i, own in zip(closed, scores, strict=True)}
    if open_:
        asked = [tuple(interface.prompt(examples[i])) for i in open_]
        longest = max(map(len, asked)) + max_new_tokens
        engine = LocalEngine(
            bare(model), interface.tokenizer, rows=max(1, min(ROWS, _DECODED_TOKENS[_device(model)] // longest))
        )
        stop = interface.answer_stop
        said = engine.greedy(asked, max_new_tokens=max_new_tokens, stop=stop, word_first=word_first, what=what)
        for i, row in zip(open_, said, strict=True):
            text, score = row.text.strip(), Score(row.total, len(row.tokens))
            found[i] = _spoken(examples[i], text, None if judge is None else judge(text, examples[i]), score)
    return [found[i] for i in range(len(examples))]


def repeated(
    model: nn.Module, interface: Interface, examples: Sequence[Example], *, what: str = "predicting"
) -> list[Prediction]:
    """Whether the model's greedy answer equals each row's response, token for token, from one pass without decoding.

    The answer is the response if they are equal, otherwise empty, because the model's own text is not known. The score
    is the response's mean token log-likelihood.
    """
    readings = read_targets(model, [interface.encode(example) for example in examples], what=what)
    found = []
    for example, reading in zip(examples, readings, strict=True):
        answer = example.response if reading.likeliest and isinstance(example, FreeForm) else ""
        found.append(_spoken(example, answer, reading.likeliest, reading.score))
    return found


def _spoken(example: Example, answer: str, correct: bool | None, score: Score) -> Prediction:
    return Prediction(
        id=example.id,
        answer=answer,
        correct=correct,
        confidence=math.exp(score.mean),
        scores=(score.mean,),
        num_tokens=(score.num_tokens,),
    )


def fitting(interface: Interface, examples: Sequence[Example], window: int, policy: Policy) -> list[Example]:
    """The examples that fit the window with their longest answer; longer ones are refused, excluded or truncated."""
    rows = [longest_row(interface, example) for example in examples]
    if policy != "truncate":
        return [examples[i] for i in fit(rows, window, policy)]
    cut = [shortened(interface, example, window) for example in examples]
    for example, row, short in zip(examples, rows, cut, strict=True):
        if short is None:
            raise ValueError(
                f"{example.id}: expected a row that fits {window} tokens once its prompt is cut, but what may not be "
                f"cut is longer (the whole row has {len(row) - 1}); shorten its answer, or exclude long rows"
            )
    return [short for short in cut if short is not None]


def chosen(example: Example, scores: tuple[Score, ...]) -> Prediction:
    """The candidate with the highest mean token log-likelihood; the first one if several are equal."""
    assert isinstance(example, Choice)
    means = [score.mean for score in scores]
    best = max(range(len(means)), key=means.__getitem__)
    return Prediction(
        id=example.id,
        answer=best,
        correct=best == example.answer,
        confidence=1 / sum(math.exp(mean - means[best]) for mean in means),
        scores=tuple(means),
        num_tokens=tuple(score.num_tokens for score in scores),
    )
