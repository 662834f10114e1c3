"""Two real processes over gloo: FSDP2 and DDP equal one process, checkpoints fit any number, all refuse alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
import trained
import two_ranks
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from any_models import regressor
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from transformers import Phi3Config, Phi3ForCausalLM
from two_ranks import EPOCH, HALF, STEPS, build, keep, sharded, take_up, train, whole

from cplus.core import kernels, optim
from cplus.core.evidence import MeanGradient, Source
from cplus.core.gates import Collaborative, NormMatched
from cplus.core.guard import Guard, protect
from cplus.distributed import checkpoint
from cplus.integrations.transformers import preserve
from cplus.methods.curvature import Curvature
from cplus.methods.variants import NormAligned, Tail, agem
from cplus.training.gateshares import layer_shares

PHI = Phi3Config(
    vocab_size=tiny.VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    sliding_window=None,
)
EVIDENCE = {
    "mean": MeanGradient,
    "norm-aligned": NormAligned,
    "tail": Tail,
    "curvature": partial(Curvature, strength=0.4),
}


def plain(model: nn.Module) -> nn.Module:
    return model


def work(rank: int, folder: Path) -> None:
    """Everything the tests below ask two processes, in one start."""
    found: dict[str, Any] = {}
    model, optimizer, guard = build(sharded, torch.float32)
    train(model, optimizer, guard, 1, HALF)
    keep(model, optimizer, guard, folder / "two")
    torch.save(guard.state_dict(), folder / f"plain-{rank}.pt")
    train(model, optimizer, guard, HALF + 1, STEPS)
    found["fsdp"] = {"weights": whole(model), "steps": guard.gate.steps, "bytes": (guard.nbytes, guard.step_nbytes)}

    model, optimizer, guard = build(sharded, torch.float32)
    take_up(model, optimizer, guard, folder / "one")
    train(model, optimizer, guard, HALF + 1, STEPS)
    found["resumed"] = whole(model)

    model, optimizer, guard = build(DistributedDataParallel, torch.float32)
    train(model, optimizer, guard, 1, STEPS)
    found["ddp"] = {"weights": whole(model), "steps": guard.gate.steps}

    model = tiny.lm()
    hybrid = fully_shard(tiny.lm(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    for name, kind in EVIDENCE.items():
        for wrap, candidate in (("ddp", model), ("fsdp", sharded(tiny.lm())), ("hybrid", hybrid)):
            params = list(candidate.parameters())
            reference = kind(model=candidate, sources=two_ranks.SOURCES)(params, 0)
            found[f"{name} {wrap}"] = (reference.vectors[0], reference.losses)
    found["phi"] = phi_in_bf16()
    model, optimizer, guard = adapters(sharded)
    train(model, optimizer, guard, 1, EPOCH)
    found["lora"] = (guard.engine.sharded, whole(model))
    found["only rows"] = [only_rows(sharded, rows) for rows in TOKENS]
    found["one pass"] = one_pass(sharded)
    found["any loss"] = any_loss(rank)
    found["said"] = refusals(rank)
    found |= trainers(folder)
    torch.save(found, folder / f"found-{rank}.pt")


def one_pass(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Our AdamW, which gates in its own pass; a small model is compiled for once."""
    with mock.patch.object(kernels, "WORTH_COMPILING", 0):
        model = wrap(tiny.lm())
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        evidence = MeanGradient(model=model, sources=two_ranks.SOURCES)
        guard = Guard(optimizer, model, evidence=evidence, gate=Collaborative(beta=0.9))
        train(model, optimizer, guard, 1, EPOCH)
        held = {"one pass": guard.one_pass, "bytes": guard.nbytes, "step bytes": guard.step_nbytes}
        return {**held, "weights": whole(model), "shares": [own.admitted for own in layer_shares(guard)]}


def any_loss(rank: int) -> dict[str, Any]:
    """Each process has half of one source's batches and all of the other's, replicated and sharded."""
    found: dict[str, Any] = {}
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp", fully_shard)):
        case = regressor()
        model = wrap(case.model)
        entries = [(0.5, case.past[rank::2], case.loss), (0.5, case.new, case.loss)]
        reference = protect(SGD(model.parameters(), lr=0.1), model, evidence=entries).refresh()
        found[name] = (reference.vectors[0], reference.losses)
    case = regressor()
    model = fully_shard(case.model)
    with pytest.raises(ValueError) as error:
        protect(SGD(model.parameters(), lr=0.1), model, evidence=[(1.0, case.past[: 2 + rank], case.loss)])
    return {**found, "refused": str(error.value)}


