"""The optimizer's step with the gate against torch's fused AdamW step: time by size, memory, and the memory limit.

python benchmarks/steps.py [--sizes 1 4 16 64 135] [--rounds 9] [--out benchmarks/results]
python benchmarks/steps.py --counts 1 --out benchmarks/results    syncs, launches and copies on the pretend accelerator
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import finish, in_turn, medians, options, peak, ratio, resident
from torch import Tensor, nn

from cplus.base.terminal import console
from cplus.core import kernels
from cplus.core.evidence import Reference
from cplus.core.gates import Collaborative, Elementwise, stored
from cplus.core.guard import Guard
from cplus.core.optim import AdamW

# Bytes a step must move for each parameter: theta and two moments in and out, the gradient in; signs and average.
FUSED_BYTES = 4 * (2 + 1 + 2 + 2)
MOVED = {
    "torch": FUSED_BYTES,
    "one-pass float32": FUSED_BYTES + 0.25 + 8,
    "one-pass bfloat16": FUSED_BYTES + 0.25 + 4,
    "one-pass uint8": FUSED_BYTES + 0.25 + 2,
    "one-pass coefficients": FUSED_BYTES + 4,  # bfloat16 in and out; the signs are one small buffer of zeros
}
ARMS = (*MOVED, "hooks float32", "hooks uint8", "hooks coefficients", "plain float32")
OPTIONS = {"lr": 1e-5, "weight_decay": 0.1}


def gradients(params: Sequence[nn.Parameter], refresh: int) -> Reference:
    """Evidence that is already known: the benchmark is about the step, not about the refresh."""
    generator = torch.Generator().manual_seed(1)
    return Reference(vectors=[[torch.randn(p.shape, generator=generator) for p in params]])


def coefficients(params: Sequence[nn.Parameter], refresh: int) -> Reference:
    """Stored coefficients, as of the row `cplus-curvature`."""
    generator = torch.Generator().manual_seed(1)
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


def drawn(millions: float) -> list[Tensor]:
    """One random gradient per tensor."""
    torch.manual_seed(0)
    return [torch.randn(shape) * 1e-3 for shape in shapes(millions)]


def optimizer(name: str, bag: Bag) -> torch.optim.Optimizer:
    """Our one-pass AdamW, or torch's fused one."""
    if name.startswith("one-pass"):
        return AdamW(bag.parameters(), **OPTIONS)
    return torch.optim.AdamW(bag.parameters(), fused=True, **OPTIONS)


def guarded(name: str, made: torch.optim.Optimizer, bag: Bag) -> Guard:
    """The gate of an arm on its optimizer."""
    kind, ema = name.split()
    if ema == "coefficients":
        guard = Guard(made, bag, evidence=coefficients, gate=Elementwise(stored, uses="coefficients", whole=False))
    else:
        guard = Guard(made, bag, evidence=gradients, gate=Collaborative(beta=0.9, ema=ema))  # type: ignore[arg-type]
    if kind == "plain":
        guard.gating.__dict__["compiled"] = False
    guard.refresh()
    return guard


def time_steps(millions: float, rounds: int) -> dict[str, Any]:
    """All arms in turn at one size."""
    known = drawn(millions)
    steps: dict[str, Callable[[], object]] = {}
    compiled = {}
    for name in ARMS:
        bag = Bag(known)
        made = optimizer(name, bag)
        steps[name] = made.step
        if name != "torch":
            compiled[name] = guarded(name, made, bag).gating.compiled
    seconds = in_turn(steps, rounds=rounds, warm=2)
    return {
        "parameters": sum(g.numel() for g in known),
        "compiled": compiled,
        "seconds": medians(seconds),
        "ratio": {name: ratio(seconds, name, "torch") for name in ARMS[1:]},
    }


