"""The plan of a job or a repair: rows, memory, disk, and a time from one timed update, refresh and decoded batch."""

from __future__ import annotations

import importlib
import math
import tempfile
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

import torch

from cplus import models
from cplus.base import files
from cplus.core.rows import MAX_TOKENS, Encoded
from cplus.data.examples import FreeForm, Message
from cplus.jobs.choices import (
    SHARE,
    Chosen,
    Tokens,
    assumed_material,
    assumed_rows,
    evidence_tokens,
    is_open,
    tokens_per_epoch,
)
from cplus.jobs.keep import interface_of, is_cached, portions, split_up, stand_in, with_written
from cplus.jobs.memory import DevicePlan, Footprint, ModelSize, device_plan, giga, has_weights
from cplus.jobs.outputs import FLOOR_ROWS, FLOOR_TOKENS
from cplus.jobs.prepare import TooLarge, announce, bind_rows, load, preflight, row_of
from cplus.jobs.progress import PeakMemory, duration, say
from cplus.jobs.repair import Given, prepare, ranked_by, trial_rows
from cplus.jobs.rows import located
from cplus.jobs.settings import MAX_ROWS, AdaptConfig, RepairConfig
from cplus.methods.repair import BYTES_PER_PARAMETER, TRIALS
from cplus.methods.table import Material, Method, Past
from cplus.models import Loaded
from cplus.models.decoding import ROWS, LocalEngine
from cplus.models.scoring import log_likelihoods
from cplus.probes.abilities import ability
from cplus.probes.bank import Probe
from cplus.probes.build import bank_folder
from cplus.probes.settings import BLOCK
from cplus.training.driver import STATE_BYTES, adapted, in_precision, start
from cplus.training.loop import Stepped, updates_per_epoch
from cplus.training.rows import Group, Rows, Source, past_rows

