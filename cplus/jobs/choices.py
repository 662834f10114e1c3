"""Settings that choose themselves, each with its reason, and the tokens of an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cplus import models
from cplus.base import files
from cplus.core.rows import Encoded, batched, measured
from cplus.data.examples import Choice as MultipleChoice
from cplus.distributed import processes as world
from cplus.jobs.memory import CHECKPOINTED, Footprint, ModelSize, giga
from cplus.jobs.rows import Tasks
from cplus.jobs.settings import AdaptConfig
from cplus.methods.table import METHODS, Material, Method
from cplus.training.loop import Schedule, epoch_batches, updates_per_epoch

RATE, SIZE = 3e-5, 135e6
"""The rate that was found on a model of this size; others get it times the root of the ratio of the sizes."""
LOWEST, HIGHEST = 1e-6, 1e-3
ADAPTERS = 10
"""Adapters are trained at this many times the rate of all weights."""
UPDATES, FEWEST_EPOCHS, EVALUATIONS = 60, 3, 3
"""Free text: the epochs of at least this many updates, and never fewer epochs; about this many evaluations."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A setting that was not given, its value and why it has this value."""

    name: str
    value: float | int | str | bool
    why: str

    @property
    def named(self) -> str:
        """The setting and its value."""
        return f"{self.name} {f'{self.value:g}' if isinstance(self.value, float) else self.value}"

    def __str__(self) -> str:
        return f"{self.named}: {self.why}"


def rate_by_size(parameters: int, *, adapters: bool = False) -> float:
    """AdamW's learning rate for a model of this size, to one digit.

    >>> rate_by_size(134_515_008), rate_by_size(4_022_468_096), rate_by_size(602_000, adapters=True)
    (3e-05, 5e-06, 0.004)
    """
    rate = min(HIGHEST, max(LOWEST, RATE * math.sqrt(SIZE / max(1, parameters))))
    return float(f"{rate * (ADAPTERS if adapters else 1):.0e}")


def _size(parameters: int) -> str:
    """A number of parameters in words.

    >>> _size(134_515_008), _size(601_536), _size(4_022_468_096)
    ('135 M', '0.602 M', '4.02 B')
    """
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def epochs_by_rows(num_new: int, batch_size: int, most: int) -> int:
    """Epochs of free text at most: many for a small file, few for a large one.

    >>> [epochs_by_rows(count, 8, 25) for count in (8, 40, 96, 1000)]
    [25, 12, 5, 3]
    """
    wanted = math.ceil(UPDATES / updates_per_epoch(num_new, batch_size))
    return max(FEWEST_EPOCHS, min(most, wanted))


def choose(
    config: AdaptConfig, tasks: Tasks, size: ModelSize, need: Footprint
) -> tuple[AdaptConfig, tuple[Chosen, ...]]:
    """The settings with everything chosen that was not given."""
    given, found = config.model_fields_set, []
    if config.lr is None:
        if config.optimizer != "adamw":
            raise ValueError(
                f"the default learning rate is AdamW's, but the optimizer is {config.optimizer}; provide lr"
            )
        adapters = config.lora is not None
        why = f"by the size of the model, {_size(size.parameters)}: {RATE:g} at {_size(int(SIZE))}, by the root of the "
        why += "ratio" + f", and {ADAPTERS} times that for adapters" * adapters
        found.append(Chosen(name="lr", value=rate_by_size(size.parameters, adapters=adapters), why=why))
    rows = () if tasks.new is None else tasks.new.examples
    free = bool(rows) and not isinstance(rows[0], MultipleChoice)
    if free and "epochs" not in given and config.stop != "never":
        count = len(rows)
        epochs = epochs_by_rows(count, config.batch_size, config.epochs)
        updates = epochs * updates_per_epoch(count, config.batch_size)
        why = f"{updates} updates of {config.batch_size} of the {count} new rows at most, fewer if all is learned"
        found.append(Chosen(name="epochs", value=epochs, why=why))
        every = max(1, round(epochs / EVALUATIONS))
        if "evaluate_every" not in given and every > 1 and config.lost_limit is None and not config.keep_best:
            why = f"about {EVALUATIONS} evaluations while training"
            found.append(Chosen(name="evaluate_every", value=every, why=why))
    processes, device = world.started()[1], models.choose_device(config.device)
    if "compute_dtype" not in given and device.type == "cuda" and torch.cuda.is_bf16_supported():
        why = "the device computes in it; weights, optimizer and gate stay float32"
        found.append(Chosen(name="compute_dtype", value="bfloat16", why=why))
    light = need.peak - size.activation_bytes + size.activation_bytes // CHECKPOINTED
    # Free memory differs between processes, their settings must not.
    if "gradient_checkpointing" not in given and processes == 1 and light <= need.available < need.peak:
        why = (
            f"{giga(need.peak)} GB would be needed at the peak, {giga(need.available)} GB are free; activations "
            f"computed twice need about {giga(light)} GB"
        )
        found.append(Chosen(name="gradient_checkpointing", value=True, why=why))
    return config.model_copy(update={own.name: own.value for own in found}), tuple(found)


def stored(settings: Path) -> tuple[Chosen, ...]:
    """The choices that a job's file of settings holds beside the values: a resumed job was given everything."""
    return tuple(Chosen(**row) for row in files.read_json(settings).get("chosen", ()))


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
