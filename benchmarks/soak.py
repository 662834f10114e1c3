"""A long run of the built-in model: is memory flat, are open files flat, is the pace flat?

python benchmarks/soak.py --out benchmarks/results/soak.json            the run
python benchmarks/soak.py --draw benchmarks/results/soak.json --picture docs/soak.svg
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from cplus import models
from cplus.base import files
from cplus.base.environment import environment
from cplus.data import interfaces
from cplus.jobs.checkpoint import Checkpoints
from cplus.methods.table import METHODS, Material, Past
from cplus.models.scoring import predict
from cplus.toy import world
from cplus.training.driver import Training, start
from cplus.training.loop import EpochEnded
from cplus.training.settings import Settings

WARM = 0.1
"""The share of the run in which caches fill; what comes after must be flat."""
CHECKPOINT, EVALUATE = 100, 250


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at the process; its pace is by its own CPU time, so that other work on the machine does not count."""

    step: int
    megabytes: float
    open_files: int
    steps_a_second: float


def begun(lr: float, epochs: int) -> tuple[Training, Any, list[Any]]:
    """CPLUS on toy-s: 16 new facts in batches of 8, 8 anchors, 24 taught facts in the place of probes."""
    base = models.load("toy-s", device="cpu")
    bound = interfaces.build("cloze", base.tokenizer, chat=False)
    known, new = world.taught("harbours"), world.untaught("harbours")[:16]
    past = Past(
        name="past",
        anchors=[bound.encode(row) for row in known[:8]],
        probes=[bound.encode(row) for row in known[8:32]],
    )
    settings = Settings(method="cplus", seed=0, epochs=epochs, lr=lr, batch_size=8, order="shuffled", clip_norm=1.0)
    material = Material(new=[bound.encode(row) for row in new], past=(past,))
    return start(settings, METHODS["cplus"], base.model, material), bound, list(known[32:96])


def soak(steps: int, every: int, folder: Path) -> list[Sample]:
    """Train with refreshes, checkpoints and evaluations all along, looking at the process now and then."""
    training, bound, rows = begun(1e-4, epochs=steps // 2)
    kept = Checkpoints(folder / "checkpoint.pt", "soak", minutes=1e9, steps=CHECKPOINT)
    own, samples, clock, last = psutil.Process(), [], time.process_time(), 0
    for event in training.run():
        step = training.log.cursor.step
        if not isinstance(event, EpochEnded):
            continue
        if kept.due(step):
            kept.save(training)
        if step % EVALUATE == 0:
            training.model.eval()
            predict(training.model, bound, rows, what="soak")
            training.model.train()
        if step - last >= every:
            now = time.process_time()
            gc.collect()
            samples.append(
                Sample(
                    step=step,
                    megabytes=own.memory_info().rss / 1e6,
                    open_files=own.num_fds(),
                    steps_a_second=(step - last) / (now - clock),
                )
            )
            print(samples[-1], file=sys.stderr)
            clock, last = time.process_time(), step
    return samples


def judged(samples: list[Sample]) -> dict[str, Any]:
    """Growth in percent from the first fifth after the warm-up to the last; medians, so that one pause is none."""
    warm = samples[int(WARM * len(samples)) :]
    fifth = max(1, len(warm) // 5)
    found = {}
    for name in ("megabytes", "open_files", "steps_a_second"):
        values = [getattr(sample, name) for sample in warm]
        early, late = statistics.median(values[:fifth]), statistics.median(values[-fifth:])
        found[name] = {"early": early, "late": late, "growth_percent": 100 * (late / early - 1)}
    memory, opened, pace = (found[name]["growth_percent"] for name in found)
    return {**found, "flat": bool(memory < 1.0 and opened <= 0.0 and pace > -10.0)}


def draw(record: dict[str, Any], picture: Path) -> None:
    """The three curves, one above the other."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cplus"  # the same file from the same numbers
    from matplotlib import pyplot

    names = {"megabytes": "memory, MB", "open_files": "open files", "steps_a_second": "updates a CPU second"}
    figure, axes = pyplot.subplots(3, 1, figsize=(7, 5), sharex=True)
    steps = [sample["step"] for sample in record["samples"]]
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        values = [sample[name] for sample in record["samples"]]
        axis.plot(steps, values, color="#2166ac", linewidth=1.2)
        axis.set_ylim(0, 1.25 * max(values))
        axis.set_ylabel(title)
        growth = record["judged"][name]["growth_percent"]
        axis.set_title(f"{growth:+.2f} % from after the warm-up to the end", fontsize=8, loc="right")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("update")
    figure.tight_layout()
    with files.replacing(picture) as part:
        figure.savefig(part, format="svg", metadata={"Date": None})


def main() -> int:
    """Run, or draw what a run wrote."""
    options = argparse.ArgumentParser(description="A long run whose memory, files and pace must stay flat.")
    options.add_argument("--steps", type=int, default=10_000)
    options.add_argument("--every", type=int, default=100, help="updates between two looks")
    options.add_argument("--out", type=Path, help="the curves as JSON")
    options.add_argument("--draw", type=Path, metavar="JSON", help="draw these curves instead of running")
    options.add_argument("--picture", type=Path, default=Path("docs/soak.svg"))
    asked = options.parse_args()
    if asked.draw is not None:
        draw(files.read_sealed(asked.draw), asked.picture)
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="cplus-soak-") as folder:
        samples = soak(asked.steps, asked.every, Path(folder))
    record = {
        "steps": asked.steps,
        "checkpoint_every": CHECKPOINT,
        "evaluate_every": EVALUATE,
        "samples": [asdict(sample) for sample in samples],
        "judged": judged(samples),
        "environment": environment(threads=1, device="cpu"),
    }
    if asked.out is not None:
        files.write_json(asked.out, files.sealed(record))
    print(record["judged"])
    return 0 if record["judged"]["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
