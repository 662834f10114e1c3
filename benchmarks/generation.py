"""New tokens per second of the probe generator against one-at-a-time `generate`: same requests, prefill included.

python benchmarks/generation.py [--requests 128] [--rounds 4] [--data-dir DIR] [--out benchmarks/results]

A round is all requests by the engine and a share of them one at a time.
"""

from __future__ import annotations

import random
import time
from statistics import mean, median
from typing import Any

import torch
from timing import finish, options
from transformers import StoppingCriteria

from cplus import models
from cplus.data import interfaces
from cplus.data.examples import Example
from cplus.data.tasks import load_task
from cplus.models.decoding import LocalEngine, Request, Sampling, request_seed
from cplus.probes.settings import MAX_NEW_TOKENS, ProbeSettings, plan


def requests(interface: interfaces.Interface, anchors: list[Example], count: int) -> list[Request]:
    """What `cplus probe` would ask for these anchors."""
    settings = ProbeSettings()
    plans = [plan(index, anchors, settings) for index in range(count)]
    return [
        Request(index=p.index, prompt=interface.request(p.shots, p.topic), seed=request_seed(0, p.index)) for p in plans
    ]


class Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a row at a stop text, for the price of decoding it."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], begin: int) -> None:
        self._tokenizer, self._stop, self._begin = tokenizer, stop, begin

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        text = self._tokenizer.decode(input_ids[0, self._begin :])
        return torch.tensor([any(mark in text for mark in self._stop)], device=input_ids.device)


def one_at_a_time(loaded: models.Loaded, asked: list[Request], sampling: Sampling) -> dict[str, Any]:
    """transformers' own `generate`, a request at a time, with the same stop texts."""
    tokens, begin = 0, time.perf_counter()
    for request in asked:
        ids = torch.tensor([request.prompt], device=loaded.device)
        torch.manual_seed(request.seed)
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=sampling.max_new_tokens,
            stopping_criteria=[Stop(loaded.tokenizer, sampling.stop, ids.shape[1])],
            pad_token_id=loaded.tokenizer.pad_token_id,
        )
        tokens += out.shape[1] - ids.shape[1]
    return _figures(tokens, time.perf_counter() - begin)


def engine(loaded: models.Loaded, asked: list[Request], sampling: Sampling, rows: int) -> dict[str, Any]:
    """The generator's engine, from a cold prefix cache."""
    begin = time.perf_counter()
    samples = list(LocalEngine(loaded.model, loaded.tokenizer, rows=rows).sample(asked, sampling))
    return _figures(sum(len(sample.tokens) for sample in samples), time.perf_counter() - begin)


def _figures(tokens: int, seconds: float) -> dict[str, Any]:
    return {"new_tokens": tokens, "seconds": seconds, "rate": tokens / seconds}


def main() -> None:
    """Measure both side by side and print the ratio."""
    args = options(
        __doc__,
        model="smollm2-135m",
        task="arc_easy",
        interface="cloze",
        anchors=8,
        requests=128,
        rounds=4,
        rows=64,
    )
    loaded = models.load(args.model)
    task = load_task(args.task, args.data_dir)
    interface = interfaces.build(args.interface, loaded.tokenizer, wording=task.wording)
    anchors = random.Random(0).sample(list(task.examples), args.anchors)
    asked = requests(interface, anchors, args.requests)
    sampling = Sampling(temperature=0.8, max_new_tokens=MAX_NEW_TOKENS[args.interface], stop=interface.stop(anchors))
    engine(loaded, asked[:2], sampling, args.rows)  # first calls pay for set-up that is not generation
    rounds = []
    for turn in range(args.rounds):
        fast = engine(loaded, asked, sampling, args.rows)
        plain = one_at_a_time(loaded, asked[turn :: args.rounds], sampling)
        rounds.append({"engine": fast, "one_at_a_time": plain, "ratio": fast["rate"] / plain["rate"]})
    result = {
        "model": args.model,
        "task": args.task,
        "interface": args.interface,
        "anchors": args.anchors,
        "requests": args.requests,
        "prompt_tokens": mean(len(request.prompt) for request in asked),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "ratio": median(turn["ratio"] for turn in rounds),
    }
    bars = {"writing probes, new tokens a second / one at a time": (result["ratio"], ">=", 6.0)}
    finish("generation", result, args.out, bars)


if __name__ == "__main__":
    main()
