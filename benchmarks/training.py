"""Training with the gate against training without it, on a real model: step, refresh, batch of one, whole epoch.

python benchmarks/training.py [--data-dir DIR] [--rounds 7] [--out benchmarks/results]
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timing import finish, in_turn, medians, options, peak, ratio, resident
from torch import Tensor, nn
from torch.nn import functional as F

from cplus import METHODS, models
from cplus.base.terminal import console
from cplus.core.engine import Engine
from cplus.core.evidence import MeanGradient, Source, borrowed_gradients, taken
from cplus.core.gates import Collaborative
from cplus.core.guard import Guard
from cplus.core.losses import answer_losses
from cplus.core.optim import AdamW
from cplus.core.rows import Encoded, shared_prefix
from cplus.data import interfaces
from cplus.data.tasks import load_task
from cplus.methods.table import Material, Past
from cplus.training.loop import Event, Refreshed, Schedule, adapt, prepare

OPTIONS = {"lr": 1e-6, "weight_decay": 0.1}
NUM_NEW, ANCHORS = 683, 8  # Qwen3-0.6B's initially wrong rows of csqa: the paper's setting of App. E.12


def encoded(base: models.Loaded, task: str, data: Path | None) -> list[Encoded]:
    """A task's rows by the letter interface."""
    found = load_task(task, data)
    bound = interfaces.build("letter", base.tokenizer, wording=found.wording)
    return [bound.encode(example) for example in found.examples]


def sources(rows: Sequence[Encoded], probes: int) -> tuple[Source, ...]:
    """Rows of the task in the roles of anchors and probes: what they say does not change what they cost."""
    return (
        Source(name="anchors", weight=0.5, rows=rows[:ANCHORS]),
        Source(name="probes", weight=0.5, rows=rows[ANCHORS : ANCHORS + probes]),
    )


def guarded(optimizer: torch.optim.Optimizer, model: nn.Module, rows: Sequence[Encoded], probes: int) -> Guard:
    """CPLUS's gate on an optimizer."""
    evidence = MeanGradient(model=model, sources=sources(rows, probes))
    return Guard(optimizer, model, evidence=evidence, gate=Collaborative(beta=0.9))


def whole_step(base: nn.Module, rows: Sequence[Encoded], rounds: int) -> dict[str, Any]:
    """Forward, backward and update of eight rows of about 190 tokens, gated and not."""
    batch = sorted(rows, key=lambda row: abs(len(row) - 190))[:8]
    arms: dict[str, Callable[[], object]] = {}
    for name in ("ungated", "gated", "gated by hooks"):
        model = copy.deepcopy(base).train()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
        if name == "gated":
            optimizer = AdamW(model.parameters(), **OPTIONS)
        if name != "ungated":
            guarded(optimizer, model, rows, probes=8).refresh()
        arms[name] = partial(step, model, optimizer, batch)
    seconds = in_turn(arms, rounds=rounds, warm=2)
    return {
        "rows": len(batch),
        "tokens": sum(map(len, batch)) / len(batch),
        "seconds": medians(seconds),
        "ratio": {name: ratio(seconds, name, "ungated") for name in ("gated", "gated by hooks")},
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Encoded]) -> None:
    """One update."""
    optimizer.zero_grad()
    answer_losses(model, batch).mean().backward()
    optimizer.step()


def full_logit_loss(model: nn.Module, row: Encoded) -> Tensor:
    """One example's loss the straightforward way: all logits, labels shifted by one."""
    ids = torch.tensor([[*row.prompt, *row.target]])
    labels = torch.tensor([[-100] * len(row.prompt) + list(row.labels)])
    logits = model(input_ids=ids).logits.float()
    return F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100)


def one_at_a_time(model: nn.Module, params: Sequence[nn.Parameter], parts: Sequence[Source]) -> list[Tensor]:
    """The evidence by a loop over examples with all logits."""
    with borrowed_gradients(model, params) as passes:
        for part in parts:
            for row in part.rows:
                (full_logit_loss(model, row) * (part.weight / len(part.rows))).backward()  # type: ignore[no-untyped-call]
        return taken(Engine(model), params, passes)


