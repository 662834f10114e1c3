"""The optimizer's step with the gate against torch's fused AdamW step: time by size, memory, and the memory limit.

python benchmarks/steps.py [--sizes 1 4 16 64 135] [--rounds 9] [--out benchmarks/results] [--json]
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import finish, in_turn, medians, peak, ratio, resident
from torch import Tensor, nn

from cplus.base.terminal import console
from cplus.core import kernels
from cplus.core.evidence import Reference
from cplus.core.gates import Collaborative, Elementwise, stored
from cplus.core.guard import Guard
from cplus.core.optim import AdamW

# Bytes a step must move for each parameter: theta and two moments in and out, the gradient in; signs and average.
FUSED_BYTES = 4 * (2 + 1 + 2 + 2)
GATED_BYTES = {"float32": FUSED_BYTES + 0.25 + 8, "bfloat16": FUSED_BYTES + 0.25 + 4, "uint8": FUSED_BYTES + 0.25 + 2}
GATED_BYTES["coefficients"] = FUSED_BYTES + 4  # bfloat16 in and out; the signs are one small buffer of zeros
OPTIONS = {"lr": 1e-5, "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class Given:
    """Evidence that is already known: the benchmark is about the step, not about the refresh."""

    seed: int

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """Random gradients, the same at every call."""
        generator = torch.Generator().manual_seed(self.seed)
        return Reference(vectors=[[torch.randn(p.shape, generator=generator) for p in params]])


@dataclass(frozen=True, kw_only=True)
class GivenCoefficients:
    """Stored coefficients, as of the row `cplus-curvature`."""

    seed: int

    def __call__(self, params: Sequence[nn.Parameter], refresh: int) -> Reference:
        """Random numbers in [0, 1], the same at every call."""
        generator = torch.Generator().manual_seed(self.seed)
        return Reference(vectors=[[torch.rand(p.shape, generator=generator).bfloat16() for p in params]])


def shapes(millions: float) -> list[tuple[int, ...]]:
    """Tensors as a small Llama has them: a fifth of the parameters in the embedding, the rest in its layers."""
    width = 576 if millions >= 16 else 144
    total = int(millions * 1e6)
    layer = [(width, width), (width // 3, width), (width // 3, width), (width, width)]
    layer += [(width * 8 // 3, width)] * 2 + [(width, width * 8 // 3), (width,), (width,)]
    count = max(1, int(total * 0.79) // sum(torch.Size(s).numel() for s in layer))
    rest = total - count * sum(torch.Size(s).numel() for s in layer)
    return [(rest // width, width), *layer * count]


class Bag(nn.Module):
    """Parameters and nothing else; all arms share the gradients."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn_like(g) * 0.02) for g in gradients])
        for p, g in zip(self.weights, gradients, strict=True):
            p.grad = g


def gradients_of(millions: float) -> list[Tensor]:
    """One random gradient a tensor."""
    torch.manual_seed(0)
    return [torch.randn(shape) * 1e-3 for shape in shapes(millions)]


def arm(name: str, gradients: Sequence[Tensor]) -> tuple[Callable[[], object], Guard | None]:
    """One way to take the step, ready to be called, and its guard."""
    bag = Bag(gradients)
    kind, _, ema = name.partition(" ")
    made = (
        AdamW(bag.parameters(), **OPTIONS)
        if kind == "one-pass"
        else torch.optim.AdamW(bag.parameters(), fused=True, **OPTIONS)
    )
    if kind == "torch":
        return made.step, None
    if ema == "coefficients":
        fixed = Elementwise(stored, uses="coefficients", whole=False)
        guard = Guard(made, bag, evidence=GivenCoefficients(seed=1), gate=fixed)
    else:
        guard = Guard(made, bag, evidence=Given(seed=1), gate=Collaborative(beta=0.9, ema=ema or "float32"))  # type: ignore[arg-type]
    if kind == "plain":
        guard.__dict__["compiled"] = False
    guard.refresh()
    return made.step, guard


ARMS = (
    "torch",
    "one-pass float32",
    "one-pass bfloat16",
    "one-pass uint8",
    "one-pass coefficients",
    "hooks float32",
    "hooks uint8",
    "hooks coefficients",
    "plain float32",
)


def time_steps(millions: float, rounds: int) -> dict[str, Any]:
    """All arms in turn at one size."""
    gradients = gradients_of(millions)
    made = {name: arm(name, gradients) for name in ARMS}
    seconds = in_turn({name: step for name, (step, _) in made.items()}, rounds=rounds, warm=2)
    return {
        "parameters": sum(g.numel() for g in gradients),
        "compiled": {name: guard.compiled for name, (_, guard) in made.items() if guard is not None},
        "seconds": medians(seconds),
        "ratio": {name: ratio(seconds, name, "torch") for name in ARMS[1:]},
    }


