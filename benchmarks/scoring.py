"""How much faster scoring is than the plain loop, on the same rows, with equal answers.

python benchmarks/scoring.py [--rows 128] [--threads 2] [--data-dir DIR] [--json]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cplus.base.terminal import output, print_json, track
from cplus.core.rows import shared_prefix
from cplus.data.examples import Example, Prediction
from cplus.data.interfaces import Interface, build
from cplus.data.tasks import load_task
from cplus.models import load, scoring
from cplus.models.scoring import PackedRow

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
    plain(model, interface, examples[:2])
    scoring(model, interface, examples[:2])
    seconds = {"plain": 0.0, "cplus": 0.0}
    slow: list[list[float]] = []
    fast: list[Prediction] = []
    for start in track(range(0, len(examples), CHUNK), interface.name, total=-(-len(examples) // CHUNK)):
        chunk = examples[start : start + CHUNK]
        begin = time.perf_counter()
        slow += plain(model, interface, chunk)
        middle = time.perf_counter()
        fast += scoring(model, interface, chunk)
        seconds["plain"] += middle - begin
        seconds["cplus"] += time.perf_counter() - middle
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", default="csqa")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(options.model)
    task = load_task(options.task, options.data_dir)
    found = [
        measure(loaded.model, build(name, loaded.tokenizer, wording=task.wording), task.examples[: options.rows])
        for name in BARS
    ]
    if options.json:
        print_json({"model": options.model, "task": options.task, "threads": options.threads, "results": found})
    for each in [] if options.json else found:
        output.print(
            f"{each['interface']}: {each['ratio']:.2f}x the plain loop (bar {each['bar']}, limit by FLOPs "
            f"{each['flop_limit']:.2f}x), {each['plain_rows_per_second']:.1f} -> {each['cplus_rows_per_second']:.1f} "
            f"rows/s, largest difference {each['max_log_likelihood_difference']:.1e}, "
            f"{each['different_answers']} answers differ"
        )
    if any(e["max_log_likelihood_difference"] > TOLERANCE or e["different_answers"] for e in found):
        sys.exit("the fast scores are not those of the plain loop")


if __name__ == "__main__":
    main()
