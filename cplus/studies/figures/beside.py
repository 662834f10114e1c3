"""What each study measures beside what the paper reports, the most telling line first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cplus.evaluation.statistics import Estimate
from cplus.experiment.record import RunResult
from cplus.studies import e01, e02, e03, e05, e06, e07, e11, e12, e13
from cplus.studies.collected import Answered, Collected
from cplus.studies.e10 import KINDS
from cplus.studies.figures.drawing import method_name, size
from cplus.studies.figures.tables import numbers
from cplus.studies.scales import family
from cplus.studies.summaries import Figure, learned, margin, over_seeds, pick, retained, shown, strongest

ADDED = "added here"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One line: what it is of, measured, published."""

    what: str
    measured: str
    published: str


def _several(found: Sequence[Estimate | None], *, sign: bool = False) -> str:
    """Figures in a row, divided by strokes."""
    if all(each is None for each in found):
        return "not run"
    return " / ".join(shown(each, sign=sign) for each in found)


def _given(values: Sequence[object]) -> str:
    return " / ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)


def _methods(
    results: Sequence[RunResult], methods: Sequence[str], published: Mapping[str, object], figure: Figure = retained
) -> Beside:
    """Retention of several methods in one line."""
    return Beside(
        what=f"Retention, {' / '.join(method_name(m) for m in methods)} (%)",
        measured=_several([over_seeds(pick(results, method=method), figure) for method in methods]),
        published=_given([published[method] for method in methods]),
    )


def _e01(own: Answered, found: Collected) -> list[Beside]:
    won, total = e01.wins(own.runs)
    rows = sorted(e01.recovered(own.runs), key=lambda row: size(row.at["model"]))
    shares = {row.at["model"]: row.figures["recovery"] for row in rows}
    paper, scales = numbers("e01"), numbers("e01", 1)
    return [
        Beside(
            what="CPLUS minus each setting's strongest baseline at A = 4 and 8 (points of Retention)",
            measured=shown(e01.gain(family(own.runs), retained), sign=True),
            published=f"+{paper['mean gain at A in {4, 8}, Qwen3']:.2f}",
        ),
        Beside(
            what="settings in which CPLUS keeps most",
            measured=f"{won} of {total}" if total else "not run",
            published=f"{paper['settings led, Qwen3']} and {paper['settings led, Gemma and Phi']}",
        ),
        Beside(
            what="SFT's forgetting recovered at A = 4 and 8 (%)",
            measured=", ".join(f"{model} {shown(each)}" for model, each in shares.items()) or "not run",
            published=", ".join(f"{model} {value}" for model, value in scales.items()),
        ),
        Beside(
            what="Acquisition of CPLUS (%)",
            measured=shown(over_seeds(pick(own.runs, method="cplus"), learned)),
            published=f"{paper['acquisition']:g}",
        ),
    ]


def _e02(own: Answered, found: Collected) -> list[Beside]:
    paper = numbers("e02")
    said = ", ".join(f"{value:+.2f} after {task}" for task, value in paper.items())
    moved = [over_seeds(pick(own.runs, method=method), e02.change) for method in ("sft", "cpl", "cplus")]
    first = Beside(
        what="change on outside tasks, SFT / CPL / CPLUS (points)",
        measured=_several(moved, sign=True),
        published=f"CPLUS {said}",
    )
    tasks = dict.fromkeys(getattr(spec, "task", "") for spec in own.specs)
    rest = [
        Beside(
            what=f"CPLUS after {task} (points)",
            measured=shown(over_seeds(pick(own.runs, method="cplus", task=task), e02.change), sign=True),
            published=f"{paper[task]:+.2f}" if task in paper else "other tasks",
        )
        for task in tasks
    ]
    return [first, *rest]


