"""Builds a sealed bank, block by block, and keeps it in a cache that studies and jobs share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cplus.base import files
from cplus.data.examples import Example
from cplus.data.interfaces import Interface, Rejected
from cplus.models import Loaded
from cplus.models.decoding import Engine, LocalEngine
from cplus.probes.bank import (
    FORMAT,
    MANIFEST,
    Bank,
    described,
    journal_path,
    open_journal,
    probe_from_row,
    probe_to_row,
    seal,
)
from cplus.probes.settings import ProbeSettings
from cplus.probes.writing import Block, Outcome, Tally, TooFewProbes, labeller_of, rejections, writer

# Builds a sealed bank on disk, block by block; an interrupted build is resumed.


_LATER = ("ability", "answer_tokens")
"""Settings that a manifest holds only where they are used."""

OnEvent = Callable[[Outcome], None]


def build(
    folder: Path,
    base: Loaded,
    interface: Interface,
    anchors: Sequence[Example],
    settings: ProbeSettings,
    *,
    engine: Engine | None = None,
    watch: OnEvent = lambda event: None,
    wait: float = 0.0,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Bank:
    """Build a bank in `folder`, or resume building it; one already sealed with the same identity is returned.

    If another process is building it, wait for up to `wait` seconds; `notify` is then called once.
    """
    engine = engine or LocalEngine(base.model, base.tokenizer)
    identity = identify(base, interface, anchors, settings, engine)
    if folder.exists():
        return _same(folder, identity)
    path = journal_path(folder)
    tally = Tally(anchors, interface, settings)
    # Whichever engine samples the inputs, the frozen model itself answers them.
    labeller = labeller_of(base, interface, settings)
    # What a resumed build must share: the size may change unless labels are balanced.
    kept = {k: v for k, v in identity["settings"].items() if k != "num_probes" or settings.label_balanced}
    with open_journal(path, {**identity, "settings": kept}, wait=wait, notify=notify) as journal:
        if folder.exists():  # another process has built it in the meantime
            return _same(folder, identity)
        files.tidy(folder.parent, folder.name)
        for entry in journal.entries:
            block = _block_from_entry(entry)
            tally.add(block)
            watch(block)
        try:
            for event in tally.generate(engine, labeller):
                if isinstance(event, dict):
                    rows = [
                        {"index": index, "reason": result.reason}
                        if isinstance(result, Rejected)
                        else {"index": index, "probe": probe_to_row(result)}
                        for index, result in event.items()
                    ]
                    journal.append({"outcomes": rows})
                watch(event)
        except TooFewProbes as error:
            raise TooFewProbes(f"{error}. The accepted ones are stored in {path}") from error
        # The first N probes, and the yield of the requests up to the last of them.
        probes = tally.probes[: settings.num_probes]
        used = probes[-1].request + 1
        counts = {"requests": used, "accepted": len(probes), "rejected": dict(rejections(tally.blocks, used - 1))}
        bank = seal(folder, probes, {**identity, "counts": counts, "yield": round(len(probes) / used, 6)})
        path.unlink()
    return bank


def identify(
    base: Loaded, interface: Interface, anchors: Sequence[Example], settings: ProbeSettings, engine: Engine
) -> dict[str, Any]:
    """Everything that determines a bank's content."""
    written = writer(interface, anchors, settings)
    recorded = asdict(settings) | {
        "topics": list(settings.topics),
        "max_new_tokens": settings.max_new_tokens or written.max_new_tokens,
    }
    # The names and values that banks were sealed with, whether or not a setting still exists.
    recorded |= {"confidence_floor": 0.0, "domain": None}
    recorded = {key: value for key, value in recorded.items() if value is not None or key not in _LATER}
    return {
        "model": {"name": base.name, "fingerprint": base.fingerprint},
        "anchors": described(anchors),
        "interface": interface.name,
        # These tokens depend on the wording of the request and on the tokenizer.
        "first_request_sha256": files.fingerprint(list(written.request(written.plan(0)))),
        "settings": recorded,
        "engine": engine.describe(),
    }


def _same(folder: Path, identity: Mapping[str, Any]) -> Bank:
    if (folder / MANIFEST).is_file():
        bank = Bank.load(folder)
        if all(bank.manifest[key] == value for key, value in identity.items()):
            journal_path(folder).unlink(missing_ok=True)  # a crash just after sealing leaves it behind
            return bank
    raise ValueError(f"{folder} already exists and is not this bank; remove it or choose another folder")


def _block_from_entry(entry: Mapping[str, Any]) -> Block:
    try:
        return {
            row["index"]: Rejected(row["reason"]) if "reason" in row else probe_from_row(row["probe"])
            for row in entry["outcomes"]
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"an entry of the journal is damaged ({error!r}); remove the journal and start again"
        ) from error


# One cache of banks: studies and jobs with the same model, anchors and settings share one bank.


def bank_folder(
    base: Loaded, interface: Interface, anchors: Sequence[Example], settings: ProbeSettings, banks: Path | None = None
) -> Path:
    """Where the bank of this model, these anchors and these settings is kept; `banks` is another folder of banks."""
    identity = identify(base, interface, anchors, settings, LocalEngine(base.model, base.tokenizer))
    return (banks or files.cache_folder() / "banks") / f"bank-{files.fingerprint(identity)[:24]}"


def sealed_before(
    base: Loaded, interface: Interface, anchors: Sequence[Example], settings: ProbeSettings
) -> tuple[Path, str] | None:
    """A bank in the cache that begins with this one, and how its writing differed, which is at most in last bits.

    It may be larger where nothing else depends on its size, and another version of a library may have written it.
    """
    wanted = identify(base, interface, anchors, settings, LocalEngine(base.model, base.tokenizer))
    exact = bank_folder(base, interface, anchors, settings)
    others = sorted(path.parent for path in exact.parent.glob(f"bank-*/{MANIFEST}") if path.parent != exact)
    for folder in (exact, *others):
        found = files.read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            continue
        size, needed = found["settings"]["num_probes"], settings.num_probes
        if (
            (size == needed or (size > needed and settings.ability is not None))
            and found["model"]["fingerprint"] == base.fingerprint
            and {**found["settings"], "num_probes": needed} == wanted["settings"]
            and all(found[key] == wanted[key] for key in ("anchors", "interface", "first_request_sha256"))
        ):
            engine = {key: value for key, value in found["engine"].items() if wanted["engine"].get(key) != value}
            other = ", ".join(f"{key} {value}" for key, value in engine.items())
            return folder, f"; written with {other}" if other else ""
    return None


def cached_bank(
    base: Loaded,
    interface: Interface,
    anchors: Sequence[Example],
    settings: ProbeSettings,
    *,
    banks: Path | None = None,
    watch: OnEvent = lambda event: None,
    notify: Callable[[str], None] = lambda sentence: None,
) -> Bank:
    """The sealed bank, read from the cache or written into it now; another process that writes it is waited for."""
    place = bank_folder(base, interface, anchors, settings, banks)
    return build(place, base, interface, anchors, settings, watch=watch, wait=math.inf, notify=notify)
