"""E12: what is the best use of a fixed budget of evidence?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Published, Result, Study, Summary
from cplus.studies.summaries import (
    KEPT_AND_LEARNED,
    Metric,
    above,
    by_seed,
    margin,
    pick,
    run_results,
    shown,
    strongest,
    table,
)

FIELDS = ("num_probes", "parts", "refresh", "memory")
TOLERANCE = 1.05


def runs(scale: Scale) -> list[RunSpec]:
    """Uses of one budget of evidence, half of the seeds for selection and half for confirmation; two dearer uses."""
    few, large = scale.base.num_probes, scale.large_bank
    parts = large // few
    equal: list[dict[str, float | int | None]] = [
        {"num_probes": few},
        {"num_probes": 2 * few, "parts": 2},
        {"num_probes": large, "parts": parts},
        {"num_probes": large, "parts": parts, "memory": 0.5},
        {"num_probes": large, "parts": parts, "memory": 0.8},
        {"num_probes": few, "memory": 0.5},
    ]
    dearer: list[dict[str, float | int | None]] = [{"num_probes": large}]
    if scale.base.num_new is not None:
        steps = math.ceil(scale.base.num_new / scale.base.batch_size)
        equal += [
            {"num_probes": 3 * large, "parts": 3 * parts},
            {"num_probes": large, "refresh": parts * steps},
            {"num_probes": few, "parts": steps, "refresh": 1},
            {"num_probes": large, "parts": parts * steps, "refresh": 1},
        ]
        dearer += [{"num_probes": few, "refresh": 1}]
    return [
        *(scale.at(**setting, seed=seed) for setting in equal for seed in range(2 * scale.seeds_where_five)),
        *(scale.at(**setting, seed=seed) for setting in dearer for seed in range(scale.seeds_where_five)),
    ]


def cost(result: RunResult) -> float:
    """Rows of evidence over the whole run."""
    return float(result.cost["preservation_rows"])


def setting_name(result: RunResult) -> str:
    """A run's use of evidence in words."""
    spec = result.spec
    when = "epoch" if spec.refresh is None else "step" if spec.refresh == 1 else f"{spec.refresh} steps"
    seen = f"1/{spec.parts} of {spec.num_probes}" if spec.parts > 1 else f"all {spec.num_probes}"
    return f"{seen} every {when}" + (f", memory {spec.memory}" if spec.memory else "")


def by_setting(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """The runs of each use of evidence."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(setting_name(result), []).append(result)
    return groups


def summary(results: Sequence[Result]) -> Summary:
    """Retention by use of evidence; the best one within the fixed bank's budget against the fixed bank."""
    mine = run_results(results)
    columns: dict[str, Metric] = {**KEPT_AND_LEARNED, "evidence rows": cost}
    rows = table(mine, FIELDS, columns)
    few = min((result.spec.num_probes for result in mine), default=0)
    fixed = pick(mine, num_probes=few, parts=1, refresh=None, memory=0.0)
    if not fixed:
        return Summary(rows=rows, answer="The fixed bank was not run.", claims=())
    budget = TOLERANCE * max(by_seed(fixed, cost).values())
    within = {label: own for label, own in by_setting(mine).items() if max(by_seed(own, cost).values()) <= budget}
    first, fresh = halves(fixed)
    best = strongest({label: of_seeds(own, first) for label, own in within.items()}) or setting_name(fixed[0])
    claims = tuple(
        above(f"{label} keeps more than the fixed bank, on fresh seeds", of_seeds(own, fresh), of_seeds(fixed, fresh))
        for label, own in within.items()
        if label != setting_name(fixed[0])
    )
    gain = shown(margin(of_seeds(within[best], fresh), of_seeds(fixed, fresh)), sign=True)
    answer = (
        f"Of {len(within)} uses at the cost of {few} probes per epoch the best on {len(first)} seeds is {best}; on "
        f"{len(fresh)} fresh seeds it keeps {gain} points more than the fixed bank."
    )
    return Summary(rows=rows, answer=answer, claims=claims)


def halves(results: Sequence[RunResult]) -> tuple[set[int], set[int]]:
    """The seeds for selection and the fresh ones for confirmation."""
    seeds = sorted({result.spec.seed for result in results})
    return set(seeds[: (len(seeds) + 1) // 2]), set(seeds[(len(seeds) + 1) // 2 :])


def of_seeds(results: Sequence[RunResult], seeds: set[int]) -> list[RunResult]:
    """The results of these seeds."""
    return [result for result in results if result.spec.seed in seeds]


STUDY = Study(
    name="e12",
    title="Rotating evidence",
    question="What is the best use of a fixed refresh budget?",
    paper="added here; docs/studies.md",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="a draft on an earlier toy world, Retention",
            numbers={"all 128 every epoch": 90.4, "1/4 of 512 every epoch": 93.5, "all 512 every epoch": 94.3},
        ),
    ),
)
