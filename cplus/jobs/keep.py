"""What a job keeps: rows that the base model writes itself, and the bank of probes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cplus.base import files
from cplus.data import interfaces
from cplus.data.examples import Example
from cplus.data.interfaces import Freeform
from cplus.jobs.folder import Folder
from cplus.jobs.progress import bank_view, say
from cplus.jobs.settings import AdaptConfig, allotted
from cplus.methods.table import Method
from cplus.models import Loaded
from cplus.probes.abilities import MIN_YIELD, ability
from cplus.probes.bank import Bank, Probe, described, seal
from cplus.probes.build import bank_folder, cached_bank
from cplus.probes.settings import TOPICS, ProbeSettings
from cplus.training.rows import Group, Rows

# The rows to keep that the base model writes itself: held-out past rows first, then anchors, then the bank.


PAST_ROWS = 40
"""Self-written rows that are held out to measure Retention on."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """The numbers of rows of one ability: held out, anchors and probes, written in this order."""

    ability: str
    past: int
    anchors: int
    probes: int
    at_most: int = 0
    """The rows that a method with anchors and probes would have the model write; the fewer ones are their beginning."""

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
    probes = allotted(config.settings(num_new).num_probes, weights)
    found = [
        Portion(
            ability=name,
            past=past[name],
            anchors=anchors[name] if set(method.needs) != {"new"} else 0,
            probes=probes[name] if method.needs_bank else 0,
            at_most=past[name] + anchors[name] + probes[name],
        )
        for name in weights
    ]
    return [portion for portion in found if portion.total]


def interface_of(config: AdaptConfig, base: Loaded) -> Freeform:
    """How self-written rows are read: through the chat template, or as plain text where there is none."""
    chat = bool(getattr(base.tokenizer, "chat_template", None)) and not config.plain
    bound = interfaces.build("freeform", base.tokenizer, chat=chat, turns=config.turns, thinking=config.thinking)
    assert isinstance(bound, Freeform)
    return bound


def writing_settings(config: AdaptConfig, name: str, count: int) -> ProbeSettings:
    """How the base model writes rows of an ability."""
    return ProbeSettings(
        num_probes=count,
        temperature=config.temperature,
        topics=TOPICS,
        seed=config.seed,
        min_yield=MIN_YIELD,
        ability=name,
    )


def with_written(config: AdaptConfig, method: Method, rows: Rows, base: Loaded) -> tuple[Rows, Written | None]:
    """The rows with those that the base model writes now or wrote before; training sees no held-out one."""
    asked = portions(config, method, len(rows.new.examples))
    if not asked:
        return rows, None
    bound = interface_of(config, base)
    banks = [_bank(config, base, bound, portion) for portion in asked]
    return split_up(config, method, rows, bound, asked, banks)


def split_up(
    config: AdaptConfig,
    method: Method,
    rows: Rows,
    bound: Freeform,
    asked: Sequence[Portion],
    banks: Sequence[Bank],
) -> tuple[Rows, Written | None]:
    """The banks' rows by their purpose."""
    held: list[Example] = []
    anchors: list[Example] = []
    probes: list[Probe] = []
    for portion, bank in zip(asked, banks, strict=True):
        examples, end = bank.examples, portion.past + portion.anchors
        held += examples[: portion.past]
        anchors += examples[portion.past : end]
        probes += bank.probes[end : portion.total]
    given = rows.anchors
    if given is not None and anchors:
        if given.closed:
            raise ValueError(
                "the anchors given are multiple choice, and self-written rows are free text; keep one of the two, or "
                "protect the other by a job of its own and kept"
            )
        anchors = [*given.examples, *anchors]
    limit = max(ability(portion.ability).answer_tokens for portion in asked)
    past = Group(
        name="past", part="retention", interface=bound, examples=tuple(held), max_new_tokens=limit, by_base=True
    )
    group = Group(name="anchors", part="retention", interface=bound, examples=tuple(anchors), max_new_tokens=limit)
    rows = replace(
        rows,
        past=past if held else rows.past,
        anchors=group if anchors else given,
        notes=(*_still_true(rows.notes, held), _note(asked, len(held), len(anchors), len(probes))),
    )
    if not method.needs_bank:
        return rows, None
    count = config.settings(len(rows.new.examples)).num_probes
    return rows, Written(
        probes=tuple(probes),
        manifest=_manifest(asked, banks),
        given=() if given is None else given.examples,
        from_given=0 if given is None else count - len(probes),
    )


def is_cached(config: AdaptConfig, base: Loaded, portion: Portion) -> bool:
    """Whether the base model has written these rows before."""
    return _written_before(config, base, interface_of(config, base), portion) is not None


def _written_before(config: AdaptConfig, base: Loaded, bound: Freeform, portion: Portion) -> Path | None:
    """A bank in the cache that begins with these rows."""
    for count in (portion.total, portion.at_most):
        place = bank_folder(base, bound, (), writing_settings(config, portion.ability, count))
        if place.exists():
            return place
    return None


