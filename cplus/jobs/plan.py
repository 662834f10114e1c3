"""The plan of a job or a repair: rows, memory, disk, and a time from one timed update, refresh and decoded batch."""

from __future__ import annotations

import importlib
import math
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

import torch

from cplus import models
from cplus.base import files
from cplus.core.rows import MAX_TOKENS, Encoded
from cplus.data.examples import FreeForm, Message
from cplus.jobs import choices
from cplus.jobs.keep import earlier_bank, interface_of, portions, split_up, with_written, written_before
from cplus.jobs.memory import Footprint, ModelSize, SizePlan, giga, has_weights, size_plan
from cplus.jobs.outputs import FLOOR_ROWS, FLOOR_TOKENS
from cplus.jobs.prepare import Preflight, TooLarge, preflight, row_of, uses_bank
from cplus.jobs.progress import PeakMemory, duration, say
from cplus.jobs.repair import Given, prepare, ranked_by, trial_rows
from cplus.jobs.rows import bind_rows, load, located
from cplus.jobs.settings import MAX_ROWS, AdaptConfig, RepairConfig
from cplus.methods.repair import BYTES_PER_PARAMETER, TRIALS
from cplus.methods.table import Material, Method, Past
from cplus.models import Loaded
from cplus.models.decoding import ROWS, LocalEngine
from cplus.models.scoring import log_likelihoods
from cplus.probes.abilities import ability
from cplus.probes.bank import Bank, Probe
from cplus.probes.build import bank_folder
from cplus.probes.settings import BLOCK
from cplus.training.driver import adapted, start
from cplus.training.loop import Stepped, updates_per_epoch
from cplus.training.rows import Group, Rows, Source

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
    method = replace(method, parts=1)
    lr = config.lr if isinstance(config.lr, float) else 0.0  # a rate that is still to be tested takes no other time
    once = config.model_copy(update={"epochs": 1, "order": "file", "lr": lr})
    training = start(once, method, base.model, short)
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
    return Past(name=past.name, anchors=some(past.anchors), probes=probes, synthetic=probes)


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
    if all(written_before(config, base, portion) for portion in asked):
        return with_written(config, method, rows, base)[0], 0, 0
    lengths = [ability(portion.ability).answer_tokens for portion in asked]
    banks = [_stand_ins(portion.total, length) for portion, length in zip(asked, lengths, strict=True)]
    rows, _ = split_up(config, method, rows, interface_of(config, base), asked, banks)
    total = sum(portion.total for portion in asked)
    return rows, total, REQUEST_TOKENS + max(lengths)


def _stand_ins(count: int, length: int) -> Bank:
    """A bank of requests and answers of about these many tokens, under different ids."""
    ask = Message(role="user", content=" ".join(["word"] * REQUEST_TOKENS))
    example = FreeForm(id="assumed", messages=(ask,), response=" ".join(["word"] * length))
    one = Probe(example=example, confidence=1.0, request=0, shots=(), topic=None)
    probes = tuple(replace(one, example=replace(example, id=f"assumed-{i}")) for i in range(count))
    counts = {"requests": count, "accepted": count, "rejected": {}}
    return Bank(probes=probes, manifest={"counts": counts, "probes_sha256": ""})


def repair_seconds(config: AdaptConfig, new: Group, past: float, pace: Pace, *, max_rows: int = MAX_ROWS) -> float:
    """Seconds to rank and search; `past` is the number of tokens of the past rows.

    Importance takes a gradient of each past row and, in each round, of each new row; blame one of each past row.
    """
    tokens = sum(map(len, new.encoded()[:max_rows]))
    ranked = past if ranked_by(new) == "blame" else past + tokens
    trial = tokens * trial_rows(new, max_rows) / len(new.encoded()[:max_rows])
    return ranked * pace.update + (3 * past + (TRIALS + 2) * trial) * pace.read


