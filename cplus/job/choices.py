"""Settings that choose themselves: what a job does where the user says nothing, each choice with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cplus import files, models, world
from cplus.data.examples import Choice as MultipleChoice
from cplus.experiment.schedule import updates_per_epoch
from cplus.job.memory import Footprint, ModelSize, checkpointed, giga
from cplus.job.rows import Tasks
from cplus.job.settings import AUTO, AdaptConfig
from cplus.passes import orders_shards

RATE, SIZE = 3e-5, 135e6
"""The rate that was found on a model of this size; others get it times the root of the ratio of the sizes."""
LOWEST, HIGHEST = 1e-6, 1e-3
ADAPTERS = 10
"""Adapters are trained at this many times the rate of all weights."""
UPDATES, FEWEST_EPOCHS, EVALUATIONS = 60, 3, 6
"""Free text: the epochs of at least this many updates, and never fewer epochs; about this many evaluations."""
FEWEST_PARTS = 2
"""Parts of a batch on a CPU."""


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


def default_rate(config: AdaptConfig, parameters: int) -> Chosen:
    """The learning rate of a job that names none."""
    if config.optimizer != "adamw":
        raise ValueError(f"the default learning rate is AdamW's, but the optimizer is {config.optimizer}; provide lr")
    adapters = config.lora is not None
    why = f"by the size of the model, {_size(parameters)}: {RATE:g} at {_size(int(SIZE))}, by the root of the ratio"
    why += f", and {ADAPTERS} times that for adapters" * adapters
    return Chosen(name="lr", value=rate_by_size(parameters, adapters=adapters), why=why)


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
    """The settings with everything chosen that was not given; a rate that is to be tested stays open."""
    given, found = config.model_fields_set, []
    if config.lr is None:
        found.append(default_rate(config, size.parameters))
    if "epochs" not in given and (count := _free_rows(tasks)) and config.stop != "never":
        epochs = epochs_by_rows(count, config.batch_size, config.epochs)
        updates = epochs * updates_per_epoch(count, config.batch_size)
        why = f"{updates} updates of {config.batch_size} of the {count} new rows at most, fewer if all is learned"
        found.append(Chosen(name="epochs", value=epochs, why=why))
        every = max(1, round(epochs / EVALUATIONS))
        if "evaluate_every" not in given and every > 1 and config.lost_limit is None and not config.keep_best:
            why = f"about {EVALUATIONS} evaluations while training"
            found.append(Chosen(name="evaluate_every", value=every, why=why))
    processes, device = world.started()[1], models.choose_device(config.device)
    if config.micro_batches is None and (parts := parts_of_a_batch(config, processes, device.type)) > 1:
        why = "any number of processes computes and resumes them with the same bits"
        found.append(Chosen(name="micro_batches", value=parts, why=why))
    if "compute_dtype" not in given and device.type == "cuda" and torch.cuda.is_bf16_supported():
        why = "the device computes in it; weights, optimizer and gate stay float32"
        found.append(Chosen(name="compute_dtype", value="bfloat16", why=why))
    light = checkpointed(need, size)
    # Free memory differs between processes, their settings must not.
    if "gradient_checkpointing" not in given and processes == 1 and light <= need.available < need.peak:
        why = (
            f"{giga(need.peak)} GB would be needed at the peak, {giga(need.available)} GB are free; activations "
            f"computed twice need about {giga(light)} GB"
        )
        found.append(Chosen(name="gradient_checkpointing", value=True, why=why))
    return with_chosen(config, found), tuple(found)


def parts_of_a_batch(config: AdaptConfig, processes: int, device: str) -> int:
    """A part for each process; on a CPU at least two, so that one process and two write the same weights.

    A GPU computes half a batch in hardly less time than a whole one, so one process does not split there.
    """
    if config.batch_size == 1 or (processes > 1 and config.sharding != "ddp" and not orders_shards()):
        return 1
    return max(processes, FEWEST_PARTS if device == "cpu" else 1)


def _free_rows(tasks: Tasks) -> int:
    """The number of new rows, where they are free text."""
    rows = () if tasks.new is None else tasks.new.examples
    return len(rows) if rows and not isinstance(rows[0], MultipleChoice) else 0


def with_chosen(config: AdaptConfig, found: list[Chosen] | tuple[Chosen, ...]) -> AdaptConfig:
    """The settings with these values."""
    return config.model_copy(update={own.name: own.value for own in found})


def as_rows(found: Iterable[Chosen]) -> list[dict[str, Any]]:
    """Plain values, for a job's file of settings."""
    return [asdict(own) for own in found]


def stored(settings: Path) -> tuple[Chosen, ...]:
    """The choices that a job's file of settings holds beside the values: a resumed job was given everything."""
    return tuple(Chosen(**row) for row in files.read_json(settings).get("chosen", ()))


def is_open(config: AdaptConfig) -> bool:
    """Whether the learning rate is still to be tested."""
    return config.lr == AUTO
