"""A job prepared: settings checked, files read, memory and disk counted, the model loaded, its rows bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cplus import models
from cplus.experiment.rows import Group, Rows
from cplus.experiment.settings import Settings
from cplus.job import footprint
from cplus.job.folder import Folder
from cplus.job.other_jobs import curves
from cplus.job.progress import say
from cplus.job.rows import gather, located, read
from cplus.job.settings import AdaptConfig, paper
from cplus.methods import Method
from cplus.models import Loaded
from cplus.probes.own_answers import own_answers
from cplus.receipts.receipt import Comparison


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
    comparisons: Mapping[str, Comparison]

    @property
    def settings(self) -> Settings:
        """The engine's settings."""
        return self.config.settings(len(self.rows.new.examples))


def row_of(config: AdaptConfig) -> Method:
    """The method's row with the job's blend and smoothing."""
    row = config.settings().row
    _check_bank_settings(config, row)
    if row.adapter is not None and config.lora is not None:
        raise ValueError(f"method {row.name!r} has adapters of its own; leave out lora, or choose another method")
    return row


def _check_bank_settings(config: AdaptConfig, row: Method) -> None:
    """Refuse settings of a bank for a method that uses none; values from a preset do not count."""
    brought = paper(config.model) if config.preset == "paper" else {}
    for name in () if row.needs_bank else ("bank", "num_probes", "shots", "temperature", "topics"):
        default = AdaptConfig.model_fields[name].default
        if getattr(config, name) not in (default, brought.get(name, default)):
            raise ValueError(f"method {row.name!r} has no use for {name}: it uses no self-probes; leave {name} out")


def prepare(config: AdaptConfig, folder: Folder, home: Path) -> Job:
    """Check, load and bind everything; whatever can be refused is refused here, before anything is written."""
    method = row_of(config)
    tasks = read(config, method, home)
    for line in tasks.formats:
        say(line)
    size, need = footprint.needs(config, method, tasks, home)
    for warning in footprint.check(need, size, config):
        say(f"warning: {warning}")
    say(f"{config.model}: {size.parameters:,} parameters, {size.trainable:,} trained; {method.name}: {method.summary}")
    base = load(config, home)
    with models.computing(config.compute_dtype, base.device):
        rows = gather(config, tasks, base)
        if config.own_answers:
            rows = answered(rows, base)
    for note in rows.notes:
        say(f"note: {note}")
    groups = rows.evaluated(config.max_asked, config.seed)
    return Job(
        config=config,
        home=home,
        folder=folder,
        method=method,
        base=base,
        rows=rows,
        groups=groups,
        comparisons=curves([Path(located(str(place), home)) for place in config.compare], groups, config.method),
    )


def answered(rows: Rows, base: Loaded) -> Rows:
    """The rows to keep with the base model's own answers, where they are free text."""
    anchors, past, notes = rows.anchors, rows.past, list(rows.notes)
    if anchors is not None and not anchors.closed:
        anchors, sentence = with_own_answers(anchors, base)
        notes.append(sentence)
    if past is not None and not past.closed:
        past, sentence = with_own_answers(past, base)
        notes.append(sentence)
    return replace(rows, anchors=anchors, past=past, notes=tuple(notes))


def load(config: AdaptConfig, home: Path) -> Loaded:
    """The base model in float32, with the chat template of the settings."""
    loaded = models.load(
        located(config.model, home),
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
    )
    if config.chat_template is not None:
        place = Path(located(str(config.chat_template), home))
        if not place.is_file():
            raise ValueError(f"{place}: expected a file with a chat template, but there is none")
        loaded.tokenizer.chat_template = place.read_text(encoding="utf-8")
    return loaded


def with_own_answers(group: Group, base: Loaded) -> tuple[Group, str]:
    """The group with the base model's greedy answers, kept in the cache, and a note about it."""
    examples = own_answers(base, group.interface, group.examples, name=group.name)
    lost = len(group.examples) - len(examples)
    note = f"The {group.name} rows hold the base model's own answers" + (
        f"; left out without a complete answer: {lost}" * bool(lost)
    )
    return replace(group, examples=examples), f"{note}."
