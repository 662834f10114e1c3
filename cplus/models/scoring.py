"""A model's answers: the likeliest candidate or decoded text, each with its log-likelihood, bounded in memory."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

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
# Scoring is compute-bound: on a CPU, batches larger than the caches are slower. Decoding reads all weights for each
# token of a batch, so a batch is as large as the key-value cache allows.
_TOKENS = {"cpu": (512, 8192), "mps": (4096, 8192), "cuda": (16384, 65536)}
"""Tokens that are scored together and that are decoded together."""


def scored(model: nn.Module, lengths: Sequence[int], kept: Sequence[int], what: str) -> Iterator[list[int]]:
    """Indices of rows to score together; `kept` is the number of positions at which each row needs logits."""
    if not lengths:
        return
    share = max(positions / length for positions, length in zip(kept, lengths, strict=True))
    vocabulary = int(bare(model).config.get_text_config().vocab_size)
    max_tokens = min(_together(model)[0], int(_MAX_LOGITS / (vocabulary * share)))
    with progress() as bars:
        task = bars.add_task(what, total=len(lengths))
        for batch in length_sorted_batches(lengths, max_tokens=max_tokens, max_rows=_MAX_ROWS):
            yield batch
            bars.advance(task, len(batch))


def _together(model: nn.Module) -> tuple[int, int]:
    return _TOKENS.get(next(model.parameters()).device.type, _TOKENS["cpu"])


def bare(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper: it includes the adapters, and its forward has named arguments."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


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


def packed_scores(model: Any, rows: Sequence[PackedRow], offset: int, prefix: Any | None) -> list[list[float]]:
    """Each candidate's summed log-likelihood; `prefix` is the key-value cache of `offset` tokens before all rows."""
    device = next(model.parameters()).device
    width, keep = max(map(len, rows)), max(row.kept for row in rows)
    # Left-padded tokens, their positions and their segments: 0 for a prompt, 1, 2, ... for candidates, -1 for padding.
    ids, positions, segments = torch.zeros(3, len(rows), width, dtype=torch.long)
    segments -= 1
    where = []  # row, column among the kept, and token of everything to be predicted
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
                where += [(i, c - (width - keep), token) for c, token in zip(columns, target, strict=True)]
            column, begin = cells.stop, offset + len(row.prompt)
    # Every token sees the prefix and the prompt, a candidate otherwise only itself.
    segments = segments.to(device)
    seen = ((segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)).tril()
    seen = torch.cat([seen.new_ones(len(rows), width, offset), seen], dim=2)[:, None]
    if model.config._attn_implementation != "sdpa":  # eager attention adds the mask to its scores
        seen = torch.zeros_like(seen, dtype=model.dtype).masked_fill_(~seen, torch.finfo(model.dtype).min)
    past = copy.deepcopy(prefix)
    if past is not None:
        past.batch_repeat_interleave(len(rows))
    logits = model(
        input_ids=ids.to(device),
        attention_mask=seen,
        position_ids=positions.to(device),
        past_key_values=past,
        use_cache=past is not None,
        logits_to_keep=keep,
    ).logits.float()
    at, kept, token = torch.tensor(where, device=device).unbind(1)
    chosen = iter((logits[at, kept, token] - logits.logsumexp(2)[at, kept]).tolist())
    return [[sum(next(chosen) for _ in candidate) for candidate in row.candidates] for row in rows]


# Log-likelihoods of answers: each prompt is processed once for all its candidates, with logits at answers only.


@dataclass(frozen=True, slots=True)
class Score:
    """One answer's log-likelihood: the sum over its tokens, and their number."""

    total: float
    num_tokens: int
    likeliest: bool | None = None
    """Whether each of its tokens is the most likely one at its position, where that was asked."""

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
    scores: dict[int, tuple[Score, ...]] = {}
    for batch in scored(model, [len(row) for row in rows], [row.kept for row in rows], what):
        totals = packed_scores(bare(model), [rows[i] for i in batch], len(prefix), past)
        for index, own in zip(batch, totals, strict=True):
            scores[index] = tuple(map(Score, own, map(len, rows[index].candidates)))
    return [scores[i] for i in range(len(rows))]


@torch.inference_mode()
def log_likelihoods(model: nn.Module, rows: Sequence[Encoded], *, what: str = "scoring") -> list[Score]:
    """The score of each row's target in one pass; if it is the likeliest, greedy decoding gives this target."""
    check_window(model, [len(row) - 1 for row in rows])
    scores: dict[int, Score] = {}
    for batch in scored(model, [len(row) for row in rows], [len(row.target) for row in rows], what):
        logits, labels = target_logits(bare(model), [rows[i] for i in batch])
        tokens = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(2)
        totals = tokens.masked_fill(labels < 0, 0.0).sum(1).tolist()
        likeliest = ((logits.argmax(2) == labels) | (labels < 0)).all(1).tolist()
        for index, total, repeats in zip(batch, totals, likeliest, strict=True):
            scores[index] = Score(total, rows[index].num_scored, repeats)
    return [scores[i] for i in range(len(rows))]


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
    candidates = {i: own for i, example in enumerate(examples) if (own := interface.candidates(example))}
    prompts = [tuple(interface.prompt(example)) for example in examples]
    scores = score_candidates(model, [prompts[i] for i in candidates], list(candidates.values()), what=what)
    found = {i: _choice(examples[i], own) for i, own in zip(candidates, scores, strict=True)}
    asked = [i for i in range(len(examples)) if i not in candidates]
    if asked:
        longest = max(len(prompts[i]) for i in asked) + max_new_tokens
        engine = LocalEngine(bare(model), interface.tokenizer, rows=max(1, min(ROWS, _together(model)[1] // longest)))
        said = engine.greedy(
            [prompts[i] for i in asked],
            max_new_tokens=max_new_tokens,
            stop=interface.answer_stop,
            word_first=word_first,
            what=what,
        )
        for i, row in zip(asked, said, strict=True):
            text, score = row.text.strip(), Score(row.total, len(row.tokens))
            found[i] = spoken(examples[i], text, None if judge is None else judge(text, examples[i]), score)
    return [found[i] for i in range(len(examples))]


def repeated(
    model: nn.Module, interface: Interface, examples: Sequence[Example], *, what: str = "predicting"
) -> list[Prediction]:
    """Whether the model's greedy answer equals each row's response, token for token, from one pass without decoding.

    The answer is the response if they are equal, otherwise empty, because the model's own text is not known. The score
    is the response's mean token log-likelihood.
    """
    scores = log_likelihoods(model, [interface.encode(example) for example in examples], what=what)
    return [
        spoken(example, example.response if own.likeliest and isinstance(example, FreeForm) else "", own.likeliest, own)
        for example, own in zip(examples, scores, strict=True)
    ]


def spoken(example: Example, answer: str, correct: bool | None, score: Score) -> Prediction:
    """An answer in words, with the score of its tokens."""
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


def _choice(example: Example, scores: tuple[Score, ...]) -> Prediction:
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
