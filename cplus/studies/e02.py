"""E2: does preservation extend beyond the behaviour that the anchors represent?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Claim, Published, Result, Study, Summary
from cplus.studies.summaries import Metric, above, margin, over_seeds, pick, run_results, shown, table

METHODS = ("sft", "replay", "cpl", "cplus")


def runs(scale: Scale) -> list[RunSpec]:
    """The first model adapted to each task, as in E1, and evaluated on tasks it was not trained on."""
    return [
        scale.at(model=cell.model, task=cell.task, lr=cell.lr, method=method, seed=seed)
        for cell in scale.grid
        if cell.model == scale.grid[0].model
        for method in METHODS
        for seed in range(scale.seeds_where_five)
    ]


def change(result: RunResult) -> float | None:
    """The mean change of accuracy over the outside tasks, in points."""
    changes = [task["after"] - task["before"] for task in result.external.values()]
    return sum(changes) / len(changes) if changes else None


def change_on(task: str) -> Metric:
    """The change of accuracy on one outside task."""

    def metric(result: RunResult) -> float | None:
        found = result.external.get(task)
        return None if found is None else found["after"] - found["before"]

    return metric


def kept(result: RunResult) -> float | None:
    """The mean share of correct answers kept over the outside tasks."""
    return result.external_kept


def summary(results: Sequence[Result]) -> Summary:
    """Change of outside accuracy by adaptation task and method."""
    mine = run_results(results)
    outside = sorted({name for result in mine for name in result.external})
    figures = {"change": change, "kept": kept, **{f"change on {name}": change_on(name) for name in outside}}
    rows = table(mine, ("task", "method"), figures)
    ours = pick(mine, method="cplus")
    claims = (
        Claim(
            says="outside tasks: CPLUS's accuracy rises above the base model's",
            margin=over_seeds(ours, change),
            paper="Sec. 4.3",
        ),
        *(
            above(
                f"outside tasks: CPLUS loses less than {name}",
                ours,
                pick(mine, method=name),
                change,
                paper="Sec. 4.3; Figs. 1 (b), 4",
            )
            for name in METHODS[:-1]
        ),
    )
    moved = {name: shown(over_seeds(pick(mine, method=name), change), sign=True) for name in METHODS}
    gap = shown(margin(ours, pick(mine, method="cpl"), change), sign=True)
    answer = (
        f"On tasks used neither for training nor as anchors CPLUS changes accuracy by {moved['cplus']} points, CPL by "
        f"{moved['cpl']} and SFT by {moved['sft']}: CPLUS minus CPL is {gap} points."
    )
    return Summary(rows=rows, answer=answer, claims=claims)


STUDY = Study(
    name="e02",
    title="Beyond the represented target",
    question="Does preservation extend beyond the behaviour represented by the anchors?",
    paper="Sec. 4.3; Figs. 1 (b), 4, 16; App. E.10",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="Sec. 4.3, CPLUS's mean change on outside benchmarks, points",
            numbers={"arc_c": 1.15, "mmlu": 0.88, "medqa": 0.14},
        ),
    ),
)
