"""A job prepared: everything checked before anything is written, the model loaded, its rows bound."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from cplus import models
from cplus.base import files
from cplus.base.environment import versions
from cplus.data.examples import Choice, Example, fingerprint
from cplus.distributed import processes as world
from cplus.jobs.folder import Folder
from cplus.jobs.keep import Written, earlier_bank, job_bank, with_written
from cplus.jobs.memory import CHECKPOINTED, Footprint, ModelSize, check_packed, footprint, giga, model_size
from cplus.jobs.progress import PeakMemory, say
from cplus.jobs.rows import Tasks, bind_rows, evaluated, load, located, read, template
from cplus.jobs.settings import AdaptConfig, paper, refuse
from cplus.methods.table import REPAIR, Method
from cplus.models import Loaded, loading
from cplus.probes.bank import Bank
from cplus.training.loop import updates_per_epoch
from cplus.training.rows import Group, PastTask, Rows
from cplus.training.sharding import needs_whole

# Settings that choose themselves, each with its reason.


FREE_TEXT: Mapping[str, str | float] = {"method": "divergence", "strength": 2.0}
"""How free text is learned where the model writes the rows to keep, and at twice the rate: the study `chat`."""
NOT_THERE = ("method", "preset", "anchor_weight", "beta", "ema", "strength", "bank", "lora", "repair")
"""Settings that are the user's own choice of a method, or with which the study has no run."""
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


def is_free(tasks: Tasks) -> bool:
    """Whether the new rows are free text."""
    return tasks.new is not None and not isinstance(tasks.new.examples[0], Choice)


def choose_method(config: AdaptConfig, tasks: Tasks) -> tuple[Chosen, ...]:
    """What keeps most by our own measurements of the kind of rows that the job has; else the method stays CPLUS."""
    only_written = config.written and config.anchors is None and not config.kept
    own = config.model_fields_set.intersection(NOT_THERE)
    if own or not only_written or not is_free(tasks) or world.started()[1] > 1 or config.optimizer != "adamw":
        return ()
    why = "free text, and the model writes the rows to keep: at equal learning a chat model moved less than under cplus"
    return tuple(
        Chosen(name=name, value=value, why=f"{why}, or as far, at less cost") for name, value in FREE_TEXT.items()
    )


def choose(
    config: AdaptConfig, tasks: Tasks, size: ModelSize, need: Footprint, better: tuple[Chosen, ...] = ()
) -> tuple[AdaptConfig, tuple[Chosen, ...]]:
    """The settings with everything chosen that was not given, after the method."""
    given, found = config.model_fields_set, list(better)
    if config.lr is None:
        if config.optimizer != "adamw":
            raise ValueError(
                f"the default learning rate is AdamW's, but the optimizer is {config.optimizer}; provide lr"
            )
        adapters = config.lora is not None
        why = f"by the size of the model, {_size(size.parameters)}: {RATE:g} at {_size(int(SIZE))}, by the root of the "
        why += "ratio" + f", and {ADAPTERS} times that for adapters" * adapters
        why += f", and twice that for {better[0].value}" if better else ""
        rate = rate_by_size(size.parameters, adapters=adapters) * (2 if better else 1)
        found.append(Chosen(name="lr", value=rate, why=why))
    if tasks.new is not None and is_free(tasks) and "epochs" not in given and config.stop != "never":
        count = len(tasks.new.examples)
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


# What is checked before anything is written, by a job and by its plan alike: settings, rows, memory, disk.


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A job that can work, before any weight is loaded: settings as chosen, method, rows as read, size and bytes."""

    config: AdaptConfig
    chosen: tuple[Chosen, ...]
    method: Method
    tasks: Tasks
    size: ModelSize
    need: Footprint
    warnings: tuple[str, ...]


class TooLarge(ValueError):
    """The job does not fit into this machine's memory."""


