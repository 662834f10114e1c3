"""E13: how much forgetting does a gentle start avoid, and what does CPLUS add to it?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.records import RunResult, RunSpec
from cplus.studies.scales import Scale
from cplus.studies.shape import above, margin, over_seeds, pick, retained, shown, single, table
from cplus.studies.study import Result, Study, Summary

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


def when_learned(result: RunResult) -> float | None:
    """Retention at the first look with 99 % Acquisition; None if there is none."""
    return next((point["retention"] for point in result.curve if point["acquisition"] >= LEARNED), None)


def epochs_to_learn(result: RunResult) -> float | None:
    """The first epoch with 99 % Acquisition; None if there is none."""
    return next((point["epoch"] for point in result.curve if point["acquisition"] >= LEARNED), None)


def summary(results: Sequence[Result]) -> Summary:
    """Retention where the new rows are first known, and at the end, by schedule and method."""
    mine = [result for result in single(results) if result.curve]
    gentle, constant = ([r for r in mine if bool(r.spec.warmup) == warm] for warm in (True, False))
    rows = table(
        mine,
        ("warmup", "method"),
        {"retention when learned": when_learned, "epochs to learn": epochs_to_learn, "final retention": retained},
    )
    claims = (
        *(
            above(
                f"{name}: a gentle start keeps more",
                pick(gentle, method=name),
                pick(constant, method=name),
                when_learned,
            )
            for name in METHODS
        ),
        *(
            above(
                f"with a gentle start CPLUS keeps more than {name}",
                pick(gentle, method="cplus"),
                pick(gentle, method=name),
                when_learned,
            )
            for name in METHODS[:-1]
        ),
    )
    kept = {
        (warm, name): shown(over_seeds(pick(own, method=name), when_learned))
        for warm, own in (("gentle", gentle), ("constant", constant))
        for name in ("sft", "cplus")
    }
    lead = shown(margin(pick(gentle, method="cplus"), pick(gentle, method="sft"), when_learned), sign=True)
    answer = (
        f"Where 99 % of the new rows are first known, SFT has kept {kept['constant', 'sft']} % at a constant rate and "
        f"{kept['gentle', 'sft']} % with a gentle start, CPLUS {kept['constant', 'cplus']} % and "
        f"{kept['gentle', 'cplus']} %: with a gentle start CPLUS still keeps {lead} points more."
    )
    return Summary(rows=rows, answer=answer, claims=claims)


STUDY = Study(
    name="e13",
    title="A gentle start",
    question="How much forgetting does a warm-up avoid, and what does CPLUS add to it?",
    paper="added here; docs/studies.md",
    runs=runs,
    summary=summary,
    published=(),
)
