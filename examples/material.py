"""What the examples share: a model, rows it gets wrong, and rows it should keep getting right."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

from cplus.probes.generate import write_probes
from cplus.scoring import predict

from cplus import models
from cplus.core.rows import Encoded
from cplus.data import interfaces
from cplus.data.examples import Example
from cplus.data.tasks import load_task
from cplus.probes.settings import ProbeSettings


@dataclass(frozen=True, kw_only=True)
class Material:
    """Rows as tokens for training and evidence, and as examples for the questions before and after."""

    model: Any
    tokenizer: Any
    interface: interfaces.Interface
    unknown: list[Example]
    known: list[Example]
    new: list[Encoded]
    anchors: list[Encoded]
    probes: list[Encoded]

    def report(self, when: str, model: Any) -> dict[str, float]:
        """Print and return the shares of new rows learned and of known rows kept."""
        learned, kept = (
            sum(p.right for p in predict(model, self.interface, rows)) / len(rows)
            for rows in (self.unknown, self.known)
        )
        print(f"{when}: {learned:.0%} of the new rows right, {kept:.0%} of the known rows", flush=True)
        return {"learned": learned, "kept": kept}


def arguments() -> argparse.Namespace:
    """The options of every example; by default a toy that takes seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy", help="alias, hub id or folder")
    parser.add_argument("--task", default="harbours", help="what to learn, by name or file")
    parser.add_argument("--interface", default="cloze", choices=interfaces.NAMES)
    parser.add_argument("--asked", type=int, default=600, help="rows of the task that are asked and used")
    parser.add_argument("--new", type=int, default=96, help="rows to learn, of those answered wrong")
    parser.add_argument("--anchors", type=int, default=8, help="rows to keep as evidence, of those answered right")
    parser.add_argument("--probes", type=int, default=64, help="rows the model writes itself as further evidence")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--out", default="runs/example")
    return parser.parse_args()


def material(options: argparse.Namespace, seed: int = 0) -> Material:
    """Ask the model: what it gets wrong is new, what it gets right is the past."""
    base, task = models.load(options.model), load_task(options.task)
    interface = interfaces.build(options.interface, base.tokenizer, wording=task.wording)
    rows = random.Random(seed).sample(list(task.examples), min(options.asked, len(task.examples)))
    right = [p.right for p in predict(base.model, interface, rows)]
    known = [row for row, was_right in zip(rows, right, strict=True) if was_right]
    unknown = [row for row, was_right in zip(rows, right, strict=True) if not was_right][: options.new]
    anchors, held_out = known[: options.anchors], known[options.anchors :][:200]
    probes = write_probes(base, interface, anchors, ProbeSettings(num_probes=options.probes, seed=seed))
    return Material(
        model=base.model,
        tokenizer=base.tokenizer,
        interface=interface,
        unknown=unknown,
        known=held_out,
        new=[interface.encode(row) for row in unknown],
        anchors=[interface.encode(row) for row in anchors],
        probes=[interface.encode(probe.example) for probe in probes],
    )
