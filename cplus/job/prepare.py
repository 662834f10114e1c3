"""A job prepared: everything checked, the model loaded, its rows bound."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cplus import leader, world
from cplus.data.examples import fingerprint
from cplus.environment import versions
from cplus.experiment.rows import Group, Rows
from cplus.experiment.settings import Settings
from cplus.job.choices import Chosen
from cplus.job.folder import Folder
from cplus.job.memory import Footprint
from cplus.job.other_jobs import curves
from cplus.job.preflight import announce, bind_all, load, preflight
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
    rows, written = leader.in_turn(lambda: bind_all(config, found, base), (base.model, base.tokenizer))
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
