"""Fast scoring gives the numbers of one example at a time; greedy decoding is the argmax, step by step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cplus.core.rows import Encoded, shared_prefix
from cplus.data.examples import Choice, FreeForm, Message
from cplus.data.interfaces import build
from cplus.data.readers import read_file
from cplus.models import load
from cplus.models.decoding import LocalEngine
from cplus.models.scoring import log_likelihoods, predict, score_candidates, takes_block_masks

Tokens = tuple[int, ...]
TOLERANCE = 1e-4


@torch.no_grad()
def one_at_a_time(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The plain way: the whole text alone, all logits, a sum."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
    return sum(logits[len(prompt) + i - 1, token].item() for i, token in enumerate(answer))


def rows(count: int, *, longest: int, prefix: Tokens = (), seed: int = 0) -> tuple[list[Tokens], list[list[Tokens]]]:
    """Prompts of uneven length and two to five candidates of one to four tokens."""
    draw = random.Random(seed)

    def tokens(most: int) -> Tokens:
        return tuple(draw.randrange(5, 300) for _ in range(draw.randint(1, most)))

    prompts = [prefix + tokens(longest) for _ in range(count)]
    return prompts, [[tokens(4) for _ in range(draw.randint(2, 5))] for _ in range(count)]


def check(model: Any, prompts: Sequence[Tokens], candidates: Sequence[Sequence[Tokens]]) -> None:
    for prompt, own, scores in zip(prompts, candidates, score_candidates(model, prompts, candidates), strict=True):
        for answer, score in zip(own, scores, strict=True):
            assert score.num_tokens == len(answer)
            assert score.total == pytest.approx(one_at_a_time(model, prompt, answer), abs=TOLERANCE)


def test_scores_are_those_of_one_at_a_time(tiny: Any) -> None:
    for attention in ("sdpa", "eager"):
        if not (tiny.family == "gemma2" and attention == "sdpa"):  # its capped attention exists in eager form only
            tiny.model.set_attn_implementation(attention)
        for prefix in ((), tuple(range(20, 32))):
            prompts, candidates = rows(9, longest=12, prefix=prefix)
            assert shared_prefix(prompts) == prefix
            check(tiny.model, prompts, candidates)
    encoded = [Encoded(prompt, own[0]) for prompt, own in zip(prompts, candidates, strict=True)]
    for row, score in zip(encoded, log_likelihoods(tiny.model, encoded), strict=True):
        assert score.total == pytest.approx(one_at_a_time(tiny.model, row.prompt, row.target), abs=TOLERANCE)
        assert score.mean == score.total / len(row.target)


def test_rows_beyond_a_sliding_window_are_scored_apart_and_beyond_the_models_refused(make_tiny: Any) -> None:
    model = make_tiny("gemma2").model
    assert takes_block_masks(model, 32)
    assert not takes_block_masks(model, 33)
    check(model, *rows(4, longest=8, prefix=tuple(range(20, 60))))
    with pytest.raises(ValueError, match="1 of 2 rows are longer than the model's window of 512 tokens"):
        score_candidates(model, [(5,) * 512, (5,)], [[(6, 7)], [(6,)]])
    score_candidates(model, [(5,) * 512], [[(6,)]])


@torch.no_grad()
def argmax_loop(model: Any, prompt: Sequence[int], steps: int, ends: set[int]) -> list[int]:
    said: list[int] = []
    while len(said) < steps and not (said and said[-1] in ends):
        said.append(int(model(torch.tensor([[*prompt, *said]])).logits[0, -1].argmax()))
    return said


def test_greedy_is_the_argmax_of_each_step_and_may_begin_with_a_word(tiny: Any) -> None:
    prompts, _ = rows(5, longest=15, seed=3)
    engine, ends = LocalEngine(tiny.model, tiny.tokenizer, rows=2), {tiny.tokenizer.eos_token_id}
    for prompt, answer in zip(prompts, engine.greedy(prompts, max_new_tokens=12, word_first=False), strict=True):
        assert answer.tokens == argmax_loop(tiny.model, prompt, 12, ends)
        assert (answer.end == "end of text") == (answer.tokens[-1] in ends)
    for prompt, answer in zip(prompts, engine.greedy(prompts, max_new_tokens=6), strict=True):
        word, rest = answer.tokens[0], answer.tokens[1:]
        assert answer.prompt == prompt
        assert tiny.tokenizer.decode([word]).strip()
        assert rest == argmax_loop(tiny.model, [*prompt, word], 5, ends)


def test_predict_by_letter_is_the_argmax_over_the_letters_logits(tiny: Any) -> None:
    interface = build("letter", tiny.tokenizer)
    if tiny.family == "gemma2":
        tiny.model.config.sliding_window = 512
    examples = [Choice(id=str(i), question=f"Which {i}?", choices=("p", "q", "r", "s"), answer=i % 4) for i in range(6)]
    predictions = predict(tiny.model, interface, examples)
    for example, prediction in zip(examples, predictions, strict=True):
        with torch.no_grad():
            logits = tiny.model(torch.tensor([interface.prompt(example)])).logits[0, -1]
        among = logits[[tokens[0] for tokens in interface.candidates(example)]].softmax(0)
        assert prediction.id == example.id
        assert prediction.answer == int(among.argmax())
        assert prediction.correct == (prediction.answer == example.answer)
        assert prediction.confidence == pytest.approx(among.max().item(), abs=TOLERANCE)


def test_predict_by_cloze_compares_means_not_sums(tiny_llama: Any) -> None:
    interface = build("cloze", tiny_llama.tokenizer)
    example = Choice(id="q", question="Where do fish live?", choices=("in water", "z", "on the moon now"), answer=0)
    (prediction,) = predict(tiny_llama.model, interface, [example])
    prompt = interface.prompt(example)
    means = [one_at_a_time(tiny_llama.model, prompt, c) / len(c) for c in interface.candidates(example)]
    assert prediction.scores == pytest.approx(means, abs=TOLERANCE)
    assert prediction.answer == means.index(max(means))
    assert prediction.num_tokens == tuple(map(len, interface.candidates(example)))
    assert prediction.confidence == pytest.approx(max(torch.tensor(means).softmax(0).tolist()), abs=TOLERANCE)


def test_predict_in_words_is_judged_and_keeps_the_order(tiny_llama: Any) -> None:
    interface = build("freeform", tiny_llama.tokenizer)
    examples = [
        FreeForm(id=str(i), messages=(Message(role="user", content="Say " + "it " * i),), response="x")
        for i in range(4)
    ]
    seen: list[str] = []

    def judge(text: str, example: Any) -> bool:
        seen.append(example.id)
        return example.id == "2"

    predictions = predict(tiny_llama.model, interface, examples, judge=judge, max_new_tokens=5)
    assert [p.id for p in predictions] == seen == ["0", "1", "2", "3"]
    assert [p.correct for p in predictions] == [False, False, True, False]
    prompt = interface.prompt(examples[3])
    said = argmax_loop(tiny_llama.model, prompt, 5, {tiny_llama.tokenizer.eos_token_id})
    mean = one_at_a_time(tiny_llama.model, prompt, said) / len(said)
    assert predictions[3].confidence == pytest.approx(math.exp(mean), abs=TOLERANCE)
    assert predict(tiny_llama.model, interface, examples[:1], max_new_tokens=2)[0].correct is None


@pytest.mark.real
@pytest.mark.packaged
def test_gemma_batched_equals_one_at_a_time_and_begins_with_bos(
    packaged_folder: Callable[[str], Any], data_dir: Any
) -> None:
    loaded = load(packaged_folder("gemma-3-270m"))
    interface = build("cloze", loaded.tokenizer)
    for example in (examples := read_file(data_dir / "csqa.jsonl")[:2]):
        assert interface.prompt(example)[0] == loaded.tokenizer.bos_token_id
    for example, prediction in zip(examples, predict(loaded.model, interface, examples), strict=True):
        prompt = interface.prompt(example)
        plain = [one_at_a_time(loaded.model, prompt, c) / len(c) for c in interface.candidates(example)]
        assert prediction.scores == pytest.approx(plain, abs=TOLERANCE)
    begin, *rest = loaded.tokenizer.encode("The capital of France is Paris, and the city lies on the river Seine.")
    sentence = Encoded((begin,), tuple(rest))
    without = Encoded(sentence.target[:1], sentence.target[1:])
    with_bos, bare = (-score.mean for score in log_likelihoods(loaded.model, [sentence, without]))
    assert with_bos < 3 < bare  # measured 2.6 and 4.8
