"""The plan of a repair as text and JSON: rows, memory, disk, and a range for the time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cplus.experiment.bank_cache import bank_folder
from cplus.experiment.rows import Rows
from cplus.job import answer_timing
from cplus.job.memory import giga
from cplus.job.plan import self_written, shown_range
from cplus.job.repair.prepare import Given, prepare
from cplus.job.repair.settings import RepairConfig
from cplus.job.repair.step import ranked_by, trial_rows
from cplus.job.repair.timing import FEWEST, repair_seconds
from cplus.job.timing import Range
from cplus.methods import Method
from cplus.models import Loaded
from cplus.repairing.model import BYTES_PER_PARAMETER
from cplus.repairing.share import TRIALS


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """The result of `--plan`; ranges are from the shortest likely repair to the longest."""

    given: Given
    probes: int
    seconds: dict[str, Range]

    @property
    def total(self) -> Range:
        """Seconds of the whole repair, loading left out."""
        return sum(self.seconds.values(), Range(0.0, 0.0))

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of rows and probes."""
        rows = self.given.rows
        anchors = 0 if rows.anchors is None else len(rows.anchors.examples)
        return {"new": len(rows.new.examples), "anchors": anchors, "probes": self.probes}

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "settings": self.given.config.shown(),
            "size": asdict(self.given.size),
            "need": asdict(self.given.need),
            "counts": self.counts,
            "trials": TRIALS * self.given.config.rounds,
            "seconds": {part: asdict(spent) for part, spent in self.seconds.items()},
            "total_seconds": asdict(self.total),
            "warnings": [*self.given.rows.notes, *self.given.notes],
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        given, config, need, counts = self.given, self.given.config, self.given.need, self.counts
        times = ", ".join(f"{part} {shown_range(spent)}" for part, spent in self.seconds.items())
        tried = f"{TRIALS * config.rounds} evaluations of {trial_rows(given.rows.new, config.max_rows)} new rows"
        if ranked_by(given.rows.new) == "importance":
            used = f" and {min(counts['new'], config.max_rows)} new"
        else:
            used, tried = "", f"{FEWEST * config.rounds} to {tried}"
        past = min(counts["anchors"] + self.probes, config.max_rows)
        return [
            f"models     {config.tuned} towards {config.model}: {given.size.parameters:,} parameters, in float32",
            f"rows       {counts['new']} new, {counts['anchors']} anchors, {self.probes} probes",
            f"ranking    {past} past{used} rows, one backward pass each; {config.rounds} round(s)",
            f"search     {tried}",
            f"memory     {giga(need.held)} GB held ({BYTES_PER_PARAMETER} bytes per parameter), about "
            f"{giga(need.peak)} at the peak; {giga(need.available)} free",
            f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
            f"time       {shown_range(self.total)} here: {times}",
            *(f"warning    {note}" for note in (*given.rows.notes, *given.notes)),
            f"writes     {config.out}/model: the repaired model, {giga(4 * given.size.parameters)} GB",
            f"writes     {config.out}/receipt.html: base, tuned and repaired model, row by row",
            f"writes     {config.out}/record.json: settings and figures; {config.out}/README.md: the model card",
        ]


def plan(config: RepairConfig) -> RepairPlan:
    """Check everything and time a few rows; nothing is written but the cache."""
    writing: list[Range | None] = []

    def stand_ins(config: RepairConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, None]:
        rows, spent, _ = self_written(config, method, rows, base)
        writing.append(spent)
        return rows, None

    given = prepare(config, Path.cwd(), stand_ins)
    base, rows, anchors = given.base, given.rows, given.rows.anchors
    assert anchors is not None
    settings = config.settings(len(rows.new.examples)).probes
    times = {group.name: answer_timing.evaluating(config, base, group) for group in (*given.groups, anchors)}
    seconds = {"evaluating": Range(0.0, 0.0)}
    for group in given.groups:
        found, count = times[group.name], len(group.examples)
        tuned = found.answering if group.closed or config.judge != "none" else found.during
        seconds["evaluating"] += Range(
            count * (2 * found.answering.low + tuned.low), count * (2 * found.answering.high + tuned.high)
        )
        if group.part == "retention" and not group.closed and config.judge == "none":
            seconds["evaluating"] += answer_timing.noise_floor(config, group, found)
    built = config.bank is not None or bank_folder(base, anchors.interface, anchors.examples, settings).exists()
    if writing[0] is not None:
        seconds["writing probes"] = writing[0]
    elif not built and not config.written:
        seconds["writing probes"] = answer_timing.writing(base, anchors, settings)
    probes, own = settings.num_probes, [len(row) for row in anchors.encoded()]
    mean, others = sum(own) / len(own), min(probes, max(0, config.max_rows - len(own)))
    during, count = times[rows.new.name].during, trial_rows(rows.new, config.max_rows)
    seconds["repairing"] = repair_seconds(
        config,
        base,
        rows.new.encoded(),
        Range(sum(own) + mean * others, sum(own) + 2 * mean * others),
        trial=Range(count * during.low, count * during.high),
        by=ranked_by(rows.new),
        rounds=config.rounds,
        max_rows=config.max_rows,
    )
    return RepairPlan(given=given, probes=probes, seconds=seconds)
