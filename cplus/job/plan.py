"""What a job will need, before it starts: size, memory, disk, the price of keeping, and time from a short timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cplus.data.batching import batched, measured
from cplus.data.encoded import Encoded
from cplus.experiment.driver import adapted
from cplus.experiment.material import past_rows
from cplus.experiment.rows import Rows
from cplus.experiment.schedule import updates_per_epoch
from cplus.job import bank as banks
from cplus.job import footprint, timing
from cplus.job.footprint import Footprint, ModelSize, giga
from cplus.job.prepare import load, row_of
from cplus.job.progress import duration
from cplus.job.rows import Tasks, gather, group_of, located, read
from cplus.job.settings import AdaptConfig
from cplus.loop import Schedule, epoch_batches
from cplus.methods import METHODS, Material, Method
from cplus.models import Loaded
from cplus.probes.bank import Bank


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer of `--plan`; `seconds` are for all epochs, whether or not an early end spares some."""

    config: AdaptConfig
    size: ModelSize
    need: Footprint
    tokens: Tokens
    updates: int
    new: int
    anchors: int
    probes: int
    seconds: dict[str, float]
    warnings: tuple[str, ...]

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
            "size": asdict(self.size),
            "need": asdict(self.need),
            "tokens_per_epoch": {**asdict(self.tokens), "percent_above_sft": self.tokens.percent},
            "updates_per_epoch": self.updates,
            "counts": {"new": self.new, "anchors": self.anchors, "probes": self.probes},
            "seconds": self.seconds,
            "warnings": list(self.warnings),
            "writes": self.writes,
        }

    def lines(self) -> list[str]:
        """The plan in words."""
        need, tokens, size = self.need, self.tokens, self.size
        kept, step = need.kept_bytes_per_parameter, need.step_bytes_per_parameter
        times = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.seconds.items())
        return [
            f"model      {self.config.model}: {size.parameters:,} parameters, {size.trainable:,} trained, in float32",
            f"rows       {self.new} new, {self.anchors} anchors, {self.probes} probes",
            f"training   {self.config.epochs} epochs at most, {self.updates} updates each",
            f"gate       {kept:.2f} bytes per trained parameter held, {step:.2f} more during an update",
            f"cost       {tokens.percent:+.0f} % FLOPs against plain fine-tuning: {tokens.sft:,} tokens of new rows "
            f"per epoch, {tokens.training - tokens.sft:,} more trained on, {tokens.evidence:,} of evidence",
            f"memory     {giga(need.held)} GB held, about {giga(need.peak)} at the peak; {giga(need.available)} free",
            f"disk       {giga(need.disk)} GB needed, {giga(need.free)} GB free",
            f"time       {duration(sum(self.seconds.values()))} at most here: {times}",
            *(f"warning    {warning}" for warning in self.warnings),
            *(f"writes     {path}: {what}" for path, what in self.writes.items()),
        ]


def plan(config: AdaptConfig) -> Plan:
    """Compute the job's size and time a few steps of it; nothing is written."""
    home = Path.cwd()
    method = row_of(config)
    tasks = read(config, method, home)
    size, need = footprint.needs(config, method, tasks, home)
    warnings = footprint.check(need, size, config)
    base = load(config, home)
    rows, assumed = _rows(config, tasks, base)
    material, probes = _material(config, method, rows, home)
    tokens, updates = (
        tokens_per_epoch(config, method, material),
        updates_per_epoch(len(material.new), config.batch_size),
    )
    seconds = {
        "evaluating before and after": 2
        * sum(timing.evaluating(config, base, group) for group in rows.evaluated(config.max_asked, config.seed))
    }
    if probes and config.bank is None and rows.anchors is not None:
        seconds["writing probes"] = timing.writing(base, rows.anchors, config.settings(len(material.new)).probes)
    base = replace(base, model=adapted(config.settings(), method, base.model))
    pace = timing.pace(config, method, base, material)
    seconds["training"] = config.epochs * (tokens.training * pace.training + tokens.evidence * pace.evidence)
    if method.refresh == "once":
        seconds["evidence, taken once"] = evidence_tokens(method, material) * pace.evidence
    return Plan(
        config=config,
        size=size,
        need=need,
        tokens=tokens,
        updates=updates,
        new=len(material.new),
        anchors=len(material.past[0].anchors),
        probes=probes,
        seconds=seconds,
        warnings=(*warnings, *rows.notes, *assumed),
    )


