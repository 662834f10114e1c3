"""Taps: observers of a guard, which read what it is about to apply and add it to sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cplus.attach import Guard
from cplus.data.encoded import Encoded
from cplus.diagnostics.measures import apart, applied, masked, masses
from cplus.diagnostics.proposals import proposals
from cplus.diagnostics.scratch import Shelf
from cplus.diagnostics.sums import LayerSums, admitted, judged
from cplus.evidence import Evidence
from cplus.gates import Proposal

NUM_COORDINATES = 512
NUM_STATES = 7
NUM_PREVIEWED = 32


class Admission:
    """What the gate admits at every step.

    Paper: App. E.7, but over all steps instead of seven states, and also after the smoothing.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.sums = LayerSums(layers)

    def __call__(self, position: int, proposal: Proposal, c: Tensor) -> None:
        """Add one step of one tensor."""
        theta, proposed = proposal.theta, proposal.proposed
        self.sums.add(position, {**masked(theta, proposed, proposal.sign), **applied(theta, proposed, c)})

    def report(self) -> dict[str, Any]:
        """Shares by epoch and by layer."""
        return {
            "epochs": [{"epoch": epoch, **admitted(sums)} for epoch, sums in self.sums.epochs().items()],
            "layers": [{"layer": layer, **admitted(sums)} for layer, sums in self.sums.by_layer().items()],
        }


class References:
    """Compares the gate with full-data references: CPL's, which is the gradient of all past rows, and the method's own.

    Paper: App. B; App. E.8; App. E.11. The own reference is `weight` times CPL's plus the gradient of `others`.
    CPL's gradient is stored on the device where it has room, else on disk; of the own reference only the signs are.
    """

    def __init__(
        self, guard: Guard, layers: Sequence[str], *, cpl: Evidence, weight: float, others: Evidence | None
    ) -> None:
        self.guard, self.cpl, self.weight, self.others = guard, cpl, weight, others
        self.sums = LayerSums(layers)
        numbers = sum(p.numel() for p in guard.params)
        self.shelf = Shelf(5 * numbers, guard.params[0].device)

    def refresh(self) -> None:
        """Compute both references at the current parameters, as the guard's next refresh would."""
        for i, g in enumerate(self._gradient(self.cpl)):
            self.shelf.put(f"cpl-{i}", g)
            self.shelf.put(f"own-{i}", g.sign().to(torch.int8))
        if self.others is None:
            return
        for i, g in enumerate(self._gradient(self.others)):
            own = g + self.weight * self.shelf.get(f"cpl-{i}", g.device)
            self.shelf.put(f"own-{i}", own.sign().to(torch.int8))

    def _gradient(self, evidence: Evidence) -> list[Tensor]:
        return evidence(self.guard.params, self.guard.refreshes).vectors[0]

    def __call__(self, position: int, proposal: Proposal, c: Tensor) -> None:
        """Add one step of one tensor."""
        theta, proposed, sign, device = proposal.theta, proposal.proposed, proposal.sign, proposal.theta.device
        past = self.shelf.get(f"cpl-{position}", device)
        sums = masses(theta, proposed, sign, c, past) | {"apart_cpl": apart(theta, proposed, sign, past)}
        del past  # one reference in memory at a time
        sums["apart_own"] = apart(theta, proposed, sign, self.shelf.get(f"own-{position}", device))
        self.sums.add(position, sums | {"energy": masked(theta, proposed, sign)["energy"]})

    def report(self) -> dict[str, Any]:
        """Masses and agreements by epoch and by layer."""
        return {
            "epochs": [{"epoch": epoch, **judged(sums)} for epoch, sums in self.sums.epochs().items()],
            "layers": [{"layer": layer, **judged(sums)} for layer, sums in self.sums.by_layer().items()],
        }


class Coordinates:
    """A fixed sample of one tensor's coordinates: evidence, proposal and coefficient at chosen steps.

    Paper: App. E.8, the coordinate-level view.
    """

    def __init__(self, name: str, position: int, size: int, *, steps: Sequence[int], seed: int) -> None:
        self.name, self.position, self.steps = name, position, frozenset(steps)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        self.indices = order[:NUM_COORDINATES].sort().values
        self.seen = 0
        self.rows: list[dict[str, Any]] = []

    def __call__(self, position: int, proposal: Proposal, c: Tensor) -> None:
        """Record the sample if the step is one of the chosen ones."""
        if position != self.position:
            return
        self.seen += 1
        if self.seen not in self.steps:
            return
        at = self.indices.to(c.device)
        signs = proposal.sign.reshape(-1)[at].sign().tolist()
        delta = proposal.proposed.reshape(-1)[at] - proposal.theta.reshape(-1)[at]
        self.rows.append(
            {
                "step": self.seen,
                "evidence": "".join("0+-"[int(sign)] for sign in signs),
                "proposal": " ".join(f"{value:.2e}" for value in delta.tolist()),
                "coefficient": " ".join(f"{value:.3g}" for value in c.reshape(-1)[at].tolist()),
            }
        )

    def report(self) -> dict[str, Any]:
        """The sample as space-separated numbers; the evidence has one character per coordinate."""
        return {"tensor": self.name, "indices": " ".join(map(str, self.indices.tolist())), "steps": self.rows}


class Geometry:
    """The binary mask on the update proposed for the same new rows, at points spread over the run.

    Paper: App. E.7, the read-only audit.
    """

    def __init__(self, guard: Guard, rows: Sequence[Encoded], *, epochs: int) -> None:
        self.guard, self.rows = guard, rows[:NUM_PREVIEWED]
        self.states = spread(epochs, NUM_STATES)
        self.found: list[dict[str, Any]] = []

    def measure(self, completed: int) -> None:
        """Preview the update at the current parameters and evidence, if this point is one of the chosen ones."""
        if completed not in self.states or any(row["completed_epochs"] == completed for row in self.found):
            return
        layer_sums = LayerSums([""] * len(self.guard.params))
        for i, (theta, proposed) in enumerate(proposals(self.guard.model, self.guard.optimizer, self.rows)):
            layer_sums.add(i, masked(theta, proposed, self.guard.evidence_at(i)))
        self.found.append({"completed_epochs": completed, **admitted(layer_sums.epochs()[1])})

    def report(self) -> list[dict[str, Any]]:
        """One row per point."""
        return self.found


def spread(count: int, most: int) -> tuple[int, ...]:
    """At most `most` evenly spaced numbers from 0 to `count` - 1, including both ends.

    >>> spread(25, 7), spread(3, 7)
    ((0, 4, 8, 12, 16, 20, 24), (0, 1, 2))
    """
    return tuple(sorted({round(k * (count - 1) / max(1, most - 1)) for k in range(most)}))
