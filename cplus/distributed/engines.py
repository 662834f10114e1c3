"""Parameters in shards: those of FSDP2, and the flat partitions of DeepSpeed ZeRO 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from cplus.core.engine import Engine, Passes, others, shape_of


class Sharded(Engine):
    """Each process holds a part of every parameter; what FSDP2 and ZeRO have in common."""

    sharded = True

    def check(self, params: Sequence[nn.Parameter], *, whole: bool, refresh_every: int | None) -> None:
        """Refuse anything but shards of FSDP2 over all processes."""
        super().check(params, whole=whole, refresh_every=refresh_every)
        names = self.names()
        plain = [p for p in params if not hasattr(p, "device_mesh")]
        if plain:
            raise TypeError(
                f"{names.get(id(plain[0]), 'a parameter')!r} is a plain tensor beside {len(params) - len(plain)} "
                "sharded ones; add adapters first, then call fully_shard on every trained module"
            )
        for p in params:
            self._check_placement(p, names.get(id(p), "a parameter"))
        if not any(kind.__name__ == "FSDPModule" for module in self.model.modules() for kind in type(module).__mro__):
            raise TypeError("the parameters are sharded, but not by FSDP2; shard them with fully_shard instead")
        self._check_whole(whole)

    def _check_placement(self, p: nn.Parameter, name: str) -> None:
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        shards = [x for x in placements if not x.is_replicate()]
        if len(shards) > 1 or any(x.is_partial() for x in shards):
            raise TypeError(
                f"{name!r} is placed as {tuple(map(str, placements))}: tensor parallelism is not supported; train "
                "with FSDP2 (fully_shard) alone"
            )
        if mesh.size() != self.world:
            raise TypeError(
                f"{name!r} is sharded over {mesh.size()} of {self.world} processes; the gate needs one mesh over all "
                "of them"
            )

    @staticmethod
    def _check_whole(whole: bool) -> None:
        if whole:
            raise TypeError("this method needs whole vectors and the parameters are sharded; use DDP or one process")

    def versions(self, params: Sequence[nn.Parameter]) -> list[int]:
        """None: sharding writes parameters itself, before each pass."""
        return []

    def rows_here(self, rows: Tensor, p: nn.Parameter) -> Tensor:
        """The part that belongs to the rows of this process's shard."""
        assert isinstance(p, DTensor)
        placements = [place if place.is_shard(0) else Replicate() for place in p.placements]
        spread = distribute_tensor(rows.to(p.device), p.device_mesh, placements, src_data_rank=None)  # all have it
        return spread.to_local().view(-1, *[1] * (p.ndim - 1))

    @property
    def averaging(self) -> int:
        """Gradients are averaged over the processes."""
        return self.world

    def total(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """They have been summed."""
        return list(gradients)


# DeepSpeed ZeRO wraps a torch optimizer over this process's flat float32 partitions and steps it once for each of them,
# before the weights are gathered; hooks on that optimizer gate one partition at a time. DeepSpeed is never imported.


OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
OFFLOADS = ("cpu_offload", "offload_optimizer", "offload_param")
LIMITS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda e: type(e.optimizer).__name__ not in OPTIMIZERS,
        "its optimizer is not that of ZeRO 1, 2 or 3; set zero_optimization.stage, without ZenFlow, SuperOffload, MiCS "
        "or, at stage 1, float32 accumulation of bfloat16 gradients",
    ),
    (lambda e: e.fp16_enabled(), "float16 scales the loss and skips steps; use bf16"),
    (
        lambda e: getattr(e.optimizer, "torch_autocast_gradscaler", None) is not None,
        "a gradient scaler skips partitions one by one; use torch_autocast with bfloat16",
    ),
    (
        lambda e: any(getattr(e.optimizer, name, False) for name in OFFLOADS),
        "offloading is not supported; keep optimizer and parameters on the device",
    ),
    (
        lambda e: dist.get_world_size(e.optimizer.dp_process_group) != dist.get_world_size() or e.has_moe_layers,
        "experts, tensor and sequence parallelism divide the processes; use data parallelism alone",
    ),
    (
        lambda e: any(group.get("use_muon") for group in e.optimizer.optimizer.param_groups),
        "Muon replaces the gradient before the step; use AdamW",
    ),
    (
        lambda e: not getattr(e, "managed_gradient_accumulation", lambda: True)(),
        "evidence needs DeepSpeed to manage the accumulation; remove managed_gradient_accumulation",
    ),
)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of a parameter's coordinates from `start`, at `offset` in one of this process's partitions."""

    name: str
    start: int
    partition: int
    offset: int
    size: int


class Zero(Sharded):
    """The partitions that a DeepSpeed engine steps, one after another."""

    AFTER_A_BAD_GRADIENT = "resume from a checkpoint"
    one_by_one = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        deepspeed: Any = model
        for applies, reason in LIMITS:
            if applies(deepspeed):
                raise TypeError(f"this DeepSpeed engine cannot be protected: {reason}")
        zero: Any = deepspeed.optimizer
        self.deepspeed, self.zero = deepspeed, zero
        self.third = type(self.zero).__name__ == OPTIMIZERS[1]
        """Whether this is ZeRO 3, which shards the parameters, too."""
        flat = zero.fp32_partitioned_groups_flat if self.third else zero.single_partition_of_fp32_groups
        self.partitions: list[nn.Parameter] = list(flat)
        """This process's flat float32 partitions, in the order of their steps."""
        self.fragments = self._fragments()
        self.padding = sum(p.numel() for p in self.partitions) - sum(f.size for f in self.fragments)
        self._groups: list[dict[str, Any]] = zero.optimizer.param_groups
        self._clear_padding()

    @property
    def module(self) -> nn.Module:
        """The module inside the engine."""
        module: nn.Module = self.deepspeed.module
        return module

    def names(self) -> dict[int, str]:
        """The parameters' names, and those of the partitions."""
        return {**super().names(), **{id(p): f"ZeRO partition {i}" for i, p in enumerate(self.partitions)}}

    def params(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The partitions."""
        self._follow(optimizer)
        if optimizer is not self.zero.optimizer:
            raise TypeError("this optimizer is not the engine's; pass the one that deepspeed.initialize returned")
        return self.partitions

    def trained(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The model's own trained parameters, which the partitions hold."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def check(self, params: Sequence[nn.Parameter], *, whole: bool, refresh_every: int | None) -> None:
        """Refuse methods that need whole tensors, and refreshes inside a step."""
        Engine.check(self, params, whole=whole, refresh_every=refresh_every)
        self._check_whole(whole)
        if refresh_every is not None:
            raise ValueError("inside its step ZeRO cannot compute evidence; call guard.refresh() between two updates")

    def stepping(self, params: Sequence[nn.Parameter]) -> range:
        """The partition that the optimizer steps now."""
        now = [p for group in self.zero.optimizer.param_groups for p in group["params"]]
        found = [i for i, p in enumerate(self.partitions) if len(now) == 1 and p is now[0]]
        if not found:
            raise RuntimeError("the optimizer inside the engine was stepped by itself; call engine.step() instead")
        return range(found[0], found[0] + 1)

    def idle(self, optimizer: Optimizer) -> bool:
        """Whether the learning rate is 0 in every group."""
        self._follow(optimizer)
        return all(group.get("lr") == 0 for group in self._groups)

    def _follow(self, optimizer: Optimizer) -> None:
        """Note the groups, which loading a checkpoint may replace; in a step ZeRO 1 and 2 list only the current one."""
        now = optimizer.param_groups
        if len(now) >= len(self._groups) or not any(group is now[0] for group in self._groups):
            self._groups = now

    def held_still(self, training: Mapping[str, Sequence[int]], params: Sequence[nn.Parameter]) -> dict[int, Tensor]:
        """The coordinates of each partition that do not train; it may hold a part of a row."""
        found: dict[int, Tensor] = {}
        known = dict(self.module.named_parameters())
        for f in self.fragments:
            if f.name in training:
                p = params[f.partition]
                still = found.setdefault(f.partition, torch.zeros(p.shape, dtype=torch.bool, device=p.device))
                width = shape_of(known[f.name])[1:].numel()
                whole = others(training[f.name], known[f.name]).repeat_interleave(width)
                still[f.offset : f.offset + f.size] = whole[f.start : f.start + f.size].to(p.device)
        return found

    @contextmanager
    def passes(self, params: Sequence[nn.Parameter]) -> Iterator[Passes]:
        """Passes between two updates; training gradients that wait in the engine would be mixed with the evidence."""
        zero, passes = self.zero, ZeroPasses(self)
        waiting = zero._epilogue_ran_this_backward if self.third else zero.micro_step_id >= 0
        if waiting or zero.micro_step_id > 0:
            raise RuntimeError(
                "the engine holds gradients of an unfinished accumulation; call guard.refresh() after the "
                "engine.step() of the last micro-batch and before the next backward pass"
            )
        boundary = self.deepspeed._is_gradient_accumulation_boundary
        hooks = [p.register_hook(passes.note(p)) for p in passes.trained]  # type: ignore[no-untyped-call]
        passes.discard()
        try:
            yield passes
        finally:
            for hook in hooks:
                hook.remove()
            passes.discard()
            self.deepspeed._is_gradient_accumulation_boundary = boundary
            zero.set_gradient_accumulation_boundary(self.deepspeed.is_gradient_accumulation_boundary())

    @torch.no_grad()
    def sums_of_weights(self, params: Sequence[nn.Parameter]) -> dict[str, float]:
        """The sum of each partition, without padding, over all processes."""
        found = [0.0] * len(params)
        for f in self.fragments:
            found[f.partition] += float(params[f.partition].narrow(0, f.offset, f.size).sum(dtype=torch.float64))
        names = self.names()
        return dict(zip((names[id(p)] for p in params), self.sums(found, params[0].device), strict=True))

    def _fragments(self) -> list[Fragment]:
        """Which coordinates of which parameters this process's partitions hold."""
        found = []
        p: Any
        for name, p in self.module.named_parameters():
            if hasattr(p, "ds_tensor") and p.requires_grad:
                partition, offset, held = self.zero.grad_position[self.zero.get_param_id(p)]
                start = held * dist.get_rank(self.zero.dp_process_group)
                if (size := min(held, p.ds_numel - start)) > 0:
                    found.append(Fragment(name, start, partition, offset, size))
            elif (held := getattr(p, "_hp_mapping", None)) is not None:
                here, there = held.lp_fragment_address, held.hp_fragment_address
                found.append(Fragment(name, here.start, held.param_group_index, there.start, there.numel))
        return found

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Set padding to zero: ZeRO 3 leaves whatever the memory held, which may be NaN."""
        for i, p in enumerate(self.partitions):
            end = 0
            for f in sorted((f for f in self.fragments if f.partition == i), key=lambda f: f.offset):
                p[end : f.offset].zero_()
                end = f.offset + f.size
            p[end:].zero_()


class ZeroPasses(Passes):
    """Backward passes through an engine, whose averaged gradients are taken out instead of being stepped."""

    def __init__(self, engine: Zero) -> None:
        super().__init__(engine.trained(()))
        self.engine = engine

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Add a loss's gradient; the last pass ends what the next `take` returns."""
        self.engine.deepspeed.set_gradient_accumulation_boundary(last)
        self.engine.deepspeed.backward(loss, scale_wrt_gas=False)

    def take(self) -> list[Tensor | None]:
        """The gradients since the last call, averaged over the processes, in the layout of the partitions.

        ZeRO's own step puts them there; the torch optimizer's step is replaced for this call, and clipping is off.
        """
        zero = self.engine.zero
        inner, found = zero.optimizer, {}

        def note(*_: object, **__: object) -> None:
            for p in (p for group in inner.param_groups for p in group["params"]):
                found[id(p)] = p.grad.detach().clone()

        kept = {name: getattr(zero, name, None) for name in ("clip_grad", "overflow", "_global_grad_norm")}
        linked, step = getattr(zero, "_hp_optimizer_states_linked", None), vars(inner).get("step")
        zero.clip_grad, inner.step = 0.0, note
        if linked is not None:
            zero._hp_optimizer_states_linked = True  # there is no optimizer state before the first step
        try:
            zero.step()
        finally:
            del inner.step
            if step is not None:
                inner.step = step
            for name, value in kept.items():
                setattr(zero, name, value)
            if linked is not None:
                zero._hp_optimizer_states_linked = linked
        self.discard()
        if not found:
            raise FloatingPointError("the evidence is not finite; check the anchors and the precision")
        return [found[id(p)] for p in self.engine.partitions]

    def unreached(self) -> list[nn.Parameter]:
        """The trained parameters that got no gradient so far."""
        return [p for p in self.trained if id(p) not in self.reached]

    def note(self, p: nn.Parameter) -> Callable[[Tensor], None]:
        """A hook that notes that a parameter got a gradient."""
        return lambda _: self.reached.add(id(p))

    def discard(self) -> None:
        """Empty the engine's gradient buffers; ZeRO 3 would reuse the old gradient of a parameter without a new one."""
        zero = self.engine.zero
        zero.zero_grad(set_to_none=True)
        if self.engine.third:
            zero.grad_partitions_flat_buffer.zero_()
            return
        for held in (zero.averaged_gradients, zero.all_grad_tensors):
            held.update(dict.fromkeys(held))
        zero.micro_step_id = -1
