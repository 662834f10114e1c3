"""What a job keeps: rows that the base model writes itself, held-out ones first, then anchors, then the bank."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cplus.base import files
from cplus.data import interfaces
from cplus.data.examples import Example
from cplus.data.interfaces import Interface
from cplus.evaluation.abilities import ability
from cplus.jobs.folder import Folder
from cplus.jobs.progress import bank_view, say
from cplus.jobs.settings import AdaptConfig, allotted
from cplus.methods.table import Method
from cplus.models import Loaded
from cplus.probes.bank import Bank, Probe, described, seal
from cplus.probes.build import bank_folder, cached_bank, sealed_before
from cplus.probes.settings import ProbeSettings
from cplus.probes.writing import writing
from cplus.training.rows import Group, Rows

PAST_ROWS = 28
"""Self-written rows that are held out to measure Retention on."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """The numbers of rows of one ability: held out, anchors and probes, written in this order."""

    ability: str
    past: int
    anchors: int
    probes: int

    @property
    def total(self) -> int:
        """All rows to write."""
        return self.past + self.anchors + self.probes


@dataclass(frozen=True, kw_only=True)
class Written:
    """The self-written part of a job's bank, and the part that is still to be written from given anchors."""

    probes: tuple[Probe, ...]
    manifest: dict[str, Any]
    given: tuple[Example, ...] = ()
    from_given: int = 0


def portions(config: AdaptConfig, method: Method, num_new: int) -> list[Portion]:
    """What the base model has to write; nothing that the method has no use for."""
    weights = config.written
    if not weights:
        return []
    whole = {name: share / sum(weights.values()) for name, share in weights.items()}
    past = allotted(PAST_ROWS if config.past is None else 0, whole)
    anchors = allotted(config.num_anchors, whole)
    probes = allotted(config.settings(num_new).probes.num_probes, weights)
    found = [
        Portion(
            ability=name,
            past=past[name],
            anchors=anchors[name] if set(method.needs) != {"new"} else 0,
            probes=probes[name] if method.needs_bank else 0,
        )
        for name in weights
    ]
    return [portion for portion in found if portion.total]


def interface_of(config: AdaptConfig, base: Loaded) -> Interface:
    """How self-written rows are read: through the chat template, or as plain text where there is none."""
    chat = bool(getattr(base.tokenizer, "chat_template", None)) and not config.plain
    return interfaces.build("freeform", base.tokenizer, chat=chat, turns=config.turns, thinking=config.thinking)


def with_written(config: AdaptConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, Written | None]:
    """The rows with those that the base model writes now or wrote before; training sees no held-out one."""
    asked = portions(config, method, len(rows.new.examples))
    if not asked:
        return rows, None
    bound, given = interface_of(config, base), rows.anchors
    if given is not None and given.closed and any(portion.anchors for portion in asked):
        raise ValueError(
            "the anchors given are multiple choice, and self-written rows are free text; keep one of the two, or "
            "protect the other by a job of its own and kept"
        )
    banks = [self_written(base, bound, settings_of(config, bound, portion)) for portion in asked]
    held: list[Example] = []
    anchors: list[Example] = []
    probes: list[Probe] = []
    for portion, bank in zip(asked, banks, strict=True):
        examples, end = bank.examples, portion.past + portion.anchors
        held += examples[: portion.past]
        anchors += examples[portion.past : end]
        probes += bank.probes[end : portion.total]
    limit = max(ability(portion.ability).written_tokens for portion in asked)
    own = Group(name="past", part="retention", interface=bound, examples=tuple(held), max_new_tokens=limit)
    counts: dict[str, Sequence[object]] = {"held out to measure on": held, "anchors": anchors, "probes": probes}
    parts = ", ".join(f"{len(own)} {purpose}" for purpose, own in counts.items() if own)
    names = " and ".join(portion.ability for portion in asked)
    told = f"The base model wrote and answered the rows to keep ({names}) itself: {parts}."
    # With held-out rows, the note that there are none is no longer true.
    notes = (note for note in rows.notes if not (held and note.startswith("Retention is measured on the")))
    both = (*(given.examples if given is not None else ()), *anchors)
    rows = replace(
        rows,
        past=replace(own, by_base=True) if held else rows.past,
        anchors=replace(own, name="anchors", examples=both) if anchors else given,
        notes=(*notes, told),
    )
    if not method.needs_bank:
        return rows, None
    count = config.settings(len(rows.new.examples)).probes.num_probes
    return rows, Written(
        probes=tuple(probes),
        manifest=_manifest(asked, banks),
        given=() if given is None else given.examples,
        from_given=0 if given is None else count - len(probes),
    )


