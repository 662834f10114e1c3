"""The product on the host and on the pretend accelerator, in one process that knows the device from its beginning.

python tests/device_run.py CASE ...    prints one JSON object with what each case found
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_device
import tiny
import torch
import toyjob
from fake_device import NAME, accelerator
from torch import Tensor
from torch.optim import SGD, Optimizer
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen3Config

import cplus
from cplus.core import kernels, optim
from cplus.core.evidence import MeanGradient, Source
from cplus.core.guard import Guard, protect
from cplus.core.losses import answer_losses
from cplus.jobs.adapt import resume
from cplus.methods.objectives import elastic_weights
from cplus.methods.variants import LogitBasis
from cplus.training.gateshares import layer_shares

ANCHORS, PROBES, NEW = tiny.rows(4, seed=1), tiny.rows(6, seed=2), tiny.rows(8, seed=3)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "sgd": lambda params: SGD(params, lr=1e-1, momentum=0.9, foreach=True),
    "one-pass": lambda params: optim.AdamW(params, lr=1e-2),
}


def compiling(one_pass: bool) -> ExitStack:
    """Let small models use the compiled pass, for whose compiler the functions as they are written stand in."""
    stack = ExitStack()
    if one_pass:
        stack.enter_context(patch.object(kernels, "WORTH_COMPILING", 0))
        stack.enter_context(patch.object(kernels, "compiled", lambda block, *_: block))
        stack.enter_context(patch.object(kernels, "can_compile", lambda kind: kind == NAME))
        stack.enter_context(patch.object(kernels, "fits", lambda param: param.dtype == torch.float32))
    return stack


def guarded(name: str, optimizer: Optimizer, model: Any) -> Guard | None:
    """What acts around the optimizer: the gate, or another row's projection or gate."""
    if name not in cplus.METHODS:
        return protect(optimizer, model, anchors=ANCHORS, probes=PROBES)
    row, anchors = cplus.METHODS[name], (Source(name="anchors", weight=1.0, rows=ANCHORS),)
    evidence: Any = MeanGradient(model=model, sources=anchors)
    if name == "ogd":
        evidence = LogitBasis(model=model, rows=ANCHORS)
    return Guard(optimizer, model, evidence=evidence, gate=row.build_gate(0), projection=row.projection)


def plain_loss(rows: Any, model: Any) -> None:
    answer_losses(model, rows).mean().backward()  # type: ignore[no-untyped-call]


def trained(name: str, device: str, make_model: Callable[[], Any]) -> tuple[list[Tensor], Any, Any, Any]:
    """The weights after updates with a refresh before every second; what the last of each and the shares counted."""
    pretended = accelerator() if device == NAME else nullcontext(Counter[str]())
    with pretended as counts, compiling(name == "one-pass" and device == NAME):
        model = make_model()
        model.set_attn_implementation("eager")  # the one form of attention that every device computes alike
        model.to(device)
        optimizer = OPTIMIZERS.get(name, OPTIMIZERS["foreach"])(model.parameters())
        guard = None if name == "ewc" else guarded(name, optimizer, model)
        material: Any = SimpleNamespace(rows=lambda _: ANCHORS)
        backward = partial(plain_loss, model=model) if guard else elastic_weights(model, material, 10.0)
        refresh = update = shares = Counter[str]()
        for step in range(3):
            if guard and step % 2 == 0:
                counts.clear()
                guard.refresh()
                refresh = Counter(counts)
            optimizer.zero_grad(set_to_none=True)
            counts.clear()
            backward(NEW)
            passes = Counter(counts)
            counts.clear()
            optimizer.step()
            update = passes + counts if name == "ewc" else Counter(counts)
            counts.clear()
            layer_shares(guard)
            shares = Counter(counts)
        assert guard is None or guard.one_pass == (name == "one-pass" and device == NAME)
        return [p.detach().to("cpu") for p in model.parameters()], refresh, update, shares


def apart(ours: list[Tensor], others: list[Tensor]) -> float:
    """The share of coordinates that end elsewhere; rounding may turn the sign of a tiny gradient."""
    return float(torch.cat([(a - b).abs().flatten() > 1e-5 for a, b in zip(ours, others, strict=True)]).float().mean())


def counted(name: str) -> dict[str, Any]:
    """How the weights differ from the host's, and what a refresh and an update count for models of two depths."""
    found: dict[str, Any] = {"apart": apart(*(trained(name, device, tiny.lm)[0] for device in ("cpu", NAME)))}
    for layers in (1, 4):
        make = partial(tiny.lm, layers=layers)
        parts = trained(name, NAME, make)[1:]
        found |= {f"{part} {layers}": own for part, own in zip(("refresh", "update", "shares"), parts, strict=True)}
    return found


