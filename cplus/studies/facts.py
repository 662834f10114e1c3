"""The paper's cell with eight anchors on a real model that knows the answers, each method until all is learned.

Neighbours may choose the rate that suits the reported seeds best; CPLUS has one rate, named before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale, canonical
from cplus.studies.study import Claim, Result, Study, Summary, SummaryRow
from cplus.studies.summaries import Metric, by_seed, difference, learned, over_seeds, pick, retained, run_results, shown

BASE = RunSpec(
    model="gemma-3-270m",
    task="csqa",
    interface="cloze",
    method="cplus",
    seed=0,
    num_anchors=8,
    num_probes=48,
    num_new=48,
    num_past=100,
    lr=2e-5,
    weight_decay=0.0,
    epochs=15,
    batch_size=8,
    order="shuffled",
    warmup=0.15,
    stop_at=99.0,
)
OURS = "cplus"
RATES: Mapping[str, tuple[float, ...]] = {
    "sft": (1.0, 0.5),
    "replay": (1.0, 0.5),
    "cpl": (1.0, 0.5),
    OURS: (1.0,),
}
"""Each method's rates as multiples of the setting's."""
LEARNED = 97.0
"""Acquisition from which a run counts as having learned, in percent."""


def runs(scale: Scale) -> list[RunSpec]:
    """All methods at the first rate, seed by seed, then the neighbours' other rates."""
    seeds = range(scale.seeds_where_three)
    return [
        run_at(method, rates[rung], seed)
        for rung in range(max(map(len, RATES.values())))
        for seed in seeds
        for method, rates in RATES.items()
        if rung < len(rates)
    ]


def run_at(method: str, rate: float, seed: int) -> RunSpec:
    """The setting's run of a method at a multiple of its rate."""
    return canonical(replace(BASE, method=method, lr=BASE.lr * rate, seed=seed))


def updates(result: RunResult) -> float:
    """The updates until everything was learned."""
    return float(result.counts["updates"])


COLUMNS: Mapping[str, Metric] = {
    "retention": retained,
    "acquisition": learned,
    "updates": updates,
    "seconds": lambda result: result.seconds,
}


def summary(results: Sequence[Result]) -> Summary:
    """A row for each method and rate; CPLUS against each neighbour at its best rate."""
    mine = run_results(results)
    table = {
        key: pick(mine, method=key[0], lr=key[1])
        for key in dict.fromkeys((result.spec.method, result.spec.lr) for result in mine)
    }
    rows = tuple(_row(method, lr, own) for (method, lr), own in table.items())
    ours = by_seed(pick(mine, method=OURS), retained)
    claims, best = [], {}
    for method in RATES:
        if method == OURS:
            continue
        best[method] = _best([own for key, own in table.items() if key[0] == method])
        claims.append(
            Claim(
                says=f"CPLUS keeps more than {method} at its best rate",
                margin=difference(ours, by_seed(best[method], retained)),
            )
        )
    kept = {"CPLUS": over_seeds(pick(mine, method=OURS), retained)}
    kept |= {method: over_seeds(own, retained) for method, own in best.items()}
    listed = ", ".join(f"{method} {shown(found)}" for method, found in kept.items())
    answer = f"Where 99 % of the new answers are learned, {BASE.model} keeps of what it knew (%): {listed}."
    return Summary(rows=rows, answer=answer, claims=tuple(claims))


def _best(ladder: Sequence[Sequence[RunResult]]) -> Sequence[RunResult]:
    """The rate that keeps most, among those that learn on most seeds."""
    reached = [found for own in ladder if (found := [r for r in own if r.acquisition >= LEARNED])]
    most = max((len(found) for found in reached), default=0)
    full = [found for found in reached if len(found) == most]
    return max(full, key=lambda found: sum(map(retained, found)) / len(found), default=[])


def _row(method: str, lr: float, own: Sequence[RunResult]) -> SummaryRow:
    found = {name: over_seeds(own, metric) for name, metric in COLUMNS.items()}
    figures = {name: value for name, value in found.items() if value is not None}
    return SummaryRow(at={"method": method, "lr": lr}, figures=figures)


STUDY = Study(
    name="facts",
    title="Facts of a real model",
    question="How much of what a real model knows does each method keep where everything new is learned?",
    paper="Sec. 4.2 on a model at hand; docs/studies.md",
    runs=runs,
    summary=summary,
    published=(),
)
