"""How the parameters are held and stepped: whole in every process here; sharded engines are in `cplus.distributed`.

The guard and the evidence ask an `Engine` for everything that depends on it: which tensors the optimizer steps, how
backward passes are run, and what is summed over the processes. `engine_of` chooses it; neither DeepSpeed nor torch's
DTensor is imported for a model that does not use them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

Row = TypeVar("Row")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, detached and sharing memory; all of a plain tensor."""
    detached = tensor.detach()
    # DTensor is detected by its method: importing the class would cost every run a second.
    return detached.to_local() if hasattr(detached, "to_local") else detached


def in_model(p: nn.Parameter) -> nn.Parameter:
    """The model's parameter that a float32 master belongs to; any other parameter is its own."""
    found: nn.Parameter = getattr(p, "in_model", p)
    return found


class Passes:
    """Backward passes over the evidence, whose gradients torch accumulates in `.grad`."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.trained = [in_model(p) for p in params]
        self._masters = [in_model(p) is not p for p in params]
        self.reached: set[int] = set()

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Add a loss's gradient; the last pass is the one before `take`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def take(self) -> list[Tensor | None]:
        """Take out this process's part of the gradients since the last call, None where there is none."""
        gradients: list[Tensor | None] = []
        for p, master in zip(self.trained, self._masters, strict=True):
            gradient, p.grad = p.grad, None
            if gradient is None:
                gradients.append(None)
            else:
                self.reached.add(id(p))
                gradients.append(local(gradient).float() if master else local(gradient))
        return gradients

    def unreached(self) -> list[nn.Parameter]:
        """The parameters that got no gradient so far."""
        return [p for p in self.trained if p.grad is None and id(p) not in self.reached]