def saving_seconds(config: AdaptConfig, size: ModelSize, need: Footprint, base: Loaded, updates: int) -> float:
    """Seconds of checkpoints, model and pages, from the time to hash the weights and to write a few megabytes."""
    begun = time.perf_counter()
    models.fingerprint(base.model)
    for name in ("scipy.stats", "jinja2"):  # what the pages need
        importlib.import_module(name)
    hashing = time.perf_counter() - begun
    count = max(4, min(_BLOB, need.checkpoint))
    place = files.cache_folder()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        begun = time.perf_counter()
        files.write_state(Path(folder) / "state.pt", {"weights": torch.zeros(count // 4)})
        per_byte = (time.perf_counter() - begun) / count
    saved = 1 + (updates // config.checkpoint_steps if config.checkpoint_steps is not None else 0)
    kept = 4 * size.trainable * config.epochs * (config.keep_best or config.lost_limit is not None)
    return hashing + per_byte * (saved * need.checkpoint + 4 * size.parameters + kept)


def assumed_material(config: AdaptConfig, method: Method, rows: Rows, home: Path) -> tuple[Material, int]:
    """Rows as tokens, and the number of probes; probes not yet written are taken to be as long as the anchors."""
    anchors = [] if rows.anchors is None else rows.anchors.encoded()
    count = len(rows.new.examples)
    probes: list[Encoded] = []
    wanted = uses_bank(config, method)
    if wanted and rows.anchors is not None:
        if config.bank is not None:
            bank = Bank.load(Path(located(str(config.bank), home)))
            probes = [rows.anchors.interface.encode(example) for example in bank.examples]
        else:
            probes = list(islice(cycle(anchors), config.settings(count).probes.num_probes))
    past = [Past(name="past", anchors=anchors, probes=probes, synthetic=probes[:count])]
    for place, group in zip(config.kept, rows.kept, strict=True):
        written = earlier_bank(Path(located(str(place), home)), group).examples if wanted else ()
        encoded = [group.interface.encode(example) for example in written]
        past.append(Past(name=group.name, anchors=group.encoded(), probes=encoded, synthetic=encoded[:count]))
    return Material(new=rows.trained.encoded(), past=tuple(past)), len(probes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `--plan`: what a job needs, and its time on this machine as it is now if it runs to the end."""

    found: Preflight
    tokens: choices.Tokens
    updates: int
    counts: dict[str, int]
    sources: tuple[Source, ...]
    seconds: dict[str, float]
    warnings: tuple[str, ...]
    trial_bytes: int | None
    """Memory at the peak of what was timed; None where an earlier peak of the process hides it."""

    @property
    def peak(self) -> int:
        """Memory at the job's peak: as the trial measured it, else as computed."""
        return self.found.need.peak if self.trial_bytes is None else self.trial_bytes

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "settings": self.found.config.model_dump(mode="json"),
            "chosen": [asdict(own) for own in self.found.chosen],
            "size": asdict(self.found.size),
            "need": asdict(self.found.need),
            "trial_bytes": self.trial_bytes,
            "tokens_per_epoch": {**asdict(self.tokens), "percent_above_sft": self.tokens.percent},
            "updates_per_epoch": self.updates,
            "counts": self.counts,
            "sources": [asdict(source) for source in self.sources],
            "warnings": list(self.warnings),
            "seconds": self.seconds,
            "total_seconds": sum(self.seconds.values()),
            "within": WITHIN,
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        config, need, tokens, size = self.found.config, self.found.need, self.tokens, self.found.size
        base = "in float32" if config.load == "float32" else f"{size.packed:,} held in 4 bits"
        return [
            f"model      {config.model}: {size.parameters:,} parameters, {size.trainable:,} trained, {base}",
            f"rows       {', '.join(f'{count} {name}' for name, count in self.counts.items())}",
            f"training   {config.epochs} epochs at most, {self.updates} updates each",
            *(f"chosen     {own}" for own in self.found.chosen),
            f"gate       {need.gate / size.trainable:.2f} bytes per trained parameter",
            f"cost       {tokens.percent:+.0f} % FLOPs against plain fine-tuning: {tokens.sft:,} tokens of new rows "
            f"per epoch, {tokens.training - tokens.sft:,} more trained on, {tokens.evidence:,} of evidence",
            *_lines(need, self.peak, self.seconds, self.warnings, config.out, size),
        ]


def _lines(
    need: Any, peak: int, seconds: Mapping[str, float], warnings: Iterable[str], out: Path, size: ModelSize
) -> list[str]:
    """What the plans of a job and of a repair have in common."""
    total = sum(seconds.values())
    parts = ", ".join(f"{part} {duration(spent)}" for part, spent in seconds.items())
    return [
        f"memory     {giga(need.held)} GB held, about {giga(peak)} at the peak; {giga(need.available)} free",
        f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
        f"time       about {duration(total)} here ({duration(total / WITHIN)} to {duration(total * WITHIN)}): {parts}",
        *(f"warning    {warning}" for warning in warnings),
        f"writes     {out}/model, {giga(4 * size.parameters)} GB; {out}/receipt.html, record.json and README.md",
    ]


def plan_anywhere(config: AdaptConfig, *, starting: float = 0.0) -> Plan | SizePlan:
    """The job's plan; for a model that is too large for this machine or has no weights here, what fits where."""
    home = Path.cwd()
    where = models.resolve(located(config.model, home))
    try:
        if has_weights(where):
            return plan(config, starting=starting)
        reason = f"{where} holds no weights, so nothing was timed"
    except TooLarge as error:
        reason = str(error)
    return size_plan(config, row_of(config), where, reason)


def plan(config: AdaptConfig, *, starting: float = 0.0) -> Plan:
    """Compute the job's size and time an update, a refresh and a batch of decoding; nothing is written but the cache.

    `starting` is how long the program took to get here, which the job will take again.
    """
    home, begun = Path.cwd(), time.perf_counter()
    memory = PeakMemory(models.choose_device(config.device))
    found = preflight(config, home)
    config, method = found.config, found.method
    base = load(config, home)
    say("timing a sample of each part on this model and these rows")
    rows, own, length = own_rows(config, method, bind_rows(config, found.tasks, base), base)
    notes = (f"the base model has not written its {own} rows yet; their length is assumed",) if own else ()
    seconds = {"starting": starting, "loading": time.perf_counter() - begun}
    material, probes = assumed_material(config, method, rows, home)
    tokens = choices.tokens_per_epoch(config, method, material)
    updates = updates_per_epoch(len(material.new), config.batch_size)
    saving = saving_seconds(config, found.size, found.need, base, config.epochs * updates)
    with models.computing(config.compute_dtype, base.device):
        pace = decoding_pace(base, material.new)
    tried = replace(base, model=adapted(config, method, base.model))
    update, evidence = training_pace(config, method, tried, material)
    pace = replace(pace, update=update, evidence=evidence)
    seconds["evaluating"] = evaluation_seconds(config, rows, base, pace)
    seconds["writing probes"] = pace.decoding(own / ACCEPTED, length)
    if probes:
        seconds["writing probes"] += bank_seconds(config, rows, base, pace)
    epoch = tokens.training * update + tokens.evidence * evidence
    once = choices.evidence_tokens(method, material) * evidence if method.refresh == "once" else 0.0
    seconds["training"] = config.epochs * epoch + once
    if choices.is_open(config):
        seconds["choosing the rate"] = choices.SHARE * seconds["training"]
    if config.repair:
        past = sum(len(row) for task in material.past for row in (*task.anchors, *task.probes)[:MAX_ROWS])
        seconds["repairing"] = repair_seconds(config, rows.new, past, pace)
    seconds["saving"] = saving
    return Plan(
        found=found,
        tokens=tokens,
        updates=updates,
        counts={"new": len(rows.new.examples), "anchors": len(material.past[0].anchors), "probes": probes},
        sources=rows.sources,
        seconds={part: spent for part, spent in seconds.items() if spent},
        warnings=(*found.warnings, *rows.notes, *notes),
        trial_bytes=memory.peak(),
    )


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """The result of `cplus repair --plan`."""

    given: Given
    counts: dict[str, int]
    seconds: dict[str, float]

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "settings": self.given.config.shown(),
            "size": asdict(self.given.size),
            "need": asdict(self.given.need),
            "counts": self.counts,
            "trials": TRIALS,
            "warnings": [*self.given.rows.notes, *self.given.notes],
            "seconds": self.seconds,
            "total_seconds": sum(self.seconds.values()),
            "within": WITHIN,
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        given, config, warnings = self.given, self.given.config, (*self.given.rows.notes, *self.given.notes)
        rows = trial_rows(given.rows.new, config.max_rows)
        return [
            f"models     {config.tuned} towards {config.model}: {given.size.parameters:,} parameters, "
            f"{BYTES_PER_PARAMETER} bytes per parameter",
            f"rows       {', '.join(f'{count} {name}' for name, count in self.counts.items())}",
            f"search     at most {TRIALS} evaluations of {rows} new rows",
            *_lines(given.need, given.need.peak, self.seconds, warnings, config.out, given.size),
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
    probes = config.settings(len(rows.new.examples)).probes.num_probes
    lengths = [len(row) for row in anchors.encoded()]
    past = sum(lengths) / len(lengths) * min(len(lengths) + probes, config.max_rows)
    seconds = {
        "evaluating": 1.5 * evaluation_seconds(config, rows, base, pace),  # three models instead of two
        "writing probes": pace.decoding(own / ACCEPTED, length) + bank_seconds(config, rows, base, pace),
        "repairing": repair_seconds(config, rows.new, past, pace, max_rows=config.max_rows),
    }
    counts = {"new": len(rows.new.examples), "anchors": len(anchors.examples), "probes": probes}
    return RepairPlan(given=given, counts=counts, seconds={part: spent for part, spent in seconds.items() if spent})
