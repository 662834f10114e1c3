"""The paper's cell with eight anchors on real models that know the answers, each method until all is learned.

Neighbours may choose the rate that suits the reported seeds best; CPLUS has one rate, named before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cplus.lab.drawing import cell, compare_methods, joined_names, method_name
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale, canonical
from cplus.lab.study import Claim, Collected, ComparisonLine, Summary, Table
from cplus.lab.summaries import Metric, by_seed, difference, learned, over_seeds, pick, retained, shown, table, updates
from cplus.training.settings import RunSpec

TITLE = "Facts of real models"
QUESTION = "How much of what a real model knows does each method keep where everything new is learned?"

OURS = "cplus"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model's setting, the number of seeds, and the neighbours' rates as multiples of the setting's."""

    base: RunSpec
    seeds: int
    rates: tuple[float, ...]


_SHARED = RunSpec(
    model="",
    task="csqa",
    interface="cloze",
    method=OURS,
    seed=0,
    num_anchors=8,
    num_probes=48,
    num_new=48,
    weight_decay=0.0,
    epochs=15,
    batch_size=8,
    order="shuffled",
    warmup=0.15,
    stop_at=99.0,
)
GEMMA = Cell(base=replace(_SHARED, model="gemma-3-270m", num_past=400, lr=2e-5), seeds=3, rates=(1.0, 0.5))
QWEN = Cell(
    base=replace(
        _SHARED,
        model="qwen2.5-coder-1.5b",
        interface="letter",
        num_rows=100,
        num_past=48,
        num_new=20,
        num_probes=24,
        lora=16,
        lr=2e-4,
        epochs=8,
        batch_size=4,
    ),
    seeds=1,
    rates=(1.0,),
)
"""The paper's interface on a model that knows the answers; adapters, because full training needs 25 GB."""
CELLS = {cell.base.model: cell for cell in (GEMMA, QWEN)}
METHODS = ("sft", "replay", "cpl", OURS)
LEARNED = 97.0
"""Acquisition from which a run counts as having learned, in percent."""


def runs(scale: Scale) -> list[RunSpec]:
    """All methods at the first rate, seed by seed, then the neighbours' other rates; none without a real model."""
    if scale.base.interface != "freeform":
        return []
    return [
        run_at(cell, method, rate, seed)
        for cell in CELLS.values()
        for rate in cell.rates
        for seed in range(min(cell.seeds, scale.seeds_where_three))
        for method in METHODS
        if rate == cell.rates[0] or method != OURS
    ]


def run_at(cell: Cell, method: str, rate: float, seed: int) -> RunSpec:
    """A cell's run of a method at a multiple of its rate."""
    return canonical(replace(cell.base, method=method, lr=cell.base.lr * rate, seed=seed))


COLUMNS: Mapping[str, Metric] = {
    "retention": retained,
    "acquisition": learned,
    "updates": updates,
    "seconds": lambda result: result.seconds,
}


def summary(mine: Sequence[RunResult]) -> Summary:
    """A row for each model, method and rate; CPLUS against each neighbour at its best rate."""
    rows = table(mine, ("model", "method", "lr"), COLUMNS)
    claims: list[Claim] = []
    answers: list[str] = []
    for model in CELLS:
        here = pick(mine, model=model)
        best = {method: _best(pick(here, method=method)) for method in METHODS}
        ours = by_seed(best[OURS], retained)
        claims += [
            Claim(f"{model}: CPLUS keeps more than {method} at its best rate", difference(ours, by_seed(own, retained)))
            for method, own in best.items()
            if method != OURS
        ]
        kept = ", ".join(f"{method} {shown(over_seeds(own, retained))}" for method, own in best.items())
        answers.append(f"{model} keeps of what it knew (%): {kept}")
    answer = f"Where 99 % of the new answers are learned, {'; '.join(answers)}."
    return Summary(rows=rows, answer=answer, claims=tuple(claims))


def _best(own: Sequence[RunResult]) -> Sequence[RunResult]:
    """The runs at the rate that keeps most, among the rates that learn on most seeds."""
    rates = dict.fromkeys(result.spec.lr for result in own)
    reached = [[r for r in pick(own, lr=rate) if r.acquisition >= LEARNED] for rate in rates]
    most = max(map(len, reached), default=0)
    full = [found for found in reached if len(found) == most > 0]
    return max(full, key=lambda found: sum(map(retained, found)) / len(found), default=[])


# Facts of real models: what each method keeps at each rate where everything is learned; not in the paper.


def tab_facts(found: Collected) -> Table:
    """Every model, method and rate, the highest Retention first."""
    rows = sorted(
        found.studies["facts"].summary.rows, key=lambda row: (row.at["model"], -row.figures["retention"].mean)
    )
    columns = ("retention", "acquisition", "updates", "seconds")
    settings = "; ".join(
        f"{model}: {cell.base.num_new} new and {cell.base.num_past} past questions of {cell.base.task} by "
        f"{cell.base.interface}, {cell.base.num_anchors} anchors, {cell.base.num_probes} probes"
        for model, cell in CELLS.items()
    )
    return Table(
        label="tab:facts",
        paper="Added here",
        caption=f"What is kept where 99 % of the new questions are right. {settings}.",
        columns=("model", "method", "rate", *columns),
        rows=tuple(
            (
                row.at["model"],
                method_name(row.at["method"]),
                f"{row.at['lr']:.2g}",
                *(cell(row.figures.get(name)) for name in columns),
            )
            for row in rows
        ),
    )


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention of every method at each model's first rate."""
    runs = found.studies["facts"].results
    what = f"Retention where 99 % are learned, {joined_names(METHODS)} (%)"
    return [
        compare_methods(f"{model}: {what}", pick(runs, model=model, lr=own.base.lr), METHODS, None)
        for model, own in CELLS.items()
    ]
