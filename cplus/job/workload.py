"""The tokens of a job's epochs, counted as they will be batched, before the bank is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from cplus.data.batching import batched, measured
from cplus.data.encoded import Encoded
from cplus.experiment.material import past_rows
from cplus.experiment.rows import Rows
from cplus.experiment.schedule import updates_per_epoch
from cplus.job.bank import earlier_bank
from cplus.job.rows import Tasks, group_of, located
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


def padded(rows: Sequence[Encoded]) -> int:
    """The tokens of rows in batches of similar length."""
    return sum(measured(batch).padded for batch in batched(rows))


def assumed_rows(config: AdaptConfig, tasks: Tasks, base: Loaded) -> tuple[Rows, str]:
    """Rows for a task that is not split yet: its first rows stand in for the incorrect and correct ones."""
    assert tasks.split is not None
    given = group_of(config, tasks.split, base, name=tasks.split.name, part="external")
    whole = given.examples
    count = config.num_new or len(whole) // 2
    cut = {"new": whole[:count], "anchors": whole[: config.num_anchors], "past": whole[count:] or whole}
    groups = {
        name: replace(given, name=name, part="retention", examples=tuple(examples)) for name, examples in cut.items()
    }
    note = f"the number of rows that the model answers incorrectly is not known yet: {count} new rows are assumed"
    groups["new"] = replace(groups["new"], part="acquisition")
    notes = tuple(filter(None, [given.note]))
    return Rows(new=groups["new"], anchors=groups["anchors"], past=groups["past"], notes=notes), note


def assumed_material(
    config: AdaptConfig, method: Method, rows: Rows, home: Path, *, length: int = 1
) -> tuple[Material, int]:
    """Rows as tokens, and the number of probes; probes not yet written are `length` times as long as the anchors."""
    anchors = [] if rows.anchors is None else rows.anchors.encoded()
    count = len(rows.new.examples)
    probes: list[Encoded] = []
    if (method.needs_bank or config.repair) and rows.anchors is not None:
        if config.bank is not None:
            bank = Bank.load(Path(located(str(config.bank), home)))
            probes = [rows.anchors.interface.encode(example) for example in bank.examples]
        else:
            longer = [replace(row, prompt=row.prompt + (length - 1) * (row.prompt + row.target)) for row in anchors]
            probes = list(islice(cycle(longer), config.settings(count).num_probes))
    past = [past_rows("past", anchors=anchors, probes=probes, synthetic=probes[:count])]
    for place, group in zip(config.kept, rows.kept, strict=True):
        wanted = method.needs_bank or config.repair
        written = earlier_bank(Path(located(str(place), home)), group).examples if wanted else ()
        encoded = [group.interface.encode(example) for example in written]
        past.append(past_rows(group.name, anchors=group.encoded(), probes=encoded, synthetic=encoded[:count]))
    return Material(new=rows.trained.encoded(), past=tuple(past)), len(probes)
