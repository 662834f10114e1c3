"""A job prepared: everything checked before anything is written, the model loaded, its rows bound."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cplus import models
from cplus.base.environment import versions
from cplus.data.examples import fingerprint
from cplus.data.prompts import read_template
from cplus.distributed import processes as leader
from cplus.distributed import processes as world
from cplus.jobs.choices import Chosen, choose, is_open
from cplus.jobs.folder import Folder, curves
from cplus.jobs.keep import Written, with_written
from cplus.jobs.memory import Footprint, ModelSize, check_packed, footprint, giga, model_size
from cplus.jobs.outputs import check_push
from cplus.jobs.progress import say
from cplus.jobs.rows import Tasks, gather, located, read
from cplus.jobs.settings import AdaptConfig, paper
from cplus.methods.after import Undone
from cplus.methods.table import Method
from cplus.models import Loaded, loading
from cplus.models.scoring import fitting
from cplus.probes.labels import own_answers
from cplus.receipts.page import ComparedRun
from cplus.training.rows import Group, Rows
from cplus.training.settings import Settings
from cplus.training.sharding import needs_whole

# What is checked before anything is written, by a job and by its plan alike: settings, rows, memory, disk.


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The settings as chosen, the method's row, the rows as read, and the size of a job that can work; no weight is
    loaded.
    """

    config: AdaptConfig
    chosen: tuple[Chosen, ...]
    method: Method
    tasks: Tasks
    size: ModelSize
    need: Footprint
    warnings: tuple[str, ...]


def announce(found: Preflight) -> None:
    """Print what is known before the model is loaded: the format of each file, what was chosen, the model's size."""
    for line in found.tasks.formats:
        say(line)
    for own in found.chosen:
        say(f"chosen: {own}")
    size, method = found.size, found.method
    say(
        f"{found.config.model}: {size.parameters:,} parameters, {size.trainable:,} trained; "
        f"{method.name}: {method.summary}"
    )


class TooLarge(ValueError):
    """The job does not fit into this machine's memory."""


def preflight(config: AdaptConfig, home: Path) -> Preflight:
    """Read and check everything that needs no model; a job that cannot work is refused here."""
    method = row_of(config)
    check_processes(config, method)
    _template(config, home)
    check_push(config)
    if config.load == loading.NAME:
        loading.check(models.choose_device(config.device))
    tasks = read(config, method, home)
    name = located(config.model, home)
    if name.endswith(".gguf") and Path(name).is_file():
        check_packed(Path(name), models.choose_device(config.device))
    size = model_size(config, method, models.resolve(name))
    anchors = config.num_anchors if tasks.anchors is None else len(tasks.anchors.examples)
    earlier = sum(len(task.examples) for task in tasks.kept)
    need = footprint(config, method, size, anchors + earlier)
    config, chosen = choose(config, tasks, size, need)
    need = footprint(config, method, size, anchors + earlier)
    return Preflight(
        config=config,
        chosen=chosen,
        method=method,
        tasks=tasks,
        size=size,
        need=need,
        warnings=(*_check_bytes(need, size, config), *_waiting(config)),
    )


def row_of(config: AdaptConfig) -> Method:
    """The method's row with the job's blend and smoothing."""
    row = config.settings().row
    _check_bank_settings(config, row)
    if row.adapter is not None and config.lora is not None:
        raise ValueError(f"method {row.name!r} decides itself what trains; leave out lora, or choose another method")
    if row.after is not None and config.lora is not None and not config.lora.merge:
        raise ValueError(f"method {row.name!r} changes the merged weights after training; leave out merge=false")
    if isinstance(row.after, Undone) and config.repair:
        raise ValueError(
            f"method {row.name!r} ends with a repair of its own; leave out repair, or choose another method"
        )
    if row.adapter is not None and is_open(config):
        raise ValueError(f"method {row.name!r} decides itself what trains, so no rate is tested for it; provide lr")
    return row