def tokens_per_epoch(config: AdaptConfig, method: Method, material: Material) -> Tokens:
    """Count the tokens of the first epoch as they will be batched."""
    schedule = Schedule(epochs=1, batch_size=config.batch_size, order=config.order)

    def trained(row: Method) -> int:
        return sum(padded(batch) for batch in epoch_batches(row, material, schedule, seed=config.seed, epoch=1))

    updates = updates_per_epoch(len(material.new), config.batch_size)
    training = trained(method)
    training += round(updates * padded(material.rows("anchors")) * method.objective.anchor_passes)
    # What is taken once is preparation, which the paper leaves out of the cost of training.
    refreshes = updates / method.refresh if isinstance(method.refresh, int) else float(method.refresh == "epoch")
    evidence = round(refreshes * evidence_tokens(method, material))
    return Tokens(sft=trained(METHODS["sft"]), training=training, evidence=evidence)


def evidence_tokens(method: Method, material: Material) -> int:
    """The tokens of one refresh."""
    return sum(padded(source.at(0)) for source in method.sources(material)) if method.evidence else 0


def padded(rows: Sequence[Encoded]) -> int:
    """The tokens of rows in batches of like length."""
    return sum(measured(batch).padded for batch in batched(rows))


def _rows(config: AdaptConfig, tasks: Tasks, base: Loaded) -> tuple[Rows, list[str]]:
    """The rows; for a task that is not split yet, its first rows stand in for the incorrect and correct ones."""
    if tasks.split is None:
        return gather(config, tasks, base), []
    whole = group_of(config, tasks.split, base, name=tasks.split.name, part="external").examples
    count = config.num_new or len(whole) // 2
    cut = {"new": whole[:count], "anchors": whole[: config.num_anchors], "past": whole[count:] or whole}
    groups = {
        name: replace(group_of(config, tasks.split, base, name=name, part="retention"), examples=tuple(examples))
        for name, examples in cut.items()
    }
    note = f"the number of rows that the model answers incorrectly is not known yet: {count} new rows are assumed"
    return Rows(new=groups["new"], anchors=groups["anchors"], past=groups["past"]), [note]


def _material(config: AdaptConfig, method: Method, rows: Rows, home: Path) -> tuple[Material, int]:
    """Rows as tokens; probes that are not written yet are taken to be as long as the anchors."""
    anchors = [] if rows.anchors is None else rows.anchors.encoded()
    probes: list[Encoded] = []
    if method.needs_bank and rows.anchors is not None:
        if config.bank is not None:
            bank = Bank.load(Path(located(str(config.bank), home)))
            probes = [rows.anchors.interface.encode(example) for example in bank.examples]
        else:
            count = config.settings(len(rows.new.examples)).num_probes
            probes = list(islice(cycle(anchors), count))
    count = len(rows.new.examples)
    past = [past_rows("past", anchors=anchors, probes=probes, synthetic=probes[:count])]
    for place, group in zip(config.kept, rows.kept, strict=True):
        written = banks.earlier(Path(located(str(place), home)), group).examples if method.needs_bank else ()
        encoded = [group.interface.encode(example) for example in written]
        past.append(past_rows(group.name, anchors=group.encoded(), probes=encoded, synthetic=encoded[:count]))
    return Material(new=rows.new.encoded(), past=tuple(past)), len(probes)