def preflight(config: AdaptConfig, home: Path) -> Preflight:
    """Read and check everything that needs no model, and print it; a job that cannot work is refused here."""
    method, device = row_of(config), models.choose_device(config.device)
    check_processes(config, method)
    template(config, home)
    if config.load == loading.NAME:
        loading.check(device)
    tasks = read(config, method, home)
    if better := choose_method(config, tasks):
        method = row_of(config.model_copy(update={own.name: own.value for own in better}))
    name = located(config.model, home)
    if name.endswith(".gguf") and Path(name).is_file():
        check_packed(Path(name), device)
    size = model_size(config, method, models.resolve(name))
    anchors = config.num_anchors if tasks.anchors is None else len(tasks.anchors.examples)
    anchors += sum(len(task.examples) for task in tasks.kept)
    config, chosen = choose(config, tasks, size, footprint(config, method, size, anchors), better)
    need = footprint(config, method, size, anchors)
    if need.held > need.available:
        raise TooLarge(
            f"{config.model} needs {giga(need.held)} GB for weights, gradients, the optimizer and the gate, but "
            f"{giga(need.available)} GB are free; train adapters (lora r=16), use several devices or a smaller model; "
            "--plan shows what other settings need"
        )
    if need.disk > need.free:
        raise ValueError(
            f"{config.out}: checkpoints and model need {giga(need.disk)} GB, but {giga(need.free)} GB are free; make "
            "room or choose another out"
        )
    warnings = []
    if need.peak > need.available:
        warnings.append(
            f"memory may not suffice: about {giga(need.peak)} GB at the peak, {giga(need.available)} GB are free"
        )
    if size.stored_dtype != "float32" and config.load == "float32":
        warnings.append(
            f"the weights are stored in {size.stored_dtype}; they are trained in float32, because {size.stored_dtype} "
            "would round small updates away"
        )
    for own in chosen:
        say(f"chosen: {own}")
    say(f"{config.model}: {size.parameters:,} parameters, {size.trainable:,} trained; {method.name}: {method.summary}")
    return Preflight(
        config=config, chosen=chosen, method=method, tasks=tasks, size=size, need=need, warnings=tuple(warnings)
    )


def row_of(config: AdaptConfig) -> Method:
    """The method's row with the job's blend and smoothing."""
    row, lora = config.row, config.lora
    brought = paper(config.model) if config.preset == "paper" else {}
    for name in () if uses_bank(config, row) else ("bank", "num_probes", "shots", "temperature", "topics"):
        default = AdaptConfig.model_fields[name].default
        if getattr(config, name) not in (default, brought.get(name, default)):
            raise ValueError(f"method {row.name!r} has no use for {name}: it uses no self-probes; leave {name} out")
    own, apart = row.adapter is not None, lora is not None and not lora.merge
    name = f"method {row.name!r}"
    refuse(
        (own and lora is not None, f"{name} decides itself what trains; leave out lora, or choose another method"),
        (
            row.after is not None and apart,
            f"{name} changes the merged weights after training; leave out merge=false",
        ),
        (
            row.after == REPAIR and config.repair,
            f"{name} ends with a repair of its own; leave out repair, or choose another method",
        ),
    )
    return row


def check_processes(config: AdaptConfig, method: Method) -> None:
    """Refuse what several processes cannot do together."""
    if world.started()[1] == 1:
        return
    split = config.sharding == "fsdp"
    refuse(
        (
            config.repair,
            "repair runs in one process; leave it out here, then run cplus repair on the written model",
        ),
        (
            models.choose_device(config.device).type == "mps",
            "several processes need CUDA devices or the CPU; choose device cuda or cpu",
        ),
        (
            split and needs_whole(method, config.seed),
            f"method {method.name!r} needs whole weights in every process; add sharding ddp",
        ),
        (split and config.load == loading.NAME, "weights in 4 bits cannot be sharded; add sharding ddp"),
        (
            split and config.optimizer == "adamw8bit",
            "bitsandbytes cannot step shards; use optimizer adamw, or add sharding ddp",
        ),
    )


def uses_bank(config: AdaptConfig, row: Method) -> bool:
    """Whether a job needs self-probes: for its method, or for the repair after it."""
    return row.needs_bank or config.repair


