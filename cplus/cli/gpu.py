"""`cplus doctor --gpu`: every kernel of the gate against the algorithm, host syncs, and the speed of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from cplus.core import algorithm, kernels
from cplus.core.guard import protect
from cplus.core.optim import AdamW

BLOCKS = {"gate": kernels.gate_block, "adamw": kernels.adamw_block}
AVERAGES = {"none": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
ARGUMENTS = {
    "gate": ("theta", "param", "packed", "ema", "numbers"),
    "adamw": ("param", "gradient", "m", "v", "packed", "ema", "numbers"),
}
COUNT, STEPS, BETA, RATE = 4099, 6, 0.9, 1e-3  # coordinates: no multiple of anything; the rate: the size of a step
LAYERS, WIDTH, ROUNDS = 16, 1024, 7  # of the model whose step is timed: more than any cache holds
BARS = {"gate": 1.0, "adamw": 4.0}
"""Units of last place allowed: torch's AdamW, the reference, rounds in another order on some processors."""


def launched(block: str, average: str, held: Mapping[str, Any]) -> None:
    """One launch of a kernel as training launches it."""
    *tensors, packed, ema, numbers = (held[name] for name in ARGUMENTS[block])
    device = packed.device
    if device.type == "cpu":
        kernels.run(block, tensors, packed, ema, tuple(numbers.tolist()))
    else:
        kernels.compiled(BLOCKS[block], AVERAGES[average], device)(*tensors, packed, ema, numbers)


def distance(
    block: str, average: str, device: torch.device, launch: Callable[[str, str, Mapping[str, Any]], None]
) -> float:
    """The largest difference from the algorithm after a step; each step starts from the algorithm's parameters.

    In units of last place of the parameter, or of the size of a step where that is larger.
    """
    random = torch.Generator().manual_seed(0)
    theta, g_hat = torch.randn(2, COUNT, generator=random)
    g_hat[::5] = 0.0
    drawn = torch.randn(STEPS, COUNT, generator=random) * (RATE if block == "gate" else 1.0)
    expected = _by_algorithm(theta, g_hat, drawn, block, average)
    held: dict[str, Any] = {"packed": kernels.Signs.of(g_hat).packed.to(device), "ema": None}
    held |= {name: torch.zeros(COUNT, device=device) for name in ("m", "v")}
    if average != "none":
        held["ema"] = kernels.zeros(theta.to(device), average)  # type: ignore[arg-type]
    found = 0.0
    for t, values in enumerate(drawn, start=1):
        own = () if block == "gate" else _adamw_numbers(t)
        held["numbers"] = torch.tensor((*own, *kernels.gate_numbers(BETA, t)), device=device)
        held |= {"theta": theta.to(device), "param": theta.clone().to(device), "gradient": values.to(device)}
        if block == "gate":
            held["param"] += held["gradient"]
        launch(block, average, held)
        larger = torch.maximum(theta.abs(), expected[t - 1].abs()).clamp(min=RATE)
        unit = torch.nextafter(larger, torch.tensor(torch.inf)) - larger
        found = max(found, float(((held["param"].cpu() - expected[t - 1]).abs() / unit).max()))
        theta = expected[t - 1]
    return found


def _adamw_numbers(t: int) -> tuple[float, ...]:
    """The scalars of AdamW's step t: betas 0.9 and 0.999, weight decay 0.01."""
    step, root = RATE / (1 - 0.9**t), (1 - 0.999**t) ** -0.5
    return 1 - 0.9, 0.999, 1 - 0.999, 1 - RATE * 0.01, step, root, 1e-8


def _by_algorithm(theta: Tensor, g_hat: Tensor, drawn: Tensor, block: str, average: str) -> list[Tensor]:
    """The parameters after each step, by the functions of `algorithm`; a shorter average is rounded between them."""
    shadow = nn.Parameter(theta.clone())
    optimizer = torch.optim.AdamW([shadow], lr=RATE, weight_decay=0.01, fused=True)
    beta = 0.0 if average == "none" else BETA
    ema = kernels.zeros(theta, "float32" if average == "none" else average)  # type: ignore[arg-type]
    found = []
    for t, values in enumerate(drawn, start=1):
        proposed = theta + values
        if block == "adamw":
            shadow.data.copy_(theta)
            shadow.grad = values.clone()
            optimizer.step()
            proposed = shadow.detach().clone()
        mask = algorithm.collaborates(g_hat, proposed - theta)
        ema = kernels.stored(algorithm.smooth(kernels.read(ema), mask, beta), ema)
        theta = algorithm.apply(theta, proposed, algorithm.coefficient(kernels.read(ema), beta, t))
        found.append(theta)
    return found


def step_milliseconds(device: torch.device) -> dict[str, float]:
    """The median time of an AdamW step: plain, gated in one pass by our AdamW, and gated behind hooks."""
    found = {}
    for name, own in (("plain", False), ("one_pass", True), ("hooks", False)):
        step, _ = _protected(device, own=own, gated=name != "plain")
        times = []
        for _ in range(ROUNDS + 1):  # the first one compiles
            begin = perf_counter()
            step()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(perf_counter() - begin)
        found[name] = 1000 * median(times[1:])
    return found


def syncs(device: torch.device) -> dict[str, int]:
    """How often a gated step and a refresh wait for the GPU, by torch's own count."""
    step, refresh = _protected(device, own=True, gated=True)
    step()
    found = {}
    for name, act in (("step", step), ("refresh", refresh)):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found[name] = sum("synchroniz" in str(one.message) for one in told)
    return found


def _protected(device: torch.device, *, own: bool, gated: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One step and one refresh of a stack of linear layers, whose past behaviour is the size of its weights."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device)
    optimizer = AdamW(model.parameters()) if own else torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if not gated:
        return optimizer.step, lambda: None
    size = [(1.0, [0], lambda stack, batch: sum(p.square().sum() for p in stack.parameters()))]
    guard = protect(optimizer, model, evidence=size)
    guard.refresh()
    return optimizer.step, guard.refresh


def examined(device: torch.device) -> Iterator[tuple[str, bool, str, dict[str, Any]]]:
    """Each check: its name, whether it passed, what it says, and what it measured."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    units = {
        f"{block}, {average}": distance(block, average, device, launched) for block in BLOCKS for average in AVERAGES
    }
    worst = max(units, key=units.__getitem__)
    says = (
        f"{len(units)} kernels on {where}: at most {units[worst]:.2g} units of last place from the algorithm ({worst})"
    )
    near = all(unit <= BARS[name.split(",")[0]] for name, unit in units.items())
    yield "kernels", near, says, {"units_of_last_place": units}
    times = step_milliseconds(device)
    says = "a step of {:,} parameters: plain {plain:.2f} ms, gated in one pass {one_pass:.2f}, behind hooks {hooks:.2f}"
    yield "speed", True, says.format(LAYERS * WIDTH**2, **times), {"milliseconds": times}
    if device.type == "cuda":
        waits = syncs(device)
        says = "a gated step waits for the GPU {step} times, a refresh {refresh} times".format_map(waits)
        yield "syncs", waits["step"] == 0, says, {"syncs": waits}
