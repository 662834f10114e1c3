"""What the examples share: the built-in model, facts it does not know yet, and what it should keep."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

import cplus
from cplus import interfaces, models
from cplus.data.encoded import Encoded
from cplus.data.examples import Example
from cplus.probes.generate import write_probes
from cplus.probes.settings import Settings
from cplus.scoring import predict
from cplus.toy.world import examples


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
        """Print and return the shares of new facts learned and of known facts kept."""
        learned, kept = (
            sum(p.right for p in predict(model, self.interface, rows)) / len(rows)
            for rows in (self.unknown, self.known)
        )
        print(f"{when}: {learned:.0%} of the new facts, {kept:.0%} of the known facts", flush=True)
        return {"learned": learned, "kept": kept}


def arguments() -> argparse.Namespace:
    """The few options of every example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--new", type=int, default=96, help="facts to learn")
    parser.add_argument("--out", default="runs/example")
    return parser.parse_args()


def material(new: int, seed: int = 0) -> Material:
    """Ask the model about one domain: what it gets wrong is new, what it gets right is the past."""
    base = models.load("toy")
    interface = interfaces.build("cloze", base.tokenizer)
    facts = examples("harbours")
    facts = random.Random(seed).sample(facts, 600)
    right = [p.right for p in predict(base.model, interface, facts)]
    known = [fact for fact, was_right in zip(facts, right, strict=True) if was_right]
    unknown = [fact for fact, was_right in zip(facts, right, strict=True) if not was_right][:new]
    anchors, held_out = known[:8], known[8:208]
    probes = write_probes(base, interface, anchors, Settings(num_probes=64, seed=seed))

    def tokens(rows: list[Example]) -> list[Encoded]:
        return cplus.encode(rows, base.tokenizer, interface="cloze")

    return Material(
        model=base.model,
        tokenizer=base.tokenizer,
        interface=interface,
        unknown=unknown,
        known=held_out,
        new=tokens(unknown),
        anchors=tokens(anchors),
        probes=tokens([probe.example for probe in probes]),
    )


def features(row: Encoded) -> dict[str, list[int]]:
    """A row as trainers take it."""
    ids = [*row.prompt, *row.target]
    return {"input_ids": ids, "labels": [-100] * len(row.prompt) + [*row.target]}