def spoilt(name: str, compiles: bool) -> dict[str, Any]:
    """After a gradient that is not finite and a good one: what has moved, what waited, what the next refresh says."""
    with accelerator() as counts, compiling(compiles):
        model = tiny.lm().to(NAME)
        optimizer = OPTIMIZERS[name](model.parameters())
        guard = protect(optimizer, model, anchors=ANCHORS)
        guard.refresh()
        before: list[Tensor] = []
        for step in range(3):
            optimizer.zero_grad()
            plain_loss(NEW, model)
            if step == 1:
                before = [p.detach().clone() for p in model.parameters()]
                list(model.parameters())[-1].grad.mul_(float("nan"))
            counts.clear()
            optimizer.step()
        syncs, said = counts["sync"], ""
        try:
            guard.refresh()
        except FloatingPointError as error:
            said = str(error)
        same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        return {"syncs": syncs, "same": same, "said": said}


def paper_model() -> dict[str, Any]:
    """Counts for the 310 parameters of Qwen3-0.6B, in tiny widths."""
    sizes: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 28, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name in OPTIMIZERS:
        weights, refresh, update, _ = trained(
            name, NAME, lambda: AutoModelForCausalLM.from_config(Qwen3Config(**sizes))
        )
        found[name] = {"parameters": len(weights), "refresh": refresh, "update": update}
    return found


def family(name: str) -> float:
    """The share of a tiny model's coordinates that end elsewhere than on the host."""
    sizes: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    kind: Any = {"qwen3": Qwen3Config, "gemma": GemmaConfig, "llama": LlamaConfig}[name]

    def make() -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(kind(**sizes))

    return apart(*(trained("foreach", device, make)[0] for device in ("cpu", NAME)))


def job(folder: Path, out: str, **changes: Any) -> Any:
    """Settings of a small job; the bank is written once for both devices."""
    values: dict[str, Any] = {"epochs": 1, "num_probes": 4, "evaluate_rows": 4, **changes}
    if values.get("method") in ("sft", "replay", "cpl", "ogd"):
        del values["num_probes"]
    return toyjob.asked(folder, out=folder / out, **values)


def product(folder: Path, case: str) -> dict[str, Any]:
    """The same job on both devices: its figures and weights."""
    method, _, more = case.partition(" ")
    changes: dict[str, Any] = {"method": method, **({"lora": {"r": 4}} if more == "lora" else {})}
    found = {}
    for device in ("cpu", NAME):
        with accelerator() if device == NAME else nullcontext(), compiling(more == "one-pass" and device == NAME):
            done = cplus.adapt(job(folder, f"{case}-{device}", device=device, **changes))
        found[device] = {"figures": done.record["figures"], "receipt": (done.folder / "receipt.html").is_file()}
    ours, others = (toyjob.written(folder / f"{case}-{device}") for device in ("cpu", NAME))
    same = found["cpu"] == found[NAME]
    return {"same": same, "apart": apart(list(ours.values()), [others[name] for name in ours])}


def moved(folder: Path) -> dict[str, float]:
    """Jobs that stop after an update and are resumed on the other device, against the one that never stopped."""

    def on(device: str) -> Any:
        return patch.object(torch.accelerator, "current_accelerator", lambda **_: torch.device(device))

    found = {}
    with accelerator():
        settings: dict[str, Any] = {"method": "cpl", "device": "auto", "checkpoint_steps": 1}
        with on("cpu"):
            cplus.adapt(job(folder, "whole", **settings))
        whole = toyjob.written(folder / "whole")
        for first, second in (("cpu", NAME), (NAME, "cpu")):
            with on(first):
                toyjob.stop_at(1, job(folder, first, **settings))
            with on(second):
                resume(folder / first)
            own = toyjob.written(folder / first)
            found[f"{first} to {second}"] = apart(list(whole.values()), [own[name] for name in whole])
    return found


def mixed() -> str:
    """What is said of a sum over two devices."""
    with accelerator():
        try:
            torch.ones(3, device=NAME) + torch.ones(3)
        except RuntimeError as error:
            return str(error)
    return ""


OTHERS: dict[str, Callable[[Path], Any]] = {
    "mixed": lambda folder: mixed(),
    "spoilt": lambda folder: [spoilt(*case) for case in (("foreach", False), ("sgd", True), ("one-pass", True))],
    "moved": moved,
    "qwen3-0.6b": lambda folder: paper_model(),
}


def main(cases: list[str]) -> None:
    """Every case in turn."""
    fake_device.register()
    load = AutoModelForCausalLM.from_pretrained
    AutoModelForCausalLM.from_pretrained = partial(load, attn_implementation="eager")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["CPLUS_CACHE"] = str(folder / "cache")
        toyjob.write_files(folder)
        for rows, kept in (("new", 8), ("past", 8)):
            path = folder / f"{rows}.jsonl"
            path.write_text(
                "".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:kept]), encoding="utf-8"
            )
        cplus.models.load("toy", device="cpu")  # its module is imported outside of the pretence
        for case in cases:
            if case in OPTIMIZERS or case.startswith("counted "):
                found[case] = counted(case.removeprefix("counted "))
            elif case in ("qwen3", "gemma", "llama"):
                found[case] = family(case)
            elif case in OTHERS:
                found[case] = OTHERS[case](folder)
            else:
                found[case] = product(folder, case)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