def _e03(own: Answered, found: Collected) -> list[Beside]:
    asked = dict.fromkeys(spec.num_anchors for spec in own.specs)
    led = total = 0
    for budget in asked:
        here = pick(own.runs, num_anchors=budget)
        groups = {method: pick(here, method=method) for method in e03.METHODS}
        if all(groups.values()):
            total += 1
            led += strongest(groups) == "cplus"
    ours = pick(own.runs, method="cplus")
    gains = [margin(ours, pick(own.runs, method=method)) for method in e03.METHODS[:-1]]
    return [
        Beside(
            what="budgets at which gradients keep most",
            measured=f"{led} of {total}" if total else "not run",
            published=str(numbers("e03")["budgets at which CPLUS is highest"]),
        ),
        Beside(
            what="gradients minus replay of probes / of anchors and probes (points of Retention)",
            measured=_several(gains, sign=True),
            published="in a figure only",
        ),
    ]


def _e04(own: Answered, found: Collected) -> list[Beside]:
    here = pick(own.runs, num_anchors=found.scale.anchors, anchor_weight=0.5, beta=0.9, shots=2, temperature=0.8)
    first = _methods(here, ("cplus-anchors", "cplus-probes", "cplus"), numbers("e04"))
    more = _methods(here, ("cplus-no-ema", "cplus", "cplus-norm-aligned"), numbers("e04"))
    return [
        Beside(
            what="Retention, anchors alone / probes alone / both (%)",
            measured=first.measured,
            published=first.published,
        ),
        Beside(
            what="Retention, binary mask / smoothed / norm-aligned (%)",
            measured=more.measured,
            published=more.published,
        ),
    ]


def _e05(own: Answered, found: Collected) -> list[Beside]:
    last = f"average after {found.scale.tasks[-1]}"
    rows = {row.at["method"]: row.figures for row in own.summary.rows}
    return [
        Beside(
            what=f"average accuracy at the end, {' / '.join(method_name(m) for m in e05.METHODS)} (%)",
            measured=_several([rows.get(method, {}).get(last) for method in e05.METHODS]),
            published=_given([numbers("e05")[method][-1] for method in e05.METHODS]),
        )
    ]


def _e06(own: Answered, found: Collected) -> list[Beside]:
    curves = [result for result in own.runs if result.curve]
    methods = ("cplus", "replay", "cpl")
    ours = [row.figures for row in own.summary.rows if row.at.get("method") == "cplus"]
    costs = [figures["cost"] for figures in ours if "cost" in figures]
    return [
        Beside(
            what="first epoch at full Acquisition, CPLUS / Replay / CPL",
            measured=_several([over_seeds(pick(curves, method=method), e06.first_full) for method in methods]),
            published=_given([numbers("e06")[method] for method in methods]),
        ),
        Beside(
            what="FLOPs of CPLUS with the small bank, times SFT's, by model",
            measured=" / ".join(f"{cost.mean:.2f}" for cost in costs) or "not run",
            published="in a figure only",
        ),
    ]


def _e07(own: Answered, found: Collected) -> list[Beside]:
    most = max((getattr(spec, "wrong_anchors", 0) for spec in own.specs), default=0)
    ends = [pick(own.runs, wrong_anchors=wrong) for wrong in (0, most)]
    paper = [numbers("e07")[key] for key in ("0", "8")]
    figures: dict[str, Figure] = {"Retention": retained, "Correction": e07.corrected, "overall accuracy": e07.overall}
    return [
        Beside(
            what=f"{name}, all anchors right / all wrong (%)",
            measured=_several([over_seeds(end, figure) for end in ends]),
            published=_given([values[place] for values in paper]),
        )
        for place, (name, figure) in enumerate(figures.items())
    ]


def _e08(own: Answered, found: Collected) -> list[Beside]:
    methods = ("sft", "replay", "cpl", "cplus")
    paper = {method: numbers("e08")[method] for method in methods}
    kept = _methods(own.runs, methods, {method: values[1] for method, values in paper.items()})
    new = _methods(own.runs, methods, {method: values[0] for method, values in paper.items()}, learned)
    new = Beside(what=new.what.replace("Retention", "Acquisition"), measured=new.measured, published=new.published)
    return [kept, new]


