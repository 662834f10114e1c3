"""What the frozen model is shown so that it writes new inputs, and how its texts are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from cplus.data.examples import Example
from cplus.interfaces import Interface, Rejected
from cplus.probes import settings as probe_settings
from cplus.probes.general import SelfWritten
from cplus.probes.settings import BLOCK, MAX_NEW_TOKENS, ProbeSettings, RequestPlan

LONGER, STEP = 1.25, 64
"""A new question may have this many times the tokens of the longest anchor's prompt, rounded up to whole steps."""


class Writer(Protocol):
    """Plans, writes and reads the requests of one bank; `block` of them are sampled together."""

    @property
    def block(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    def plan(self, index: int) -> RequestPlan: ...
    def request(self, plan: RequestPlan) -> tuple[int, ...]: ...
    def parse(self, text: str, plan: RequestPlan) -> Example | Rejected: ...


@dataclass(frozen=True, kw_only=True)
class FromAnchors:
    """Each request shows a few anchors, in the interface's own words.

    Paper: App. C.1.
    """

    interface: Interface
    anchors: Sequence[Example]
    settings: ProbeSettings
    block: int = BLOCK

    @property
    def max_new_tokens(self) -> int:
        """Maximum length of an input: more where an anchor's own is long, as MedQA's case descriptions are."""
        least = MAX_NEW_TOKENS[self.interface.name]
        if self.interface.name == "freeform":
            return least
        longest = max((len(self.interface.prompt(anchor)) for anchor in self.anchors), default=0)
        return max(least, STEP * ceil(LONGER * longest / STEP))

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that may end an input."""
        return self.interface.stop(self.anchors)

    def plan(self, index: int) -> RequestPlan:
        """The anchors and the topic of a request."""
        return probe_settings.plan(index, self.anchors, self.settings)

    def request(self, plan: RequestPlan) -> tuple[int, ...]:
        """The tokens that the model continues."""
        return self.interface.request(plan.shots, plan.topic)

    def parse(self, text: str, plan: RequestPlan) -> Example | Rejected:
        """The input that was written."""
        return self.interface.parse(text, plan.shots)


def writer(interface: Interface, anchors: Sequence[Example], settings: ProbeSettings) -> Writer:
    """The writer of these settings: from anchors, or from nothing where they name an ability."""
    if settings.ability is None:
        return FromAnchors(interface=interface, anchors=anchors, settings=settings)
    return SelfWritten.of(interface, settings)