def refresh(model: nn.Module, rows: Sequence[Encoded], probes: int, rounds: int) -> dict[str, Any]:
    """Evidence in length-sorted batches with logits at the answers only, against the loop; and how equal they are."""
    params, parts = list(model.parameters()), sources(rows, probes)
    fast = MeanGradient(model=model, sources=parts)
    found: dict[str, list[Tensor]] = {}
    arms: dict[str, Callable[[], object]] = {
        "loop": lambda: found.update(loop=one_at_a_time(model, params, parts)),
        "cplus": lambda: found.update(cplus=fast(params, 0).vectors[0]),
    }
    seconds = in_turn(arms, rounds=rounds, warm=0)
    difference = math.sqrt(
        sum(float((a - b).square().sum()) for a, b in zip(found["loop"], found["cplus"], strict=True))
    )
    norm = math.sqrt(sum(float(g.square().sum()) for g in found["loop"]))
    used = [row for part in parts for row in part.rows]
    tokens = sum(map(len, used))
    return {
        "rows": len(used),
        "tokens_a_second": {name: tokens / median(each) for name, each in seconds.items()},
        "ratio": ratio(seconds, "loop", "cplus"),
        "flop_limit": limit(model, parts),
        "relative_difference": difference / norm,
    }


def limit(model: Any, parts: Sequence[Source]) -> float:
    """The ratio of multiplications: the loop puts all tokens through all layers, the output layer included."""
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters()) - head
    rows = [row for part in parts for row in part.rows]
    shared = len(shared_prefix([row.prompt for row in rows]))
    slow = sum(map(len, rows)) * (body + head)
    fast = (shared + sum(len(row) - 1 - shared for row in rows)) * body + len(rows) * head
    return slow / fast


class MaskedAdamW:
    """A hand-written AdamW with the mask, a tensor at a time: what one writes first."""

    def __init__(self, params: Sequence[nn.Parameter], evidence: Sequence[Tensor], beta: float = 0.9) -> None:
        self.params, self.evidence, self.beta, self.t = params, evidence, beta, 0
        self.m, self.v, self.ema = ([torch.zeros_like(p) for p in params] for _ in range(3))

    @torch.no_grad()
    def step(self) -> None:
        """Moments, bias correction, decoupled decay; then sign test, average and the masked update."""
        self.t += 1
        lr, decay = OPTIONS["lr"], OPTIONS["weight_decay"]
        for p, g_hat, m, v, ema in zip(self.params, self.evidence, self.m, self.v, self.ema, strict=True):
            assert p.grad is not None
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            m_hat, v_hat = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
            delta = -lr * (m_hat / (v_hat.sqrt() + 1e-8) + decay * p)
            mask = (g_hat * delta <= 0).float()
            ema.mul_(self.beta).add_(mask, alpha=1 - self.beta)
            p.add_(delta * (ema / (1 - self.beta**self.t)))


def batch_of_one(base: nn.Module, rows: Sequence[Encoded], rounds: int) -> dict[str, Any]:
    """The paper's protocol, one example an update, against a straightforward loop."""
    plain, fast = copy.deepcopy(base).train(), copy.deepcopy(base).train()
    params = list(plain.parameters())
    hand = MaskedAdamW(params, one_at_a_time(plain, params, sources(rows, 8)))
    optimizer = AdamW(fast.parameters(), **OPTIONS)
    guarded(optimizer, fast, rows, probes=8).refresh()
    order = {"straightforward": iter(rows[16:]), "cplus": iter(rows[16:])}

    def straightforward() -> None:
        for p in params:
            p.grad = None
        full_logit_loss(plain, next(order["straightforward"])).backward()  # type: ignore[no-untyped-call]
        hand.step()

    def cplus() -> None:
        step(fast, optimizer, [next(order["cplus"])])

    seconds = in_turn({"straightforward": straightforward, "cplus": cplus}, rounds=rounds, warm=2)
    return {
        "steps_a_second": {name: 1 / each for name, each in medians(seconds).items()},
        "ratio": ratio(seconds, "straightforward", "cplus"),
    }