def phi_in_bf16() -> dict[str, Any]:
    """The paper's setting for Phi-3.5, tiny: two processes, FSDP, bfloat16 passes over float32 weights."""
    evidence = {}
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        torch.manual_seed(0)
        model = Phi3ForCausalLM(PHI)
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
        rows = MeanGradient(model=model, sources=two_ranks.SOURCES)
        guard = Guard(optimizer, model, evidence=rows, gate=two_ranks.Recorder())
        evidence[name] = torch.cat([g.flatten() for g in guard.refresh().vectors[0]])
    train(model, optimizer, guard, 1, 4)
    return {**evidence, "steps": guard.steps, "dtypes": [str(p.dtype) for p in guard.params]}


def adapters(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, AdamW, Guard]:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(tiny.lm(), config)
    wrap(model.get_base_model())
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    evidence = MeanGradient(model=model, sources=two_ranks.SOURCES)
    return model, optimizer, Guard(optimizer, model, evidence=evidence, gate=two_ranks.Recorder())


TOKENS = ([3, 19, 20, 39], [1])  # rows of both processes, and of the first alone


def only_rows(wrap: Callable[[nn.Module], nn.Module], rows: list[int]) -> list[Tensor]:
    """The weights after some steps that train these rows of the embedding and everything else."""
    model = wrap(tiny.lm())
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    evidence = MeanGradient(model=model, sources=two_ranks.SOURCES)
    only = {"model.embed_tokens.weight": rows}
    guard = Guard(optimizer, model, evidence=evidence, gate=Collaborative(beta=0.9), only_rows=only)
    train(model, optimizer, guard, 1, 4)
    return whole(model)


def trainers(folder: Path) -> dict[str, Any]:
    """Trainer under DDP and, through Accelerate, under FSDP2; each resumed from its own checkpoint."""
    found: dict[str, Any] = {}
    layers = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    for name, engine in {"ddp": {}, "fsdp": {"fsdp": True, "fsdp_config": layers}}.items():
        with posing_as_a_gpu() if engine else nullcontext():
            run = trained.trainer(folder / name, per_device_train_batch_size=2, save_strategy="steps", **engine)
            run.args.save_steps = 4
            callback = preserve(run, anchors=trained.ANCHORS, probes=trained.PROBES, ema="float32")
            run.train()
            again = trained.trainer(folder / name, per_device_train_batch_size=2, **engine)
            preserve(again, anchors=trained.ANCHORS, probes=trained.PROBES, ema="float32")
            again.train(resume_from_checkpoint=str(folder / name / "checkpoint-4"))
        assert callback.guard is not None
        found[f"trainer {name}"] = (callback.guard.engine.sharded, whole(run.model), whole(again.model))
    return found


@contextmanager
def posing_as_a_gpu() -> Iterator[None]:
    """Accelerate offers FSDP on accelerators only; told that gloo's CPUs are some, it shards them all the same."""
    start = AcceleratorState.__init__

    def posing(self: AcceleratorState, *args: Any, **options: Any) -> None:
        PartialState(cpu=True)
        if not AcceleratorState._shared_state:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        start(self, *args, **options)

    AcceleratorState.__init__ = posing
    try:
        yield
    finally:
        AcceleratorState.__init__ = start


