"""A repair prepared: everything checked, both models loaded, rows bound; nothing is written yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cplus import models
from cplus.experiment.rows import Group, Rows
from cplus.job.memory import ModelSize, available, disk_free, giga, model_size
from cplus.job.preflight import bind_rows, load
from cplus.job.progress import say
from cplus.job.repair.settings import RepairConfig
from cplus.job.repair.tuned import check_pair, load_tuned
from cplus.job.rows import Tasks, located, read
from cplus.job.written import Written, with_written
from cplus.methods import METHODS, Method
from cplus.models import Loaded
from cplus.repairing.model import BYTES_PER_PARAMETER


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that a repair holds and writes; `held` is certain, `peak` adds an estimate of the activations."""

    held: int
    peak: int
    available: int
    disk: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Given:
    """What every phase of a repair needs; `groups` are the rows evaluated with base, tuned and repaired model."""

    config: RepairConfig
    home: Path
    size: ModelSize
    need: Need
    base: Loaded
    tuned: Loaded
    rows: Rows
    groups: tuple[Group, ...]
    notes: tuple[str, ...]
    written: Written | None = None
    """What the base model wrote itself of the rows to keep."""

    @property
    def new(self) -> list[Group]:
        """The groups that must stay known: the rows trained on, and those held out, if there are any."""
        return [self.rows.new, *([] if self.rows.validation is None else [self.rows.validation])]


Write: TypeAlias = Callable[[RepairConfig, Method, Rows, Loaded], tuple[Rows, Written | None]]


def prepare(config: RepairConfig, home: Path, write: Write = with_written) -> Given:
    """Check, load and bind everything; whatever can be refused without an evaluation is refused here.

    `write` gives the rows to keep that the base model writes itself; a plan has other means.
    """
    _check_places(config, home)
    tasks = read(config, METHODS[config.method], home)
    for line in tasks.formats:
        say(line)
    size = model_size(config, METHODS[config.method], models.resolve(located(config.model, home)))
    need = needed(config, size)
    say(f"{config.model}: {size.parameters:,} parameters; {config.tuned} is repaired towards it")
    base = load(config, home)
    tuned = load_tuned(config, base, home)
    notes = _one_template(config, base, tuned)
    with models.computing(config.compute_dtype, base.device):
        rows, written = write(config, METHODS[config.method], _bound(config, tasks, base, tuned), base)
    for note in (*rows.notes, *notes):
        say(f"note: {note}")
    groups = rows.evaluated(config.max_asked, config.seed)
    return Given(
        config=config,
        home=home,
        size=size,
        need=need,
        base=base,
        tuned=tuned,
        rows=rows,
        groups=groups,
        notes=tuple(notes),
        written=written,
    )


def _bound(config: RepairConfig, tasks: Tasks, base: Loaded, tuned: Loaded) -> Rows:
    assert tasks.new is not None
    check_pair(base, tuned, tasks.new.examples)
    return bind_rows(config, tasks, base)


def _check_places(config: RepairConfig, home: Path) -> None:
    """Refuse an output folder that holds one of the models: replacing it would remove the model."""
    out = config.out.resolve()
    for name in (config.model, config.tuned):
        path = Path(located(name, home)).expanduser()
        if path.exists() and path.resolve().is_relative_to(out):
            raise ValueError(f"{config.out}: expected a folder of its own for the repaired model, but it holds {name}")


def needed(config: RepairConfig, size: ModelSize) -> Need:
    """The bytes of a repair; one that cannot work is refused."""
    held = BYTES_PER_PARAMETER * size.parameters
    found = Need(
        held=held,
        peak=held + size.activation_bytes,
        available=available(models.choose_device(config.device)),
        disk=12 * size.parameters + (64 << 20),  # two files of sums and the model
        free=disk_free(config.out),
    )
    if found.held > found.available:
        raise ValueError(
            f"repairing {config.model} needs {giga(found.held)} GB for both models and the importance, but "
            f"{giga(found.available)} GB are free; use a machine with more memory"
        )
    if found.disk > found.free:
        raise ValueError(
            f"{config.out}: importance and model need {giga(found.disk)} GB, but {giga(found.free)} GB are free; make "
            "room or choose another out"
        )
    return found


def _one_template(config: RepairConfig, base: Loaded, tuned: Loaded) -> list[str]:
    """Use one chat template for both models: the file's, else the tuned model's, with which it will be used."""
    was, now = base.tokenizer.chat_template, tuned.tokenizer.chat_template
    if config.chat_template is not None:
        tuned.tokenizer.chat_template = was
        return []
    if was == now:
        return []
    base.tokenizer.chat_template = now
    return ["The chat templates of base and tuned model differ; the tuned model's was used for both."]