def check_processes(config: AdaptConfig, method: Method) -> None:
    """Refuse what several processes cannot do together."""
    if world.started()[1] == 1:
        return
    if config.repair:
        raise ValueError("repair runs in one process; leave it out here, then run cplus repair on the written model")
    if is_open(config):
        raise ValueError("lr auto is tested in one process; provide lr, or leave it out for the rate by model size")
    if models.choose_device(config.device).type == "mps":
        raise ValueError("several processes need CUDA devices or the CPU; choose device cuda or cpu, or one process")
    if config.sharding != "fsdp":
        return
    if needs_whole(method, config.seed):
        raise ValueError(f"method {method.name!r} needs whole weights in every process; add sharding ddp")
    if config.load == loading.NAME:
        raise ValueError("weights in 4 bits cannot be sharded; add sharding ddp")
    if config.optimizer == "adamw8bit":
        raise ValueError("bitsandbytes cannot step shards; use optimizer adamw, or add sharding ddp")


def _check_bank_settings(config: AdaptConfig, row: Method) -> None:
    """Refuse settings of a bank for a method that uses none; values from a preset do not count."""
    brought = paper(config.model) if config.preset == "paper" else {}
    for name in () if uses_bank(config, row) else ("bank", "num_probes", "shots", "temperature", "topics"):
        default = AdaptConfig.model_fields[name].default
        if getattr(config, name) not in (default, brought.get(name, default)):
            raise ValueError(f"method {row.name!r} has no use for {name}: it uses no self-probes; leave {name} out")


def uses_bank(config: AdaptConfig, row: Method) -> bool:
    """Whether a job needs self-probes: for its method, or for the repair after it."""
    return row.needs_bank or config.repair


def _check_bytes(found: Footprint, size: ModelSize, config: AdaptConfig) -> list[str]:
    """Refuse a job that cannot work; return warnings about memory and precision."""
    if found.held > found.available:
        raise TooLarge(
            f"{config.model} needs {giga(found.held)} GB for weights, gradients, the optimizer and the gate, but "
            f"{giga(found.available)} GB are free; train adapters (lora r=16), use several devices or a smaller model; "
            "--plan shows what fits where"
        )
    if found.disk > found.free:
        raise ValueError(
            f"{config.out}: checkpoints and model need {giga(found.disk)} GB, but {giga(found.free)} GB are free; make "
            "room or choose another out"
        )
    warnings = []
    if found.peak > found.available:
        warnings.append(
            f"memory may not suffice: about {giga(found.peak)} GB at the peak, {giga(found.available)} GB are free"
        )
    if size.stored_dtype != "float32" and config.load == "float32":
        warnings.append(
            f"the weights are stored in {size.stored_dtype}; they are trained in float32, because {size.stored_dtype} "
            "would round small updates away"
        )
    return warnings


def _waiting(config: AdaptConfig) -> list[str]:
    """A warning if a batch has fewer parts than there are processes; more parts would give another result."""
    parts, processes = config.micro_batches, world.started()[1]
    if parts is None or parts >= processes:
        return []
    return [
        f"{processes - parts} of the {processes} processes wait while the {parts} parts of a batch are computed "
        f"(micro_batches); a new job could have {processes}"
    ]


def load(config: AdaptConfig, home: Path) -> Loaded:
    """The base model in the precision and with the chat template of the settings."""
    loaded = models.load(
        located(config.model, home),
        dtype=config.load,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
    )
    if (template := _template(config, home)) is not None:
        loaded.tokenizer.chat_template = template
    return loaded


def _template(config: AdaptConfig, home: Path) -> str | None:
    place = config.chat_template
    return None if place is None else read_template(Path(located(str(place), home)))


def bind_rows(config: AdaptConfig, tasks: Tasks, base: Loaded) -> Rows:
    """The rows bound to the model, with its own answers where the settings say so."""
    with models.computing(config.compute_dtype, base.device):
        rows = gather(config, tasks, base)
        return answered(rows, base, config.max_length or base.window) if config.own_answers else rows