def stand_in(few: Sequence[Probe], count: int) -> Bank:
    """A bank of `count` rows for a plan: a few rows again and again, under different ids."""
    rows = islice(cycle(few), count)
    probes = tuple(replace(own, example=replace(own.example, id=f"{own.example.id}-{i}")) for i, own in enumerate(rows))
    counts = {"requests": count, "accepted": count, "rejected": {}}
    return Bank(probes=probes, manifest={"counts": counts, "probes_sha256": ""})


def _bank(config: AdaptConfig, base: Loaded, bound: Freeform, portion: Portion) -> Bank:
    settings = writing_settings(config, portion.ability, portion.total)
    if (place := _written_before(config, base, bound, portion)) is not None:
        say(f"keep {portion.ability}: {portion.total} self-written rows reused from {place}")
        return Bank.load(place, model_fingerprint=base.fingerprint)
    say(f"keep {portion.ability}: the base model writes {portion.total} rows of its own; they are cached")
    with bank_view(portion.total) as watch:
        bank = cached_bank(base, bound, (), settings, watch=watch, notify=say)
    counts = bank.manifest["counts"]
    rejected = ", ".join(f"{reason} {n}" for reason, n in Counter(counts["rejected"]).most_common())
    say(
        f"keep {portion.ability}: {portion.total} rows of {counts['requests']} requests; rejected: {rejected or 'none'}"
    )
    return bank


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


def _still_true(notes: Sequence[str], held: Sequence[Example]) -> list[str]:
    """The notes without the one that there are no held-out past rows."""
    return [note for note in notes if not (held and note.startswith("Retention is measured on the"))]


def _note(asked: Sequence[Portion], held: int, anchors: int, probes: int) -> str:
    names = " and ".join(portion.ability for portion in asked)
    parts = [f"{held} held out to measure on"] if held else []
    parts += [f"{anchors} anchors"] if anchors else []
    parts += [f"{probes} probes"] if probes else []
    return f"The base model wrote and answered the rows to keep ({names}) itself: {', '.join(parts)}."


# The job's bank: a given one, one from the cache, or a new one; a sealed copy is stored beside the model.


def job_bank(folder: Path, settings: ProbeSettings, base: Loaded, anchors: Group, given: Path | None) -> Bank:
    """The job's bank: copied to `folder` on the first call, read from there on later ones."""
    if not folder.exists():
        source = given or _built(base, anchors, settings)
        checked_bank(source, base, anchors)
        with files.replacing_folder(folder) as part:
            shutil.copytree(source, part, dirs_exist_ok=True)
    return checked_bank(folder, base, anchors)


def written_bank(folder: Path, written: Written, settings: ProbeSettings, base: Loaded, anchors: Group) -> Bank:
    """The bank of a job that keeps self-written rows, sealed for its anchors, with what given anchors contribute."""
    if not folder.exists():
        probes, manifest = list(written.probes), dict(written.manifest)
        if written.from_given:
            given = replace(anchors, examples=written.given)
            bank = Bank.load(_built(base, given, replace(settings, num_probes=written.from_given)))
            probes += bank.probes
            part = {"keep": "anchors", "probes": len(bank.probes), "drawn_from": bank.manifest["probes_sha256"]}
            manifest["parts"] = [*manifest["parts"], part]
        seal(folder, probes, {**manifest, "anchors": described(anchors.examples)})
    return checked_bank(folder, base, anchors)


def earlier_bank(place: Path, anchors: Group) -> Bank:
    """The bank of an earlier job, whichever model wrote it, if it was sealed for these anchors and their interface."""
    folder = Folder(place).bank
    if not folder.exists():
        raise ValueError(f"{place}: its job has anchors but no bank; use a method that needs no bank, like cpl")
    return _same_interface(Bank.load(folder, anchors=anchors.examples), folder, anchors)


def checked_bank(folder: Path, base: Loaded, anchors: Group) -> Bank:
    """The bank in the folder, if it was sealed for this model, these anchors and their interface."""
    bank = Bank.load(folder, model_fingerprint=base.fingerprint, anchors=anchors.examples)
    return _same_interface(bank, folder, anchors)


def _same_interface(bank: Bank, folder: Path, anchors: Group) -> Bank:
    if bank.manifest["interface"] != anchors.interface.name:
        raise ValueError(
            f"probe bank {folder} was sealed for the interface {bank.manifest['interface']}, but the anchors use "
            f"{anchors.interface.name}; rebuild it with 'cplus probe'"
        )
    return bank


def _built(base: Loaded, anchors: Group, settings: ProbeSettings) -> Path:
    place = bank_folder(base, anchors.interface, anchors.examples, settings)
    if place.exists():
        say(f"bank: reused from {place}")
        return place
    say(f"bank: the frozen model writes {settings.num_probes} probes from {len(anchors.examples)} anchors")
    with bank_view(settings.num_probes) as watch:
        bank = cached_bank(base, anchors.interface, anchors.examples, settings, watch=watch, notify=say)
    requests, seal = bank.manifest["counts"]["requests"], bank.manifest["probes_sha256"]
    say(f"bank: {len(bank.probes)} probes of {requests} requests, sealed {seal[:12]}")
    return place
