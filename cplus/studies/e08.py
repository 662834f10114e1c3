"""E8: does CPLUS remain effective under an aggressive update schedule?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Published, Result, Study, Summary
from cplus.studies.summaries import above, learned, margin, over_seeds, pick, retained, run_results, shown, table

METHODS = ("sft", "replay", "cpl", "cplus")


def runs(scale: Scale) -> list[RunSpec]:
    """One large learning rate for a fixed number of epochs, evaluated after the last one."""
    lr, epochs = scale.aggressive_schedule
    return [scale.at(method=m, lr=lr, epochs=epochs, seed=s) for m in METHODS for s in range(scale.seeds_where_one)]


def overall(result: RunResult) -> float:
    """Accuracy over past and new rows together."""
    past, new = result.counts["asked"], result.counts["new"]
    return (result.retention * past + result.acquisition * new) / (past + new)


def summary(results: Sequence[Result]) -> Summary:
    """Acquisition, Retention and overall accuracy by method."""
    mine = run_results(results)
    ours = pick(mine, method="cplus")
    claims = (
        *(
            above(
                f"CPLUS keeps more than {name} under the aggressive schedule",
                ours,
                pick(mine, method=name),
                paper="App. E.5; Table 5",
            )
            for name in METHODS[:-1]
        ),
        above(
            "CPLUS learns more than cpl under the aggressive schedule",
            ours,
            pick(mine, method="cpl"),
            learned,
            paper="App. E.5; Table 5",
        ),
    )
    gaps = {name: shown(margin(ours, pick(mine, method=name)), sign=True) for name in METHODS[:-1]}
    answer = (
        f"Under the aggressive schedule CPLUS keeps {shown(over_seeds(ours, retained))} % at "
        f"{shown(over_seeds(ours, learned))} % Acquisition; its Retention minus SFT's is {gaps['sft']} points, minus "
        f"CPL's {gaps['cpl']}."
    )
    rows = table(mine, ("method",), {"acquisition": learned, "retention": retained, "overall": overall})
    return Summary(rows=rows, answer=answer, claims=claims)


STUDY = Study(
    name="e08",
    title="Aggressive schedule",
    question="Does CPLUS remain effective under an aggressive update schedule?",
    paper="Table 5; App. E.5",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="Table 5: Acquisition, Retention, overall; lr 1e-5, 10 epochs, seed 0",
            numbers={
                "sft": (98.97, 21.77, 69.53),
                "replay": (100.0, 12.68, 66.70),
                "cpl": (42.63, 9.57, 30.02),
                "cplus": (98.97, 39.0, 76.09),
            },
        ),
    ),
)