def memory(name: str, millions: float) -> dict[str, float]:
    """What the gate holds and what a step takes on top, as the system counts it; in a process of its own."""
    kernels.WORTH_COMPILING = 0
    bag = Bag(drawn(millions))
    made = optimizer(name, bag)
    made.step()
    before = resident()
    ungated = peak(made.step) - before
    guard = guarded(name, made, bag)
    made.step()
    held = resident()
    during = peak(made.step) - held
    count = sum(p.numel() for p in bag.parameters())
    return {
        "held_bytes_a_parameter": (held - before) / count,
        "reported_bytes_a_parameter": guard.nbytes / count,
        "temporary_bytes": during,
        "temporary_bytes_ungated": ungated,
        "temporary_bytes_a_parameter": during / count,
    }


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
    found = {}
    for name, moved in MOVED.items():
        limit = moved * largest["parameters"] / rate
        found[name] = {
            "bytes_a_parameter": moved,
            "limit_seconds": limit,
            "share_of_bandwidth": limit / largest["seconds"][name],
            "limit_ratio": moved / FUSED_BYTES,
        }
    return found


def counts() -> dict[str, Any]:
    """What an update and a refresh of the 310 parameters of Qwen3-0.6B, in tiny widths, count on `fakegpu`.

    A launch is an operation on the device that is no view; those of the optimizer itself are among an update's.
    """
    script = Path(__file__).parents[1] / "tests" / "device_run.py"
    done = subprocess.run([sys.executable, script, "qwen3-0.6b"], capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["qwen3-0.6b"]  # type: ignore[no-any-return]


def main() -> None:
    """Measure, print the bars, write the JSON: one file per vector width."""
    asked = options(__doc__, sizes=[1.0, 4.0, 16.0, 64.0, 135.0], rounds=9, counts=0)
    if asked.counts:
        found = counts()
        bars = {f"syncs per update, {name}": (own["update"].get("sync", 0), "<=", 0) for name, own in found.items()}
        bars |= {f"launches per update, {name}": (own["update"]["launch"], "<=", 60) for name, own in found.items()}
        finish("counts", found, asked.out, bars)
        return
    steps = {}
    for size in asked.sizes:
        steps[f"{size:g}M"] = largest = time_steps(size, asked.rounds)
        console.print(f"{size:g} M parameters, times torch's step: {largest['ratio']}")
    rate = bandwidth(asked.rounds)
    held = {}
    for name in ("one-pass float32", "one-pass uint8", "hooks float32"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(memory, (name, 1))  # loads the kernels, which are no memory of the gate
            held[name] = pool.apply(memory, (name, asked.sizes[-1]))
    figures = {
        "processor": {"name": kernels.processor(), "vector_bits": kernels.vector()[0], "kernels": "C++"},
        "steps": steps,
        "bandwidth_bytes_a_second": rate,
        "roofline": roofline(largest, rate),
        "memory": held,
    }
    fused, small, hooks = held.values()
    step = largest["ratio"]
    bars = {
        "one-pass AdamW step / torch's fused step": (step["one-pass float32"], "<=", 1.8),
        "one-pass, uint8 average / torch's fused step": (step["one-pass uint8"], "<=", 2.2),
        "one-pass, stored coefficients / torch's fused step": (step["one-pass coefficients"], "<=", 2.0),
        "hooks on torch's fused AdamW / torch's fused step": (step["hooks float32"], "<=", 4.0),
        "bytes per parameter, one-pass, fp32 average": (fused["held_bytes_a_parameter"], "<=", 4.5),
        "bytes per parameter, one-pass, uint8 average": (small["held_bytes_a_parameter"], "<=", 1.5),
        "temporary megabytes, one-pass, fp32 average": (fused["temporary_bytes"] / 1e6, "<=", 64.0),
        "temporary megabytes, one-pass, uint8 average": (small["temporary_bytes"] / 1e6, "<=", 64.0),
        "bytes per parameter, hooks": (hooks["held_bytes_a_parameter"], "<=", 4.5),
        "temporary bytes per parameter, hooks (a copy of theta is 4)": (
            hooks["temporary_bytes_a_parameter"], "<=", 4.5,
        ),
    }  # fmt: skip
    finish(f"steps-{torch.backends.cpu.get_cpu_capability().lower()}", figures, asked.out, bars)


if __name__ == "__main__":
    main()