# A job prepared: everything checked, the model loaded, its rows bound.


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every phase of a job needs."""

    config: AdaptConfig
    home: Path
    folder: Folder
    method: Method
    base: Loaded
    rows: Rows
    written: Written | None = None
    """The bank's self-written part, where the base model writes the rows to keep."""
    chosen: tuple[Chosen, ...]
    """The settings that were not given, with the reasons for their values."""
    warnings: tuple[str, ...]
    seconds: Mapping[str, float]
    """What it took to prepare, by part."""
    begun: float
    """When the program was started, by `time.perf_counter`."""
    memory: PeakMemory

    @property
    def settings(self) -> AdaptConfig:
        """The settings with the number of probes."""
        return self.config.settings(len(self.rows.new.examples))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The rows evaluated before and after training."""
        return evaluated(self.config, self.rows)

    def bank(self) -> Bank | None:
        """The sealed probes of a job that uses them: given, from the cache, or written now."""
        config, anchors = self.config, self.rows.anchors
        if not uses_bank(config, self.method) or anchors is None:
            return None
        given = None if config.bank is None else Path(located(str(config.bank), self.home))
        return job_bank(self.folder.bank, self.settings.probes, self.base, anchors, given, self.written)

    def past_tasks(self, bank: Bank | None) -> list[PastTask]:
        """The job's own anchors and bank, and those of the earlier jobs it protects."""
        found = [] if self.rows.anchors is None else [(self.rows.anchors, bank)]
        wanted = uses_bank(self.config, self.method)
        for place, group in zip(self.config.kept, self.rows.kept, strict=True):
            found.append((group, earlier_bank(Path(located(str(place), self.home)), group) if wanted else None))
        return [
            PastTask(
                name=anchors.name,
                interface=anchors.interface,
                anchors=anchors.examples,
                probes=() if own is None else own.examples,
                written_by="" if own is None else str(own.manifest["model"]["fingerprint"]),
            )
            for anchors, own in found
        ]

    def seen(self, bank: Bank | None) -> list[Example]:
        """Every row that is trained on, protected or measured as a row of the job, and every probe."""
        probes = () if bank is None else bank.examples
        return [*(row for group in self.rows.groups for row in group.examples), *probes]

    def base_again(self) -> Loaded:
        """The base model, read again, because training changed the weights of the one in memory."""
        base = load(self.config, self.home)
        if base.fingerprint != self.base.fingerprint:
            raise ValueError(f"{self.config.model}: the base model changed while the job ran; start a new job")
        return base


def prepare(config: AdaptConfig, folder: Folder, home: Path, begun: float | None = None) -> Job:
    """Check, load and bind everything that can be without writing anything."""
    clock, memory = time.perf_counter(), PeakMemory(models.choose_device(config.device))
    world.agree("their settings or versions", [config.model_dump(mode="json"), versions()])
    found = world.in_turn(lambda: preflight(config, home))
    config = found.config
    world.agree("the settings they chose", config.model_dump(mode="json"))
    base = load(config, home)
    world.agree("the base model", base.fingerprint)
    rows = world.in_turn(lambda: bind_rows(config, found.tasks, base))
    world.agree("their rows", [fingerprint(group.examples) for group in rows.groups])
    return Job(
        config=config,
        home=home,
        folder=folder,
        method=found.method,
        base=base,
        rows=rows,
        chosen=found.chosen,
        warnings=found.warnings,
        seconds={"loading": time.perf_counter() - clock},
        begun=clock if begun is None else begun,
        memory=memory,
    )


def with_own_rows(job: Job) -> Job:
    """The job with the rows that the base model writes itself, by the first process with the help of the others."""
    clock = time.perf_counter()

    def written() -> tuple[Rows, Written | None]:
        with models.computing(job.config.compute_dtype, job.base.device):
            return with_written(job.config, job.method, job.rows, job.base)

    rows, own = world.in_turn(written)
    for line in (*(f"warning: {one}" for one in job.warnings), *(f"note: {one}" for one in rows.notes)):
        say(line)
    seconds = {**job.seconds, "writing probes": time.perf_counter() - clock}
    return replace(job, rows=rows, written=own, seconds=seconds)
