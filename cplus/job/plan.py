"""The plan of a job as text and JSON: size, memory, disk, the price of protection, and a range for the time."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cplus import models
from cplus.experiment.bank_cache import bank_folder
from cplus.experiment.driver import adapted
from cplus.experiment.rows import Group, Rows, Source
from cplus.experiment.schedule import updates_per_epoch
from cplus.job import answer_timing, timing
from cplus.job.answer_timing import decoding_bytes
from cplus.job.choices import Chosen, is_open, with_chosen
from cplus.job.fits import DevicePlan, device_plan, has_weights
from cplus.job.memory import Footprint, ModelSize, giga
from cplus.job.preflight import Preflight, TooLarge, announce, bind_rows, load, preflight, row_of
from cplus.job.progress import duration, say
from cplus.job.range_test import range_test
from cplus.job.repair.settings import MAX_ROWS
from cplus.job.repair.step import ranked_by, trial_rows
from cplus.job.repair.timing import repair_seconds
from cplus.job.rows import located
from cplus.job.settings import AdaptConfig
from cplus.job.timing import Range, Yardstick
from cplus.job.usage import PeakMemory
from cplus.job.workload import Tokens, assumed_material, assumed_rows, evidence_tokens, tokens_per_epoch
from cplus.job.written import interface_of, is_cached, portions, split_up, stand_in, with_written
from cplus.methods import Material, Method
from cplus.models import Loaded


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `--plan`; ranges are from the shortest likely job to the longest, on this machine as it is now."""

    config: AdaptConfig
    size: ModelSize
    need: Footprint
    tokens: Tokens
    tokens_high: Tokens
    updates: int
    new: int
    sources: tuple[Source, ...]
    anchors: int
    probes: int
    seconds: dict[str, Range]
    warnings: tuple[str, ...]
    devices: DevicePlan
    chosen: tuple[Chosen, ...] = ()
    trial_bytes: int | None = None
    """Memory of the process, or of the GPU, at the peak of the trial that was timed, with as many rows decoded at once
    as the job will; None where an earlier peak of the process hides it."""

    @property
    def peak(self) -> int:
        """Memory at the job's peak: as the trial measured it, else as computed."""
        return self.need.peak if self.trial_bytes is None else self.trial_bytes

    @property
    def total(self) -> Range:
        """Seconds of the whole job."""
        return sum(self.seconds.values(), Range(0.0, 0.0))

    @property
    def writes(self) -> dict[str, str]:
        """The files that the job will write."""
        out = self.config.out
        made = {
            f"{out}/model": f"the adapted model, {giga(4 * self.size.parameters)} GB",
            f"{out}/receipt.html": "what was learned and lost, row by row",
            f"{out}/record.json": "settings, figures, curve, cost",
            f"{out}/README.md": "the model card",
            f"{out}/work": "checkpoint and the base model's answers, removed at the end",
        }
        return made | ({f"{out}/bank": f"{self.probes} sealed probes"} if self.probes else {})

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "settings": self.config.model_dump(mode="json"),
            "chosen": [asdict(own) for own in self.chosen],
            "size": asdict(self.size),
            "need": asdict(self.need),
            **{key: value for key, value in self.devices.row().items() if key in ("bytes", "devices")},
            "trial_bytes": self.trial_bytes,
            "tokens_per_epoch": {**asdict(self.tokens), "percent_above_sft": self.tokens.percent},
            "tokens_per_epoch_high": {**asdict(self.tokens_high), "percent_above_sft": self.tokens_high.percent},
            "updates_per_epoch": self.updates,
            "counts": {"new": self.new, "anchors": self.anchors, "probes": self.probes},
            "sources": [asdict(source) for source in self.sources],
            "seconds": {part: asdict(spent) for part, spent in self.seconds.items()},
            "total_seconds": asdict(self.total),
            "warnings": list(self.warnings),
            "writes": self.writes,
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        need, tokens, high, size = self.need, self.tokens, self.tokens_high, self.size
        kept, step = need.kept_bytes_per_parameter, need.step_bytes_per_parameter
        times = ", ".join(f"{part} {shown_range(spent)}" for part, spent in self.seconds.items())
        base = "in float32" if self.config.load == "float32" else f"{size.packed:,} held in 4 bits"
        percent = f"{tokens.percent:+.0f}" + (f" to {high.percent:+.0f}" if high.percent > tokens.percent else "")
        return [
            f"model      {self.config.model}: {size.parameters:,} parameters, {size.trainable:,} trained, {base}",
            f"rows       {self.new} new, {self.anchors} anchors, {self.probes} probes",
            f"training   {self.config.epochs} epochs at most, {self.updates} updates each",
            *(f"chosen     {own}" for own in self.chosen),
            f"gate       {kept:.2f} bytes per trained parameter held, {step:.2f} more during an update",
            f"cost       {percent} % FLOPs against plain fine-tuning: {tokens.sft:,} tokens of new rows per epoch, "
            f"{tokens.training - tokens.sft:,} more trained on, {tokens.evidence:,} of evidence",
            f"memory     {giga(need.held)} GB held, about {giga(self.peak)} at the peak; {giga(need.available)} free",
            *self.devices.device_lines(),
            f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
            f"time       {shown_range(self.total)} here: {times}",
            *(f"warning    {warning}" for warning in self.warnings),
            *(f"writes     {path}: {what}" for path, what in self.writes.items()),
        ]


