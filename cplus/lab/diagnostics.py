"""What the gate did and how good its evidence was, measured without changing the training.

`RunSpec.diagnose` takes the names of `OBSERVED`; `RunResult.diagnostics` then has one entry per name:

- `admission`: the share of coordinates and of update energy that the gate admits, by epoch and by layer, for the binary
  mask and for the smoothed coefficient;
- `reference`: the harmful mass admitted and the safe mass removed, judged by the gradient of all past rows, and the
  update-weighted agreement of the mask with the method's own full-data mask and with CPL's, by epoch and by layer;
- `geometry`: the binary mask on the update proposed for a fixed set of new rows, at seven points of the run;
- `coordinates`: evidence, proposal and coefficient of 512 coordinates of one tensor, at a few steps;
- `audit`: the agreement between the masks of anchors, probes, their blend and all past rows, by layer and by number of
  anchors, with the weights frozen and the optimizer's moments advancing.

`docs/method.md` shows the shape of each entry.
"""

from __future__ import annotations

import copy
import math
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.core.algorithm import blend, coefficient, collaborates, smooth
from cplus.core.engine import trainable
from cplus.core.evidence import Evidence, MeanGradient, Source, borrowed_gradients
from cplus.core.gates import Proposal
from cplus.core.guard import Guard
from cplus.core.kernels import Signs, sign_of
from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded
from cplus.methods.objectives import mean_backward
from cplus.methods.table import METHODS, Material
from cplus.methods.variants import free_bytes
from cplus.training.gateshares import layer_of
from cplus.training.loop import EpochEnded, Event, Prepared, Refreshed, Schedule

# An optimizer's proposals, computed one tensor at a time without taking the step.


def propose(optimizer: Optimizer, p: nn.Parameter, *, advance: bool = False) -> Tensor:
    """The value the optimizer would give one parameter, which is not changed; `advance` updates its optimizer state.

    A copy of the optimizer, without its hooks, steps a copy of this parameter alone.
    """
    if p.grad is None:
        return p.detach()
    copied = nn.Parameter(p.detach().clone())
    copied.grad = p.grad
    state = optimizer.state.get(p, {})
    [group] = [group for group in optimizer.param_groups if any(q is p for q in group["params"])]
    twin = type(optimizer).__new__(type(optimizer))
    twin.__setstate__(
        {
            "defaults": dict(optimizer.defaults),
            "param_groups": [{**group, "params": [copied]}],
            "state": defaultdict(dict, {copied: state if advance else copy.deepcopy(state)} if state else {}),
        }
    )
    twin.step()
    if advance:
        optimizer.state[p] = twin.state[copied]
    return copied.detach()


