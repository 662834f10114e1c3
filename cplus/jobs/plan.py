"""The plan of a job: rows, memory, disk, and a time from one timed refresh, update and decoded batch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cplus import models
from cplus.core.rows import MAX_TOKENS, Encoded, batched, measured
from cplus.data.examples import FreeForm, Message
from cplus.evaluation.abilities import ABILITIES, ability, requests
from cplus.jobs.keep import Portion, earlier_bank, interface_of, portions, settings_of, with_written
from cplus.jobs.memory import giga, size_plan
from cplus.jobs.outputs import DECODED, ability_interface
from cplus.jobs.prepare import TooLarge, preflight, row_of, uses_bank
from cplus.jobs.progress import duration, memory_used, say
from cplus.jobs.repair import ranked_by, trial_rows
from cplus.jobs.rows import bind_rows, evaluated, load, located
from cplus.jobs.settings import MAX_ROWS, AdaptConfig
from cplus.methods.repair import TRIALS
from cplus.methods.table import METHODS, Material, Method, Past
from cplus.models import Loaded
from cplus.models.decoding import ROWS, LocalEngine
from cplus.probes.bank import Bank
from cplus.probes.build import sealed_before
from cplus.probes.settings import BLOCK
from cplus.probes.writing import ACCEPTED
from cplus.training.driver import adapted, start
from cplus.training.loop import Schedule, epoch_batches, updates_per_epoch
from cplus.training.rows import Group, Rows

WITHIN = 1.5
"""The factor on the planned time, up or down, within which the job should end."""
REQUEST_TOKENS = 20
"""About the length of a request that a model writes itself."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
SAVED = 3e8
"""Bytes per second at which checkpoints and models are written, about."""
_TIMED_ROWS, _TIMED_STEPS, _TIMED_PROMPT = 32, 8, 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `--plan`, as a JSON object and in words."""

    row: Mapping[str, Any]
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a padded token in an update's passes and in evidence, of the optimizer's step, and of a step of
    decoding `_TIMED_ROWS` rows; and the bytes of activations per token.
    """

    update: float
    evidence: float
    step: float
    decoded: float
    activations: float

    @property
    def read(self) -> float:
        """Seconds of a token that is only read: a backward pass costs two forward ones."""
        return self.update / 3

    def decoding(self, count: float, length: float) -> float:
        """Seconds to decode this many rows of this length; fewer rows at once take hardly less time per step."""
        steps = math.ceil(count / ROWS) * length
        return steps * self.decoded * max(0.6, min(count, ROWS) / _TIMED_ROWS)