def shown_range(seconds: Range) -> str:
    """A range of seconds in words."""
    low, high = duration(seconds.low), duration(seconds.high)
    return low if low == high else f"{low} to {high}"


def plan_anywhere(config: AdaptConfig, *, starting: float = 0.0) -> Plan | DevicePlan:
    """The job's plan; for a model that is too large for this machine or has no weights here, what fits where."""
    home = Path.cwd()
    where = models.resolve(located(config.model, home))
    try:
        if has_weights(where):
            return plan(config, starting=starting)
        reason = f"{where} holds no weights, so nothing was timed"
    except TooLarge as error:
        reason = str(error)
    return device_plan(config, row_of(config), where, config.num_anchors, reason)


def plan(config: AdaptConfig, *, starting: float = 0.0) -> Plan:
    """Compute the job's size and try a little of each part; nothing is written but the cache.

    `starting` is how long the program took to get here, which the job will take again.
    """
    home, begun = Path.cwd(), time.perf_counter()
    memory = PeakMemory(models.choose_device(config.device))
    found = preflight(config, home)
    config = found.config
    announce(found)
    base = load(config, home)
    say("timing a sample of each part on this model and these rows")
    loading = time.perf_counter() - begun
    rows, writing, assumed = _rows(config, found, base)
    if writing is None and not config.own_answers:
        loading = time.perf_counter() - begun
    method, new = found.method, rows.new
    yardstick = Yardstick(base, new)
    material, probes = assumed_material(config, method, rows, home)
    longer, _ = assumed_material(config, method, rows, home, length=2)
    tokens, high = (tokens_per_epoch(config, method, own) for own in (material, longer))
    yardstick.measure()
    seconds = {"loading": Range(loading, loading)}
    if starting:
        seconds["starting"] = Range(starting, starting)
    seconds["evaluating"] = answer_timing.evaluation_seconds(config, base, rows)
    yardstick.measure()
    if writing is not None:
        seconds["writing probes"] = writing
    elif probes and not config.written:
        seconds |= _writing(config, base, rows.anchors, len(new.examples))
    decoding = memory.peak()
    if decoding is not None:
        decoding += decoding_bytes(config, base, rows, probes if "writing probes" in seconds else 0)
    if config.repair:
        seconds["repairing"] = _repairing(config, base, new, material, longer)
    updates = updates_per_epoch(len(material.new), config.batch_size)
    steps = Range(updates * (1 if config.stop != "never" else config.epochs), updates * config.epochs)
    seconds["saving"] = timing.saving_seconds(config, found.size, found.need, base, steps)
    yardstick.measure()
    say("timing a few updates")
    base = replace(base, model=adapted(config.settings(), method, base.model))
    chosen = found.chosen
    if is_open(config):
        begun = time.perf_counter()
        held = [] if rows.past is None else rows.past.encoded()
        test = range_test(config, config.settings(len(new.examples)), method, base.model, material, held)
        seconds["choosing the rate"] = Range(*2 * [time.perf_counter() - begun])
        config, chosen = with_chosen(config, [test.chosen]), (*chosen, test.chosen)
    pace = timing.pace(config, method, base, material)
    once = Range(0.0, 0.0)
    if method.refresh == "once":
        once = Range(*(evidence_tokens(method, own) * pace.evidence for own in (material, longer)))
    seconds["training"] = timing.training_seconds(config, tokens, high, len(material.new), pace) + once
    yardstick.measure()
    peak = memory.peak()
    return Plan(
        config=config,
        size=found.size,
        need=found.need,
        tokens=tokens,
        tokens_high=high,
        updates=updates,
        new=len(new.examples),
        sources=rows.sources,
        anchors=len(material.past[0].anchors),
        probes=probes,
        seconds={part: spent * yardstick.stretch() for part, spent in seconds.items()},
        warnings=(*found.warnings, *rows.notes, *assumed),
        devices=device_plan(
            config, method, models.resolve(located(config.model, home)), config.num_anchors, size=found.size
        ),
        chosen=chosen,
        trial_bytes=None if peak is None else max(peak, decoding or 0),
    )