def refusals(rank: int) -> dict[str, str]:
    said: dict[str, str] = {}

    def ask(name: str, question: Any) -> None:
        with pytest.raises((TypeError, ValueError, FloatingPointError)) as error:
            question()
        said[name] = str(error.value)

    rows = tiny.rows(3)
    old = FSDP1(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    ask("fsdp1", lambda: protect(AdamW(old.parameters()), old, anchors=rows))
    model = sharded(tiny.lm())
    evidence = MeanGradient(model=model, sources=two_ranks.SOURCES)
    ask("projection", lambda: Guard(SGD(model.parameters(), lr=0.1), model, evidence=evidence, projection=agem))
    control = NormMatched(Collaborative(beta=0.9))
    ask("norm", lambda: Guard(SGD(model.parameters(), lr=0.1), model, evidence=evidence, gate=control))
    different = MeanGradient(model=model, sources=(Source(name="anchors", weight=1.0, rows=rows[rank:]),))
    ask("rows", lambda: different(list(model.parameters()), 0))
    model.extra = nn.Linear(2, 2)
    ask("mixed", lambda: protect(SGD(model.parameters(), lr=0.1), model, anchors=rows))

    for name, shape, placements in (("tensor", (1, 2), [Shard(0), Shard(1)]), ("alone", (2,), [Shard(0)])):
        linear = nn.Linear(4, 4, bias=False)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, init_device_mesh("cpu", shape), placements))
        ask(name, partial(protect, SGD(linear.parameters(), lr=0.1), linear, anchors=rows))

    model, optimizer, guard = build(sharded, torch.float32)
    guard.refresh()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if rank == 1:
        p.grad.to_local().fill_(float("nan"))
    ask("nan", optimizer.step)
    return said


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, and its checkpoint half way."""
    folder = tmp_path_factory.mktemp("ranks")
    model, optimizer, guard = build(plain, torch.float32)
    train(model, optimizer, guard, 1, HALF)
    keep(model, optimizer, guard, folder / "one")
    train(model, optimizer, guard, HALF + 1, STEPS)
    bytes_held = (guard.nbytes, guard.step_nbytes)
    return {"folder": folder, "weights": whole(model), "steps": guard.gate.steps, "bytes": bytes_held}


@pytest.fixture(scope="module")
def two(one: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of two processes found."""
    two_ranks.launch(work, one["folder"])
    return [torch.load(one["folder"] / f"found-{rank}.pt", weights_only=True) for rank in range(2)]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest relative difference of a parameter."""
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True))


def test_two_ranks_equal_one_process_after_fifty_steps(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for found in two:
        for engine in ("fsdp", "ddp"):
            assert distance(found[engine]["weights"], one["weights"]) < 1e-6
        assert [2 * held for held in found["fsdp"]["bytes"]] == list(one["bytes"])  # each holds a half


@pytest.mark.parametrize("engine", ["fsdp", "ddp"])
def test_masks_differ_only_within_rounding_of_zero(engine: str, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    flips = total = 0
    for step, expected in enumerate(one["steps"]):
        for i, (mask, g_hat, delta) in enumerate(expected):
            parts = [found[engine]["steps"][step][i][0] for found in two]
            other = torch.cat(parts) if engine == "fsdp" else parts[0]
            flipped = other != mask
            near = torch.minimum(g_hat.abs() / g_hat.abs().max(), delta.abs() / delta.abs().max())
            assert bool((near[flipped] < 1e-5).all())
            flips, total = flips + int(flipped.sum()), total + mask.numel()
    assert total == STEPS * sum(p.numel() for p in tiny.lm().parameters())
    assert flips <= total * 1e-4


def test_a_run_of_two_ranks_goes_on_with_one_and_the_other_way_round(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    model, optimizer, guard = build(plain, torch.float32)
    take_up(model, optimizer, guard, one["folder"] / "two")
    assert guard.steps == HALF
    train(model, optimizer, guard, HALF + 1, STEPS)
    assert distance(whole(model), two[0]["fsdp"]["weights"]) < 1e-6
    assert distance(two[0]["resumed"], one["weights"]) < 1e-6


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_trainer_on_two_ranks_gives_the_weights_of_our_loop_and_resumes(engine: str, two: list[dict[str, Any]]) -> None:
    expected = [p.detach() for p in trained.ours().parameters()]
    for found in two:
        is_sharded, weights, resumed = found[f"trainer {engine}"]
        assert is_sharded == (engine == "fsdp")
        assert distance(weights, expected) < 1e-6
        assert distance(resumed, weights) < 1e-6


def test_sharded_adapters_equal_those_of_one_process(two: list[dict[str, Any]]) -> None:
    model, optimizer, guard = adapters(plain)
    train(model, optimizer, guard, 1, EPOCH)
    for is_sharded, weights in (found["lora"] for found in two):
        assert is_sharded
        # Adapters are small beside their steps: 2e-7 apart without vector instructions and 9e-7 with AVX2.
        assert distance(weights, whole(model)) < 1e-5


def test_shards_are_gated_in_the_pass_of_the_optimizer(two: list[dict[str, Any]]) -> None:
    expected = one_pass(plain)
    for found in (own["one pass"] for own in two):
        assert found["one pass"] == expected["one pass"]  # both False where nothing can be compiled
        assert found["step bytes"] == expected["step bytes"] / (1 if found["one pass"] else 2)
        assert found["bytes"] == pytest.approx(expected["bytes"] / 2, rel=0.01)
        assert distance(found["weights"], expected["weights"]) < 1e-6
        assert found["shares"] == pytest.approx(expected["shares"], abs=1e-4)


def test_shards_train_only_the_rows_of_one_process(two: list[dict[str, Any]]) -> None:
    start = whole(tiny.lm())[0]
    for i, rows in enumerate(TOKENS):
        expected = only_rows(plain, rows)
        others = [row for row in range(len(start)) if row not in rows]
        for found in two:
            weights = found["only rows"][i]
            assert torch.equal(weights[0][others].view(torch.int32), start[others].view(torch.int32))
            assert (weights[0][rows] != start[rows]).any(dim=1).all()
            assert distance(weights, expected) < 1e-6


def test_bf16_passes_over_float32_shards_give_the_evidence_of_float32(two: list[dict[str, Any]]) -> None:
    for found in (rank["phi"] for rank in two):
        assert set(found["dtypes"]) == {"torch.float32"}
        assert found["steps"] == 4
        assert found["bfloat16"].dtype == torch.float32
        assert float(torch.cosine_similarity(found["bfloat16"], found["float32"], dim=0)) > 0.999
        assert not torch.equal(found["bfloat16"], found["float32"])


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_over_ranks_is_the_evidence_of_one(name: str, two: list[dict[str, Any]]) -> None:
    model = tiny.lm()
    expected = EVIDENCE[name](model=model, sources=two_ranks.SOURCES)(list(model.parameters()), 0)
    for wrap in ("ddp", "fsdp", "hybrid"):
        (vectors, losses), (others, _) = (found[f"{name} {wrap}"] for found in two)
        whole = [torch.cat(pair) for pair in zip(vectors, others, strict=True)] if wrap == "fsdp" else vectors
        for g, e in zip(whole, expected.vectors[0], strict=True):
            torch.testing.assert_close(g, e, rtol=2**-7 if e.dtype == torch.bfloat16 else 1e-4, atol=1e-7)
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        if wrap == "ddp":
            assert all(torch.equal(a, b) for a, b in zip(vectors, others, strict=True))


def test_states_of_other_shards_and_parameters_are_refused(
    one: dict[str, Any], two: list[dict[str, Any]], tmp_path: Path
) -> None:
    _, _, guard = build(plain, torch.float32)
    state = torch.load(one["folder"] / "plain-0.pt", weights_only=True)
    with pytest.raises(ValueError, match=r"one of 2 shards and this run has 1; .*distributed.checkpoint.save"):
        guard.load_state_dict(state)
    model = nn.Linear(3, 3)
    guard = Guard(SGD(model.parameters(), lr=0.1), model, evidence=MeanGradient(model=model, sources=()))
    with pytest.raises(ValueError, match="belongs to other parameters"):
        checkpoint.load(guard, one["folder"] / "one" / "guard")
    with pytest.raises(ValueError, match=r"it has no .metadata file"):
        checkpoint.load(guard, tmp_path)


def test_two_ranks_refuse_alike(two: list[dict[str, Any]]) -> None:
    for said in (found["said"] for found in two):
        assert "wrapped by FSDP1; use FSDP2" in said["fsdp1"]
        assert "needs whole vectors and the parameters are sharded" in said["projection"]
        assert "needs whole vectors" in said["norm"]
        assert "'extra.weight' is a plain tensor beside" in said["mixed"]
        assert "tensor parallelism is not supported; train with FSDP2" in said["tensor"]
        assert "sharded, but not by FSDP2" in said["alone"]
        assert "the 2 processes hold different anchors; create them in one process and distribute them" in said["rows"]
        assert "is not finite at step 1; the parameters are unchanged" in said["nan"]
    assert "held by another process" in two[0]["said"]["nan"]


def test_two_processes_share_the_batches_of_any_loss(two: list[dict[str, Any]]) -> None:
    case = regressor()
    params = list(case.model.parameters())
    expected = [torch.zeros_like(p) for p in params]
    for batches in (case.past, case.new):
        for batch in batches:
            gradients = torch.autograd.grad(case.loss(case.model, batch), params)
            expected = [e + 0.5 * g / len(batches) for e, g in zip(expected, gradients, strict=True)]
    first, second = (found["any loss"] for found in two)
    for found in (first, second):
        assert distance(found["ddp"][0], expected) < 1e-5
        assert found["ddp"][1] == pytest.approx(found["fsdp"][1])
        assert "the 2 processes hold different numbers of batches of evidence1" in found["refused"]
    shards = zip(first["fsdp"][0], second["fsdp"][0], strict=True)
    assert distance([torch.cat(pair) for pair in shards], expected) < 1e-5
