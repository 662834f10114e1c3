"""Adapters under the gate: LoRA on a plain and on a 4-bit base, merged and not, through the Trainer, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu
from bitsandbytes.nn import LinearNF4
from datasets import Dataset
from peft import LoraConfig, OSFConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from torch.optim import AdamW
from trained import ANCHORS, PROBES, Stop, arguments, features, same, trainer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from cplus.core.guard import Guard, protect
from cplus.core.losses import answer_losses
from cplus.integrations.transformers import preserve, scope
from cplus.jobs.prepare import row_of
from cplus.jobs.settings import AdaptConfig
from cplus.training.settings import Lora

NEW = tiny.rows(8, seed=4)


def four_bit(folder: Path, compute: torch.dtype) -> PeftModel:
    """Adapters on a base in 4 bits; 32 does not divide its outputs, so that bitsandbytes cannot repack it."""
    tiny.lm().save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    return lora(base.requires_grad_(False))


def lora(model: nn.Module | None = None) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model or tiny.lm(), config)


def guarded(model: nn.Module) -> tuple[AdamW, Guard]:
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return optimizer, protect(optimizer, model, anchors=ANCHORS, probes=PROBES)


def train(model: nn.Module, optimizer: AdamW, guard: Guard, steps: int = 6) -> list[float]:
    losses = []
    for step in range(steps):
        if step % 3 == 0:
            guard.refresh()
        optimizer.zero_grad()
        loss = answer_losses(model, NEW).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_only_adapters_move_and_the_evidence_is_about_them() -> None:
    model = lora()
    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}
    optimizer, guard = guarded(model)
    assert all("lora_" in guard.names[id(p)] for p in guard.params)
    losses = train(model, optimizer, guard)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)
    found = guard.refresh()
    model.zero_grad()
    weights = [0.5 / len(ANCHORS)] * len(ANCHORS) + [0.5 / len(PROBES)] * len(PROBES)
    (answer_losses(model.eval(), [*ANCHORS, *PROBES]) * torch.tensor(weights)).sum().backward()
    for p, g in zip(guard.params, found.vectors[0], strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-4, atol=1e-7)


def test_the_wrapper_still_computes_only_the_logits_that_are_needed() -> None:
    model = lora()
    shapes: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(lambda *seen: shapes.append(seen[-1].shape))
    answer_losses(model, NEW)
    assert shapes == [torch.Size([len(NEW), max(len(row.target) for row in NEW), tiny.VOCABULARY])]


def test_merged_outputs_are_the_gated_adapters_and_go_on_as_a_plain_model() -> None:
    model = lora().eval()
    train(model, *guarded(model))
    before = answer_losses(model, NEW).detach()
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into the base weights .* call model.unmerge_adapter\(\)"):
        guarded(model)
    torch.testing.assert_close(answer_losses(model, NEW).detach(), before, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    assert guarded(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(answer_losses(merged, NEW).detach(), before, rtol=1e-4, atol=1e-5)
    merged.requires_grad_(True)
    losses = train(merged, *guarded(merged))
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("processor")
def test_a_4_bit_base_stays_and_the_gate_says_what_it_acts_on(tmp_path: Path) -> None:
    model = four_bit(tmp_path, torch.float32)
    packed = {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(packed) == 14
    optimizer, guard = guarded(model)
    assert scope(model, guard) == (
        "the gate acts on 12 tensors of 832 coordinates; 24 tensors, 14 of them quantised, are frozen and do not change"
    )
    with torch.no_grad():
        answer_losses(model.eval(), NEW)
    losses = train(model, optimizer, guard)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, packed[name]) for name, p in model.named_parameters() if name in packed)


def test_a_4_bit_base_that_an_evaluation_repacked_is_refused() -> None:
    layer = LinearNF4(64, 32)
    model = nn.Sequential(nn.Linear(8, 64), layer.to("cpu"))
    layer.weight.data, _ = _convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    with pytest.raises(ValueError, match=r"must give gradients, .* repack them .* load the model again and protect it"):
        protect(AdamW(model[0].parameters()), model, evidence=[(1.0, [torch.ones(1, 8)], lambda m, x: m(x).mean())])


@pytest.mark.usefixtures("processor")
def test_sft_trainer_on_a_4_bit_base_trains_once_its_adapters_are_float32_again(
    tmp_path: Path, make_tiny: Callable[[str], Any]
) -> None:
    model = four_bit(tmp_path, torch.bfloat16)
    packed = {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    args = SFTConfig(**arguments(tmp_path / "run", bf16=True, num_train_epochs=1, gradient_checkpointing=False))
    rows = Dataset.from_list([{name: features(row)[name] for name in ("input_ids", "labels")} for row in NEW])
    run = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=make_tiny("qwen3").tokenizer)
    callback = preserve(run, anchors=ANCHORS, probes=PROBES)
    with pytest.raises(TypeError, match="is bfloat16: steps below one ulp read back as zero; load float32 masters"):
        run.train()  # TRL turns the adapters of a quantised base into bfloat16
    adapters = [p for p in run.model.parameters() if p.requires_grad]
    for p in adapters:
        p.data = p.data.float()
    before = [p.detach().clone() for p in adapters]
    run.train()
    assert callback.guard is not None
    assert callback.guard.steps == 2
    assert not all(torch.equal(p, q) for p, q in zip(adapters, before, strict=True))
    assert all(torch.equal(p, packed[name]) for name, p in model.named_parameters() if name in packed)


def test_trainer_with_adapters_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    def start(folder: Path, callbacks: Any = None) -> Any:
        run = trainer(folder, lora(), callbacks, save_strategy="steps", save_steps=4)
        preserve(run, anchors=ANCHORS, probes=PROBES)
        return run

    whole = start(tmp_path / "whole")
    whole.train()
    with pytest.raises(InterruptedError):
        start(tmp_path / "run", [Stop(5)]).train()
    resumed = start(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model, whole.model)
    assert not same(resumed.model, lora())


def test_orthogonal_subspace_fine_tuning_takes_the_gate_too() -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny.lm(), OSFConfig(target_modules=["q_proj", "up_proj"], effective_rank=4))
    plain = copy.deepcopy(model)
    optimizer, guard = guarded(model)
    losses = train(model, optimizer, guard)
    assert losses[-1] < losses[0]
    loose = AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    answer_losses(plain, NEW).mean().backward()
    loose.step()
    assert not same(model, plain)


def test_learned_prompts_are_refused() -> None:
    model = get_peft_model(tiny.lm(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(TypeError, match="learns a prompt, which the evidence does not cover; use LoRA"):
        guarded(model)


@pytest.mark.parametrize("name", ["lora", "osf"])
def test_a_row_with_adapters_takes_no_other_ones(name: str) -> None:
    config = AdaptConfig(model="toy", new="new.jsonl", method=name)
    assert row_of(config).adapter is not None
    with pytest.raises(ValueError, match=f"method '{name}' decides itself what trains; leave out lora"):
        row_of(config.model_copy(update={"lora": Lora()}))
