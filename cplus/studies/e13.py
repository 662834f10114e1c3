"""E13: how much forgetting does a gentle start avoid, and what does CPLUS add to it?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.evaluation.matched import LossPoint, common_level, crossing
from cplus.experiment.record import RunResult, RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Result, Study, Summary
from cplus.studies.summaries import Figure, above, margin, over_seeds, pick, retained, shown, single, table

METHODS = ("sft", "replay", "cpl", "cplus")
SHARE = 0.5
LEARNED = 99.0


def runs(scale: Scale) -> list[RunSpec]:
    """Four methods, looked at after every epoch, at a constant rate and at one that rises over half of the updates."""
    return [
        scale.at(method=method, warmup=warmup, evaluate_every=1, external=(), seed=seed)
        for warmup in (0.0, SHARE)
        for method in METHODS
        for seed in range(scale.three)
    ]


def path(result: RunResult) -> list[LossPoint]:
    """What is not yet known and what is lost, in percent, from the base model on."""
    looks = [(100.0 - point["acquisition"], 100.0 - point["retention"]) for point in result.curve]
    return [(100.0, 0.0), *looks]


def level(results: Sequence[RunResult]) -> float:
    """The Acquisition at which all are compared: 99 %, or the highest that every run reaches."""
    return min(LEARNED, 100.0 - common_level(map(path, results))) if results else LEARNED


def kept_at(acquisition: float) -> Figure:
    """Retention where a run first has this Acquisition, by straight lines between looks."""
    return lambda result: 100.0 - crossing(path(result), 100.0 - acquisition) if result.curve else None


def epochs_to_learn(result: RunResult) -> float | None:
    """The first epoch with 99 % Acquisition; None if there is none."""
    return next((point["epoch"] for point in result.curve if point["acquisition"] >= LEARNED), None)


def summary(results: Sequence[Result]) -> Summary:
    """Retention where the new rows are first known, and at the end, by schedule and method."""
    mine = [result for result in single(results) if result.curve]
    gentle, constant = ([r for r in mine if bool(r.spec.warmup) == warm] for warm in (True, False))
    common = level(mine)
    kept, ours = kept_at(common), pick(gentle, method="cplus")
    figures: dict[str, Figure] = {
        "retention when learned": kept,
        "epochs to learn": epochs_to_learn,
        "final retention": retained,
    }
    claims = (
        *(
            above(f"{m}: a gentle start keeps more", pick(gentle, method=m), pick(constant, method=m), kept)
            for m in METHODS
        ),
        *(
            above(f"with a gentle start CPLUS keeps more than {m}", ours, pick(gentle, method=m), kept)
            for m in METHODS[:-1]
        ),
    )
    said = {
        (warm, m): shown(over_seeds(pick(own, method=m), kept))
        for warm, own in (("gentle", gentle), ("constant", constant))
        for m in ("sft", "cplus")
    }
    lead = shown(margin(ours, pick(gentle, method="sft"), kept), sign=True)
    answer = (
        f"Where {common:.0f} % of the new rows are first known, SFT has kept {said['constant', 'sft']} % at a constant "
        f"rate and {said['gentle', 'sft']} % with a gentle start, CPLUS {said['constant', 'cplus']} % and "
        f"{said['gentle', 'cplus']} %: with a gentle start CPLUS still keeps {lead} points more than SFT."
    )
    return Summary(rows=table(mine, ("warmup", "method"), figures), answer=answer, claims=claims)


STUDY = Study(
    name="e13",
    title="A gentle start",
    question="How much forgetting does a warm-up avoid, and what does CPLUS add to it?",
    paper="added here; docs/studies.md",
    runs=runs,
    summary=summary,
    published=(),
)