class Engine:
    """Whole parameters in this process, or equal copies of them in several; the base class of all engines.

    `sharded`: each process holds a part of every parameter, so that every pass is collective. `one_by_one`: a step
    changes one tensor after another, with hooks around each. `padding`: coordinates that belong to no parameter.
    """

    sharded = False
    one_by_one = False
    padding = 0
    AFTER_A_BAD_GRADIENT = "the parameters are unchanged"

    def __init__(self, model: nn.Module) -> None:
        running = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
        self.model = model
        self._bad_step: Tensor | None = None
        self.moving: Tensor | None = None
        """On an accelerator, whether all gradients were finite so far; from the first that was not, nothing moves."""

    @property
    def module(self) -> nn.Module:
        """The user's own module."""
        return self.model

    def names(self) -> dict[int, str]:
        """The name of each parameter by its identity."""
        return {id(p): name for name, p in self.module.named_parameters()}

    def params(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The tensors that the optimizer steps and the gate sees, each once, in the optimizer's order."""
        return trainable(optimizer)

    def trained(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The model's own parameters that these tensors hold."""
        return params

    def check(self, params: Sequence[nn.Parameter], *, whole: bool, refresh_every: int | None) -> None:
        """Refuse what this engine cannot gate; `whole`: the method compares coordinates with one another."""
        if refresh_every is not None and refresh_every < 1:
            raise ValueError(f"refresh_every must be at least 1, got {refresh_every}")
        if any(kind.__name__ == "FullyShardedDataParallel" for m in self.model.modules() for kind in type(m).__mro__):
            raise TypeError("the model is wrapped by FSDP1; use FSDP2 (torch.distributed.fsdp.fully_shard) instead")
        check_adapters(self.module)

    def stepping(self, params: Sequence[nn.Parameter]) -> range:
        """The positions of the parameters that the current call of the optimizer's step changes."""
        return range(len(params))

    def idle(self, optimizer: Optimizer) -> bool:
        """Whether the learning rate is 0: the first warm-up step, or a step that only creates optimizer state."""
        return all(group.get("lr") == 0 for group in optimizer.param_groups)

    def versions(self, params: Sequence[nn.Parameter]) -> list[int]:
        """The parameters' version counters, which any write but one through `.data` raises; [] if they say nothing."""
        return [p._version for p in params]

    def held_still(self, training: Mapping[str, Sequence[int]], params: Sequence[nn.Parameter]) -> dict[int, Tensor]:
        """Where the tensors do not train, by position, from the rows of parameters that do, by name."""
        known = dict(self.module.named_parameters())
        positions = {id(in_model(p)): i for i, p in enumerate(params)}
        return {
            positions[id(known[name])]: self.rows_here(others(rows, known[name]), known[name])
            for name, rows in training.items()
        }

    def rows_here(self, rows: Tensor, p: nn.Parameter) -> Tensor:
        """A vector with an entry for each row of a parameter, cut to the rows held here and shaped like the rows."""
        return rows.to(p.device).view(-1, *[1] * (p.ndim - 1))

    def sums_of_weights(self, params: Sequence[nn.Parameter]) -> dict[str, float]:
        """The sum of each parameter over all shards, by its name: a cheap fingerprint."""
        names = self.names()
        sums = [p.detach().sum(dtype=torch.float64) for p in params]
        whole = torch.stack([s.full_tensor() if hasattr(s, "full_tensor") else s for s in sums])
        return dict(zip((names[id(in_model(p))] for p in params), whole.tolist(), strict=True))

    @property
    def shards(self) -> int:
        """The number of parts that each parameter is in."""
        return self.world if self.sharded else 1

    @contextmanager
    def passes(self, params: Sequence[nn.Parameter]) -> Iterator[Passes]:
        """Run passes with empty gradients, then restore the user's gradients."""
        held = [in_model(p) for p in params]
        kept = [p.grad for p in held]
        for p in held:
            p.grad = None
        try:
            yield Passes(params)
        finally:
            for p, grad in zip(held, kept, strict=True):
                p.grad = grad

    def turns(self, batches: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], float, bool]]:
        """This process's batches, batch k being that of process k mod n: items, weight, whether it is the last one.

        Every process makes as many passes as the others; one without a batch left passes a row with weight 0.
        """
        for start in range(0, len(batches), self.world):
            own, last = start + self.rank, start + self.world >= len(batches)
            yield (batches[own], 1.0, last) if own < len(batches) else (batches[-1][-1:], 0.0, last)

    @property
    def averaging(self) -> int:
        """What a loss is multiplied by so that its gradients are summed: FSDP2 and ZeRO average over the processes."""
        return 1

    def rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Every world-th row: those of this process."""
        return rows[self.rank :: self.world]

    def total(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sum of the processes' gradients, in place; shards have been summed in the backward pass."""
        return [self.sum(gradient) for gradient in gradients]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place; every process must call it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def sums(self, values: Sequence[float], device: torch.device) -> list[float]:
        """Each number's sum over the processes; a NaN in one process gives NaN in all."""
        if self.world == 1:
            return list(values)
        return self.sum(torch.tensor(values, dtype=torch.float64, device=device)).tolist()

    def over_shards(self, value: float, device: torch.device) -> float:
        """A sum over this process's coordinates, as one over all coordinates."""
        return self.sums([value], device)[0] if self.sharded else value

    def check_gradients(
        self, optimizer: Optimizer, params: Sequence[nn.Parameter], names: Mapping[int, str], step: int
    ) -> None:
        """Refuse a gradient that is not finite; a gradient scaler checks them and skips the step itself.

        Reading the answer from an accelerator would make the host wait at every step: there it is noted, nothing gated
        moves from that step on, and `check_earlier_gradients` reads it where the host waits anyway.
        """
        gradients = [(p, local(p.grad)) for p in params if p.grad is not None]
        if not gradients or getattr(optimizer, "found_inf", None) is not None:
            return
        if not gradients[0][1].is_cpu:
            largest = torch.stack(torch._foreach_norm([g for _, g in gradients], math.inf)).max()
            infinite = (~largest.isfinite()).float()
            infinite = self.sum(infinite) if self.sharded else infinite  # a NaN in one process stops all of them
            now = torch.where(infinite > 0, step, math.inf)
            self._bad_step = now if self._bad_step is None else torch.minimum(self._bad_step, now)
            self.moving = self._bad_step.isinf()
            return
        # A sum reads memory once at full speed; if only the sum overflows, the exact check below finds no error.
        total = torch.stack([g.sum().float() for _, g in gradients]).sum()
        if math.isfinite(self.over_shards(float(total), total.device)):
            return  # a NaN in one process stops all of them, so that none waits forever
        bad = [p for p, g in gradients if not bool(torch.isfinite(g).all())]
        if self.over_shards(len(bad), total.device):
            name = names.get(id(bad[0]), "a parameter") if bad else "a parameter held by another process"
            raise FloatingPointError(
                f"the gradient of {name} is not finite at step {step}; {self.AFTER_A_BAD_GRADIENT}. "
                "Lower the learning rate, clip the gradient or check the batch"
            )

    def check_earlier_gradients(self, *, gated: bool) -> None:
        """Refuse to continue after a step on an accelerator whose gradient was not finite."""
        if self._bad_step is None:
            return
        step, device = float(self._bad_step), self._bad_step.device
        self._bad_step = self.moving = None
        if step < math.inf:
            held = "no parameter has moved since" if gated and not self.one_by_one else "parameters may have moved"
            raise FloatingPointError(
                f"the gradient was not finite at step {step:.0f}, which on {device.type} is read only now; {held}; "
                "resume from the last checkpoint. Lower the learning rate, clip the gradient or check the batch"
            )

    def check_alike(self, value: object, what: str, device: torch.device) -> None:
        """Refuse, in every process, a value that differs between processes."""
        if self.world == 1:
            return
        mark = float(zlib.crc32(repr(value).encode()) & 0xFFFFF)  # small enough for exact squares in float64
        total, squares = self.sums([mark, mark * mark], device)
        if squares * self.world != total * total:
            raise ValueError(
                f"the {self.world} processes hold different {what}; create them in one process and distribute them"
            )


def engine_of(model: nn.Module, params: Sequence[nn.Parameter]) -> Engine:
    """The engine that holds these parameters; another one is supported by a class like those in `distributed`."""
    if is_deepspeed(model):
        kind = "Zero"
    elif any(hasattr(p, "device_mesh") for p in params):
        kind = "Sharded"
    else:
        return Engine(model)
    engine: Engine = getattr(import_module("cplus.distributed.engines"), kind)(model)
    return engine


