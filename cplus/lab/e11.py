"""E11: how much of forgetting is a moved prior over answers?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.lab.drawing import PALETTE, compare_methods, line, method_name, panels, picture
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import Collected, ComparisonLine, Picture, Published, Summary
from cplus.lab.summaries import Metric, above, diagnosed, learned, over_seeds, pick, retained, shown, table
from cplus.training.settings import RunSpec

TITLE = "Answer prior"
QUESTION = "How much of forgetting is a flip of the prior over answers?"
NEVER_A = Published("a model that never answers A, Qwen3-0.6B on CSQA, Retention", {"never A": 35.8})

METHODS = ("sft", "replay", "cpl", "constant-label", "balanced-label", "cplus")


def runs(scale: Scale) -> list[RunSpec]:
    """Methods and label controls with Retention by answer; with lettered options also with permuted options."""
    taps = ("prior", "permuted") if scale.base.interface == "letter" else ("prior",)
    return scale.each({"method": METHODS, "seed": range(scale.seeds_where_one)}, external=(), diagnose=taps)


def explained(result: RunResult) -> float | None:
    """The percentage of forgetting that is undone by removing each answer's mean change of score."""
    prior = result.diagnostics.get("prior")
    if prior is None or prior["retention"] >= 100.0:
        return None
    return float(100.0 * (prior["corrected"] - prior["retention"]) / (100.0 - prior["retention"]))


METRICS: dict[str, Metric] = {
    "retention": retained,
    "macro": diagnosed("prior", "macro"),
    "corrected": diagnosed("prior", "corrected"),
    "explained": explained,
    "moved": diagnosed("prior", "moved"),
    "consistent": diagnosed("permuted", "consistent", "percent"),
    "acquisition": learned,
}


def summary(mine: Sequence[RunResult]) -> Summary:
    """Retention, macro-averaged over answers and corrected for the prior; CPLUS against banks with other labels."""
    ours = pick(mine, method="cplus")
    claims = (
        above("CPLUS keeps more than with one constant label", ours, pick(mine, method="constant-label")),
        above("a balanced bank keeps more than the bank as it came", pick(mine, method="balanced-label"), ours),
    )
    shares = [shown(over_seeds(pick(mine, method=name), explained)) for name in ("sft", "cplus")]
    constant, own = (over_seeds(pick(mine, method=m), retained) for m in ("constant-label", "cplus"))
    answer = (
        f"Removing each answer's mean change of score undoes {shares[0]} % of SFT's forgetting and {shares[1]} % of "
        f"CPLUS's; with one constant label CPLUS keeps {shown(constant)} %, with the bank's own labels {shown(own)} %."
    )
    return Summary(rows=table(mine, ("method",), METRICS), answer=answer, claims=claims)


# E11, answer prior: how much of forgetting is a moved prior over answers; not in the paper.


def fig_answer_prior(found: Collected) -> Picture:
    """Retention, its mean over answers, and Retention with each answer's mean change of score removed."""
    own = found.studies["e11"].results
    figure, (axis,) = panels(1, width=6.4, height=3.0, ylabel="Retention (%)")
    kinds = {"retention": "as asked", "macro": "averaged over answers", "corrected": "prior taken off"}
    for number, (kind, name) in enumerate(kinds.items()):
        each = ((x, over_seeds(pick(own, method=m), METRICS[kind])) for x, m in enumerate(METHODS))
        points = [(x + 0.18 * (number - 1), estimate) for x, estimate in each if estimate is not None]
        line(axis, points, name, PALETTE[number], "os^"[number], linestyle="none")
    axis.set_xticks(range(len(METHODS)), [method_name(method) for method in METHODS])
    caption = (
        "How much of forgetting is a moved prior over answers: Retention, the mean over answers of their Retention, "
        "and Retention after each answer's mean change of score is taken off."
    )
    return picture(figure, "fig:answer-prior", "Added here", caption)


def comparison(found: Collected) -> list[ComparisonLine]:
    """The share of forgetting that is a moved prior."""
    what, runs = "forgetting that is a moved prior, SFT / CPLUS (%)", found.studies["e11"].results
    return [compare_methods(what, runs, ("sft", "cplus"), None, explained)]