def _e09(own: Answered, found: Collected) -> list[Beside]:
    plain = [result for result in own.runs if not result.spec.diagnose]
    return [_methods(plain, ("norm-matched", "shuffled", "cpl", "cplus"), numbers("e09"))]


def _e10(own: Answered, found: Collected) -> list[Beside]:
    rows = [row for row in own.summary.rows if KINDS["cpl"] in row.figures and "num_anchors" in row.at]
    last = max(rows, key=lambda row: int(row.at["num_anchors"]), default=None)
    at = f"at A = {last.at['num_anchors']}" if last else "at the largest budget"
    paper = numbers("e10")
    return [
        Beside(
            what=f"agreement with the own full-data mask {at}, CPL / CPLUS (% of update energy)",
            measured=_several([last.figures[KINDS[kind]] if last else None for kind in ("cpl", "cplus")]),
            published=" / ".join(f"{100 * paper[kind]:.0f}" for kind in ("cpl", "cplus")),
        )
    ]


def _e11(own: Answered, found: Collected) -> list[Beside]:
    return [
        Beside(
            what="forgetting that is a moved prior, SFT / CPLUS (%)",
            measured=_several([over_seeds(pick(own.runs, method=m), e11.explained) for m in ("sft", "cplus")]),
            published=ADDED,
        ),
        Beside(
            what="Retention, one constant label / as it came / balanced (%)",
            measured=_several(
                [over_seeds(pick(own.runs, method=m), retained) for m in ("constant-label", "cplus", "balanced-label")]
            ),
            published=ADDED,
        ),
    ]


def _e12(own: Answered, found: Collected) -> list[Beside]:
    groups: dict[str, list[RunResult]] = {}
    for result in own.runs:
        groups.setdefault(e12.name(result), []).append(result)
    few, large = found.scale.base.num_probes, found.scale.large
    names = (f"all {few} every epoch", f"1/{large // few} of {large} every epoch", f"all {large} every epoch")
    return [
        Beside(
            what=f"Retention, {few} probes / {large} in {large // few} parts by turns / all {large} (%)",
            measured=_several([over_seeds(groups.get(name, ()), retained) for name in names]),
            published=ADDED,
        )
    ]


def _e13(own: Answered, found: Collected) -> list[Beside]:
    common = e13.level([result for result in own.runs if result.curve])
    names = " / ".join(method_name(m) for m in e13.METHODS)

    def kept(method: str, warm: bool) -> Estimate | None:
        mine = [r for r in pick(own.runs, method=method) if bool(r.spec.warmup) == warm]
        return over_seeds(mine, e13.kept_at(common))

    return [
        Beside(
            what=f"Retention where {common:.0f} % are learned, constant rate / gentle start, SFT and CPLUS (%)",
            measured=" and ".join(_several([kept(m, warm) for warm in (False, True)]) for m in ("sft", "cplus")),
            published=ADDED,
        ),
        *(
            Beside(
                what=f"the same, {title}, {names} (%)",
                measured=_several([kept(method, warm) for method in e13.METHODS]),
                published=ADDED,
            )
            for title, warm in (("constant rate", False), ("gentle start", True))
        ),
    ]


_ALL: Mapping[str, Callable[[Answered, Collected], list[Beside]]] = {
    "e01": _e01,
    "e02": _e02,
    "e03": _e03,
    "e04": _e04,
    "e05": _e05,
    "e06": _e06,
    "e07": _e07,
    "e08": _e08,
    "e09": _e09,
    "e10": _e10,
    "e11": _e11,
    "e12": _e12,
    "e13": _e13,
}


def beside(name: str, found: Collected) -> list[Beside]:
    """A study's figures beside the paper's, the headline first."""
    return _ALL[name](found.studies[name], found)