def epoch(base: nn.Module, rows: Sequence[Encoded], batch_size: int, sizes: Sequence[int]) -> dict[str, Any]:
    """A whole epoch of SFT and one of CPLUS by the library's own loop, their steps taken in turn.

    The steps do not depend on the number of probes, so the larger banks add their own refresh to the same steps.
    """
    past = Past(name="past", anchors=rows[:ANCHORS], probes=rows[ANCHORS : ANCHORS + sizes[0]])
    material = Material(new=list(rows[-NUM_NEW:]), past=(past,))
    spent = {name: {"steps": 0.0, "refresh": 0.0} for name in ("sft", "cplus")}
    streams: dict[str, Iterator[Event]] = {}
    for name in spent:
        model = copy.deepcopy(base)
        optimizer = AdamW(model.parameters(), **OPTIONS)
        prepared = prepare(METHODS[name], optimizer, model, material, seed=0)
        streams[name] = adapt(model, optimizer, prepared, schedule=Schedule(epochs=1, batch_size=batch_size), seed=0)
    while streams:
        for name in list(streams):
            begin = time.perf_counter()
            event = next(streams[name], None)
            spent[name]["refresh" if isinstance(event, Refreshed) else "steps"] += time.perf_counter() - begin
            if event is None:
                del streams[name]
    params = list(model.parameters())
    refreshes = {sizes[0]: spent["cplus"]["refresh"]}
    for size in sizes[1:]:
        begin = time.perf_counter()
        MeanGradient(model=model, sources=sources(rows, size))(params, 0)
        refreshes[size] = time.perf_counter() - begin
    sft, steps = sum(spent["sft"].values()), spent["cplus"]["steps"]
    return {
        "batch_size": batch_size,
        "new_rows": NUM_NEW,
        "sft_seconds": sft,
        "cplus_step_seconds": steps,
        "refresh_seconds": refreshes,
        "ratio": {size: (steps + each) / sft for size, each in refreshes.items()},
        "flop_formula": {size: 1 + (ANCHORS + size) / NUM_NEW for size in sizes},
    }


def refresh_memory(model: nn.Module, rows: Sequence[Encoded]) -> dict[str, float]:
    """What a refresh holds at its peak, in bytes per parameter: one gradient and the activations of one batch."""
    guard = guarded(AdamW(model.parameters(), **OPTIONS), model, rows, probes=32)
    before = resident()
    during = peak(guard.refresh) - before
    count = sum(p.numel() for p in model.parameters())
    held = resident() - before
    guard.detach()
    return {"peak_bytes_a_parameter": during / count, "held_bytes_a_parameter": held / count}


def main() -> None:
    """Measure, print the bars, write the JSON."""
    asked = options(__doc__, model="smollm2-135m", rounds=7, batch_size=8)
    base = models.load(asked.model)
    short, longer = encoded(base, "csqa", asked.data_dir), encoded(base, "medqa", asked.data_dir)
    figures: dict[str, Any] = {"model": asked.model}
    for name, measure in {
        "step": lambda: whole_step(base.model, longer, asked.rounds),
        "refresh": lambda: refresh(base.model, short, 32, 3),
        "batch_of_one": lambda: batch_of_one(base.model, short, asked.rounds),
        "refresh_memory": lambda: refresh_memory(base.model, short),
        "epoch": lambda: epoch(base.model, short, asked.batch_size, (32, 128, 512)),
    }.items():
        figures[name] = measure()
        console.print(f"{name}: {figures[name]}")
    bars = {
        "gated training step / ungated": (figures["step"]["ratio"]["gated"], "<=", 1.10),
        "refresh / one-at-a-time loop, tokens a second": (figures["refresh"]["ratio"], ">=", 1.8),
        "evidence, relative difference": (figures["refresh"]["relative_difference"], "<=", 1e-5),
        "batch-1 steps a second / straightforward loop": (figures["batch_of_one"]["ratio"], ">=", 2.0),
        "epoch of CPLUS with N=32 / epoch of SFT": (figures["epoch"]["ratio"][32], "<=", 1.15),
    }
    finish("training", figures, asked.out, bars)


if __name__ == "__main__":
    main()
