"""DeepSpeed ZeRO 1, 2 and 3 in two real gloo processes: the plain loop's masks and weights, resumed and refused."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import two_ranks
import zero_ranks
from any_models import Case, regressor
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from zero_ranks import HALF, PAST, STEPS, Masks, whole

from cplus.core.evidence import Source
from cplus.core.gates import Elementwise, stored
from cplus.core.guard import Guard, protect
from cplus.core.losses import answer_losses
from cplus.distributed import checkpoint
from cplus.distributed.engines import Zero
from cplus.integrations.transformers import scope
from cplus.methods.curvature import Curvature

STAGES, EPOCHS = (1, 2, 3), 17
pytestmark = pytest.mark.timeout(3600)  # three stages in one start of two processes: minutes on a busy machine
installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install setuptools wheel, then --no-build-isolation 'cplus[deepspeed]'",
)


def work(rank: int, folder: Path) -> None:
    """Everything the tests below ask two processes, in one start."""
    zero_ranks.quiet()
    found: dict[str, Any] = {}
    for stage in STAGES:
        found[f"engine {stage}"] = engines(stage, folder / f"engine-{stage}")
        found[f"trainer {stage}"] = trainers(stage, folder / f"trainer-{stage}")
        found[f"any loss {stage}"] = any_loss(stage, rank)
        found[f"rows {stage}"] = only_rows(stage)
        found[f"curvature {stage}"] = curved(stage)
    torch.save(found, folder / f"found-{rank}.pt")


def engines(stage: int, folder: Path) -> dict[str, Any]:
    """Fifty steps, and the second half of them again from a checkpoint."""
    engine, optimizer = zero_ranks.start(stage)
    guard = protect(optimizer, engine, **PAST)
    masks, refused = zero_ranks.watched(guard), refusals(engine, optimizer)
    zero_ranks.train(engine, guard, 1, HALF)
    engine.save_checkpoint(str(folder))
    checkpoint.save(guard, folder / "guard")
    zero_ranks.train(engine, guard, HALF + 1, STEPS)
    engine.backward(answer_losses(engine, zero_ranks.NEW[:2]).mean())
    with pytest.raises(RuntimeError) as unfinished:
        guard.refresh()
    guard.engine.world = 4
    with pytest.raises(ValueError) as other:
        checkpoint.load(guard, folder / "guard")

    again, optimizer = zero_ranks.start(stage)
    again.load_checkpoint(str(folder))
    resumed = protect(optimizer, again, **PAST)
    checkpoint.load(resumed, folder / "guard")
    zero_ranks.train(again, resumed, HALF + 1, STEPS)
    return {
        "weights": whole(engine.module),
        "resumed": whole(again.module),
        "masks": masks(),
        "steps": (guard.steps, resumed.steps),
        "bytes": (guard.nbytes, sum(p.numel() for p in guard.params) - guard.engine.padding),
        "refused": {**refused, "unfinished": str(unfinished.value), "world": str(other.value)},
    }


def refusals(engine: Any, optimizer: Any) -> dict[str, str]:
    said: dict[str, str] = {}
    questions: dict[str, Callable[[], Any]] = {
        "module": lambda: protect(optimizer, engine.module, **PAST),
        "another": lambda: protect(SGD([nn.Parameter(torch.ones(1))], lr=0.1), engine, **PAST),
        "every": lambda: protect(optimizer, engine, refresh_every=3, **PAST),
    }
    for name, question in questions.items():
        with pytest.raises((TypeError, ValueError)) as error:
            question()
        said[name] = str(error.value)
    return said


def trainers(stage: int, folder: Path) -> dict[str, Any]:
    """Trainer over 51 updates, and resumed from its checkpoint within an epoch."""
    run, watch = zero_ranks.trainer(stage, folder, EPOCHS, save_strategy="steps", save_steps=HALF)
    run.train()
    again, _ = zero_ranks.trainer(stage, folder, EPOCHS)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
    shares = [entry["cplus/admitted_share"] for entry in run.state.log_history if "cplus/admitted_share" in entry]
    return {
        "weights": whole(run.model),
        "resumed": whole(again.model),
        "masks": watch.masks(),
        "shares": shares,
    }


def odd() -> Case:
    """A model with parameters of odd sizes, which two processes cannot share without padding."""
    case = regressor()
    torch.manual_seed(2)
    return replace(case, model=nn.Sequential(nn.Linear(5, 17), nn.SiLU(), nn.Linear(17, 4)))


def any_loss(stage: int, rank: int) -> dict[str, Any]:
    """Each process has half of one source's batches and all of the other's; odd sizes need padding."""
    case = odd()
    engine, optimizer = zero_ranks.start(stage, case.model, gradient_clipping=1e-3)
    entries = [(0.5, case.past[rank::2], case.loss), (0.25, case.new, case.loss)]
    guard = protect(optimizer, engine, evidence=entries)
    reference = guard.refresh()
    parts = {
        f"{f.name} {f.start}": reference.vectors[0][f.partition][f.offset : f.offset + f.size]
        for f in guard.engine.fragments
    }
    return {"parts": parts, "padding": guard.engine.padding, "losses": reference.losses}


def only_rows(stage: int) -> list[Tensor]:
    """One epoch in which five rows of the embedding train; two of them are at the border between the processes."""
    engine, optimizer = zero_ranks.start(stage)
    guard = protect(optimizer, engine, only_rows=zero_ranks.ONLY, **PAST)
    assert scope(engine.module, guard).endswith(f"; of {zero_ranks.EMBEDDING} only 5 of 40 rows train")
    zero_ranks.train(engine, guard, 1, zero_ranks.EPOCH)
    return whole(engine.module)


def by_curvature(optimizer: Any, model: Any) -> Guard:
    """The curvature gate in a loop of one's own."""
    sources = (
        Source(name="anchors", weight=0.25, rows=PAST["anchors"]),
        Source(name="probes", weight=0.75, rows=PAST["probes"]),
    )
    evidence = Curvature(model=model, sources=sources, strength=0.4)
    return Guard(optimizer, model, evidence=evidence, gate=Elementwise(stored, uses="coefficients", whole=False))


