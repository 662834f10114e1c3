"""E8: does CPLUS remain effective under an aggressive update schedule?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.lab.drawing import compare_methods, joined_names, measured_table, method_name, rows_by_method
from cplus.lab.records import RunResult
from cplus.lab.scales import METHODS, Scale
from cplus.lab.study import Collected, ComparisonLine, Published, Summary, Table
from cplus.lab.summaries import leads, learned, margin, over_seeds, pick, retained, shown, table
from cplus.training.settings import RunSpec

TITLE = "Aggressive schedule"
QUESTION = "Does CPLUS remain effective under an aggressive update schedule?"
PAPER = "Table 5; App. E.5"
TABLE_5 = Published(
    "Table 5: Acquisition, Retention, overall; lr 1e-5, 10 epochs, seed 0",
    {
        "sft": (98.97, 21.77, 69.53),
        "replay": (100.0, 12.68, 66.70),
        "cpl": (42.63, 9.57, 30.02),
        "cplus": (98.97, 39.0, 76.09),
    },
)

WHERE = "App. E.5; Table 5"


def runs(scale: Scale) -> list[RunSpec]:
    """One large learning rate for a fixed number of epochs, evaluated after the last one."""
    lr, epochs = scale.aggressive_schedule
    return scale.each({"method": METHODS, "seed": range(scale.seeds_where_one)}, lr=lr, epochs=epochs)


def overall(result: RunResult) -> float:
    """Accuracy over past and new rows together."""
    past, new = result.counts["asked"], result.counts["new"]
    return (result.retention * past + result.acquisition * new) / (past + new)


def summary(mine: Sequence[RunResult]) -> Summary:
    """Acquisition, Retention and overall accuracy by method."""
    ours = pick(mine, method="cplus")
    claims = (
        *leads("CPLUS keeps more than {} under the aggressive schedule", mine, METHODS[:-1], paper=WHERE),
        *leads("CPLUS learns more than {} under the aggressive schedule", mine, ["cpl"], learned, paper=WHERE),
    )
    gaps = {name: shown(margin(ours, pick(mine, method=name)), sign=True) for name in METHODS[:-1]}
    answer = (
        f"Under the aggressive schedule CPLUS keeps {shown(over_seeds(ours, retained))} % at "
        f"{shown(over_seeds(ours, learned))} % Acquisition; its Retention minus SFT's is {gaps['sft']} points, minus "
        f"CPL's {gaps['cpl']}."
    )
    rows = table(mine, ("method",), {"acquisition": learned, "retention": retained, "overall": overall})
    return Summary(rows=rows, answer=answer, claims=claims)


# E8, aggressive schedule: Acquisition, Retention and accuracy under one large learning rate (Table 5).


def tab_fixed_aggressive_update(found: Collected) -> Table:
    """Acquisition, Retention and overall accuracy under one large learning rate.

    Paper: Table 5.
    """
    lr, epochs = found.scale.aggressive_schedule
    names = {method: (method_name(method),) for method in METHODS}
    own, paper = found.studies["e08"].results, TABLE_5.numbers
    rows = rows_by_method(own, names, (learned, retained, overall), paper)
    columns = ("Method", "Acquisition (%)", "Retention (%)", "Overall accuracy (%)")
    words = f"Learning rate {lr:g} for {epochs} epochs", "Published: 1e-05 for 10 epochs, seed 0."
    return measured_table("tab:fixed-aggressive-update", "Table 5", columns, rows, *words)


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention by method, with the paper's."""
    kept = {method: values[1] for method, values in TABLE_5.numbers.items()}
    what = f"Retention, {joined_names(METHODS)} (%)"
    return [compare_methods(what, found.studies["e08"].results, METHODS, kept)]
