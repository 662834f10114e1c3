"""Peak bytes per parameter of Qwen3 by FakeTensorMode, beside `cplus adapt --plan`: `python benchmarks/memory.py`.

Traced are two updates with the largest pass: torch's fused AdamW, the gate's kernel and its copy of the parameters.
The plan adds up what is not held at one time and, on several devices, an evaluation by whole weights.
"""

import weakref
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from timing import finish, options
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from cplus.core import engine, evidence, guard, kernels
from cplus.jobs import memory, prepare
from cplus.jobs.settings import AdaptConfig

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
SHAPES = {"0.6B": (1024, 3072, 28, 16, True), "1.7B": (2048, 6144, 28, 16, True)}
SHAPES |= {"4B": (2560, 9728, 36, 32, True), "8B": (4096, 12288, 36, 32, False)}


class Live(TorchDispatchMode):
    """The most bytes of all tensors that were alive at one time."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, known = func(*args, **(kwargs or {})), vars(self).setdefault("known", weakref.WeakSet())
        known |= {engine.local(t).untyped_storage() for t in tree_leaves(found) if isinstance(t, torch.Tensor)}
        self.peak = max(self.peak, sum(held.nbytes() for held in known))
        return found


def ones(params: Any, refresh: int) -> evidence.Reference:
    """A gradient of the past."""
    return evidence.Reference(vectors=[[torch.ones_like(engine.local(p)) for p in params]])


def traced(model: Any, gate: Any, devices: int) -> int:
    """The most bytes that two updates of a model on the meta device hold on one of the devices."""
    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    mesh = init_device_mesh("cpu", (devices,))
    stand_in: dict[str, Any] = {"gate": lambda *_: None, "copies": lambda own: [t.clone() for t in own]}
    kernel = patch.multiple(kernels, WORTH_COMPILING=0, can_compile=bool, fits=torch.is_tensor, **stand_in)
    with kernel, patch.object(engine.Engine, "check_gradients", lambda *_: None), FakeTensorMode(), Live() as live:
        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
        for module in [*model.modules()][::-1] if devices > 1 else []:
            if module is model or type(module).__name__ == "Qwen3DecoderLayer":
                fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        guard.Guard(optimizer, model, evidence=ones, gate=gate, refresh_every=2)
        live.peak, ids = 0, torch.zeros(8, 256, dtype=torch.long)
        for _ in range(2):
            logits = model(input_ids=ids, logits_to_keep=64, use_cache=False).logits.flatten(0, 1)
            torch.nn.functional.cross_entropy(logits.float(), ids[:, :64].flatten()).backward()
            del logits
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    return live.peak


def measured(shape: tuple[int, ...], devices: int, vocabulary: int = 151936, **changes: Any) -> dict[str, float]:
    """Bytes per parameter, as traced and as planned."""
    sizes: Any = dict(zip(NAMES, shape, strict=True), num_key_value_heads=8, head_dim=128, vocab_size=vocabulary)
    config, job = Qwen3Config(**sizes), AdaptConfig(model="qwen3", new="new.jsonl", device="cpu", **changes)
    row = prepare.row_of(job)
    with patch.object(memory.AutoConfig, "from_pretrained", lambda *_, **__: config), torch.device("meta"):
        size = memory.model_size(job, row, "here")
        model = memory.adapted(job, row, AutoModelForCausalLM.from_config(config))
    plan = memory.job_bytes(job, row, size, 8, copies=True).over(devices) / size.parameters
    return {"traced": traced(model, row.build_gate(0), devices) / size.parameters, "planned": plan}


if __name__ == "__main__":
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        found[f"{name}, all weights"] = {str(n): measured(shape, n) for n in (1, 8)}
        found[f"{name}, LoRA"] = {str(n): measured(shape, n, lora={"r": 16}) for n in (1, 8)}
    finish("memory", found, options(__doc__).out)
