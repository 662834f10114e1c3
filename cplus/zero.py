"""DeepSpeed ZeRO 1, 2 and 3: the flat partitions that an engine steps, and which parameters they hold.

ZeRO wraps a torch optimizer over this process's flat float32 partitions and steps it once for each of them, before the
weights are gathered; hooks on that optimizer gate one partition at a time. DeepSpeed itself is never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

Item = TypeVar("Item")
OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
PASS_THE_ENGINE = (
    "DeepSpeed ZeRO steps flat partitions, which only its engine can map to the model; call cplus.protect(optimizer, "
    "engine, ...) with the engine that deepspeed.initialize returned, or preserve(trainer, ...) with a Trainer"
)
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


def is_engine(model: nn.Module) -> bool:
    """Whether this is a DeepSpeed engine, recognised by the name of its class."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def inside(model: nn.Module) -> nn.Module:
    """The module inside a DeepSpeed engine, or the model itself."""
    return model.module if is_engine(model) else model  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of a parameter's coordinates from `start`, at `offset` in one of this process's partitions."""

    name: str
    start: int
    partition: int
    offset: int
    size: int


class Lazily(Sequence[Item]):
    """Items that are built when they are read: ZeRO has a partition's gradient only while it steps that partition."""

    def __init__(self, size: int, build: Callable[[int], Item]) -> None:
        self.size, self.build = size, build

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return [self[i] for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return self.build(index % self.size)


class Zero:
    """The partitions that a DeepSpeed engine steps, one after another."""

    def __init__(self, engine: Any, optimizer: Optimizer) -> None:
        for applies, reason in LIMITS:
            if applies(engine):
                raise TypeError(f"this DeepSpeed engine cannot be protected: {reason}")
        if optimizer is not engine.optimizer.optimizer:
            raise TypeError("this optimizer is not the engine's; pass the one that deepspeed.initialize returned")
        self.engine, self.optimizer = engine, optimizer
        self.params = partitions(engine)
        self.fragments = fragments(engine)
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        for p in self.params:
            p.zero_partition = True  # type: ignore[attr-defined]
        self._clear_padding()

    @property
    def position(self) -> int:
        """The index of the partition that the optimizer steps now."""
        now = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = [i for i, p in enumerate(self.params) if len(now) == 1 and p is now[0]]
        if not found:
            raise RuntimeError("the optimizer inside the engine was stepped by itself; call engine.step() instead")
        return found[0]

    def follow(self) -> None:
        """Note the groups, which loading a checkpoint may replace; in a step ZeRO 1 and 2 list only the current one."""
        now = self.optimizer.param_groups
        if len(now) >= len(self.groups) or not any(group is now[0] for group in self.groups):
            self.groups = now

    @property
    def idle(self) -> bool:
        """Whether the learning rate is 0 in every group."""
        self.follow()
        return all(group.get("lr") == 0 for group in self.groups)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The model's own trained parameters, which the partitions hold."""
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    @property
    def padding(self) -> int:
        """The number of coordinates in this process's partitions that belong to no parameter."""
        return sum(p.numel() for p in self.params) - sum(f.size for f in self.fragments)

    @torch.no_grad()
    def sums(self) -> dict[str, float]:
        """The sum of this process's part of each partition, without padding, as a fingerprint."""
        found = dict.fromkeys((name_of(i) for i in range(len(self.params))), 0.0)
        for f in self.fragments:
            part = self.params[f.partition].narrow(0, f.offset, f.size)
            found[name_of(f.partition)] += float(part.sum(dtype=torch.float64))
        return found

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Set padding to zero: ZeRO 3 leaves whatever the memory held, which may be NaN."""
        for i, p in enumerate(self.params):
            end = 0
            for f in sorted((f for f in self.fragments if f.partition == i), key=lambda f: f.offset):
                p[end : f.offset].zero_()
                end = f.offset + f.size
            p[end:].zero_()


def is_third(zero: Any) -> bool:
    """Whether this is the optimizer of ZeRO 3, which shards the parameters, too."""
    return type(zero).__name__ == OPTIMIZERS[1]


def partitions(engine: Any) -> list[nn.Parameter]:
    """This process's flat float32 partitions, in the order of their steps."""
    zero = engine.optimizer
    return list(zero.fp32_partitioned_groups_flat if is_third(zero) else zero.single_partition_of_fp32_groups)


def name_of(position: int) -> str:
    """The name of a partition in messages and checkpoints."""
    return f"ZeRO partition {position}"


def fragments(engine: Any) -> list[Fragment]:
    """Which coordinates of which parameters this process's partitions hold."""
    zero, found = engine.optimizer, []
    for name, p in engine.module.named_parameters():
        if hasattr(p, "ds_tensor") and p.requires_grad:
            partition, offset, held = zero.grad_position[zero.get_param_id(p)]
            start = held * dist.get_rank(zero.dp_process_group)
            if (size := min(held, p.ds_numel - start)) > 0:
                found.append(Fragment(name, start, partition, offset, size))
        elif (held := getattr(p, "_hp_mapping", None)) is not None:
            here, there = held.lp_fragment_address, held.hp_fragment_address
            found.append(Fragment(name, here.start, held.param_group_index, there.start, there.numel))
    return found
