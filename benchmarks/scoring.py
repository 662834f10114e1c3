"""How much faster scoring is than the plain loop, on the same rows, with equal answers.

python benchmarks/scoring.py [--rows 128] [--threads 2] [--data-dir DIR] [--out benchmarks/results]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from timing import finish, in_turn, options

from cplus.core.rows import shared_prefix
from cplus.data.examples import Example, Prediction
from cplus.data.interfaces import Interface, build
from cplus.data.tasks import load_task
from cplus.models import load
from cplus.models.scoring import PackedRow, predict

BARS = {"cloze": 3.0, "letter": 1.6}
TOLERANCE = 1e-4
# Both ways take turns, so that a busy machine slows both.
CHUNK = 64


@torch.inference_mode()
def plain(model: Any, interface: Interface, examples: Sequence[Example]) -> list[list[float]]:
    """One text at a time, all logits: a letter is read off one pass, other choices take one pass each."""
    device = next(model.parameters()).device
    scores = []
    for example in examples:
        prompt, own = interface.prompt(example), interface.candidates(example)
        if all(len(candidate) == 1 for candidate in own):
            last = model(torch.tensor([prompt], device=device)).logits[0].log_softmax(-1)[-1]
            scores.append([last[candidate[0]].item() for candidate in own])
            continue
        scores.append([])
        for candidate in own:
            logits = model(torch.tensor([[*prompt, *candidate]], device=device)).logits[0].log_softmax(-1)
            tokens = logits[range(len(prompt) - 1, len(prompt) + len(candidate) - 1), list(candidate)]
            scores[-1].append(tokens.mean().item())
    return scores


def limit(model: Any, interface: Interface, examples: Sequence[Example]) -> float:
    """The ratio of multiplications alone: one a weight and token, the output layer only where logits are needed."""
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    body -= 0 if model.config.tie_word_embeddings else head
    rows = [PackedRow(interface.prompt(example), interface.candidates(example)) for example in examples]
    shared = len(shared_prefix([row.prompt for row in rows]))
    slow = fast = 0
    for row in rows:
        letters = all(len(candidate) == 1 for candidate in row.candidates)
        passes = [0] if letters else [len(candidate) for candidate in row.candidates]
        slow += sum((len(row.prompt) + length) * (body + head) for length in passes)
        fast += (len(row) - shared) * body + row.kept * head
    return slow / (fast + shared * body)


def differences(slow: Sequence[Sequence[float]], fast: Sequence[Prediction]) -> tuple[float, int]:
    """The largest difference of a candidate's log-likelihood, and how many answers differ."""
    pairs = [
        abs(ours - theirs) * count
        for theirs_all, prediction in zip(slow, fast, strict=True)
        for theirs, ours, count in zip(theirs_all, prediction.scores, prediction.num_tokens, strict=True)
    ]
    answers = [max(range(len(scores)), key=scores.__getitem__) for scores in slow]
    return max(pairs), sum(a != prediction.answer for a, prediction in zip(answers, fast, strict=True))


def measure(model: Any, interface: Interface, examples: Sequence[Example]) -> dict[str, Any]:
    """Both ways in turn over chunks of the rows; the first pass of each is not counted."""
    slow: list[list[float]] = []
    fast: list[Prediction] = []
    chunks = {name: (examples[i : i + CHUNK] for i in range(0, len(examples), CHUNK)) for name in ("plain", "cplus")}
    plain(model, interface, examples[:2])
    predict(model, interface, examples[:2])
    arms = {
        "plain": lambda: slow.extend(plain(model, interface, next(chunks["plain"]))),
        "cplus": lambda: fast.extend(predict(model, interface, next(chunks["cplus"]))),
    }
    seconds = {name: sum(each) for name, each in in_turn(arms, rounds=-(-len(examples) // CHUNK), warm=0).items()}
    error, different = differences(slow, fast)
    return {
        "interface": interface.name,
        "rows": len(examples),
        "plain_rows_per_second": len(examples) / seconds["plain"],
        "cplus_rows_per_second": len(examples) / seconds["cplus"],
        "ratio": seconds["plain"] / seconds["cplus"],
        "flop_limit": limit(model, interface, examples),
        "bar": BARS[interface.name],
        "max_log_likelihood_difference": error,
        "different_answers": different,
    }


def main() -> None:
    """Measure both interfaces; exit 1 where the numbers differ."""
    asked = options(__doc__, model="smollm2-135m", task="csqa", rows=128)
    loaded = load(asked.model)
    task = load_task(asked.task, asked.data_dir)
    bound = [build(name, loaded.tokenizer, wording=task.wording) for name in BARS]
    found = [measure(loaded.model, interface, task.examples[: asked.rows]) for interface in bound]
    figures = {"model": asked.model, "task": asked.task, "threads": asked.threads, "results": found}
    bars = {f"scoring by {each['interface']} / plain loop": (each["ratio"], ">=", each["bar"]) for each in found}
    finish("scoring", figures, asked.out, bars)
    if any(e["max_log_likelihood_difference"] > TOLERANCE or e["different_answers"] for e in found):
        sys.exit("the fast scores are not those of the plain loop")


if __name__ == "__main__":
    main()