def _rows(config: AdaptConfig, found: Preflight, base: Loaded) -> tuple[Rows, Range | None, list[str]]:
    """The rows, with stand-ins for those not known yet, the seconds to write them, and what was assumed."""
    if found.tasks.split is None:
        return self_written(config, found.method, bind_rows(config, found.tasks, base), base)
    rows, note = assumed_rows(config, found.tasks, base)
    return rows, None, [note]


def _repairing(config: AdaptConfig, base: Loaded, new: Group, short: Material, longer: Material) -> Range:
    """Seconds to repair the trained model."""
    during, count = answer_timing.evaluating(config, base, new).during, trial_rows(new, MAX_ROWS)
    tokens = [
        sum(len(row) for task in own.past for row in (*task.anchors, *task.probes)[:MAX_ROWS])
        for own in (short, longer)
    ]
    trial = Range(count * during.low, count * during.high)
    return repair_seconds(config, base, short.new, Range(*tokens), trial=trial, by=ranked_by(new), max_rows=MAX_ROWS)


def self_written(config: AdaptConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, Range | None, list[str]]:
    """The rows with self-written ones from the cache, else with a few stand-ins and the seconds to write them all."""
    asked = portions(config, method, len(rows.new.examples))
    if all(is_cached(config, base, portion) for portion in asked):
        return with_written(config, method, rows, base)[0], None, []
    bound, total = interface_of(config, base), sum(portion.total for portion in asked)
    with models.computing(config.compute_dtype, base.device):
        few, spent = answer_timing.self_writing(config, base, asked[0].ability, total)
    banks = [stand_in(few, portion.total) for portion in asked]
    rows, _ = split_up(config, method, rows, bound, asked, banks)
    note = f"the base model has not written its {total} rows yet: {len(few)} were written to estimate the rest"
    return rows, spent, [note]


def _writing(config: AdaptConfig, base: Loaded, anchors: Group | None, num_new: int) -> dict[str, Range]:
    """Seconds to write the bank; nothing where it is given, cached or not needed."""
    settings = config.settings(num_new).probes
    if config.bank is not None or anchors is None:
        return {}
    if bank_folder(base, anchors.interface, anchors.examples, settings).exists():
        return {}
    return {"writing probes": answer_timing.writing(base, anchors, settings)}