def bind_all(config: AdaptConfig, found: Preflight, base: Loaded) -> tuple[Rows, Written | None]:
    """The rows bound to the model, with those that it writes itself."""
    rows = bind_rows(config, found.tasks, base)
    with models.computing(config.compute_dtype, base.device):
        return with_written(config, found.method, rows, base)


def answered(rows: Rows, base: Loaded, limit: int) -> Rows:
    """The rows to keep with the base model's own answers, where they are free text."""
    anchors, past, notes = rows.anchors, rows.past, list(rows.notes)
    if anchors is not None and not anchors.closed:
        anchors, sentence = with_own_answers(anchors, base, limit)
        notes.append(sentence)
    if past is not None and not past.closed:
        past, sentence = with_own_answers(past, base, limit)
        notes.append(sentence)
    return replace(rows, anchors=anchors, past=past, notes=tuple(notes))


def with_own_answers(group: Group, base: Loaded, limit: int) -> tuple[Group, str]:
    """The group with the base model's greedy answers, kept in the cache, and a note about it.

    A row that its answer makes longer than `limit` tokens is left out too.
    """
    say(f"the base model answers the {len(group.examples)} {group.name} rows; its answers are cached")
    examples = own_answers(base, group.interface, group.examples, name=group.name)
    examples = tuple(fitting(group.interface, examples, limit, "exclude"))
    if not examples:
        raise ValueError(
            f"none of the {len(group.examples)} {group.name} rows fits {limit} tokens with the model's own answer; "
            "raise max_length, or supply other rows"
        )
    lost = len(group.examples) - len(examples)
    note = f"The {group.name} rows hold the base model's own answers" + (
        f"; left out without a complete answer: {lost}" * bool(lost)
    )
    return replace(group, examples=examples), f"{note}."


# A job prepared: everything checked, the model loaded, its rows bound.


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every phase of a job needs; `groups` are the rows evaluated before and after training."""

    config: AdaptConfig
    home: Path
    folder: Folder
    method: Method
    need: Footprint
    base: Loaded
    rows: Rows
    groups: tuple[Group, ...]
    comparisons: Mapping[str, ComparedRun]
    written: Written | None = None
    """The bank's self-written part, where the base model writes the rows to keep."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What it took to prepare, by part."""
    chosen: tuple[Chosen, ...] = ()
    """The settings that were not given, with the reasons for their values."""

    @property
    def settings(self) -> Settings:
        """The engine's settings."""
        return self.config.settings(len(self.rows.new.examples))


def prepare(config: AdaptConfig, folder: Folder, home: Path) -> Job:
    """Check, load and bind everything; whatever can be refused is refused here, before anything is written.

    Every process reads the rows; those of the base model's own are written by the first with the help of the others,
    which then read them.
    """
    begun = time.perf_counter()
    world.agree("their settings or versions", [config.model_dump(mode="json"), versions()])
    found = world.in_turn(lambda: preflight(config, home))
    config = found.config
    world.agree("the settings they chose", config.model_dump(mode="json"))
    announce(found)
    for warning in found.warnings:
        say(f"warning: {warning}")
    method = found.method
    base = load(config, home)
    loaded = time.perf_counter()
    world.agree("the base model", base.fingerprint)
    rows, written = leader.led_in_turn(lambda: bind_all(config, found, base), (base.model, base.tokenizer))
    world.agree("their rows", [fingerprint(group.examples) for group in rows.groups])
    bound = time.perf_counter()
    for note in rows.notes:
        say(f"note: {note}")
    groups = rows.evaluated(config.max_asked, config.seed)
    return Job(
        config=config,
        home=home,
        folder=folder,
        method=method,
        need=found.need,
        base=base,
        rows=rows,
        groups=groups,
        comparisons=curves([Path(located(str(place), home)) for place in config.compare], groups, config.method),
        written=written,
        chosen=found.chosen,
        seconds={"loading": bound - begun}
        if written is None
        else {"loading": loaded - begun, "writing probes": bound - loaded},
    )
