"""One cache of banks: studies and jobs with the same model, anchors and settings share one bank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from cplus import files
from cplus.data.examples import Example
from cplus.interfaces import Interface
from cplus.models import Loaded
from cplus.probes.bank import Bank
from cplus.probes.build import OnEvent, build, identify
from cplus.probes.local import LocalEngine
from cplus.probes.settings import ProbeSettings


def bank_folder(
    base: Loaded, interface: Interface, anchors: Sequence[Example], settings: ProbeSettings, banks: Path | None = None
) -> Path:
    """Where the bank of this model, these anchors and these settings is kept; `banks` is another folder of banks."""
    identity = identify(base, interface, anchors, settings, LocalEngine(base.model, base.tokenizer))
    return (banks or files.cache_folder() / "banks") / f"bank-{files.fingerprint(identity)[:24]}"


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