def settings_of(config: AdaptConfig, bound: Interface, portion: Portion) -> ProbeSettings:
    """How the base model writes a portion."""
    return writing(bound, portion.ability, portion.total, temperature=config.temperature, seed=config.seed)


def self_written(base: Loaded, bound: Interface, settings: ProbeSettings) -> Bank:
    """A bank that begins with these rows: one in the cache, or the one that the model writes now."""
    return Bank.load(_built(base, bound, (), settings), model_fingerprint=base.fingerprint)


def _manifest(asked: Sequence[Portion], banks: Sequence[Bank]) -> dict[str, Any]:
    """The first bank's manifest with the counts of all, and where each part comes from."""
    rejected: Counter[str] = Counter()
    for bank in banks:
        rejected.update(bank.manifest["counts"]["rejected"])
    requests, accepted = (sum(bank.manifest["counts"][key] for bank in banks) for key in ("requests", "accepted"))
    parts = [
        {
            "keep": portion.ability,
            "held_out": portion.past,
            "anchors": portion.anchors,
            "probes": portion.probes,
            "drawn_from": bank.manifest["probes_sha256"],
        }
        for portion, bank in zip(asked, banks, strict=True)
    ]
    own = {key: value for key, value in banks[0].manifest.items() if key not in ("format", "probes_sha256", "anchors")}
    counts = {"requests": requests, "accepted": accepted, "rejected": dict(rejected)}
    return {**own, "counts": counts, "yield": round(accepted / requests, 6), "parts": parts}


# The job's bank: a given one, one from the cache, or a new one; a sealed copy is stored beside the model.


def job_bank(
    folder: Path,
    settings: ProbeSettings,
    base: Loaded,
    anchors: Group,
    given: Path | None,
    written: Written | None = None,
) -> Bank:
    """The job's bank: made in `folder` on the first call, read from there on later ones.

    It is the `given` one, one built from the anchors, or what the base model has `written` with what given anchors
    contribute, sealed for all anchors.
    """
    if folder.exists():
        return checked_bank(folder, base, anchors)
    if written is None:
        source = given or _built(base, anchors.interface, anchors.examples, settings)
        checked_bank(source, base, anchors)
        with files.replacing_folder(folder) as part:
            shutil.copytree(source, part, dirs_exist_ok=True)
    else:
        probes, manifest = list(written.probes), dict(written.manifest)
        if written.from_given:
            few = replace(settings, num_probes=written.from_given)
            bank = Bank.load(_built(base, anchors.interface, written.given, few))
            probes += bank.probes
            own = {"keep": "anchors", "probes": len(bank.probes), "drawn_from": bank.manifest["probes_sha256"]}
            manifest["parts"] = [*manifest["parts"], own]
        seal(folder, probes, {**manifest, "anchors": described(anchors.examples)})
    return checked_bank(folder, base, anchors)


def earlier_bank(place: Path, anchors: Group) -> Bank:
    """The bank of an earlier job, whichever model wrote it, if it was sealed for these anchors and their interface."""
    folder = Folder(place).bank
    if not folder.exists():
        raise ValueError(f"{place}: its job has anchors but no bank; use a method that needs no bank, like cpl")
    return checked_bank(folder, None, anchors)


def checked_bank(folder: Path, base: Loaded | None, anchors: Group) -> Bank:
    """The bank in the folder, if it was sealed for these anchors and their interface, and by this model if given."""
    writer = None if base is None else base.fingerprint
    bank = Bank.load(folder, model_fingerprint=writer, anchors=anchors.examples)
    if bank.manifest["interface"] != anchors.interface.name:
        raise ValueError(
            f"probe bank {folder} was sealed for the interface {bank.manifest['interface']}, but the anchors use "
            f"{anchors.interface.name}; rebuild it with 'cplus probe'"
        )
    return bank


def _built(base: Loaded, bound: Interface, anchors: Sequence[Example], settings: ProbeSettings) -> Path:
    """A bank from the cache, or written now: from anchors, or of an ability from nothing."""
    count = settings.num_probes
    found = sealed_before(base, bound, anchors, settings)
    if found is not None:
        what = "bank: " if anchors else f"keep {settings.ability}: {count} self-written rows "
        say(f"{what}reused from {found[0]}{found[1]}")
        return found[0]
    if anchors:
        say(f"bank: the frozen model writes {count} probes from {len(anchors)} anchors")
    else:
        say(f"keep {settings.ability}: {base.name} writes {count} rows of its own; they are cached")
    with bank_view(count) as watch:
        cached_bank(base, bound, anchors, settings, watch=watch, notify=say)
    return bank_folder(base, bound, anchors, settings)
