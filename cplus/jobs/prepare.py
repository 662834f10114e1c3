"""A job prepared: everything checked before anything is written, the model loaded, its rows bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cplus import models
from cplus.base.environment import versions
from cplus.data.examples import fingerprint
from cplus.distributed import processes as world
from cplus.jobs.choices import Chosen, choose
from cplus.jobs.folder import Folder
from cplus.jobs.keep import Written, with_written
from cplus.jobs.memory import Footprint, ModelSize, check_packed, footprint, giga, model_size
from cplus.jobs.progress import say
from cplus.jobs.rows import Tasks, bind_rows, evaluated, load, located, read, template
from cplus.jobs.settings import AdaptConfig, paper, refuse
from cplus.methods.table import REPAIR, Method
from cplus.models import Loaded, loading
from cplus.training.rows import Group, Rows
from cplus.training.sharding import needs_whole

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


Begin: TypeAlias = Callable[[AdaptConfig, Sequence[Chosen]], None]
"""Claims the job's folder and writes the settings into it; from then on the job can be resumed."""


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
    name = located(config.model, home)
    if name.endswith(".gguf") and Path(name).is_file():
        check_packed(Path(name), device)
    size = model_size(config, method, models.resolve(name))
    anchors = config.num_anchors if tasks.anchors is None else len(tasks.anchors.examples)
    anchors += sum(len(task.examples) for task in tasks.kept)
    config, chosen = choose(config, tasks, size, footprint(config, method, size, anchors))
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
    for line in (*tasks.formats, *(f"chosen: {own}" for own in chosen)):
        say(line)
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
    """What every phase of a job needs; `groups` are the rows evaluated before and after training."""

    config: AdaptConfig
    home: Path
    folder: Folder
    method: Method
    base: Loaded
    rows: Rows
    groups: tuple[Group, ...]
    written: Written | None
    """The bank's self-written part, where the base model writes the rows to keep."""
    chosen: tuple[Chosen, ...]
    """The settings that were not given, with the reasons for their values."""
    seconds: Mapping[str, float]
    """What it took to prepare, by part."""
    begun: float
    """When the program was started, by `time.perf_counter`."""

    @property
    def settings(self) -> AdaptConfig:
        """The settings with the number of probes."""
        return self.config.settings(len(self.rows.new.examples))


def prepare(
    config: AdaptConfig,
    folder: Folder,
    home: Path,
    begun: float | None = None,
    begin: Begin = lambda config, chosen: None,
) -> Job:
    """Check, load and bind everything, then `begin` the folder and have the base model write its rows.

    Every process reads the rows; those of the base model's own are written by the first with the help of the others,
    which then read them.
    """
    clock = time.perf_counter()
    world.agree("their settings or versions", [config.model_dump(mode="json"), versions()])
    found = world.in_turn(lambda: preflight(config, home))
    config = found.config
    world.agree("the settings they chose", config.model_dump(mode="json"))
    base = load(config, home)
    world.agree("the base model", base.fingerprint)
    rows = world.in_turn(lambda: bind_rows(config, found.tasks, base))
    world.agree("their rows", [fingerprint(group.examples) for group in rows.groups])
    loaded = time.perf_counter()
    begin(config, found.chosen)

    def written() -> tuple[Rows, Written | None]:
        with models.computing(config.compute_dtype, base.device):
            return with_written(config, found.method, rows, base)

    rows, own = world.in_turn(written)
    for line in (*(f"warning: {own}" for own in found.warnings), *(f"note: {own}" for own in rows.notes)):
        say(line)
    groups = evaluated(config, rows)
    return Job(
        config=config,
        home=home,
        folder=folder,
        method=found.method,
        base=base,
        rows=rows,
        groups=groups,
        written=own,
        chosen=found.chosen,
        seconds={"loading": loaded - clock, "writing probes": time.perf_counter() - loaded},
        begun=clock if begun is None else begun,
    )
