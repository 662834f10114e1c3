"""Less memory: float32 masters of a model in bfloat16, moments in 8 bits, evidence by recomputation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from quadratic import Bag, PastEvidence, copies, new_gradient
from quadratic import same as same_bits
from torch.utils._pytree import tree_leaves
from toyjob import asked, same, stop_at, write_files, written

from cplus import protect
from cplus.core.evidence import MeanGradient, Source
from cplus.core.gates import Collaborative
from cplus.core.guard import Guard
from cplus.core.losses import answer_losses
from cplus.core.optim import AdamW, MasterAdamW
from cplus.core.rows import Encoded
from cplus.jobs import prepare
from cplus.jobs.adapt import adapt, resume

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [Encoded((5, 6, 7), (8, 9)), Encoded((9, 8), (7,))]


def stepped(bag: Bag, optimizer: AdamW, guard: Guard, steps: range) -> None:
    """Gated steps on gradients that bfloat16 represents, at a rate far below its precision."""
    for step in steps:
        guard.refresh()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = new_gradient([p.detach().bfloat16().float() for p in held], step)
        for p, g in zip(bag.weights, gradients, strict=True):
            p.grad = g.bfloat16().to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in bag.weights)


def guarded(optimizer: AdamW, bag: Bag) -> Guard:
    return Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))


def test_a_model_in_bfloat16_trains_as_its_float32_masters() -> None:
    half, whole = Bag(torch.bfloat16), Bag(torch.float32)
    for p, q in zip(whole.weights, half.weights, strict=True):
        p.data.copy_(q)
    start = copies(half.weights)
    plain, masters = AdamW(whole.weights, lr=1e-4), MasterAdamW(half.weights, lr=1e-4)
    stepped(whole, plain, guarded(plain, whole), range(4))
    stepped(half, masters, guard := guarded(masters, half), range(2))
    kept = copy.deepcopy((half.state_dict(), masters.state_dict(), guard.state_dict()))
    # Resumed in another model, so that nothing but the saved state counts.
    again = Bag(torch.bfloat16, seed=3)
    resumed = MasterAdamW(again.weights, lr=1e-4)
    for made, state in zip((again, resumed, guard := guarded(resumed, again)), kept, strict=True):
        made.load_state_dict(state)
    stepped(again, resumed, guard, range(2, 4))
    for p, q, master in zip(whole.weights, again.weights, resumed.param_groups[0]["params"], strict=True):
        assert torch.equal(master, p)  # bit for bit
        assert torch.equal(q, p.bfloat16())
    lost = [(q == s).float().mean() for q, s in zip(again.weights, start, strict=True)]
    assert max(lost) > 0.5  # in bfloat16 alone most of these steps would be lost
    with pytest.raises(ValueError, match="with 3 float32 masters of these shapes, got none"):
        resumed.load_state_dict(AdamW(whole.weights).state_dict())
    with pytest.raises(TypeError, match="without a closure"):
        resumed.step(lambda: 0.0)


def test_protect_serves_a_model_loaded_in_bfloat16(tiny_llama: Any) -> None:
    model = copy.deepcopy(tiny_llama.model).to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"is bfloat16: .* step them by cplus.core.optim.MasterAdamW"):
        protect(torch.optim.AdamW(model.parameters()), model, anchors=ROWS)
    optimizer = MasterAdamW(model.parameters(), lr=1e-6)
    guard = protect(optimizer, model, anchors=ROWS, beta=0.0)
    guard.refresh()
    assert {g.dtype for g in guard.vectors[0]} <= {torch.int8, torch.float32}
    before = copies(guard.params)
    model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()
    assert guard.steps == 1
    moved = [not torch.equal(p, q) for p, q in zip(guard.params, before, strict=True)]
    assert sum(moved) > len(moved) / 2  # steps of 1e-6 are lost in most weights in bfloat16, and kept in the masters
    assert same_bits([p.bfloat16() for p in guard.params], model.parameters())


@pytest.mark.long
def test_moments_in_8_bits_are_gated_and_resume_bitwise(tmp_path: Path, cache: Path) -> None:
    write_files(tmp_path)
    changes: dict[str, Any] = {"optimizer": "adamw8bit", "method": "cpl", "checkpoint_steps": 1, "epochs": 2}
    adapt(asked(tmp_path, out=tmp_path / "whole", **changes))
    stop_at(3, asked(tmp_path, out=tmp_path / "cut", **changes))
    state = torch.load(tmp_path / "cut" / "work" / "checkpoint.pt", weights_only=True)["state"]["optimizer"]["state"]
    moments = [value for value in tree_leaves(state) if isinstance(value, torch.Tensor) and value.numel() >= 4096]
    assert {moment.dtype for moment in moments} == {torch.uint8}
    resume(tmp_path / "cut")
    assert same(written(tmp_path / "cut"), written(tmp_path / "whole"))


def test_moments_in_8_bits_cannot_be_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    config = asked(tmp_path, optimizer="adamw8bit", method="cpl")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="bitsandbytes cannot step shards; use optimizer adamw, or add sharding ddp"):
        prepare.check_processes(config, prepare.row_of(config))


def test_evidence_is_recomputed_where_training_is(tiny_llama: Any) -> None:
    def evidence(model: Any) -> tuple[list[torch.Tensor], int]:
        """The evidence, and the bytes that its backward pass kept."""
        kept: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.nbytes)
            return tensor

        anchors = Source(name="anchors", weight=1.0, rows=ROWS)
        found = MeanGradient(model=model, sources=(anchors,), losses=answer_losses)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            vectors = found(list(model.parameters()), 0).vectors
        return vectors[0], sum(kept)

    plain, light = copy.deepcopy(tiny_llama.model), copy.deepcopy(tiny_llama.model)
    light.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    light.train()
    (all_kept, much), (again, little) = evidence(plain), evidence(light)
    assert same_bits(all_kept, again)
    assert little < much / 2
    assert all(module.training for module in light.modules())  # the modes are as they were