def proposals(
    model: nn.Module, optimizer: Optimizer, rows: Sequence[Encoded], *, advance: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter's value and the value after one step on these rows, in the optimizer's order.

    The model's gradients and mode are restored after the last pair.
    """
    params = trainable(optimizer)
    with borrowed_gradients(model, params):
        mean_backward(model, rows, answer_losses)
        for p in params:
            proposed = propose(optimizer, p, advance=advance)
            p.grad = None
            yield p.detach(), proposed


# Tensors stored where there is room, so that an observer needs little of the memory that training uses.


class Shelf(dict[str, Tensor]):
    """Tensors by name, in files of the system's temporary folder (TMPDIR) that are mapped into memory.

    With a GPU the tensors stay there, if `need` bytes are at most a quarter of its free memory: what is read at every
    step would otherwise pass over the disk and the bus each time.
    """

    def __init__(self, need: int, device: torch.device) -> None:
        super().__init__()
        self.device = device if device.type != "cpu" and need <= free_bytes(device) // 4 else None
        where = tempfile.gettempdir()
        if self.device is None and need > (free := shutil.disk_usage(where).free):
            raise ValueError(
                f"this diagnostic needs {need / 1e9:.1f} GB of scratch, but {where} has {free / 1e9:.1f} GB free; set "
                "TMPDIR to a folder on a larger disk"
            )

    def put(self, key: str, tensor: Tensor) -> None:
        """Store a tensor, over any with the same key."""
        if key not in self and self.device is not None:
            self[key] = torch.empty_like(tensor, device=self.device)
        elif key not in self:
            with tempfile.NamedTemporaryFile(prefix="cplus-") as file:  # its space is given back with the mapping
                mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
                self[key] = mapped.view(tensor.shape)
        self[key].copy_(tensor.detach())


# What is measured, as sums over one tensor's coordinates, to be added over tensors, layers, steps and epochs.


Sums: TypeAlias = dict[str, float]
BLOCK = 1 << 20  # coordinates processed at a time, so that double precision needs only a few megabytes


def added(tensors: Sequence[Tensor], quantities: Callable[..., dict[str, Tensor]]) -> Sums:
    """The sums of quantities over corresponding parts of tensors of equal shape, flat and in double precision."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    found: list[dict[str, Tensor]] = []
    for start in range(0, flat[0].numel(), BLOCK):
        parts = quantities(*(part[start : start + BLOCK].double() for part in flat))
        found.append({name: value.sum() for name, value in parts.items()})
    return {name: float(torch.stack([part[name] for part in found]).sum()) for name in found[0]}


def admission(theta: Tensor, proposed: Tensor, g_hat: Tensor, c: Tensor) -> Sums:
    """How much of a proposal the binary mask and the coefficient admit, in coordinates and in energy (squared size).

    Paper: App. E.7.    sum m,    sum m delta^2,    sum c,    sum (c delta)^2
    """

    def quantities(t: Tensor, p: Tensor, g: Tensor, k: Tensor) -> dict[str, Tensor]:
        delta = p - t
        mask, energy = collaborates(g, delta).double(), delta.square()
        admitted = {"mask": mask, "mask_energy": mask * energy, "energy": energy}
        return {**admitted, "coefficient": k, "coefficient_energy": (k * delta).square()}

    return {"coordinates": float(theta.numel()), **added((theta, proposed, g_hat, c), quantities)}


def masses(theta: Tensor, proposed: Tensor, g_hat: Tensor, c: Tensor, past: Tensor, own: Tensor) -> Sums:
    """Harmful mass admitted and safe mass removed, judged by the gradient of all past rows; and the energy on which the
    mask differs from the masks of two references.

    Paper: App. B; App. E.11.    z = g_past * delta;    sum m [z]+,    sum (1 - m) [-z]+,    and the same with c for m;
    sum delta^2 |m - m_reference|
    """

    def quantities(t: Tensor, p: Tensor, g: Tensor, k: Tensor, cpl: Tensor, own: Tensor) -> dict[str, Tensor]:
        delta = p - t
        mask, z, energy = collaborates(g, delta).double(), cpl * delta, delta.square()
        harm, safe = z.clamp(min=0.0), (-z).clamp(min=0.0)
        found = {"harmful": harm, "safe": safe, "energy": energy}
        for kind, kept in (("mask", mask), ("coefficient", k)):
            found |= {f"{kind}_harmful": kept * harm, f"{kind}_removed": (1.0 - kept) * safe}
        for name, reference in (("own", own), ("cpl", cpl)):
            found[f"apart_{name}"] = energy * (mask - collaborates(reference, delta)).abs()
        return found

    return added((theta, proposed, g_hat, c, past, own), quantities)


class LayerSums:
    """Sums by epoch and layer; `epoch` is the current one."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = layers
        self.epoch = 1
        self._rows: dict[tuple[int, str], Sums] = {}

    def add(self, position: int, sums: Sums) -> None:
        """Add the sums of one parameter at one step."""
        _add(self._rows.setdefault((self.epoch, self.layers[position]), {}), sums)

    def by(self, part: Literal["epoch", "layer"]) -> dict[Any, Sums]:
        """The sums of each epoch over all layers, or of each layer over all epochs."""
        found: dict[Any, Sums] = {}
        for key, row in self._rows.items():
            _add(found.setdefault(key[part == "layer"], {}), row)
        return found

    def figures(self, of: Callable[[Sums], Mapping[str, Any]]) -> dict[str, Any]:
        """The figures of the sums of each epoch and of each layer."""
        return {
            f"{part}s": [{part: name, **of(sums)} for name, sums in self.by(part).items()]
            for part in ("epoch", "layer")
        }


def _add(total: Sums, sums: Sums) -> None:
    for name, value in sums.items():
        total[name] = total.get(name, 0.0) + value


def share(part: float, whole: float) -> float | None:
    """A share, or None if the whole is 0.

    >>> share(1.0, 4.0), share(0.0, 0.0)
    (0.25, None)
    """
    return part / whole if whole else None


def agrees(apart: float, energy: float) -> float | None:
    """Agreement from the energy on which two masks differ; None if nothing was proposed.

    >>> agrees(1.0, 4.0)
    0.75
    """
    return 1.0 - apart / energy if energy else None


_DOWN = re.compile(r"\b(down_proj|c_proj|fc2|dense_4h_to_h)\b")


def middle_down_projection(names: Sequence[str]) -> int:
    """The index of the middle layer's MLP down-projection, or of the middle parameter if there is none.

    >>> middle_down_projection([f"layers.{i}.mlp.down_proj.weight" for i in range(5)])
    2
    """
    found = [i for i, name in enumerate(names) if _DOWN.search(name) and "attn" not in name and "weight" in name]
    return found[len(found) // 2] if found else len(names) // 2


# Taps: observers of a guard, which read what it is about to apply and add it to sums.


NUM_COORDINATES = 512
NUM_STATES = 7
NUM_PREVIEWED = 32


class Admission(LayerSums):
    """What the gate admits at every step.

    Paper: App. E.7, but over all steps instead of seven states, and also after the smoothing.
    """

    def __call__(self, position: int, proposal: Proposal, c: Tensor) -> None:
        """Add one step of one tensor."""
        self.add(position, admission(proposal.theta, proposal.proposed, proposal.sign, c))

    def report(self) -> dict[str, Any]:
        """Shares by epoch and by layer."""
        return self.figures(lambda sums: {kind: admitted(sums, kind) for kind in ("mask", "coefficient")})


def admitted(sums: Sums, kind: str) -> dict[str, float | None]:
    """The shares of coordinates and of update energy that the mask or the coefficient admitted."""
    return {
        "coordinates": share(sums[kind], sums["coordinates"]),
        "energy": share(sums[f"{kind}_energy"], sums["energy"]),
    }


class References(LayerSums):
    """Compares the gate with full-data references: CPL's, which is the gradient of all past rows, and the method's own.

    Paper: App. B; App. E.8; App. E.11. CPL's gradient is stored on the device where it has room, else on disk; of the
    own reference only the signs are.
    """

    def __init__(self, guard: Guard, layers: Sequence[str], *, cpl: Evidence, own: Evidence) -> None:
        super().__init__(layers)
        self.guard, self.cpl, self.own = guard, cpl, own
        self.shelf = Shelf(5 * sum(p.numel() for p in guard.params), guard.params[0].device)

    def refresh(self) -> None:
        """Compute both references at the current parameters, as the guard's next refresh would."""
        for i, g in enumerate(self.cpl(self.guard.params, self.guard.refreshes).vectors[0]):
            self.shelf.put(f"cpl-{i}", g)
        for i, g in enumerate(self.own(self.guard.params, self.guard.refreshes).vectors[0]):
            self.shelf.put(f"own-{i}", g.sign().to(torch.int8))

    def __call__(self, position: int, proposal: Proposal, c: Tensor) -> None:
        """Add one step of one tensor."""
        past, own = (self.shelf[f"{name}-{position}"].to(c.device) for name in ("cpl", "own"))
        self.add(position, masses(proposal.theta, proposal.proposed, proposal.sign, c, past, own))

    def report(self) -> dict[str, Any]:
        """Masses, their shares of the proposals' totals, and the masks' agreement, by epoch and by layer."""

        def judged(sums: Sums) -> dict[str, Any]:
            kinds = {
                kind: {
                    "harmful_admitted": sums[f"{kind}_harmful"],
                    "harmful_admitted_share": share(sums[f"{kind}_harmful"], sums["harmful"]),
                    "safe_removed": sums[f"{kind}_removed"],
                    "safe_removed_share": share(sums[f"{kind}_removed"], sums["safe"]),
                }
                for kind in ("mask", "coefficient")
            }
            agreement = {name: agrees(sums[f"apart_{name}"], sums["energy"]) for name in ("own", "cpl")}
            return {"harmful": sums["harmful"], "safe": sums["safe"], **kinds, "agreement": agreement}

        return self.figures(judged)


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
        total: Sums = {}
        for i, (theta, proposed) in enumerate(proposals(self.guard.model, self.guard.optimizer, self.rows)):
            evidence = self.guard.gating.evidence_at(i)
            _add(total, admission(theta, proposed, evidence, torch.ones_like(theta)))
        self.found.append({"completed_epochs": completed, "mask": admitted(total, "mask")})

    def report(self) -> list[dict[str, Any]]:
        """One row per point."""
        return self.found


def spread(count: int, most: int) -> tuple[int, ...]:
    """At most `most` evenly spaced numbers from 0 to `count` - 1, including both ends.

    >>> spread(25, 7), spread(3, 7)
    ((0, 4, 8, 12, 16, 20, 24), (0, 1, 2))
    """
    return tuple(sorted({round(k * (count - 1) / max(1, most - 1)) for k in range(most)}))


# The observation of one run: which taps are active, when references are computed, and the results.


OBSERVED = ("admission", "reference", "geometry", "coordinates")
"""What is observed during a run; this needs a method with a gate."""
AUDITED = ("audit",)
"""What is measured before a run, for any method."""
NUM_SHOWN = 4


class Observation:
    """The taps of one run; `seconds` is their own time inside the updates, to be subtracted from the training's."""

    def __init__(
        self, names: Sequence[str], prepared: Prepared, *, full: Material, schedule: Schedule, seed: int
    ) -> None:
        self.taps: dict[str, Any] = {}
        self.seconds = 0.0
        self._epochs = schedule.epochs
        if not names:
            return
        guard, method = prepared.guard, prepared.method
        if guard is None or guard.gate is None:
            gated = [name for name, row in METHODS.items() if row.gate is not None]
            raise ValueError(
                f"method {method.name!r} has no gate, so {', '.join(names)} have nothing to observe; leave them "
                f"out, or choose one of {', '.join(gated)}"
            )
        if guard.engine.sharded:
            raise TypeError("diagnostics need whole parameters, but these are sharded; run in one process or with DDP")
        labels = [guard.names.get(id(p), "others") for p in guard.params]
        layers = [layer_of(label) for label in labels]
        if "admission" in names:
            self.taps["admission"] = Admission(layers)
        if "reference" in names:
            if not full.rows("anchors"):
                raise ValueError("the full-data reference needs past rows, got none")
            own = method.build_evidence(guard.model, full)
            assert own is not None  # a method with a gate
            cpl = METHODS["cpl"].reduction(model=guard.model, sources=METHODS["cpl"].sources(full))
            self.taps["reference"] = References(guard, layers, cpl=cpl, own=own)
        if "coordinates" in names:
            steps = schedule.epochs * math.ceil(len(full.new) / schedule.batch_size)
            chosen = [step + 1 for step in spread(steps, NUM_SHOWN)]
            at = middle_down_projection(labels)
            size = guard.params[at].numel()
            self.taps["coordinates"] = Coordinates(labels[at], at, size, steps=chosen, seed=seed)
        guard.observers += [self._timed(tap) for tap in self.taps.values()]
        if "geometry" in names:
            self.taps["geometry"] = Geometry(guard, full.new, epochs=schedule.epochs)
        self._begin(1)

    def __call__(self, event: Event) -> None:
        """Follow the run: compute references between epochs, preview after each refresh of the evidence."""
        if isinstance(event, Refreshed) and "geometry" in self.taps:
            self.taps["geometry"].measure(event.epoch - 1)
        if isinstance(event, EpochEnded) and event.epoch < self._epochs:
            self._begin(event.epoch + 1)

    def report(self) -> dict[str, Any]:
        """The results of every tap as plain JSON values."""
        return {name: tap.report() for name, tap in self.taps.items()}

    def _begin(self, epoch: int) -> None:
        for tap in self.taps.values():
            tap.epoch = epoch
        if "reference" in self.taps:
            self.taps["reference"].refresh()

    def _timed(self, tap: Callable[[int, Proposal, Tensor], None]) -> Callable[[int, Proposal, Tensor], None]:
        def observer(position: int, proposal: Proposal, c: Tensor) -> None:
            started = time.perf_counter()
            tap(position, proposal, c)
            self.seconds += time.perf_counter() - started

        return observer


# The mask audit: the agreement between the masks of few anchors, probes, their blend and all past rows.


BUDGETS = (4, 8, 16, 32, 64, 128)
"""The paper's numbers of anchors."""


@dataclass(frozen=True, kw_only=True)
class Evidences:
    """The rows whose masks are compared: `anchors` by their number; `num_anchors` is the number that the run uses."""

    anchors: Mapping[int, Sequence[Encoded]]
    num_anchors: int
    probes: Sequence[Encoded]
    past: Sequence[Encoded]
    anchor_weight: float = 0.5

    def __post_init__(self) -> None:
        if not self.probes:
            raise ValueError("the mask audit compares anchors, probes and past rows, but there are no probes")


Side: TypeAlias = tuple[str, bool]
"""A reference by the name its signs are stored under, and whether its mask is smoothed."""


def audit(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Sequence[Encoded]],
    given: Evidences,
    *,
    beta: float = 0.9,
) -> dict[str, Any]:
    """Replay the batches' proposals at the model's weights, which do not change, and compare the references' masks.

    Paper: App. E.8; App. E.11, a common sequence of proposed updates. The optimizer's moments advance, so use a new
    optimizer.    1 - sum_t delta^2 |m_t - m'_t| / sum_t delta^2
    """
    params, names = trainable(optimizer), {id(p): name for name, p in model.named_parameters()}
    labels = [names.get(id(p), "others") for p in params]
    shelf = Shelf(scratch_bytes(sum(p.numel() for p in params), len(given.anchors)), params[0].device)
    keep_signs(shelf, model, params, given)
    own = f"anchors_{given.num_anchors}", "probes", f"blend_{given.num_anchors}", "anchors_past", "blend_past"
    compared = dict(zip(("anchors", "probes", "blend", "past", "past blend"), own, strict=True))
    pairs: dict[str, tuple[Side, Side]] = {
        f"{a}/{b}": ((compared[a], False), (compared[b], False)) for a, b in combinations(compared, 2)
    }
    for count in given.anchors:
        pairs[f"cpl_{count}"] = (f"anchors_{count}", False), ("anchors_past", False)
        pairs[f"cplus_{count}"] = (f"blend_{count}", True), ("blend_past", True)
        pairs[f"cross_{count}"] = (f"blend_{count}", True), ("anchors_past", False)
    sides = {side for pair in pairs.values() for side in pair}
    layer_sums, at, viewed = LayerSums([layer_of(label) for label in labels]), middle_down_projection(labels), View()
    for t, rows in enumerate(batches, start=1):
        for i, (theta, proposed) in enumerate(proposals(model, optimizer, rows, advance=True)):
            for start in range(0, theta.numel(), BLOCK):
                old, new = (whole.reshape(-1)[start : start + BLOCK].double() for whole in (theta, proposed))
                delta = (new - old).to(shelf[f"plus-{i}"].device)
                energy, masks = delta.square(), masks_of(shelf, i, start, delta, sides, beta=beta, t=t)
                sums = {name: (energy * (masks[a] - masks[b]).abs()).sum() for name, (a, b) in pairs.items()}
                values = torch.stack([energy.sum(), *sums.values()]).tolist()
                layer_sums.add(i, dict(zip(("energy", *sums), values, strict=True)))
                if i == at:
                    blends = {name: energy * mask for (name, smoothed), mask in masks.items() if smoothed}
                    viewed.add(start, {"energy": energy, **blends})

    def agreements(sums: Sums) -> dict[str, list[float | None]]:
        """By number of anchors: CPL with full-data CPL, CPLUS with full-data CPLUS, CPLUS with full-data CPL."""
        return {
            kind: [agrees(sums[f"{kind}_{count}"], sums["energy"]) for count in sorted(given.anchors)]
            for kind in ("cpl", "cplus", "cross")
        }

    whole = layer_sums.by("epoch")[1]
    return {
        "updates": len(batches),
        "past": len(given.past),
        "probes": len(given.probes),
        "budgets": sorted(given.anchors),
        **agreements(whole),
        "references": [
            {"first": a, "second": b, "agreement": agrees(whole[f"{a}/{b}"], whole["energy"])}
            for a, b in combinations(compared, 2)
        ],
        "layers": [{"layer": layer, **agreements(sums)} for layer, sums in layer_sums.by("layer").items()],
        "coordinates": {"tensor": labels[at], **viewed.report([*sorted(given.anchors), "past"])},
    }