def curved(stage: int) -> dict[str, Any]:
    """The coefficients in the layout of the partitions, and one epoch under them."""
    engine, optimizer = zero_ranks.start(stage)
    guard = by_curvature(optimizer, engine)
    zero_ranks.train(engine, guard, 1, zero_ranks.EPOCH)
    parts = {
        f"{f.name} {f.start}": guard.vectors[0][f.partition][f.offset : f.offset + f.size]
        for f in guard.engine.fragments
    }
    return {"parts": parts, "weights": whole(engine.module)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("zero")
    two_ranks.launch(work, folder)
    return [torch.load(folder / f"found-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[list[Tensor], Masks]]:
    return {"engine": zero_ranks.plain(), "trainer": zero_ranks.plain_for_trainer(EPOCHS)}


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest relative difference of a parameter."""
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True))


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    """The relative difference of all weights as one vector."""
    return float(torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm()) / float(
        torch.cat([y.flatten() for y in b]).norm()
    )


def flips(masks: Masks, expected: Masks) -> tuple[int, int]:
    """How many of one process's mask entries differ, and their number."""
    found = total = 0
    for name, parts in masks.items():
        for first, mask in parts.items():
            found += int((mask != expected[name][0][:, first : first + mask.shape[1]]).sum())
            total += mask.numel()
    return found, total


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_zero_trains_only_the_chosen_rows(stage: int, two: list[dict[str, Any]]) -> None:
    start = [p.detach() for p in tiny.lm().parameters()]
    weights, _ = zero_ranks.plain(zero_ranks.EPOCH, only_rows=zero_ranks.ONLY)
    rows = zero_ranks.ONLY[zero_ranks.EMBEDDING]
    for found in (rank[f"rows {stage}"] for rank in two):
        changed = (found[0].view(torch.int32) != start[0].view(torch.int32)).any(dim=1)
        assert changed.nonzero().flatten().tolist() == rows
        assert distance(found, weights) < 1e-5  # ten steps; see below for masks within rounding of 0
        assert not any(torch.equal(p, q) for p, q in zip(found, start, strict=True))


@installed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by", ["engine", "trainer"])
def test_zero_gives_the_masks_and_weights_of_the_plain_loop(
    by: str, stage: int, two: list[dict[str, Any]], expected: dict[str, tuple[list[Tensor], Masks]]
) -> None:
    weights, masks = expected[by]
    counts = [flips(found[f"{by} {stage}"]["masks"], masks) for found in two]
    differ, total = (sum(column) for column in zip(*counts, strict=True))
    steps = next(iter(masks.values()))[0].shape[0]
    assert total == steps * sum(p.numel() for p in tiny.lm().parameters())
    assert differ <= total * 2e-5
    for found in two:
        # A coordinate that rounding moves across zero changes its mask, and one such step its weight by lr / 10. Sums
        # in another order differ by rounding, which AdamW enlarges where gradients are tiny: the worst tensor alone is
        # up to 1.07e-6 away on one kind of processor, so all weights count together.
        assert apart(found[f"{by} {stage}"]["weights"], weights) < (1e-3 if differ else 1e-6)


@installed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by", ["engine", "trainer"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(by: str, stage: int, two: list[dict[str, Any]]) -> None:
    for found in (rank[f"{by} {stage}"] for rank in two):
        assert all(torch.equal(a, b) for a, b in zip(found["weights"], found["resumed"], strict=True))
        if by == "engine":
            assert found["steps"] == (STEPS, STEPS)


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_share_the_guards_memory(stage: int, two: list[dict[str, Any]]) -> None:
    model = tiny.lm()
    optimizer = AdamW(model.parameters())
    guard = protect(optimizer, model, **PAST)
    guard.refresh()
    answer_losses(model, zero_ranks.NEW[:2]).mean().backward()
    optimizer.step()
    held, coordinates = zip(*(rank[f"engine {stage}"]["bytes"] for rank in two), strict=True)
    assert sum(coordinates) == sum(p.numel() for p in model.parameters())
    assert sum(held) == pytest.approx(guard.nbytes, rel=0.01)


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_weighted_losses_without_clipping_and_padding(stage: int, two: list[dict[str, Any]]) -> None:
    case = odd()
    params = dict(case.model.named_parameters())
    expected = {name: torch.zeros_like(p).flatten() for name, p in params.items()}
    for weight, batches in ((0.5, case.past), (0.25, case.new)):
        for batch in batches:
            gradients = torch.autograd.grad(case.loss(case.model, batch), list(params.values()))
            for name, g in zip(params, gradients, strict=True):
                expected[name] += weight * g.flatten() / len(batches)
    seen = 0
    for found in (rank[f"any loss {stage}"] for rank in two):
        for key, part in found["parts"].items():
            name, first = key.rsplit(" ", 1)
            torch.testing.assert_close(part, expected[name][int(first) :][: part.numel()], rtol=1e-5, atol=1e-6)
            seen += part.numel()
    assert seen == sum(p.numel() for p in params.values())
    assert any(rank[f"any loss {stage}"]["padding"] for rank in two)


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_the_log_counts_no_padding(
    stage: int, two: list[dict[str, Any]], expected: dict[str, tuple[list[Tensor], Masks]]
) -> None:
    masks = torch.cat([parts[0] for parts in expected["trainer"][1].values()], 1)
    for found in (rank[f"trainer {stage}"] for rank in two):
        assert found["shares"] == pytest.approx(masks.float().mean(1).tolist(), abs=1e-3)


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_refuse_alike(stage: int, two: list[dict[str, Any]]) -> None:
    for said in (rank[f"engine {stage}"]["refused"] for rank in two):
        assert "call cplus.protect(optimizer, engine, ...) with the engine" in said["module"]
        assert "not the engine's; pass the one that deepspeed.initialize returned" in said["another"]
        assert "call guard.refresh() between two updates" in said["every"]
        assert "gradients of an unfinished accumulation" in said["unfinished"]
        assert re.search(r"expected ZeRO's state of 4 processes, which 2 processes wrote; resume with", said["world"])


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_the_curvature_gate_has_one_processs_coefficients_and_weights(stage: int, two: list[dict[str, Any]]) -> None:
    model = tiny.lm()
    optimizer = AdamW(zero_ranks.groups(model), lr=zero_ranks.LR)
    guard = by_curvature(optimizer, model)
    guard.refresh()
    expected = {guard.names[id(p)]: c.flatten() for p, c in zip(guard.params, guard.vectors[0], strict=True)}
    for step in range(1, zero_ranks.EPOCH + 1):
        optimizer.zero_grad()
        for rows in zero_ranks.micro_batches(step):
            (answer_losses(model, rows).mean() / zero_ranks.ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), zero_ranks.CLIP)
        optimizer.step()
    seen = 0
    for found in (rank[f"curvature {stage}"] for rank in two):
        for key, part in found["parts"].items():
            name, first = key.rsplit(" ", 1)
            torch.testing.assert_close(part, expected[name][int(first) :][: part.numel()], rtol=2**-7, atol=1e-6)
            seen += part.numel()
        assert apart(found["weights"], [p.detach() for p in model.parameters()]) < 1e-6
    assert seen == sum(p.numel() for p in model.parameters())


QUIET = "import runpy, sys, zero_ranks as z; z.quiet(); sys.argv.pop(0); runpy.run_path(sys.argv[0], {}, '__main__')"


@installed
def test_the_example_runs_in_two_processes(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "deepspeed_zero.py"
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable, "-c", QUIET]
    options = [
        "--epochs",
        "2",
        "--new",
        "16",
        "--batch",
        "8",
        "--probes",
        "8",
        "--asked",
        "200",
        "--out",
        str(tmp_path),
    ]
    paths = [str(example.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(example), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("epoch 2: {'anchors':") == 2
    assert sorted(path.name for path in (tmp_path / "guard").iterdir()) == ["zero-0-of-2.pt", "zero-1-of-2.pt"]


class DeepSpeedEngine(nn.Module):
    """A stand-in with what `zero` asks an engine before anything else."""

    def __init__(self, kind: str, **changes: Any) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        inner = AdamW(self.module.parameters())
        self.optimizer = type(kind, (SimpleNamespace,), {})(optimizer=inner, **changes.pop("zero", {}))
        self.has_moe_layers = False
        self.fp16_enabled = lambda: changes.get("fp16", False)
        self.managed_gradient_accumulation = lambda: changes.get("managed", True)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (DeepSpeedEngine("BF16_Optimizer"), "not that of ZeRO 1, 2 or 3"),
        (DeepSpeedEngine("DeepSpeedZeroOptimizer", fp16=True), "float16 scales the loss and skips steps; use bf16"),
        (
            DeepSpeedEngine("DeepSpeedZeroOptimizer", zero={"torch_autocast_gradscaler": object()}),
            "a gradient scaler skips partitions",
        ),
        (DeepSpeedEngine("DeepSpeedZeroOptimizer", zero={"cpu_offload": True}), "offloading is not supported"),
        (
            DeepSpeedEngine("DeepSpeedZeroOptimizer_Stage3", zero={"offload_optimizer": True}),
            "offloading is not supported",
        ),
    ],
)
def test_engines_that_cannot_be_protected_are_refused_with_the_reason(engine: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=f"this DeepSpeed engine cannot be protected: .*{reason}"):
        Zero(engine)
