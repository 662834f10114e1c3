"""What the benchmarks share: arms timed in turn in one run, memory as the system sees it, one JSON file each."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cplus.base.environment import environment
from cplus.base.files import write_json
from cplus.base.terminal import console, print_json


def in_turn(arms: Mapping[str, Callable[[], object]], *, rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of every arm in every round; each round runs all arms, so that what slows the machine slows them all."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(-warm, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            arms[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    """The median over the rounds of one arm's time by another's."""
    return median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Each arm's median seconds."""
    return {name: median(each) for name, each in seconds.items()}


def resident() -> int:
    """Bytes of memory this process holds now, after giving back what is free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def peak(action: Callable[[], object]) -> int:
    """The most bytes this process held while the action ran."""
    resident()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the old peak
    action()
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    sys.exit(f"this system's /proc/self/status has no {name}: memory can be measured on Linux only")


def finish(name: str, figures: dict[str, Any], bars: Mapping[str, tuple[float, str, float]], options: Any) -> None:
    """Print every bar with what was measured, keep all figures as JSON; a missed bar is reported, not hidden."""
    held = {"<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b}
    figures["bars"] = {
        what: {"measured": got, "relation": sign, "bar": bar, "held": held[sign](got, bar)}
        for what, (got, sign, bar) in bars.items()
    }
    figures["environment"] = environment(threads=torch.get_num_threads(), device="cpu")
    for what, bar in figures["bars"].items():
        console.print(
            f"{'held' if bar['held'] else 'MISSED':>6}  {what}: {bar['measured']:.3g} {bar['relation']} {bar['bar']:g}"
        )
    if options.out is not None:
        write_json(options.out / f"{name}.json", figures)
        console.print(f"written: {options.out / f'{name}.json'}")
    if options.json:
        print_json(figures)