def timed(config: AdaptConfig, method: Method, base: Loaded, material: Material) -> Pace:
    """Time a decoded batch, a refresh and an update of the longest rows; this changes the model."""
    rows = sorted(material.new, key=len, reverse=True)
    engine = LocalEngine(base.model, base.tokenizer)
    with models.computing(config.compute_dtype, base.device):
        prompts = [row.prompt[-_TIMED_PROMPT:] for row in islice(cycle(rows), _TIMED_ROWS)]
        begun = time.perf_counter()
        found = engine.greedy(prompts, max_new_tokens=_TIMED_STEPS, word_first=False)
        decoded = (time.perf_counter() - begun) / (1 + max(len(row.tokens) for row in found))
    batch = rows[: max(1, min(config.batch_size, MAX_TOKENS // len(rows[0])))]
    few = len(batch) // 2 + 1
    past = [
        Past(name=task.name, anchors=task.anchors[:few], probes=task.probes[:few], synthetic=task.probes[:few])
        for task in material.past[:1]
    ]
    method = replace(method, parts=1)
    once = config.model_copy(update={"epochs": 1, "order": "file"})
    training = start(once, method, adapted(config, method, base.model), Material(new=batch, past=tuple(past)))
    guard, evidence = training.prepared.guard, 0.0
    training.model.train()
    if guard is not None and method.evidence:
        begun = time.perf_counter()
        work = guard.refresh().work
        evidence = (time.perf_counter() - begun) / max(1, work.padded)
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in training.model.parameters()}

    def saved(tensor: Tensor) -> Tensor:
        """Note what the forward pass keeps for the backward pass."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    begun = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        _, work = training.prepared.backward(batch)
    update = (time.perf_counter() - begun) / max(1, work.padded)
    training.optimizer.step()  # the first one allocates
    begun = time.perf_counter()
    training.optimizer.step()
    step = time.perf_counter() - begun
    if guard is not None:
        guard.detach()
    base.model.eval()
    activations = sum(kept.values()) / max(1, work.padded)
    return Pace(update=update, evidence=evidence, step=step, decoded=decoded, activations=activations)


def evaluation_seconds(config: AdaptConfig, groups: Sequence[Group], pace: Pace) -> float:
    """Seconds of the answers before and after training, and of the evaluations during it."""
    shown = ability_interface(groups[0].interface.tokenizer, config) is not None
    asked = [(len(requests(name)), ABILITIES[name].max_new_tokens) for name in config.measured] if shown else []
    spent = sum(2 * pace.decoding(count, most) for count, most in asked)
    for group in groups:
        rows = group.encoded()
        count, tokens = len(rows), sum(map(len, rows))
        spent += 2 * tokens * pace.read
        if not group.closed and not group.texts:  # answered after training, and before it where a judge needs that
            most = min(config.max_new_tokens, group.max_new_tokens or config.max_new_tokens)
            answer = min(most, 1.5 * sum(len(row.target) for row in rows) / count)
            few = count if config.judge != "none" or group.part == "retention" else min(count, DECODED)
            spent += pace.decoding(few, answer) * (2 if config.judge != "none" else 1)
        every, share = config.evaluate_every, min(1.0, config.evaluate_rows / count)
        if group.part == "acquisition" and group.closed and config.stop != "never":
            every, share = 1, 1.0
        if every and group.part != "external":
            spent += config.epochs // every * share * tokens * pace.read
    return spent


def writing_seconds(config: AdaptConfig, rows: Rows, asked: Sequence[Portion], base: Loaded, pace: Pace) -> float:
    """Seconds to write rows of the base model's own, or a bank from anchors; none where it is given or in the cache."""
    spent = 0.0
    for portion in asked:
        written, count = ability(portion.ability), portion.total / ACCEPTED
        request = (written.short or (64, 0))[0]
        spent += pace.decoding(count, request) + pace.decoding(portion.total, written.written_tokens)
        spent += (count + portion.total) * REQUEST_TOKENS * pace.read
    anchors, settings = rows.anchors, config.settings(len(rows.new.examples)).probes
    if config.bank is not None or config.written or anchors is None:
        return spent
    if sealed_before(base, anchors.interface, anchors.examples, settings) is not None:
        return spent
    length = sum(map(len, anchors.encoded())) / len(anchors.examples)
    count = max(BLOCK, settings.num_probes / ACCEPTED)
    return spent + pace.decoding(count, length) + count * length * pace.read


def with_stand_ins(config: AdaptConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, list[Portion]]:
    """The rows with those that the base model wrote before, else with stand-ins, and what it has yet to write."""
    asked, bound = portions(config, method, len(rows.new.examples)), interface_of(config, base)
    if all(sealed_before(base, bound, (), settings_of(config, bound, portion)) for portion in asked):
        return with_written(config, method, rows, base)[0], []
    longest = max(ability(portion.ability).written_tokens for portion in asked)
    ask = Message(role="user", content=" ".join(["word"] * REQUEST_TOKENS))
    one = FreeForm(id="assumed", messages=(ask,), response=" ".join(["word"] * longest))
    held, anchors = (
        tuple(replace(one, id=f"{kind}-{i}") for i in range(sum(getattr(portion, kind) for portion in asked)))
        for kind in ("past", "anchors")
    )
    own = Group(name="past", part="retention", interface=bound, examples=held, max_new_tokens=longest)
    given = () if rows.anchors is None else rows.anchors.examples
    return replace(
        rows,
        past=own if held else rows.past,
        anchors=replace(own, name="anchors", examples=(*given, *anchors)) if anchors else rows.anchors,
    ), asked


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


# The tokens of a job's epochs, counted as they will be batched, before the bank is written.


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Padded tokens per epoch: of plain fine-tuning, of the method's training, of its evidence."""

    sft: int
    training: int
    evidence: int

    @property
    def percent(self) -> float:
        """What the method costs above plain fine-tuning.

        Paper: App. E.12: FLOPs are 6 P L, so that P cancels out.

        >>> Tokens(sft=100, training=100, evidence=25).percent
        25.0
        """
        return 100 * (self.training + self.evidence) / self.sft - 100


def tokens_per_epoch(config: AdaptConfig, method: Method, material: Material) -> Tokens:
    """Count the tokens of the first epoch as they will be batched."""
    schedule = Schedule(epochs=1, batch_size=config.batch_size, order=config.order)

    def trained(row: Method) -> int:
        return sum(padded(batch) for batch in epoch_batches(row, material, schedule, seed=config.seed, epoch=1))

    updates = updates_per_epoch(len(material.new), config.batch_size)
    training = trained(method)
    training += round(updates * padded(material.rows("anchors")) * method.objective.anchor_passes)
    training += round(sum(padded(material.rows(kind)) for kind in method.objective.read_by_base) / 3)
    # Evidence computed once is preparation, which the paper leaves out of the cost of training.
    refreshes = updates / method.refresh if isinstance(method.refresh, int) else float(method.refresh == "epoch")
    evidence = round(refreshes * evidence_tokens(method, material))
    return Tokens(sft=trained(METHODS["sft"]), training=training, evidence=evidence)


def evidence_tokens(method: Method, material: Material) -> int:
    """The tokens of one refresh."""
    return sum(padded(source.at(0)) for source in method.sources(material)) if method.evidence else 0


def largest_pass(config: AdaptConfig, method: Method, material: Material) -> int:
    """The tokens of the largest pass of an update or a refresh."""
    longest = sorted(material.new, key=len, reverse=True)[: config.batch_size]
    evidence = [source.at(0) for source in method.sources(material)] if method.evidence else []
    return max(measured(batch).padded for rows in (longest, *evidence) if rows for batch in batched(rows))


def padded(rows: Sequence[Encoded]) -> int:
    """The tokens of rows in batches of similar length."""
    return sum(measured(batch).padded for batch in batched(rows))


def plan_anywhere(config: AdaptConfig, *, starting: float = 0.0) -> Plan:
    """The job's plan; for a model that is too large for this machine or has no weights here, what fits where."""
    home = Path.cwd()
    where = models.resolve(located(config.model, home))
    try:
        if not (isinstance(where, Path) and where.is_dir()) or any(any(where.glob(kind)) for kind in WEIGHTS):
            return plan(config, starting=starting)
        reason = f"{where} holds no weights, so nothing was timed"
    except TooLarge as error:
        reason = str(error)
    row, lines = size_plan(config, row_of(config), where, reason)
    return Plan(row=row, lines=lines)


def plan(config: AdaptConfig, *, starting: float = 0.0) -> Plan:
    """The job's size, and its time from a timed refresh, update and decoded batch; nothing is written.

    `starting` is how long the program took to get here, which the job will take again.
    """
    home, begun = Path.cwd(), time.perf_counter()
    found = preflight(config, home)
    config, method, need, size = found.config, found.method, found.need, found.size
    base = load(config, home)
    rows, asked = with_stand_ins(config, method, bind_rows(config, found.tasks, base), base)
    groups = evaluated(config, rows)
    seconds = {"starting": starting, "loading": time.perf_counter() - begun}
    say("timing a refresh, an update and a decoded batch on this model and its longest rows")
    material, probes = assumed_material(config, method, rows, home)
    tokens = tokens_per_epoch(config, method, material)
    updates = updates_per_epoch(len(material.new), config.batch_size)
    used = memory_used(base.device) - sum(p.nbytes for p in base.model.parameters())
    pace = timed(config, method, base, material)
    seconds["evaluating"] = evaluation_seconds(config, groups, pace)
    seconds["writing probes"] = writing_seconds(config, rows, asked, base, pace)
    epoch = tokens.training * pace.update + updates * pace.step + tokens.evidence * pace.evidence
    once = evidence_tokens(method, material) * pace.evidence if method.refresh == "once" else 0.0
    seconds["training"] = config.epochs * epoch + once
    if config.repair:
        past = sum(len(row) for task in material.past for row in (*task.anchors, *task.probes)[:MAX_ROWS])
        few = rows.new.encoded()[:MAX_ROWS]
        new = sum(map(len, few))
        ranked = past if ranked_by(rows.new) == "blame" else past + new
        trials = (TRIALS + 2) * new * trial_rows(rows.new, MAX_ROWS) / len(few)
        seconds["repairing"] = ranked * pace.update + (3 * past + trials) * pace.read
    saved = 1 + (config.epochs * updates // config.checkpoint_steps if config.checkpoint_steps is not None else 0)
    kept = 4 * size.trainable * config.epochs * (config.keep_best is not False or config.lost_limit is not None)
    seconds["saving"] = (saved * need.checkpoint + 4 * size.parameters + kept) / SAVED
    # What the process holds besides the weights is measured, too.
    activations = pace.activations * largest_pass(config, method, material)
    evidence = 4 * size.trainable if method.evidence else 0  # a refresh has its gradient beside that of its passes
    peak = need.held + max(0, used) + evidence + round(activations)
    counts = {"new": len(rows.new.examples), "anchors": len(material.past[0].anchors), "probes": probes}
    unseen = sum(portion.total for portion in asked)
    notes = (f"the base model has not written its {unseen} rows yet; their length is assumed",) if unseen else ()
    warnings = (*found.warnings, *rows.notes, *notes)
    held = "in float32" if config.load == "float32" else f"{size.packed:,} held in 4 bits"
    seconds = {part: spent for part, spent in seconds.items() if spent}
    total = sum(seconds.values())
    parts = ", ".join(f"{part} {duration(spent)}" for part, spent in seconds.items())
    return Plan(
        row={
            "settings": config.model_dump(mode="json"),
            "chosen": [asdict(own) for own in found.chosen],
            "size": asdict(size),
            "need": {**asdict(need), "peak": peak},
            "tokens_per_epoch": {**asdict(tokens), "percent_above_sft": tokens.percent},
            "updates_per_epoch": updates,
            "counts": counts,
            "sources": [asdict(source) for source in rows.sources],
            "warnings": warnings,
            "seconds": seconds,
            "total_seconds": total,
            "within": WITHIN,
        },
        lines=[
            f"model      {config.model}: {size.parameters:,} parameters, {size.trainable:,} trained, {held}",
            f"rows       {', '.join(f'{count} {name}' for name, count in counts.items())}",
            f"training   {config.epochs} epochs at most, {updates} updates each",
            *(f"chosen     {own}" for own in found.chosen),
            f"gate       {need.gate / size.trainable:.2f} bytes per trained parameter",
            f"cost       {tokens.percent:+.0f} % FLOPs against plain fine-tuning: {tokens.sft:,} tokens of new rows "
            f"per epoch, {tokens.training - tokens.sft:,} more trained on, {tokens.evidence:,} of evidence",
            f"memory     {giga(need.held)} GB held, about {giga(peak)} at the peak; {giga(need.available)} free",
            f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
            f"time       about {duration(total)} ({duration(total / WITHIN)} to {duration(total * WITHIN)}): {parts}",
            *(f"warning    {warning}" for warning in warnings),
            f"writes     {config.out}/model, {giga(4 * size.parameters)} GB; {config.out}/receipt.html and record.json",
        ],
    )
