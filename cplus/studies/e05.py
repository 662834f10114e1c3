"""E5: does CPLUS remain effective when tasks are learned one after another?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cplus.evaluation.statistics import Estimate, estimate
from cplus.experiment.record import SequenceResult
from cplus.experiment.settings import SequenceSpec
from cplus.studies.scales import Scale, seedless
from cplus.studies.study import Claim, Published, Result, Study, Summary, SummaryRow
from cplus.studies.summaries import Seed, difference, seed_of, sequence_results, shown

METHODS = ("sft", "replay", "cpl", "cplus")


def runs(scale: Scale) -> list[SequenceSpec]:
    """All tasks in order with every method, from one shared checkpoint after the first task."""
    return [_spec(scale, method, seed) for method in METHODS for seed in range(scale.seeds_where_three)]


def _spec(scale: Scale, method: str, seed: int) -> SequenceSpec:
    run = scale.at(method=method, seed=seed)
    spec = SequenceSpec(
        model=run.model,
        tasks=scale.tasks,
        interface=run.interface,
        method=method,
        seed=seed,
        num_anchors=run.num_anchors,
        num_probes=run.num_probes,
        num_new=run.num_new,
        num_rows=scale.sequence_rows,
        lr=run.lr,
        weight_decay=run.weight_decay,
        epochs=run.epochs,
        batch_size=run.batch_size,
        order=run.order,
        topics=run.topics,
        compute_dtype=run.compute_dtype,
    )
    return replace(spec, seed=0) if seedless(spec) else spec


def average(result: SequenceResult, stage: int) -> float:
    """The unweighted mean accuracy over the tasks met up to a stage.

    Paper: Sec. 4.1, Average Task Accuracy.
    """
    return statistics.fmean(result.accuracy[stage][:stage])


def kept(result: SequenceResult) -> float:
    """The share of earlier tasks' rows that are right before a stage and still right after it, mean over stages."""
    return statistics.fmean(stage["retention"] for stage in result.stages if stage["retention"] is not None)


def summary(results: Sequence[Result]) -> Summary:
    """Average accuracy after each stage, final accuracy on every task, and CPLUS against the other methods."""
    mine = sequence_results(results)
    rows = tuple(_row(method, own) for method in METHODS if (own := [r for r in mine if r.spec.method == method]))
    ends = {method: _ends(mine, method) for method in METHODS}
    stays = {method: {seed_of(r): kept(r) for r in mine if r.spec.method == method} for method in METHODS}
    claims = (
        *(
            Claim(says=says.format(name), margin=difference(by["cplus"], by[name]), paper=paper)
            for says, by, paper in (
                ("CPLUS's average accuracy at the end is above {}'s", ends, "Sec. 4.5; Table 7"),
                ("CPLUS keeps more of the earlier tasks' right rows than {}, mean over stages", stays, None),
            )
            for name in METHODS[:-1]
        ),
        *_each_task(mine),
    )
    finals = {method: estimate(list(own.values())) for method, own in ends.items() if own}
    best = max((m for m in finals if m != "cplus"), key=lambda m: finals[m].mean, default=None)
    gain = None if best is None else difference(ends["cplus"], ends[best])
    answer = (
        f"After the last task CPLUS answers {shown(finals.get('cplus'))} % of all tasks' rows correctly, the best "
        f"other method ({best}) {shown(finals.get(best or ''))} %: a difference of {shown(gain, sign=True)} points; "
        f"each stage keeps {shown(_mean(stays['cplus']))} % of the correct answers to earlier tasks under CPLUS, "
        f"{shown(_mean(stays['cpl']))} % under CPL."
    )
    return Summary(rows=rows, answer=answer, claims=claims)


def _each_task(results: Sequence[SequenceResult]) -> list[Claim]:
    """At the end CPLUS is above the best other method on every task of the sequence."""
    claims = []
    for index, task in enumerate(results[0].spec.tasks if results else ()):
        last = {m: {seed_of(r): r.accuracy[-1][index] for r in results if r.spec.method == m} for m in METHODS}
        others = {name: statistics.fmean(own.values()) for name, own in last.items() if own and name != "cplus"}
        best = max(others, key=others.__getitem__, default=None)
        lead = None if best is None else difference(last["cplus"], last[best])
        words = f"CPLUS's accuracy on {task} at the end is above the best other method's"
        claims.append(Claim(says=words, margin=lead, paper="Sec. 4.5; Table 8"))
    return claims


def _mean(values: Mapping[Seed, float]) -> Estimate | None:
    return estimate(list(values.values())) if values else None


def _ends(results: Sequence[SequenceResult], method: str) -> dict[Seed, float]:
    return {seed_of(r): average(r, len(r.spec.tasks)) for r in results if r.spec.method == method}


def _row(method: str, own: Sequence[SequenceResult]) -> SummaryRow:
    tasks = own[0].spec.tasks
    figures: dict[str, Estimate] = {
        f"average after {task}": estimate([average(result, stage) for result in own])
        for stage, task in enumerate(tasks, start=1)
    }
    figures |= {f"{task} at the end": estimate([r.accuracy[-1][i] for r in own]) for i, task in enumerate(tasks)}
    learned = [statistics.fmean(stage["acquisition"] for stage in result.stages) for result in own]
    figures |= {"acquisition": estimate(learned), "kept by a stage": estimate([kept(result) for result in own])}
    return SummaryRow(at={"method": method}, figures=figures)


STUDY = Study(
    name="e05",
    title="A sequence of tasks",
    question="Does CPLUS remain effective in the tested task sequence?",
    paper="Sec. 4.5; Fig. 6; Tables 7, 8; App. E.9",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="Table 7, average accuracy after arc_c, mmlu, medqa",
            numbers={
                "sft": (66.81, 72.20, 61.21),
                "replay": (72.04, 77.29, 69.73),
                "cpl": (75.18, 70.77, 69.65),
                "cplus": (83.94, 80.86, 78.87),
            },
        ),
        Published(
            where="Table 8, final accuracy on csqa, arc_c, mmlu, medqa",
            numbers={
                "sft": (36.04, 53.78, 74.82, 80.19),
                "replay": (55.29, 63.86, 79.59, 80.19),
                "cpl": (59.85, 62.60, 74.38, 81.77),
                "cplus": (69.34, 78.27, 83.43, 84.45),
            },
        ),
    ),
)
