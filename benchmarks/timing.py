"""What the benchmarks share: options, arms timed in turn, memory as the system sees it, one record in JSON each."""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cplus.base.environment import environment
from cplus.base.files import write_json
from cplus.base.terminal import console, print_json


def options(about: str | None, **defaults: Any) -> argparse.Namespace:
    """`--data-dir`, `--threads`, `--out FOLDER` and one option per default, of its type."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="the folder for the record")
    for name, value in defaults.items():
        many = isinstance(value, list)
        kind = type(value[0] if many else value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, nargs="+" if many else None)
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    return found


def in_turn(
    arms: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every arm in every round; each round runs all arms, so that what slows the machine slows them all."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(-warm, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = clock()
            arms[name]()
            if turn >= 0:
                seconds[name].append(clock() - begin)
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
    return status("VmRSS")


def peak(action: Callable[[], object]) -> int:
    """The most bytes this process held while the action ran."""
    resident()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the old peak
    action()
    return status("VmHWM")


def status(name: str) -> int:
    """A line of Linux's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def finish(
    name: str, figures: dict[str, Any], out: Path | None, bars: Mapping[str, tuple[float, str, float]] | None = None
) -> None:
    """Print every bar with what was measured, and keep all figures as JSON; a missed bar is reported, not hidden."""
    held = {"<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b}
    if bars:
        figures["bars"] = {
            what: {"measured": got, "relation": sign, "bar": bar, "held": held[sign](got, bar)}
            for what, (got, sign, bar) in bars.items()
        }
    figures["environment"] = environment(threads=torch.get_num_threads(), device="cpu")
    for what, bar in figures.get("bars", {}).items():
        verdict = "held" if bar["held"] else "MISSED"
        console.print(f"{verdict:>6}  {what}: {bar['measured']:.3g} {bar['relation']} {bar['bar']:g}")
    print_json(figures)
    if out is not None:
        write_json(out / f"{name}.json", figures)
        console.print(f"written: {out / f'{name}.json'}")
