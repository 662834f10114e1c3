"""The callback inside Trainer and SFTTrainer: the same weights as our loop, resumed as if never stopped, refusals."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from packaging.version import Version
from quadratic import ConstantEvidence
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim import SGD, AdamW
from trained import ANCHORS, NEW, PROBES, Stop, arguments, check_same, features, flat, ours, same, trainer
from transformers import Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from cplus.core.gates import Collaborative
from cplus.core.guard import Guard, protect
from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded
from cplus.integrations.rows import bank_rows, encoded
from cplus.integrations.transformers import (
    ABOUT,
    PreservationCallback,
    admitted_share,
    load_guard,
    preserve,
    save_guard,
)


def sft_trainer(folder: Path, tokenizer: Any, model: nn.Module, rows: Any, **changes: Any) -> SFTTrainer:
    settings = arguments(folder, **changes) | {"gradient_checkpointing": False}
    return SFTTrainer(model=model, args=SFTConfig(**settings), train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize(
    ("changes", "reference"),
    [
        ({}, {}),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, {}),
        (
            {"max_grad_norm": 0.3, "lr_scheduler_type": "cosine", "warmup_steps": 2},
            {"clip_norm": 0.3, "schedule": "cosine"},
        ),
    ],
    ids=["plain", "accumulated", "clipped-and-scheduled"],
)
def test_trainer_gives_the_weights_of_our_loop(
    changes: dict[str, Any], reference: dict[str, Any], tmp_path: Path
) -> None:
    run = trainer(tmp_path, **changes)
    callback = preserve(run, anchors=ANCHORS, probes=PROBES, ema="float32")
    run.train()
    divisor = run.accelerator.gradient_accumulation_steps  # not 1 where Trainer divides twice: transformers #45305
    assert divisor == 1 or Version(version("transformers")) < Version("5.5.4")
    check_same(run.model, ours(**reference, divisor=divisor))
    assert callback.guard is not None
    assert not callback.guard.optimizer._optimizer_step_post_hooks


def test_sft_trainer_gives_the_weights_of_our_loop(tmp_path: Path, make_tiny: Callable[[str], Any]) -> None:
    rows = [{name: features(row)[name] for name in ("input_ids", "labels")} for row in NEW]
    run = sft_trainer(tmp_path, make_tiny("qwen3").tokenizer, tiny.lm(), Dataset.from_list(rows))
    preserve(run, anchors=ANCHORS, probes=PROBES, ema="float32")
    run.train()
    check_same(run.model, ours())


@pytest.mark.parametrize(("refresh", "kept", "died"), [("epoch", 4, 5), (2, 5, 6)])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    refresh: Any, kept: int, died: int, tmp_path: Path
) -> None:
    changes = {"save_strategy": "steps", "save_steps": kept, "lr_scheduler_type": "cosine"}

    def start(folder: Path, callbacks: Any = None) -> Trainer:
        run = trainer(folder, callbacks=callbacks, **changes, train_sampling_strategy="random")
        preserve(run, anchors=ANCHORS, probes=PROBES, refresh=refresh)
        return run

    whole = start(tmp_path / "whole")
    whole.train()
    dying = start(tmp_path / "run", [Stop(died)])
    with pytest.raises(InterruptedError):
        dying.train()
    resumed = start(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9
    assert same(resumed.model, whole.model)
    dying.remove_callback(Stop)
    dying.train()  # from the beginning, and gated once
    [callback] = (own for own in dying.callback_handler.callbacks if isinstance(own, PreservationCallback))
    assert callback.guard is not None
    assert callback.guard.steps == 9


class Tracker(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **_: Any) -> None:
        self.seen.append(dict(logs))


def test_every_tracker_sees_the_figures(tmp_path: Path) -> None:
    tracker = Tracker()
    run = trainer(tmp_path, callbacks=[tracker], logging_steps=3)
    preserve(run, anchors=ANCHORS, probes=PROBES)
    run.train()
    logs = [entry for entry in tracker.seen if "loss" in entry]
    assert len(logs) == 3
    for entry in logs:
        assert {"cplus/anchors_loss", "cplus/probes_loss", "cplus/admitted_share"} <= entry.keys()
        assert 0.2 < entry["cplus/admitted_share"] < 0.999
    assert [e["cplus/anchors_loss"] for e in run.state.log_history[:-1]] == [e["cplus/anchors_loss"] for e in logs]
    assert len({e["cplus/anchors_loss"] for e in logs}) == 3  # refreshed in each epoch


def test_a_gate_that_does_not_count_gives_its_averages_mean() -> None:
    model = tiny.lm()
    optimizer = SGD(model.parameters(), lr=0.1)
    evidence = ConstantEvidence([torch.ones_like(p) for p in model.parameters()])
    guard = Guard(optimizer, model, evidence=evidence, gate=Collaborative(beta=0.9))
    guard.refresh()
    for sign in (1.0, -1.0, 1.0):
        for p in model.parameters():
            p.grad = torch.full_like(p, sign)
        optimizer.step()
    assert admitted_share(guard) == pytest.approx(2 / 3)  # admitted, blocked, admitted
    assert admitted_share(guard) == pytest.approx((0.81 + 1) / (0.81 + 0.9 + 1))  # nothing counted since


def test_under_bf16_the_evidence_has_the_trainers_precision(tmp_path: Path) -> None:
    model = tiny.lm()
    seen: list[tuple[bool, torch.dtype]] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, _, output: seen.append((module.training, output.dtype))
    )
    run = trainer(tmp_path, model, bf16=True)
    callback = preserve(run, anchors=ANCHORS, probes=PROBES)
    run.train()
    assert {mode for mode, _ in seen} == {True, False}  # training and evidence
    assert {dtype for _, dtype in seen} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert callback.guard is not None
    assert callback.guard.steps == 9


def test_a_loop_under_accelerate_is_our_loop() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # what a Trainer set before would stay
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = tiny.lm()
    model, optimizer = accelerator.prepare(plain, AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0))
    guard = protect(optimizer, model, anchors=ANCHORS, probes=PROBES, ema="float32")
    for _ in range(3):
        guard.refresh()
        for first in range(0, len(NEW), 2):  # two passes make one batch of four
            with accelerator.accumulate(model):
                accelerator.backward(answer_losses(model, NEW[first : first + 2]).mean())
                optimizer.step()
                optimizer.zero_grad()
    assert guard.steps == 9
    check_same(plain, ours())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_the_gradient_scaler_skips_is_not_a_step(fused: bool) -> None:
    model = tiny.lm()
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=fused)
    guard = protect(optimizer, model, anchors=ANCHORS)
    guard.refresh()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for poison in (1.0, float("inf"), 1.0):
        before = flat(model)
        optimizer.zero_grad()
        scaler.scale(answer_losses(model, NEW[:4]).mean() * poison).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model), before) == (poison != 1.0)
    assert guard.steps == 2
    assert isinstance(guard.gate, Collaborative)
    assert guard.gate.average.step == 2


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


def conversation(a: str, b: str) -> dict[str, list[dict[str, str]]]:
    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    return {"messages": [turn("user", a), turn("assistant", b), turn("user", b), turn("assistant", a)]}


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_assistant_only_loss_and_packing(packing: bool, tmp_path: Path, make_tiny: Callable[[str], Any]) -> None:
    made = make_tiny("qwen3")
    tokenizer = made.tokenizer
    tokenizer.chat_template = TURNS
    talks = [conversation(f"Where do {i} fish live?", "in water") for i in range(8)]
    build = partial(sft_trainer, tmp_path, tokenizer, made.model, Dataset.from_list(talks), assistant_only_loss=True)
    run = build(packing=packing, max_length=64)
    tokens = tokenizer.apply_chat_template(talks[0]["messages"], return_dict=True, return_assistant_tokens_mask=True)
    row = {"input_ids": tokens["input_ids"], "assistant_masks": tokens["assistant_masks"]}
    anchors = encoded([row], build().data_collator)
    said = [t for t, scored in zip(anchors[0].target, anchors[0].scored, strict=True) if scored]
    assert tokenizer.decode(said).replace("<|im_end|>", "|") == "in water|Where do 0 fish live?|"
    before = copy.deepcopy(made.model)
    callback = preserve(run, anchors=anchors)
    run.train()
    assert not same(run.model, before)
    assert callback.guard is not None
    assert callback.guard.steps == run.state.global_step > 0


def test_collated_labels_are_checked() -> None:
    def collated(labels: list[int], ids: tuple[int, ...] = (5, 6, 7, 8), **more: Any) -> list[Encoded]:
        batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), **more}
        return encoded([{}], lambda rows: batch)

    assert collated([5, 6, 7, 8]) == [Encoded((5,), (6, 7, 8))]
    assert collated([-100, -100, 7, -100]) == [Encoded((5, 6), (7,))]
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1]])}
    assert collated([-100, -100, -100, 6], (0, 0, 5, 6), **padded) == [Encoded((5,), (6,))]
    for labels in ([-100] * 4, [5, 6, 9, 8]):
        with pytest.raises(ValueError, match="labels that repeat some of the row's tokens"):
            collated(labels)
    with pytest.raises(ValueError, match="got input_ids"):
        encoded([{}], lambda rows: {"input_ids": torch.ones(1, 2)})


def test_resuming_without_the_guards_state_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path / "bare", save_strategy="steps", save_steps=4).train()
    run = trainer(tmp_path / "bare")
    preserve(run, anchors=ANCHORS)
    with pytest.raises(ValueError, match=r"resumed at step 9, but .* has no guard state"):
        run.train(resume_from_checkpoint=True)


def test_the_guard_of_other_weights_is_refused_and_the_right_one_taken(tmp_path: Path) -> None:
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        run = trainer(tmp_path / name, learning_rate=rate, save_strategy="steps", save_steps=4)
        preserve(run, anchors=ANCHORS)
        run.train()
    checkpoint = str(tmp_path / "a" / "checkpoint-4")
    run = trainer(tmp_path / "b")
    callback = preserve(run, anchors=ANCHORS)
    with pytest.raises(ValueError, match="has the guard state of other weights than the model's"):
        run.train(resume_from_checkpoint=checkpoint)
    callback.resume_from = Path(checkpoint)
    run.train(resume_from_checkpoint=checkpoint)
    assert (Path(checkpoint) / ABOUT).is_file()


def test_a_state_kept_whole_is_refused_by_a_sharded_run(tmp_path: Path) -> None:
    model = tiny.lm()
    guard = protect(AdamW(model.parameters()), model, anchors=ANCHORS)
    guard.refresh()
    save_guard(guard, tmp_path, first=True)
    load_guard(guard, tmp_path)
    guard.engine.world, guard.engine.sharded = 2, True
    with pytest.raises(
        ValueError, match=r"saved by one process and this run shards over 2; .*distributed.checkpoint.save"
    ):
        load_guard(guard, tmp_path)
    (tmp_path / ABOUT).write_text("{}")
    with pytest.raises(ValueError, match="expected the format cplus-guard/1"):
        load_guard(guard, tmp_path)


def test_optimizers_that_hide_their_step_are_refused() -> None:
    engine, backward = "with the engine that deepspeed.initialize", "updates inside the backward pass"
    model = nn.Linear(2, 2)
    for name, module, reason in (
        ("DeepSpeedZeroOptimizer", "deepspeed.runtime.zero.stage_1_and_2", engine),
        ("DeepSpeedOptimizerWrapper", "accelerate.utils.deepspeed", engine),
        ("AdaLomo", "lomo_optim.adalomo", backward),
        ("LayerWiseDummyOptimizer", "transformers.trainer_pt_utils", backward),
    ):
        optimizer = type(name, (SGD,), {"__module__": module})(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match=f"{name} cannot be protected: .*{reason}"):
            protect(optimizer, model, anchors=ANCHORS)
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(TypeError, match=backward):
        protect(SGD(model.parameters(), lr=0.1), model, anchors=ANCHORS)


def written(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    return model(ids).logits.mean()


IDS = [torch.tensor([row.prompt]) for row in NEW]
BAD: dict[str, tuple[Any, Any, str]] = {
    "no scalar": (IDS, lambda m, ids: m(ids).logits[0, :, 0], r"must be a scalar, got the shape \(6,\)"),
    "unreached": (IDS, lambda m, ids: m.model.norm.weight.sum(), r"of 24 protected parameters get no evidence"),
    "changes state": (IDS, written, "changes the model's state: the parameter 'model.norm.weight'"),
    "ends": (iter(IDS), lambda m, ids: m(ids).logits.mean(), "which can be read only once"),
    "rows too": ([ANCHORS], lambda m, rows: answer_losses(m, rows).mean(), "or evidence, not both"),
}


def test_preserve_refuses_bad_evidence_and_optimizers_that_hide_their_step(tmp_path: Path) -> None:
    for optim, reason in (
        ("schedule_free_adamw", "keep a second iterate"),
        ("adalomo", "updates inside the backward pass"),
        ("galore_adamw_layerwise", "updates inside the backward pass"),
    ):
        run = trainer(tmp_path, optim=optim, optim_target_modules=["mlp"])
        with pytest.raises(TypeError, match=f"optim='{optim}' cannot be protected: .*{reason}"):
            preserve(run, anchors=ANCHORS)
    run = trainer(tmp_path)
    for kind, (batches, loss, sentence) in BAD.items():
        with pytest.raises((TypeError, ValueError), match=sentence):
            preserve(run, evidence=[(1.0, batches, loss)], anchors=ANCHORS if kind == "rows too" else ())
    assert not any(isinstance(callback, PreservationCallback) for callback in run.callback_handler.callbacks)


def test_preserve_asks_no_evidence_for_what_the_trainers_own_optimizer_leaves_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.optimizer = SGD([run.model.model.norm.weight], lr=0.1)
    preserve(run, evidence=[(1.0, IDS, lambda m, ids: m.model.norm.weight.square().sum())])
    before = run.model.model.norm.weight.detach().clone()
    run.train()
    assert not torch.equal(run.model.model.norm.weight, before)


def test_what_cannot_be_gated_is_named_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="give anchors, probes or both; got neither"):
        PreservationCallback()
    with pytest.raises(ValueError, match="refresh must be 'epoch' or a number of steps"):
        PreservationCallback(anchors=ANCHORS, refresh=0)
    with pytest.raises(TypeError, match=r"preserve needs a transformers\.Trainer or a subclass of it, got object"):
        preserve(object(), anchors=ANCHORS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"protect needs a torch\.optim\.Optimizer, got NoneType"):
        protect(None, tiny.lm(), anchors=ANCHORS)  # type: ignore[arg-type]
    callback = PreservationCallback(anchors=ANCHORS)
    with pytest.raises(TypeError, match="the trainer owns no optimizer whose step could be gated; let it build one"):
        callback.on_train_begin(None, None, None, model=tiny.lm(), optimizer=None)


@pytest.mark.parametrize(("package", "found"), [("torch", "2.7.1+cpu"), ("transformers", "5.3.0"), ("trl", "0.9.6")])
def test_a_package_that_is_too_old_is_named_before_anything_is_attached(
    package: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, optimizer = trainer(tmp_path), SGD(tiny.lm().parameters(), lr=0.1)
    monkeypatch.setattr(importlib.import_module(package), "__version__", found)
    sentence = rf"cplus needs {package} \S+ or newer, found {re.escape(found)}; pip install '{package}>="
    with pytest.raises(ImportError, match=sentence):
        preserve(run, anchors=ANCHORS)
    with pytest.raises(ImportError, match=sentence):
        protect(optimizer, tiny.lm(), anchors=ANCHORS)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_bank_of_another_model_is_refused(tmp_path: Path, make_tiny: Callable[[str], Any]) -> None:
    from cplus.data import interfaces
    from cplus.data.examples import Choice
    from cplus.models.loading import fingerprint
    from cplus.probes.bank import Probe, seal

    made = make_tiny("llama")
    example = Choice(id="p1", question="Where do fish live?", choices=("in water", "in trees"), answer=0)
    manifest = {"model": {"name": "tiny", "fingerprint": fingerprint(made.model)}, "anchors": {}}
    seal(tmp_path / "bank", [Probe(example=example, confidence=0.9, request=0, shots=(), topic=None)], manifest)
    interface = interfaces.build("cloze", made.tokenizer)
    assert bank_rows(tmp_path / "bank", made.model, interface) == [interface.encode(example)]
    with torch.no_grad():
        next(made.model.parameters()).add_(1e-3)
    with pytest.raises(ValueError, match="was sealed for tiny@"):
        bank_rows(tmp_path / "bank", made.model, interface)