WITHIN = 1.5
"""The factor on the planned time, up or down, within which the job should end."""
REQUEST_TOKENS = 20
"""About the length of a request that a model writes itself."""
ANSWER_TOKENS = 64
"""About the length at which small models end an answer of their own."""
ACCEPTED = 0.7
"""About the share of written rows that is accepted."""
_STEPS = 8
_BLOB = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a padded token in an update and in evidence, of a token read, of a prompt begun, and of a step of
    decoding `width` rows.
    """

    update: float
    evidence: float
    read: float
    begun: float
    step: float
    width: int = ROWS

    def decoding(self, count: float, length: float) -> float:
        """Seconds to decode `count` rows of this length; fewer rows at once take hardly less time per step."""
        steps = math.ceil(count / ROWS) * length
        return count * self.begun + steps * self.step * max(1.0, min(count, ROWS) / self.width)


def decoding_pace(base: Loaded, rows: Sequence[Encoded]) -> Pace:
    """The pace of reading and decoding these rows; a backward pass is taken to cost two forward ones."""
    few = rows[:ROWS]
    engine = LocalEngine(base.model, base.tokenizer)
    engine.greedy([few[0].prompt], max_new_tokens=1, stop=())  # the first pass is slower
    begun = time.perf_counter()
    engine.greedy([row.prompt for row in few], max_new_tokens=1, stop=())
    beginning = time.perf_counter() - begun
    begun = time.perf_counter()  # the prompts are in the engine's cache now
    found = engine.greedy([row.prompt for row in few], max_new_tokens=_STEPS, stop=())
    decoding = time.perf_counter() - begun
    begun = time.perf_counter()
    log_likelihoods(base.model, few, what="timing")
    reading = time.perf_counter() - begun
    read, steps = reading / sum(map(len, few)), max(len(row.tokens) for row in found)
    return Pace(
        update=3 * read, evidence=3 * read, read=read, begun=beginning / len(few), step=decoding / steps, width=len(few)
    )


def training_pace(config: AdaptConfig, method: Method, base: Loaded, material: Material) -> tuple[float, float]:
    """Seconds of a token in an update of the longest rows and in a refresh; this changes the model."""
    longest = sorted(material.new, key=len, reverse=True)[: config.batch_size]
    batch = list(islice(cycle(longest), config.batch_size))
    short = Material(new=batch * 2, past=(_one_pass(material.past[0]),))
    method = replace(in_precision(method, config.compute_dtype, base.device), parts=1)
    training = start(replace(config.settings(), epochs=1, order="file"), method, base.model, short)
    update = evidence = 0.0
    last = time.perf_counter()
    for event in training.run():
        if isinstance(event, Stepped):  # the second one counts, the first is slower
            update = (time.perf_counter() - last) / max(1, event.work.padded)
        last = time.perf_counter()
    guard = training.prepared.guard
    if guard is not None:
        if method.evidence:
            begun = time.perf_counter()
            found = guard.refresh()
            evidence = (time.perf_counter() - begun) / max(1, found.work.padded)
        guard.detach()
    base.model.eval()
    return update, evidence


def _one_pass(past: Past) -> Past:
    """Rows for one full pass of each kind, so that a token costs what it costs in the job, in time and in memory."""

    def some(rows: Sequence[Encoded]) -> list[Encoded]:
        return list(rows[: bisect_left(list(accumulate(map(len, rows))), MAX_TOKENS) + 1])

    probes = some(past.probes)
    return past_rows(past.name, anchors=some(past.anchors), probes=probes, synthetic=probes)


def evaluation_seconds(config: AdaptConfig, rows: Rows, base: Loaded, pace: Pace) -> float:
    """Seconds of the answers before and after training, and of the losses during it."""
    spent = 0.0
    for group in rows.evaluated(config.max_asked, config.seed):
        count, tokens = len(group.examples), sum(map(len, group.encoded()))
        told = answered = 0.0
        if not group.closed and not group.texts:
            told = answered = pace.decoding(count, answer_length(config, group, base))
            if group.by_base and config.judge == "none":  # the base model's answers are the rows themselves
                told = 0.0
            if group.part == "retention" and config.judge == "none":
                told += pace.decoding(2 * min(FLOOR_ROWS, count), min(FLOOR_TOKENS, config.max_new_tokens))
        # The rows are scored by each model, and in free text the base model's answers too.
        spent += told + answered + (2 if group.closed else 4) * tokens * pace.read
        every, share = config.evaluate_every, min(1.0, config.evaluate_rows / count)
        if group.part == "acquisition" and group.closed and config.stop != "never":
            every, share = 1, 1.0
        if every and group.part != "external":
            spent += config.epochs // every * share * tokens * pace.read
    return spent


def answer_length(config: AdaptConfig, group: Group, base: Loaded) -> float:
    """Tokens of an answer: as many as the given responses have, at least 64, within the limit."""
    texts = [example.response for example in group.examples if isinstance(example, FreeForm)]
    tokens = [len(base.tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts]
    limit = min(config.max_new_tokens, group.max_new_tokens or config.max_new_tokens)
    return min(max(ANSWER_TOKENS, sum(tokens) / len(tokens)), limit)


def bank_seconds(config: AdaptConfig, rows: Rows, base: Loaded, pace: Pace) -> float:
    """Seconds to write a bank from anchors; none where it is given or in the cache."""
    anchors, settings = rows.anchors, config.settings(len(rows.new.examples)).probes
    if config.bank is not None or config.written or anchors is None:
        return 0.0
    if bank_folder(base, anchors.interface, anchors.examples, settings).exists():
        return 0.0
    length = sum(map(len, anchors.encoded())) / len(anchors.examples)
    count = max(BLOCK, settings.num_probes / ACCEPTED)
    return pace.decoding(count, length) + count * length * pace.read


def own_rows(config: AdaptConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, int, int]:
    """The rows with those that the base model wrote before, else with stand-ins: how many, and their length."""
    asked = portions(config, method, len(rows.new.examples))
    if all(is_cached(config, base, portion) for portion in asked):
        return with_written(config, method, rows, base)[0], 0, 0
    lengths = [ability(portion.ability).answer_tokens for portion in asked]
    banks = [stand_in([_stand_in(length)], portion.total) for portion, length in zip(asked, lengths, strict=True)]
    rows, _ = split_up(config, method, rows, interface_of(config, base), asked, banks)
    total = sum(portion.total for portion in asked)
    return rows, total, REQUEST_TOKENS + max(lengths)


def _stand_in(length: int) -> Probe:
    """A request and an answer of about these many tokens."""
    ask = Message(role="user", content=" ".join(["word"] * REQUEST_TOKENS))
    example = FreeForm(id="assumed", messages=(ask,), response=" ".join(["word"] * length))
    return Probe(example=example, confidence=1.0, request=0, shots=(), topic=None)


def repair_seconds(
    config: AdaptConfig, new: Group, past: float, pace: Pace, *, rounds: int = 1, max_rows: int = MAX_ROWS
) -> float:
    """Seconds to rank and search; `past` is the number of tokens of the past rows.

    Importance takes a gradient of each past row and, in each round, of each new row; blame one of each past row.
    """
    tokens = sum(map(len, new.encoded()[:max_rows]))
    ranked = rounds * past if ranked_by(new) == "blame" else past + rounds * tokens
    trial = tokens * trial_rows(new, max_rows) / len(new.encoded()[:max_rows])
    return ranked * pace.update + ((rounds + 2) * past + (TRIALS * rounds + 2) * trial) * pace.read


def saving_seconds(config: AdaptConfig, size: ModelSize, need: Footprint, base: Loaded, updates: int) -> float:
    """Seconds of checkpoints, model and pages, from the time to hash the weights and to write a few megabytes."""
    begun = time.perf_counter()
    models.fingerprint(base.model)
    for name in ("scipy.stats", "jinja2"):  # what the pages need
        importlib.import_module(name)
    hashing = time.perf_counter() - begun
    checkpoint = round(size.trainable * (4 + STATE_BYTES[config.optimizer] + need.kept_bytes_per_parameter))
    count = max(4, min(_BLOB, checkpoint))
    place = files.cache_folder()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        begun = time.perf_counter()
        files.write_state(Path(folder) / "state.pt", {"weights": torch.zeros(count // 4)})
        per_byte = (time.perf_counter() - begun) / count
    saved = 1 + (updates // config.checkpoint_steps if config.checkpoint_steps is not None else 0)
    kept = 4 * size.trainable * config.epochs * (config.keep_best or config.lost_limit is not None)
    return hashing + per_byte * (saved * checkpoint + 4 * size.parameters + kept)


def shown_times(seconds: Mapping[str, float]) -> str:
    """A time in words: in total with its range, then by part."""
    total = sum(seconds.values())
    parts = ", ".join(f"{part} {duration(spent)}" for part, spent in seconds.items())
    return f"about {duration(total)} here ({duration(total / WITHIN)} to {duration(total * WITHIN)}): {parts}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `--plan`: what a job needs, and its time on this machine as it is now if it runs to the end."""

    config: AdaptConfig
    size: ModelSize
    need: Footprint
    tokens: Tokens
    updates: int
    new: int
    sources: tuple[Source, ...]
    anchors: int
    probes: int
    seconds: dict[str, float]
    warnings: tuple[str, ...]
    devices: DevicePlan
    chosen: tuple[Chosen, ...] = ()
    trial_bytes: int | None = None
    """Memory at the peak of what was timed; None where an earlier peak of the process hides it."""

    @property
    def peak(self) -> int:
        """Memory at the job's peak: as the trial measured it, else as computed."""
        return self.need.peak if self.trial_bytes is None else self.trial_bytes

    @property
    def total(self) -> float:
        """Seconds of the whole job."""
        return sum(self.seconds.values())

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
            "updates_per_epoch": self.updates,
            "counts": {"new": self.new, "anchors": self.anchors, "probes": self.probes},
            "sources": [asdict(source) for source in self.sources],
            "seconds": self.seconds,
            "total_seconds": self.total,
            "within": WITHIN,
            "warnings": list(self.warnings),
            "writes": self.writes,
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        need, tokens, size = self.need, self.tokens, self.size
        kept, step = need.kept_bytes_per_parameter, need.step_bytes_per_parameter
        base = "in float32" if self.config.load == "float32" else f"{size.packed:,} held in 4 bits"
        return [
            f"model      {self.config.model}: {size.parameters:,} parameters, {size.trainable:,} trained, {base}",
            f"rows       {self.new} new, {self.anchors} anchors, {self.probes} probes",
            f"training   {self.config.epochs} epochs at most, {self.updates} updates each",
            *(f"chosen     {own}" for own in self.chosen),
            f"gate       {kept:.2f} bytes per trained parameter held, {step:.2f} more during an update",
            f"cost       {tokens.percent:+.0f} % FLOPs against plain fine-tuning: {tokens.sft:,} tokens of new rows "
            f"per epoch, {tokens.training - tokens.sft:,} more trained on, {tokens.evidence:,} of evidence",
            f"memory     {giga(need.held)} GB held, about {giga(self.peak)} at the peak; {giga(need.available)} free",
            *self.devices.device_lines(),
            f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
            f"time       {shown_times(self.seconds)}",
            *(f"warning    {warning}" for warning in self.warnings),
            *(f"writes     {path}: {what}" for path, what in self.writes.items()),
        ]


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
    """Compute the job's size and time an update, a refresh and a batch of decoding; nothing is written but the cache.

    `starting` is how long the program took to get here, which the job will take again.
    """
    home, begun = Path.cwd(), time.perf_counter()
    memory = PeakMemory(models.choose_device(config.device))
    found = preflight(config, home)
    config, method = found.config, found.method
    announce(found)
    base = load(config, home)
    say("timing a sample of each part on this model and these rows")
    notes: tuple[str, ...]
    if found.tasks.split is None:
        rows, own, length = own_rows(config, method, bind_rows(config, found.tasks, base), base)
        notes = (f"the base model has not written its {own} rows yet; their length is assumed",) if own else ()
    else:
        rows, note = assumed_rows(config, found.tasks, base)
        own, length, notes = 0, 0, (note,)
    seconds = {"starting": starting, "loading": time.perf_counter() - begun}
    material, probes = assumed_material(config, method, rows, home)
    tokens = tokens_per_epoch(config, method, material)
    updates = updates_per_epoch(len(material.new), config.batch_size)
    saving = saving_seconds(config, found.size, found.need, base, config.epochs * updates)
    with models.computing(config.compute_dtype, base.device):
        pace = decoding_pace(base, material.new)
    tried = replace(base, model=adapted(config.settings(), method, base.model))
    update, evidence = training_pace(config, method, tried, material)
    pace = replace(pace, update=update, evidence=evidence)
    seconds["evaluating"] = evaluation_seconds(config, rows, base, pace)
    seconds["writing probes"] = pace.decoding(own / ACCEPTED, length)
    if probes:
        seconds["writing probes"] += bank_seconds(config, rows, base, pace)
    epoch = tokens.training * update + tokens.evidence * evidence
    once = evidence_tokens(method, material) * evidence if method.refresh == "once" else 0.0
    seconds["training"] = config.epochs * epoch + once
    if is_open(config):
        seconds["choosing the rate"] = SHARE * seconds["training"]
    if config.repair:
        past = sum(len(row) for task in material.past for row in (*task.anchors, *task.probes)[:MAX_ROWS])
        seconds["repairing"] = repair_seconds(config, rows.new, past, pace)
    seconds["saving"] = saving
    return Plan(
        config=config,
        size=found.size,
        need=found.need,
        tokens=tokens,
        updates=updates,
        new=len(rows.new.examples),
        sources=rows.sources,
        anchors=len(material.past[0].anchors),
        probes=probes,
        seconds={part: spent for part, spent in seconds.items() if spent},
        warnings=(*found.warnings, *rows.notes, *notes),
        devices=device_plan(
            config, method, models.resolve(located(config.model, home)), config.num_anchors, size=found.size
        ),
        chosen=found.chosen,
        trial_bytes=memory.peak(),
    )


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """The result of `cplus repair --plan`."""

    given: Given
    probes: int
    seconds: dict[str, float]

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
            "seconds": self.seconds,
            "total_seconds": sum(self.seconds.values()),
            "within": WITHIN,
            "warnings": [*self.given.rows.notes, *self.given.notes],
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        given, config, need, counts = self.given, self.given.config, self.given.need, self.counts
        tried = (
            f"at most {TRIALS * config.rounds} evaluations of {trial_rows(given.rows.new, config.max_rows)} new rows"
        )
        by_importance = ranked_by(given.rows.new) == "importance"
        used = f" and {min(counts['new'], config.max_rows)} new" if by_importance else ""
        past = min(counts["anchors"] + self.probes, config.max_rows)
        return [
            f"models     {config.tuned} towards {config.model}: {given.size.parameters:,} parameters, in float32",
            f"rows       {counts['new']} new, {counts['anchors']} anchors, {self.probes} probes",
            f"ranking    {past} past{used} rows, one backward pass each; {config.rounds} round(s)",
            f"search     {tried}",
            f"memory     {giga(need.held)} GB held ({BYTES_PER_PARAMETER} bytes per parameter), about "
            f"{giga(need.peak)} at the peak; {giga(need.available)} free",
            f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
            f"time       {shown_times(self.seconds)}",
            *(f"warning    {note}" for note in (*given.rows.notes, *given.notes)),
            f"writes     {config.out}/model: the repaired model, {giga(4 * given.size.parameters)} GB",
            f"writes     {config.out}/receipt.html: base, tuned and repaired model, row by row",
            f"writes     {config.out}/record.json: settings and figures; {config.out}/README.md: the model card",
        ]


def plan_repair(config: RepairConfig) -> RepairPlan:
    """Check everything and time a few rows; nothing is written but the cache."""
    own = length = 0

    def stand_ins(config: RepairConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, None]:
        nonlocal own, length
        rows, own, length = own_rows(config, method, rows, base)
        return rows, None

    given = prepare(config, Path.cwd(), stand_ins)
    base, rows, anchors = given.base, given.rows, given.rows.anchors
    assert anchors is not None
    with models.computing(config.compute_dtype, base.device):
        pace = decoding_pace(base, rows.new.encoded())
    probes = config.settings(len(rows.new.examples)).num_probes
    lengths = [len(row) for row in anchors.encoded()]
    past = sum(lengths) / len(lengths) * min(len(lengths) + probes, config.max_rows)
    seconds = {
        "evaluating": 1.5 * evaluation_seconds(config, rows, base, pace),  # three models instead of two
        "writing probes": pace.decoding(own / ACCEPTED, length) + bank_seconds(config, rows, base, pace),
        "repairing": repair_seconds(config, rows.new, past, pace, rounds=config.rounds, max_rows=config.max_rows),
    }
    return RepairPlan(given=given, probes=probes, seconds={part: spent for part, spent in seconds.items() if spent})