def _memory(name: str, millions: float, answer: Any) -> None:
    kernels.WORTH_COMPILING = 0  # small tensors first, so that loading the kernels is not counted as memory of the gate
    small, _ = arm(name, gradients_of(1))
    small()
    gradients = gradients_of(millions)
    bag = Bag(gradients)
    kind, _, ema = name.partition(" ")
    made = (
        AdamW(bag.parameters(), **OPTIONS)
        if kind == "one-pass"
        else torch.optim.AdamW(bag.parameters(), fused=True, **OPTIONS)
    )
    made.step()
    before = resident()
    ungated = peak(made.step) - before
    guard = Guard(made, bag, evidence=Given(seed=1), gate=Collaborative(beta=0.9, ema=ema))  # type: ignore[arg-type]
    guard.refresh()
    made.step()
    held = resident()
    during = peak(made.step) - held
    count = sum(g.numel() for g in gradients)
    answer.put(
        {
            "held_bytes_a_parameter": (held - before) / count,
            "reported_bytes_a_parameter": guard.nbytes / count,
            "temporary_bytes": during,
            "temporary_bytes_ungated": ungated,
            "temporary_bytes_a_parameter": during / count,
        }
    )


def memory(name: str, millions: float) -> dict[str, float]:
    """What the gate holds and what a step takes on top, as the system counts it, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_memory, args=(name, millions, answer))
    process.start()
    found: dict[str, float] = answer.get(timeout=600)
    process.join()
    return found


def bandwidth(rounds: int) -> float:
    """Bytes a second of the machine's memory: the best of three plain passes over arrays far larger than its caches."""
    a, b, c = (torch.rand(1 << 27) for _ in range(3))
    passes = {
        "a *= s": (2, lambda: a.mul_(1.0)),
        "a += b": (3, lambda: a.add_(b)),
        "a += b c": (4, lambda: a.addcmul_(b, c)),
    }
    seconds = medians(in_turn({name: work for name, (_, work) in passes.items()}, rounds=rounds, warm=2))
    return max(arrays * a.nbytes / seconds[name] for name, (arrays, _) in passes.items())


def roofline(largest: dict[str, Any], rate: float) -> dict[str, Any]:
    """How close each arm comes to one pass over what it must touch."""
    count = largest["parameters"]
    found = {}
    for name, moved in {"torch": FUSED_BYTES, **{f"one-pass {k}": v for k, v in GATED_BYTES.items()}}.items():
        limit = moved * count / rate
        found[name] = {
            "bytes_a_parameter": moved,
            "limit_seconds": limit,
            "share_of_bandwidth": limit / largest["seconds"][name],
            "limit_ratio": moved / FUSED_BYTES,
        }
    return found


def main() -> None:
    """Measure, print the bars, write the JSON: one file per vector width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 4, 16, 64, 135], help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps = {}
    for size in options.sizes:
        steps[f"{size:g}M"] = found = time_steps(size, options.rounds)
        console.print(
            f"{size:g} M parameters: torch {found['seconds']['torch'] * 1e3:.1f} ms; times that: "
            + ", ".join(f"{k} {v:.2f}" for k, v in found["ratio"].items())
        )
    rate = bandwidth(options.rounds)
    largest = steps[f"{options.sizes[-1]:g}M"]
    gc.collect()
    held = {name: memory(name, options.sizes[-1]) for name in ("one-pass float32", "one-pass uint8", "hooks float32")}
    figures = {
        "processor": {"name": kernels.processor(), "vector_bits": kernels.vector()[0], "kernels": "C++"},
        "steps": steps,
        "bandwidth_bytes_a_second": rate,
        "roofline": roofline(largest, rate),
        "memory": held,
    }
    fused, small, hooks = held["one-pass float32"], held["one-pass uint8"], held["hooks float32"]
    bars = {
        "one-pass AdamW step / torch's fused step": (largest["ratio"]["one-pass float32"], "<=", 1.8),
        "one-pass, uint8 average / torch's fused step": (largest["ratio"]["one-pass uint8"], "<=", 2.2),
        "one-pass, stored coefficients / torch's fused step": (largest["ratio"]["one-pass coefficients"], "<=", 2.0),
        "hooks on torch's fused AdamW / torch's fused step": (largest["ratio"]["hooks float32"], "<=", 4.0),
        "bytes per parameter, one-pass, fp32 average": (fused["held_bytes_a_parameter"], "<=", 4.5),
        "bytes per parameter, one-pass, uint8 average": (small["held_bytes_a_parameter"], "<=", 1.5),
        "temporary megabytes, one-pass, fp32 average": (fused["temporary_bytes"] / 1e6, "<=", 64.0),
        "temporary megabytes, one-pass, uint8 average": (small["temporary_bytes"] / 1e6, "<=", 64.0),
        "bytes per parameter, hooks": (hooks["held_bytes_a_parameter"], "<=", 4.5),
        "temporary bytes per parameter, hooks (a copy of theta is 4)": (
            hooks["temporary_bytes_a_parameter"],
            "<=",
            4.5,
        ),
    }
    finish(f"steps-{torch.backends.cpu.get_cpu_capability().lower()}", figures, bars, options)


if __name__ == "__main__":
    main()
