"""What this process holds of a parameter: its shard or ZeRO's flat partitions; what the gate supports, and why not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

# Data-parallel training: the part of a tensor this process holds, the rows it sees, and sums over processes.


Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This process's place among those that train one model; a single process is rank 0 of 1."""

    rank: int = 0
    world: int = 1
    sharded: bool = False

    def rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Every world-th row.

        >>> Layout(rank=1, world=2).rows("abcde")
        'bd'
        """
        return rows[self.rank :: self.world]

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


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, detached and sharing memory; all of a plain tensor."""
    detached = tensor.detach()
    # DTensor is detected by its method: importing the class would cost every run a second.
    return detached.to_local() if hasattr(detached, "to_local") else detached


def every_part(p: Tensor, world: int, least: int = 4) -> bool:
    """Whether each process's part of a tensor, split by its first dimension as FSDP2 does, has so many coordinates."""
    rows = -(-p.shape[0] // world) if p.ndim else 0
    last = p.shape[0] - (world - 1) * rows if rows else 0
    return last * (p.numel() // max(1, p.shape[0] if p.ndim else 1)) >= least


def local_rows(rows: Tensor, p: Tensor) -> Tensor:
    """The part of a vector with one entry for each row of `p` that belongs to the rows this process holds."""
    if not hasattr(p, "device_mesh"):
        return rows
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    assert isinstance(p, DTensor)
    placements = [place if place.is_shard(0) else Replicate() for place in p.placements]
    spread = distribute_tensor(rows.to(p.device), p.device_mesh, placements, src_data_rank=None)  # every process has it
    return spread.to_local()


def layout(params: Sequence[nn.Parameter], names: dict[int, str]) -> Layout:
    """How these parameters are distributed; anything but replicas and shards of FSDP2 or ZeRO is refused."""
    running = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    if any(hasattr(p, "zero_partition") for p in params):
        return Layout(rank=rank, world=world, sharded=True)
    spread = [p for p in params if hasattr(p, "device_mesh")]
    if not spread:
        return Layout(rank=rank, world=world)
    plain = [p for p in params if not hasattr(p, "device_mesh")]
    if plain:
        raise TypeError(
            f"{names.get(id(plain[0]), 'a parameter')!r} is a plain tensor beside {len(spread)} sharded ones; add "
            "adapters first, then call fully_shard on every trained module"
        )
    for p in spread:
        _check_placement(p, names.get(id(p), "a parameter"), world)
    return Layout(rank=rank, world=world, sharded=True)


def _check_placement(p: nn.Parameter, name: str, world: int) -> None:
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    shards = [x for x in placements if not x.is_replicate()]
    if len(shards) > 1 or any(x.is_partial() for x in shards):
        raise TypeError(
            f"{name!r} is placed as {tuple(map(str, placements))}: tensor parallelism is not supported; train with "
            "FSDP2 (fully_shard) alone"
        )
    if mesh.size() != world:
        raise TypeError(
            f"{name!r} is sharded over {mesh.size()} of {world} processes; the gate needs one mesh over all of them"
        )


# DeepSpeed ZeRO 1, 2 and 3: the flat partitions that an engine steps, and which parameters they hold.
#
# ZeRO wraps a torch optimizer over this process's flat float32 partitions and steps it once for each of them, before
# the weights are gathered; hooks on that optimizer gate one partition at a time. DeepSpeed itself is never imported.


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


# What the gate supports, and the reason for everything it does not.


IN_BACKWARD = "it updates inside the backward pass, before the gate could see a step; use AdamW"
REFUSED = {
    "schedulefree": "schedule-free optimizers keep a second iterate the gate cannot see; use AdamW with a schedule",
    "lomo": IN_BACKWARD,
    "LayerWiseDummyOptimizer": IN_BACKWARD,
    "OptimizerInBackward": IN_BACKWARD,
}


def unwrapped(optimizer: object, model: nn.Module) -> Optimizer:
    """The torch optimizer inside the wrappers of Accelerate and DeepSpeed; unsupported ones are refused by name."""
    layers = [optimizer]
    while len(layers) < 3 and (inner := getattr(layers[-1], "optimizer", None)) is not None:
        layers.append(inner)
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for layer in layers for kind in type(layer).__mro__]
    refused = REFUSED if is_engine(model) else {**REFUSED, "deepspeed": PASS_THE_ENGINE}
    for name, reason in refused.items():
        if any(name in kind for kind in kinds):
            raise TypeError(f"{type(optimizer).__name__} cannot be protected: {reason}")
    if not isinstance(layers[-1], Optimizer):
        raise TypeError(f"protect needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return layers[-1]


def trainable(optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's trainable parameters, each once, in the optimizer's order."""
    params = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return list({id(p): p for p in params}.values())


def bare(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel: the evidence does its own reduction."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def check_engine(model: nn.Module, where: Layout, *, whole: bool) -> None:
    """Refuse engines whose steps or shards the guard would misinterpret."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    model = inside(model)
    if "FullyShardedDataParallel" in kinds:
        raise TypeError("the model is wrapped by FSDP1; use FSDP2 (torch.distributed.fsdp.fully_shard) instead")
    check_adapters(model)
    if not where.sharded:
        return
    if not kinds & {"FSDPModule", "DeepSpeedEngine"}:
        raise TypeError("the parameters are sharded, but not by FSDP2; shard them with fully_shard instead")
    if whole:
        raise TypeError("this method needs whole vectors and the parameters are sharded; use DDP or one process")


def check_predicts_tokens(model: nn.Module) -> None:
    """Refuse rows of tokens as evidence for a model that does not predict each token from those before it."""
    model = inside(model)
    config, head = getattr(model, "config", None), getattr(model, "get_output_embeddings", None)
    if getattr(config, "is_encoder_decoder", False):
        raise TypeError(
            f"anchors and probes need a model that predicts the next token, and {type(model).__name__} is an encoder "
            "and a decoder; pass evidence=[(1.0, batches, lambda model, batch: model(**batch).loss)]"
        )
    if head is not None and head() is None:
        raise TypeError(
            f"anchors and probes need a model that predicts the next token, and {type(model).__name__} has no output "
            "embedding; pass evidence=[(1.0, batches, lambda model, batch: model(**batch).loss)]"
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