def shape_of(p: nn.Parameter) -> torch.Size:
    """A parameter's whole shape; ZeRO 3 leaves the parameter itself empty."""
    shape: torch.Size = getattr(p, "ds_shape", p.shape)
    return shape


def others(rows: Sequence[int], p: nn.Parameter) -> Tensor:
    """The rows of a parameter but these, as a mask."""
    mask = torch.ones(shape_of(p)[0], dtype=torch.bool)
    mask[list(rows)] = False
    return mask


def is_deepspeed(model: nn.Module) -> bool:
    """Whether this is a DeepSpeed engine, recognised by the name of its class."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def inside(model: nn.Module) -> nn.Module:
    """The module inside a DeepSpeed engine, or the model itself."""
    return model.module if is_deepspeed(model) else model  # type: ignore[return-value]


def bare(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel: the evidence does its own reduction."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def trainable(optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's trainable parameters, each once, in the optimizer's order."""
    params = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return list({id(p): p for p in params}.values())


# What the gate supports, and the reason for everything it does not.


IN_BACKWARD = "it updates inside the backward pass, before the gate could see a step; use AdamW"
REFUSED = {
    "schedulefree": "schedule-free optimizers keep a second iterate the gate cannot see; use AdamW with a schedule",
    "lomo": IN_BACKWARD,
    "LayerWiseDummyOptimizer": IN_BACKWARD,
    "OptimizerInBackward": IN_BACKWARD,
}
PASS_THE_ENGINE = (
    "DeepSpeed ZeRO steps flat partitions, which only its engine can map to the model; call cplus.protect(optimizer, "
    "engine, ...) with the engine that deepspeed.initialize returned, or preserve(trainer, ...) with a Trainer"
)


def unwrapped(optimizer: object, model: nn.Module) -> Optimizer:
    """The torch optimizer inside the wrappers of Accelerate and DeepSpeed; unsupported ones are refused by name."""
    layers = [optimizer]
    while len(layers) < 3 and (inner := getattr(layers[-1], "optimizer", None)) is not None:
        layers.append(inner)
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for layer in layers for kind in type(layer).__mro__]
    refused = REFUSED if is_deepspeed(model) else {**REFUSED, "deepspeed": PASS_THE_ENGINE}
    for name, reason in refused.items():
        if any(name in kind for kind in kinds):
            raise TypeError(f"{type(optimizer).__name__} cannot be protected: {reason}")
    if not isinstance(layers[-1], Optimizer):
        raise TypeError(f"protect needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return layers[-1]


def check_predicts_tokens(model: nn.Module) -> None:
    """Refuse rows of tokens as evidence for a model that does not predict each token from those before it."""
    model = inside(model)
    head, lacks = getattr(model, "get_output_embeddings", None), ""
    if head is not None and head() is None:
        lacks = "has no output embedding"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        lacks = "is an encoder and a decoder"
    if lacks:
        raise TypeError(
            f"anchors and probes need a model that predicts the next token, and {type(model).__name__} {lacks}; pass "
            "evidence=[(1.0, batches, lambda model, batch: model(**batch).loss)]"
        )


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters that the forward pass does not use, that shift positions, or whose base gives no gradients."""
    if any(getattr(module, "merged", False) is True for module in model.modules()):
        raise ValueError(
            "the adapters are merged into the base weights and would not be trained; call model.unmerge_adapter() "
            "first, or merge_and_unload() and train the plain model"
        )
    if any(getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", False) for p in model.parameters()):
        raise ValueError(
            "the 4-bit weights must give gradients, but an evaluation let bitsandbytes repack them for inference; load "
            "the model again and protect it before it is evaluated"
        )
    keep_gradients(model)
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise TypeError(f"{config.peft_type} learns a prompt, which the evidence does not cover; use LoRA")  # type: ignore[union-attr]


def keep_gradients(model: nn.Module) -> None:
    """Leave 4-bit weights as they are in evaluation.

    With AVX-512 BF16 bitsandbytes would repack them: gradients end, and outputs that 32 does not divide are an error.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_supported(p: nn.Parameter, name: str, *, allow_16bit: bool) -> None:
    """Refuse parameters that would give wrong numbers, and say what to use instead."""
    if type(p).__name__ == "FlatParameter":
        raise TypeError(f"{name!r} is a flat FSDP1 parameter; use FSDP2 (torch.distributed.fsdp.fully_shard)")
    if hasattr(p, "_in_backward_optimizers"):
        raise TypeError(f"{name!r} has its own optimizer, which cannot be protected: {IN_BACKWARD}")
    if p.is_sparse or p.is_complex():
        raise TypeError(f"{name!r} is {'sparse' if p.is_sparse else 'complex'}; the gate needs dense real parameters")
    if p.element_size() < 4 and not allow_16bit:
        raise TypeError(
            f"{name!r} is {str(p.dtype).removeprefix('torch.')}: steps below one ulp read back as zero; load float32 "
            "masters, step them by cplus.core.optim.MasterAdamW, or pass allow_16bit=True"
        )
