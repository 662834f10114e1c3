"""What the gate supports, and the reason for everything it does not."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cplus.ranks import Layout
from cplus.zero import PASS_THE_ENGINE, inside, is_engine

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
            "masters, step them by cplus.masters.MasterAdamW, or pass allow_16bit=True"
        )
