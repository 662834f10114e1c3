"""A job prepared: everything checked, the model loaded, its rows bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cplus.experiment.rows import Group, Rows
from cplus.experiment.settings import Settings
from cplus.job.folder import Folder
from cplus.job.memory import Footprint
from cplus.job.other_jobs import curves
from cplus.job.preflight import bind_all, load, preflight
from cplus.job.progress import say
from cplus.job.rows import located
from cplus.job.settings import AdaptConfig
from cplus.job.written import Written
from cplus.methods import Method
from cplus.models import Loaded
from cplus.receipts.receipt import ComparedRun


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

    @property
    def settings(self) -> Settings:
        """The engine's settings."""
        return self.config.settings(len(self.rows.new.examples))


def prepare(config: AdaptConfig, folder: Folder, home: Path) -> Job:
    """Check, load and bind everything; whatever can be refused is refused here, before anything is written."""
    found = preflight(config, home)
    for line in found.tasks.formats:
        say(line)
    for warning in found.warnings:
        say(f"warning: {warning}")
    method, size = found.method, found.size
    say(f"{config.model}: {size.parameters:,} parameters, {size.trainable:,} trained; {method.name}: {method.summary}")
    base = load(config, home)
    rows, written = bind_all(config, found, base)
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
    )
