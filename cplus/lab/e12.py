"""E12: what is the best use of a fixed budget of evidence?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from cplus.lab import summaries
from cplus.lab.drawing import colour_and_marker, joined, panels, picture
from cplus.lab.records import RunResult
from cplus.lab.scales import Scale
from cplus.lab.study import ADDED_HERE, Collected, ComparisonLine, Picture, Published, Summary
from cplus.lab.summaries import KEPT_AND_LEARNED, Metric, by_seed, over_seeds, pick, retained, shown
from cplus.receipts.figures import OTHER
from cplus.training.settings import RunSpec

TITLE = "Rotating evidence"
QUESTION = "What is the best use of a fixed refresh budget?"
DRAFT = Published(
    "a draft on an earlier toy world, Retention",
    {"all 128 every epoch": 90.4, "1/4 of 512 every epoch": 93.5, "all 512 every epoch": 94.3},
)

FIELDS = ("num_probes", "parts", "refresh", "memory")
TOLERANCE = 1.05


def runs(scale: Scale) -> list[RunSpec]:
    """Uses of one budget of evidence, half of the seeds for selection and half for confirmation; two dearer uses."""
    few, large = scale.base.num_probes, scale.large_bank
    parts = large // few
    # Probes, parts, updates per refresh (None: an epoch), memory.
    equal: list[tuple[int, int, int | None, float]] = [
        (few, 1, None, 0.0),
        (2 * few, 2, None, 0.0),
        (large, parts, None, 0.0),
        (large, parts, None, 0.5),
        (large, parts, None, 0.8),
        (few, 1, None, 0.5),
    ]
    dearer: list[tuple[int, int, int | None, float]] = [(large, 1, None, 0.0)]
    if scale.base.num_new is not None:
        steps = math.ceil(scale.base.num_new / scale.base.batch_size)
        equal += [
            (3 * large, 3 * parts, None, 0.0),
            (large, 1, parts * steps, 0.0),
            (few, steps, 1, 0.0),
            (large, parts * steps, 1, 0.0),
        ]
        dearer += [(few, 1, 1, 0.0)]
    seeds = scale.seeds_where_five
    uses = [*((use, 2 * seeds) for use in equal), *((use, seeds) for use in dearer)]
    return [scale.at(**dict(zip(FIELDS, use, strict=True)), seed=seed) for use, count in uses for seed in range(count)]


def cost(result: RunResult) -> float:
    """Rows of evidence over the whole run."""
    return float(result.cost["preservation_rows"])


def setting_name(result: RunResult) -> str:
    """A run's use of evidence in words."""
    spec = result.spec
    when = "epoch" if spec.refresh is None else "step" if spec.refresh == 1 else f"{spec.refresh} steps"
    seen = f"1/{spec.parts} of {spec.num_probes}" if spec.parts > 1 else f"all {spec.num_probes}"
    return f"{seen} every {when}" + (f", memory {spec.memory}" if spec.memory else "")


def summary(mine: Sequence[RunResult]) -> Summary:
    """Retention by use of evidence; the best one within the fixed bank's budget against the fixed bank."""
    columns: dict[str, Metric] = {**KEPT_AND_LEARNED, "evidence rows": cost}
    rows = summaries.table(mine, FIELDS, columns)
    few = min((result.spec.num_probes for result in mine), default=0)
    fixed = pick(mine, num_probes=few, parts=1, refresh=None, memory=0.0)
    if not fixed:
        return Summary(rows=rows, answer="The fixed bank was not run.", claims=())
    budget = TOLERANCE * max(by_seed(fixed, cost).values())
    groups = summaries.grouped(mine, setting_name)
    within = {label: own for label, own in groups.items() if max(by_seed(own, cost).values()) <= budget}
    # Half of the seeds select the best use, and the fresh ones confirm it.
    seeds = sorted({result.spec.seed for result in fixed})
    first, fresh = tuple(seeds[: (len(seeds) + 1) // 2]), tuple(seeds[(len(seeds) + 1) // 2 :])
    best = summaries.strongest({label: pick(own, seed=first) for label, own in within.items()})
    best, anew = best or setting_name(fixed[0]), {label: pick(own, seed=fresh) for label, own in within.items()}
    words, plain = "{} keeps more than the fixed bank, on fresh seeds", pick(fixed, seed=fresh)
    others = [label for label in within if label != setting_name(fixed[0])]
    claims = tuple(summaries.above(words.format(label), anew[label], plain) for label in others)
    gain = shown(summaries.margin(anew[best], plain), sign=True)
    answer = (
        f"Of {len(within)} uses at the cost of {few} probes per epoch the best on {len(first)} seeds is {best}; on "
        f"{len(fresh)} fresh seeds it keeps {gain} points more than the fixed bank."
    )
    return Summary(rows=rows, answer=answer, claims=claims)


# E12, rotating evidence: Retention of every use of a refresh budget; not in the paper.


def fig_rotating_evidence(found: Collected) -> Picture:
    """Retention of every use of a refresh budget, and its rows of evidence."""
    groups = summaries.grouped(found.studies["e12"].results, setting_name)
    order = sorted(groups, key=lambda name: statistics.fmean(result.retention for result in groups[name]))
    figure, (axis,) = panels(1, width=7.0, height=max(2.6, 0.3 * len(order) + 0.8))
    axis.grid(visible=True, axis="x")
    base = f"all {found.scale.base.num_probes} every epoch"
    for y, name in enumerate(order):
        kept, rows = summaries.row({}, groups[name], {"kept": retained, "rows": cost}).figures.values()
        colour = colour_and_marker("cplus")[0] if name == base else OTHER
        axis.errorbar([kept.mean], [y], xerr=[kept.error or 0.0], color=colour, marker="o", capsize=2)
        place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 7}
        axis.annotate(f"{rows.mean:,.0f} rows", (1.0, y), **place)
        figure.estimates.append(kept)
    axis.set_yticks(range(len(order)), order)
    axis.set_xlabel("Retention (%)")
    caption = (
        "Uses of evidence by Retention, with the rows of evidence of a whole run at the right; the dark point is the "
        "fixed bank."
    )
    return picture(figure, "fig:rotating-evidence", "Added here", caption)


def comparison(found: Collected) -> list[ComparisonLine]:
    """Retention with the small bank, with parts of the large one, and with all of it."""
    groups = summaries.grouped(found.studies["e12"].results, setting_name)
    few, large = found.scale.base.num_probes, found.scale.large_bank
    names = (f"all {few} every epoch", f"1/{large // few} of {large} every epoch", f"all {large} every epoch")
    what = f"Retention, {few} probes / {large} in {large // few} parts by turns / all {large} (%)"
    kept = joined([over_seeds(groups.get(name, ()), retained) for name in names])
    return [ComparisonLine(what, kept, ADDED_HERE)]
