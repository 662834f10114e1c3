"""E11: how much of forgetting is a moved prior over answers?"""

from __future__ import annotations

from collections.abc import Sequence

from cplus.experiment.record import RunResult
from cplus.experiment.settings import RunSpec
from cplus.studies.scales import Scale
from cplus.studies.study import Published, Result, Study, Summary
from cplus.studies.summaries import Metric, above, learned, over_seeds, pick, retained, run_results, shown, table

METHODS = ("sft", "replay", "cpl", "constant-label", "balanced-label", "cplus")


def runs(scale: Scale) -> list[RunSpec]:
    """Methods and label controls with Retention by answer; with lettered options also with permuted options."""
    taps = ("prior", "permuted") if scale.base.interface == "letter" else ("prior",)
    return [
        scale.at(method=m, external=(), diagnose=taps, seed=s) for m in METHODS for s in range(scale.seeds_where_one)
    ]


def prior(name: str) -> Metric:
    """One number of the answer-prior diagnostic."""
    return lambda result: result.diagnostics.get("prior", {}).get(name)


def explained(result: RunResult) -> float | None:
    """The percentage of forgetting that is undone by removing each answer's mean change of score."""
    corrected, kept = prior("corrected")(result), prior("retention")(result)
    if corrected is None or kept is None or kept >= 100.0:
        return None
    return 100.0 * (corrected - kept) / (100.0 - kept)


def consistent(result: RunResult) -> float | None:
    """The share of questions answered with the same option in every order of the options."""
    found = result.diagnostics.get("permuted")
    return None if found is None else float(found["consistent"]["percent"])


METRICS = {
    "retention": retained,
    "macro": prior("macro"),
    "corrected": prior("corrected"),
    "explained": explained,
    "moved": prior("moved"),
    "consistent": consistent,
    "acquisition": learned,
}


def summary(results: Sequence[Result]) -> Summary:
    """Retention, macro-averaged over answers and corrected for the prior; CPLUS against banks with other labels."""
    mine = run_results(results)
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


STUDY = Study(
    name="e11",
    title="Answer prior",
    question="How much of forgetting is a flip of the prior over answers?",
    paper="added here; docs/studies.md",
    runs=runs,
    summary=summary,
    published=(
        Published(
            where="a model that never answers A, Qwen3-0.6B on CSQA, Retention",
            numbers={"never A": 35.8},
        ),
    ),
)