def keep_signs(shelf: Shelf, model: nn.Module, params: Sequence[nn.Parameter], given: Evidences) -> None:
    """Store the signs of each source's mean gradient at these weights, and of its blend with the probes'."""

    def gradient(rows: Sequence[Encoded]) -> list[Tensor]:
        source = Source(name="evidence", weight=1.0, rows=rows)
        return MeanGradient(model=model, sources=(source,))(params, 0).vectors[0]

    for i, g in enumerate(gradient(given.probes)):
        shelf.put(f"gradient-{i}", g)
        shelf.put(f"probes-{i}", Signs.of(g).packed)
    for name, rows in (*given.anchors.items(), ("past", given.past)):
        for i, g in enumerate(gradient(rows)):
            shelf.put(f"anchors_{name}-{i}", Signs.of(g).packed)
            blended = blend(g, shelf[f"gradient-{i}"].to(g.device), given.anchor_weight)
            shelf.put(f"blend_{name}-{i}", Signs.of(blended).packed)
    for i, p in enumerate(params):
        del shelf[f"gradient-{i}"]
        for sign in ("plus", "minus"):
            shelf.put(f"{sign}-{i}", torch.zeros(p.numel()))


def scratch_bytes(parameters: int, budgets: int) -> int:
    """Bytes of scratch of an audit over so many budgets: two averages, a gradient, two bits per reference's sign.

    >>> scratch_bytes(596_049_920, 6) < 10e9  # Qwen3-0.6B with the paper's budgets
    True
    """
    return 12 * parameters + (2 * (budgets + 1) + 1) * -(-parameters // 4)


def masks_of(
    shelf: Shelf, position: int, start: int, delta: Tensor, sides: Iterable[Side], *, beta: float, t: int
) -> dict[Side, Tensor]:
    """Each reference's mask on one step's part of a tensor; the moving averages on the shelf advance.

    With the weights frozen a reference is one fixed sign per coordinate, so all references share three masks: that of
    plus (1 where delta <= 0), of minus (1 where delta >= 0) and of zero (always 1), each binary or smoothed.
    """
    stop, either = start + delta.numel(), {}
    for name, sign in (("plus", 1.0), ("minus", -1.0)):
        mask, kept = collaborates(torch.tensor(sign, device=delta.device), delta).double(), shelf[f"{name}-{position}"]
        average = smooth(kept[start:stop].double(), mask, beta)
        kept[start:stop] = average
        either[sign, False], either[sign, True] = mask, coefficient(average, beta, t)
    found = {}
    for name, smoothed in sides:
        signs = sign_of(shelf[f"{name}-{position}"][start // 4 : -(-stop // 4)], delta.numel())
        minus = torch.where(signs < 0, either[-1.0, smoothed], 1.0)
        found[name, smoothed] = torch.where(signs > 0, either[1.0, smoothed], minus)
    return found


class View:
    """Sums over the steps at every coordinate of one tensor, block by block."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[str, Tensor]] = {}

    def add(self, start: int, sums: Mapping[str, Tensor]) -> None:
        """Add one step's part."""
        kept = self.blocks.setdefault(start, {})
        for name, values in sums.items():
            kept[name] = kept[name] + values if name in kept else values

    def report(self, references: Sequence[object]) -> dict[str, Any]:
        """The coordinates with the most update energy, and CPLUS's mean mask there, by number of anchors.

        Paper: App. E.11.    sum_t delta^2 c / sum_t delta^2, 1 where nothing was proposed
        """
        sums = {name: torch.cat([own[name].cpu() for own in self.blocks.values()]) for name in self.blocks[0]}
        energy = sums["energy"]
        at = energy.topk(min(NUM_COORDINATES, energy.numel())).indices.sort().values
        rows = {}
        for name in references:
            means = torch.where(energy[at] > 0, sums[f"blend_{name}"][at] / energy[at], 1.0)
            rows[str(name)] = " ".join(f"{value:.3g}" for value in means.tolist())
        return {"indices": " ".join(map(str, at.tolist())), "cplus": rows}
