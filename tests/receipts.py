"""A receipt with everything in it, for the tests of the record and of the page."""

from __future__ import annotations

import dataclasses
import random

from cplus.evaluation.requirements import Requirement
from cplus.receipts.contents import (
    Divergence,
    GateShare,
    ModelId,
    Point,
    Receipt,
    RowComparison,
    RowSet,
)

HOSTILE = "<script>document.title = 'in'</script><img src=x onerror=\"document.title = 'in'\"> & \"quotes\""
_THINGS = ("a river", "the moon", "an old clock", "fresh bread", "a bicycle", "the library", "a candle", "winter rain")


def row(id: str, kind: str | None, **given: object) -> RowComparison:
    """A row with an outcome; anything else may be given."""
    right = {"kept": (True, True), "lost": (True, False), "gained": (False, True)}.get(kind or "", (False, False))
    known: dict[str, object] = {
        "input": f"What is most like {id}?",
        "gold": "B: the moon",
        "before": "B: the moon" if right[0] else "A: a river",
        "after": "B: the moon" if right[1] else "A: a river",
        "confidence_before": 0.75,
        "confidence_after": 0.5,
    }
    return RowComparison(id=id, kind=kind, **{**known, **given})  # type: ignore[arg-type]


def rows(counts: dict[str, int], *, name: str) -> tuple[RowComparison, ...]:
    """The given number of rows of each outcome, in a mixed order."""
    draw = random.Random(f"0/{name}")
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    draw.shuffle(kinds)
    return tuple(
        row(
            f"{name}-{i}",
            kind,
            input=f"Which would you look for if you had only {draw.choice(_THINGS)} and {draw.choice(_THINGS)}?",
            confidence_before=round(draw.betavariate(4, 2), 4),
            confidence_after=round(draw.betavariate(4, 2), 4),
        )
        for i, kind in enumerate(kinds)
    )


def answered(
    texts: list[tuple[str, str]], losses: list[tuple[float, float]], *, name: str = "past"
) -> tuple[RowComparison, ...]:
    """Free-form rows nobody judged, with these answers and losses of the given responses before and after."""
    return tuple(
        row(
            f"{name}-{i}",
            None,
            input=f"How do I look after {_THINGS[i % len(_THINGS)]}?",
            gold=before,
            before=before,
            after=after,
            tokens=8,
            nll_before=was,
            nll_after=now,
        )
        for i, ((before, after), (was, now)) in enumerate(zip(texts, losses, strict=True))
    )


def curve() -> tuple[Point, ...]:
    """A run that learns, and forgets down to a Retention of 91 and up to a past loss of 1.22."""
    return tuple(
        Point(
            epoch=float(e),
            loss=None if e == 0 else round(2.8 * 0.62**e + 0.05, 4),
            retention=round(100 - 9 * (1 - 0.6**e), 3),
            acquisition=round(100 * (1 - 0.62**e), 3),
            past_nll=round(0.94 + 0.28 * (1 - 0.6**e), 4),
            new_nll=round(2.8 * 0.62**e + 0.2, 4),
        )
        for e in range(9)
    )


def full(*, scale: int = 1) -> Receipt:
    """Every part of the page, a hostile text among the rows and among the probes."""
    lost = row("hostile", "lost", input=HOSTILE, gold=HOSTILE, before=HOSTILE, after=HOSTILE)
    past = (lost, *rows({"kept": 365 * scale, "lost": 35 * scale}, name="past"))
    new = rows({"gained": 47, "still_wrong": 1}, name="new")
    sciq = rows({"kept": 210, "lost": 14, "gained": 11, "still_wrong": 65}, name="sciq")
    counts = {"kept": 21, "lost": 9, "gained": 2, "still_wrong": 28}
    asked = tuple(
        dataclasses.replace(own, id=f"request {i}", ended_before=i % 3 > 0, ended_after=i % 4 > 0)
        for i, own in enumerate(rows(counts, name="everyday"))
    )
    said = "First, gather what you need. Then work slowly, and check each step before the next. " * 6
    texts = [(said, ("Slowly.", said, f"Sure! {said[84:]}")[i % 3]) for i in range(40)]
    spoken = answered(texts, [(0.9 + i / 400, 1.2 + i / 500) for i in range(40)], name="chat")
    layers = ["embedding", *(f"layer {i}" for i in range(30)), "final norm"]
    return Receipt(
        title="What arc_easy taught smollm2-135m, and what it cost",
        created="2026-03-01T12:00:00Z",
        before=ModelId(name="smollm2-135m", fingerprint="5f1d" * 16),
        after=ModelId(name="out/model", fingerprint="a83c" * 16),
        method="cplus",
        sets=(
            RowSet(name="past", kind="retention", interface="letter", rows=past),
            RowSet(name="new", kind="acquisition", interface="letter", rows=new),
            RowSet(name="sciq", kind="external", interface="cloze", rows=sciq),
            RowSet(name="chat", kind="external", interface="freeform", rows=spoken),
            RowSet(name="everyday", kind="ability", interface="freeform", rows=asked, judge="rules"),
        ),
        settings={
            "method": "cplus",
            "lr": 5e-5,
            "epochs": 8,
            "bank": {"num_probes": 64, "shots": 2, "temperature": 0.8},
        },
        environment={"versions": {"torch": "2.13.0", "cplus": "0.1.0"}, "threads": 2, "device": "cpu"},
        curve=curve(),
        divergence=Divergence(rows=40, after=0.21, bfloat16=0.0002, q8_0=0.0006),
        followed={"past": 64, "new": 48},
        gate=tuple(
            GateShare(name=name, coordinates=3_540_000, admitted_share=0.7 - i / 300, energy_share=0.5 + i / 300)
            for i, name in enumerate(layers)
        ),
        audit={
            "sha256": "09ab" * 16,
            "probes": 64,
            "unique": 64,
            "requests": 101,
            "rejected": {"copy": 21, "no question mark": 16},
            "confidence": {"mean": 0.71, "median": 0.74, "p10": 0.42},
            "divergence": 0.031,
            "overlaps": [{"name": "past", "rows": 400, "exact": 0, "near": 1}],
            "sample": [
                {"input": "What melts in the sun?", "answer": "ice", "confidence": 0.81},
                {"input": HOSTILE, "answer": HOSTILE, "confidence": 0.2},
            ],
        },
        cost={
            "seconds": 754.2,
            "extra_bytes": 1_076_000_000,
            "training_flops": 31_000_000_000_000,
            "preservation_flops": 4_200_000_000_000,
            "training_rows": 384,
        },
        requirements=(Requirement(metric="retention", at_least=0.85), Requirement(metric="acquisition", at_least=0.95)),
        notes=("The past rows are those the model answered correctly before; 8 of them were its anchors.",),
    )
