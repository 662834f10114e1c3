"""What each method costs: rows through the model by formula, extra memory by measurement."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import AdamW

from cplus.core.rows import Encoded
from cplus.methods.table import METHODS, Material, Method, Past
from cplus.training.loop import prepare


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Extra bytes per parameter: as the method reports them, and as measured inside a step.

    Negative if a method holds less than plain fine-tuning.
    """

    method: str
    rows: str
    reported: float
    measured: float


def rows_formula(method: Method) -> str:
    """Rows per epoch with n new rows, A anchors and N probes, at 6 P L FLOPs each; one-time passes are not counted.

    >>> rows_formula(METHODS["cplus"]), rows_formula(METHODS["replay"])
    ('n + A + N per epoch', '2n per epoch')
    """
    sizes = {"probes": "N", "anchors": "A", "constant": "N", "balanced": "N", "synthetic": "n"}
    parts = ["n"]
    for kind in method.train_on[1:]:
        weight = "N" if "probes" in method.train_on else "n"
        parts.append(weight if kind == "anchors" else sizes[kind])
    seen = [
        sizes[kind] if method.parts == 1 or kind == "anchors" else f"N/{method.parts}" for _, kind in method.evidence
    ]
    if method.refresh == "epoch":
        parts += seen
    counts = ((parts.count(part), part) for part in dict.fromkeys(parts))
    text = " + ".join(part if count == 1 else f"{count}{part}" for count, part in counts) + " per epoch"
    if isinstance(method.refresh, int) and method.evidence:
        text += f", {' + '.join(seen)} every {'step' if method.refresh == 1 else f'{method.refresh} steps'}"
    passes = method.objective.anchor_passes
    text += f", A every step ({6 * passes:g} P L)" if passes else ""
    read = [{"new": "n", **sizes}[kind] for kind in method.objective.read_by_base]
    return text + (f", {' + '.join(read)} by the frozen model too (2 P L)" if read else "")


def live_bytes() -> int:
    """The storage of all live tensors, each counted once."""
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))
    # Meta tensors, which tracing leaves behind, have no storage.
    return stored_bytes(tensor for tensor in tensors if tensor.device.type != "meta")


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """The storage behind tensors, each counted once and in full even if a tensor uses only part of it."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def training_bytes(model: nn.Module) -> int:
    """All weights, plus the gradient and Adam's two moments of the trainable ones."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return stored_bytes([*model.parameters(), *model.buffers()]) + 3 * trained


def inside_a_step(method: Method, base: nn.Module, rows: Sequence[Encoded]) -> tuple[int, int]:
    """Bytes in use when the optimizer steps for the second time, and the bytes that the method reports by then."""
    past = Past(name="past", anchors=rows, probes=rows, synthetic=rows)
    model = method.trained(copy.deepcopy(base), 0)
    optimizer = AdamW(model.parameters(), lr=1e-5)
    prepared = prepare(method, optimizer, model, Material(new=rows, past=(past,)), seed=0)
    found: list[int] = []

    def measure(*_: object) -> None:
        held = [p.grad for p in model.parameters()]  # a gradient has a Python object to count only after an access
        found.append(live_bytes())
        del held

    for step in range(2):
        if step == 1:  # the first step creates the optimizer's and the gate's state
            optimizer.register_step_pre_hook(measure)
        if prepared.guard is not None and method.evidence:
            prepared.guard.refresh()
        optimizer.zero_grad(set_to_none=True)
        prepared.backward(rows)
        optimizer.step()
    guard = prepared.guard
    reported = 0 if guard is None else guard.nbytes + guard.step_nbytes
    if guard is not None:
        guard.detach()
    reported += training_bytes(model) - training_bytes(base)  # adapters instead of the model's own weights
    parameters = sum(p.numel() for p in base.parameters())
    return found[-1], reported + int(method.bytes_per_parameter * parameters)


def costs(base: nn.Module, rows: Sequence[Encoded]) -> list[Cost]:
    """Every method of the table, measured against SFT on the same rows."""
    parameters = sum(p.numel() for p in base.parameters())
    plain, _ = inside_a_step(METHODS["sft"], base, rows)
    table = []
    for method in METHODS.values():
        alive, reported = inside_a_step(method, base, rows)
        table.append(
            Cost(
                method=method.name,
                rows=rows_formula(method),
                reported=reported / parameters,
                measured=(alive - plain) / parameters,
            )
        )
    return table
