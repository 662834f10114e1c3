"""Diagnostics: each quantity equals its slow flat calculation, and observing changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from quadratic import Bag, PastEvidence, new_gradient
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from cplus import models
from cplus.core import kernels
from cplus.core.gates import Collaborative
from cplus.core.guard import Guard
from cplus.core.losses import answer_losses
from cplus.core.optim import AdamW
from cplus.core.rows import Encoded
from cplus.data.interfaces import build
from cplus.data.tasks import load_task, split
from cplus.lab import runs
from cplus.lab.diagnostics import (
    OBSERVED,
    Admission,
    Coordinates,
    Evidences,
    Observation,
    References,
    audit,
    propose,
)
from cplus.lab.records import load_result, save_result
from cplus.lab.runs import Comparison, set_up
from cplus.methods.objectives import mean_backward
from cplus.methods.table import METHODS
from cplus.models.scoring import predict
from cplus.training.gateshares import layer_of, layer_shares
from cplus.training.loop import Prepared, Schedule, adapt, epoch_batches, prepare
from cplus.training.settings import RunSpec

PAST = tiny.rows(15, seed=9)
MATERIAL = tiny.material(new=10, anchors=4, probes=6)
FULL = dataclasses.replace(MATERIAL, past=(dataclasses.replace(MATERIAL.past[0], anchors=PAST),))
SCHEDULE = Schedule(epochs=3, batch_size=4)
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
can_compile = pytest.mark.skipif(not kernels.can_compile("cpu"), reason="no C++ compiler here")
Flat = np.ndarray[Any, Any]
Seen = tuple[int, Tensor, Tensor, Tensor]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks much smaller than a tensor, so that every sum runs over several."""
    monkeypatch.setattr("cplus.lab.diagnostics.BLOCK", 100)


def trained(
    method: str,
    names: tuple[str, ...] = (),
    change: Callable[[Prepared], None] = lambda prepared: None,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, dict[str, Any], Prepared]:
    """The tiny model through the loop, observed."""
    model = tiny.lm().to(dtype)
    optimizer = AdamW(model.parameters(), **OPTIONS)
    prepared = prepare(METHODS[method], optimizer, model, MATERIAL, seed=0)
    change(prepared)
    observation = Observation(names, prepared, full=FULL, schedule=SCHEDULE, seed=0)
    for event in adapt(model, optimizer, prepared, schedule=SCHEDULE, seed=0):
        observation(event)
    return model, observation.report(), prepared


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# --- the slow way: whole vectors in float64, one formula at a time ---


@dataclasses.dataclass(frozen=True)
class Step:
    epoch: int
    delta: Flat
    g_hat: Flat
    c: Flat
    g_past: Flat
    g_own: Flat

    @property
    def mask(self) -> Flat:
        return mask(self.g_hat, self.delta)


def mask(g: Flat, delta: Flat) -> Flat:
    return (np.sign(g) * np.sign(delta) <= 0).astype(np.float64)


def flat(tensors: Any) -> Flat:
    return np.concatenate([t.detach().double().numpy().ravel() for t in tensors])


def gradient(model: nn.Module, rows: list[Encoded]) -> Flat:
    model.zero_grad()
    (sum(answer_losses(model, [row]).sum() for row in rows) / len(rows)).backward()
    found = flat(p.grad for p in model.parameters())
    model.zero_grad()
    return found


def slow_run(beta: float, weight: float) -> tuple[list[Step], nn.Module]:
    """CPLUS by hand around a plain AdamW: every vector of every step is kept."""
    model = tiny.lm().double().eval()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **OPTIONS)
    [past] = MATERIAL.past
    steps, ema = [], np.zeros(sum(p.numel() for p in params))
    for epoch in range(1, SCHEDULE.epochs + 1):
        probes, g_past = gradient(model, list(past.probes)), gradient(model, PAST)
        g_hat = weight * gradient(model, list(past.anchors)) + (1 - weight) * probes
        for rows in epoch_batches(METHODS["sft"], MATERIAL, SCHEDULE, seed=0, epoch=epoch):
            before = [p.detach().clone() for p in params]
            optimizer.zero_grad()
            mean_backward(model, rows, answer_losses)
            optimizer.step()
            delta = flat(params) - flat(before)
            ema = beta * ema + (1 - beta) * mask(g_hat, delta)
            c = np.clip(ema / (1 - beta ** (len(steps) + 1)), 0, 1)
            steps.append(Step(epoch, delta, g_hat, c, g_past, weight * g_past + (1 - weight) * probes))
            at = 0
            for p, old in zip(params, before, strict=True):
                here = torch.from_numpy(c[at : at + p.numel()]).view_as(p)
                p.data.copy_(torch.lerp(old, p.data, here))
                at += p.numel()
    return steps, model


def layer_slices() -> dict[str, Flat]:
    names = [(layer_of(name), p.numel()) for name, p in tiny.lm().named_parameters()]
    labels = np.concatenate([np.full(count, name) for name, count in names])
    return {name: labels == name for name in dict.fromkeys(name for name, _ in names)}


def groups(report: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[Step], bool], Any]]:
    """Each row of a report with the steps and the coordinates it is about."""
    for row in report["epochs"]:
        yield row, lambda step, row=row: step.epoch == row["epoch"], slice(None)
    for row in report["layers"]:
        yield row, lambda step: True, layer_slices()[row["layer"]]


CASES = [("cplus", 0.9, 0.5), ("cpl", 0.0, 1.0)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("method", "beta", "weight"), CASES)
def test_admission_and_reference_are_the_flat_calculation(method: str, beta: float, weight: float) -> None:
    steps, model = slow_run(beta, weight)
    observed, report, _ = trained(method, ("admission", "reference"), dtype=torch.float64)
    for p, q in zip(model.parameters(), observed.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)
    assert [row["epoch"] for row in report["admission"]["epochs"]] == [1, 2, 3]
    assert [row["layer"] for row in report["reference"]["layers"]] == list(layer_slices())
    fields = ("delta", "mask", "c", "g_hat", "g_past", "g_own")
    for row, chosen, at in groups(report["admission"]):
        d, m, c, *_ = (np.concatenate([getattr(s, k)[at] for s in steps if chosen(s)]) for k in fields)
        for kind, k in (("mask", m), ("coefficient", c)):
            assert row[kind]["coordinates"] == pytest.approx(k.mean(), rel=1e-6)
            assert row[kind]["energy"] == pytest.approx(((k * d) ** 2).sum() / (d * d).sum(), rel=1e-6)
    for row, chosen, at in groups(report["reference"]):
        d, m, c, _, past, own = (np.concatenate([getattr(s, k)[at] for s in steps if chosen(s)]) for k in fields)
        harm, safe = np.maximum(past * d, 0), np.maximum(-past * d, 0)
        assert row["harmful"] == pytest.approx(harm.sum(), rel=1e-6)
        for kind, k in (("mask", m), ("coefficient", c)):
            assert row[kind]["harmful_admitted"] == pytest.approx((k * harm).sum(), rel=1e-6)
            assert row[kind]["safe_removed"] == pytest.approx(((1 - k) * safe).sum(), rel=1e-6)
            assert row[kind]["safe_removed_share"] == pytest.approx(((1 - k) * safe).sum() / safe.sum(), rel=1e-6)
        for name, g in (("own", own), ("cpl", past)):
            expected = 1 - (d * d * np.abs(m - mask(g, d))).sum() / (d * d).sum()
            assert row["agreement"][name] == pytest.approx(expected, rel=1e-6)


# --- observing changes nothing ---


def unpacked(prepared: Prepared) -> None:
    prepared.guard.gate.uses = "values"  # type: ignore[union-attr]


@pytest.mark.parametrize(("method", "change"), [("cplus", lambda prepared: None), ("shuffled", unpacked)])
def test_weights_are_bitwise_the_same_with_every_tap_on(method: str, change: Callable[[Prepared], None]) -> None:
    plain, nothing, _ = trained(method, (), change)
    observed, found, prepared = trained(method, OBSERVED, change)
    assert prepared.guard is not None
    assert prepared.guard.steps == 9
    assert nothing == {}
    assert set(found) == set(OBSERVED)
    assert same(plain, observed)


def guarded(kind: type[Optimizer], observed: bool) -> tuple[Bag, Guard, Admission]:
    bag = Bag(torch.float32)
    optimizer = kind(bag.weights, **OPTIONS)
    guard = Guard(optimizer, bag, evidence=PastEvidence(), gate=Collaborative(beta=0.9))
    admission = Admission(["a", "b", "c"])
    references = References(guard, ["a", "b", "c"], cpl=PastEvidence(), own=PastEvidence())
    if observed:
        guard.observers += [admission, references, Coordinates("a", 0, 12, steps=[1, 5], seed=0)]
    for batch in range(1, 25):
        if batch % 6 == 1:
            guard.refresh()
            references.refresh()
        for p, g in zip(bag.weights, new_gradient([p.detach() for p in bag.weights], batch), strict=True):
            p.grad = g
        optimizer.step()
    return bag, guard, admission


@can_compile
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_compiled_passes_are_observed_and_stay_the_same(kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 10**12)
    _, slow, expected = guarded(kind, observed=True)
    monkeypatch.setattr(kernels, "WORTH_COMPILING", 0)
    plain, _, _ = guarded(kind, observed=False)
    observed, fast, found = guarded(kind, observed=True)
    assert fast.gating.compiled
    assert not slow.gating.compiled
    assert fast.one_pass == (kind is AdamW)
    assert same(plain, observed)
    for row, other in zip(found.report()["layers"], expected.report()["layers"], strict=True):
        for kept in ("mask", "coefficient"):
            assert row[kept] == pytest.approx(other[kept], rel=1e-4)


def observed_steps(names: tuple[str, ...] = (), decay: float = 0.1) -> tuple[list[Seen], dict[str, Any], Prepared]:
    """Every step of every tensor: its position, the evidence's sign, the proposal and the coefficient."""
    seen: list[Seen] = []

    def record(prepared: Prepared) -> None:
        assert prepared.guard is not None
        prepared.guard.optimizer.param_groups[0]["weight_decay"] = decay
        prepared.guard.observers.append(
            lambda i, proposal, c: seen.append((i, proposal.sign.clone(), proposal.delta.clone(), c.clone()))
        )

    _, report, prepared = trained("cplus", names, record)
    return seen, report, prepared


# The decay of the last step is read off the weights after it; without decay nothing is approximate.
@pytest.mark.parametrize(("decay", "tolerance"), [(0.0, 1e-5), (0.1, 1e-2)])
def test_the_jobs_energy_share_is_that_of_the_last_step(decay: float, tolerance: float) -> None:
    seen, _, prepared = observed_steps(decay=decay)
    shares = {share.name: share for share in layer_shares(prepared.guard)}
    last = {row[0]: row for row in seen}
    delta, c = (flat(last[i][k] for i in sorted(last)) for k in (2, 3))
    for name, at in layer_slices().items():
        assert shares[name].admitted == pytest.approx(c[at].mean(), rel=1e-6)
        expected = ((c * delta)[at] ** 2).sum() / (delta[at] ** 2).sum()
        assert shares[name].energy == pytest.approx(expected, rel=tolerance)


# --- proposals without taking them, and what is read off them ---


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: Adam(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: AdamW(p, lr=0.1),
    ],
)
def test_a_proposal_is_the_step_that_follows_bitwise_and_leaves_no_trace(make: Callable[..., Optimizer]) -> None:
    bag, other = Bag(torch.float32), Bag(torch.float32)
    optimizer, frozen = make(list(bag.weights)), make(list(other.weights))
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    calls: list[int] = []
    for batch in range(1, 6):
        for p, q, g in zip(
            bag.weights, other.weights, new_gradient([p.detach() for p in bag.weights], batch), strict=True
        ):
            p.grad = q.grad = g
        kept = copy.deepcopy((list(bag.weights), optimizer.state_dict()))
        proposed = [propose(optimizer, p) for p in bag.weights]
        advanced = [propose(frozen, q, advance=True) for q in other.weights]
        assert all(torch.equal(p, q) for p, q in zip(bag.weights, kept[0], strict=True))
        assert str(optimizer.state_dict()) == str(kept[1])
        optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(bag.weights, proposed, strict=True))
        # The frozen twin never moved, but its moments went on: without decay its steps are the same.
        if not optimizer.param_groups[0]["weight_decay"]:
            moved = [a - q for a, q in zip(advanced, other.weights, strict=True)]
            steps = [p - q for p, q in zip(bag.weights, kept[0], strict=True)]
            for a, b in zip(moved, steps, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(calls) == 5
    assert same(other, Bag(torch.float32))


def test_geometry_previews_the_same_rows_at_states_over_the_run() -> None:
    _, report, _ = trained("cplus", ("geometry",))
    assert [row["completed_epochs"] for row in report["geometry"]] == [0, 1, 2]
    model, [past] = tiny.lm(), MATERIAL.past
    g_hat = 0.5 * gradient(model, list(past.anchors)) + 0.5 * gradient(model, list(past.probes))
    [d] = slow_deltas(model, [list(MATERIAL.new)])
    m, first = mask(g_hat, d), report["geometry"][0]["mask"]
    assert first["coordinates"] == pytest.approx(m.mean(), abs=1e-3)
    assert first["energy"] == pytest.approx((m * d * d).sum() / (d * d).sum(), abs=1e-3)


def test_coordinates_shows_a_fixed_sample_at_chosen_steps() -> None:
    seen, report, _ = observed_steps(("coordinates",))
    found = report["coordinates"]
    names = [name for name, _ in tiny.lm().named_parameters()]
    assert found["tensor"] == "model.layers.1.mlp.down_proj.weight"
    at = [int(i) for i in found["indices"].split()]
    assert len(at) == 512 == len(set(at))
    here = [row[1:] for row in seen if row[0] == names.index(found["tensor"])]
    assert [row["step"] for row in found["steps"]] == [1, 4, 6, 9]
    for row in found["steps"]:
        sign, delta, c = (t.flatten()[at] for t in here[row["step"] - 1])
        assert row["evidence"] == "".join({1: "+", -1: "-", 0: "0"}[int(s)] for s in sign)
        assert [float(x) for x in row["proposal"].split()] == pytest.approx(delta.tolist(), rel=0.01, abs=1e-12)
        assert [float(x) for x in row["coefficient"].split()] == pytest.approx(c.tolist(), abs=1e-3)


def slow_deltas(model: nn.Module, batches: list[list[Encoded]]) -> list[Flat]:
    """Every proposal at the model's weights, which stay; the moments advance."""
    theta = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    deltas = []
    for rows in batches:
        optimizer.zero_grad()
        mean_backward(model, rows, answer_losses)
        optimizer.step()
        deltas.append(flat(model.parameters()) - flat(theta))
        for p, old in zip(model.parameters(), theta, strict=True):
            p.data.copy_(old)
    return deltas


@pytest.mark.usefixtures("small_blocks")
def test_the_audit_is_the_flat_calculation_over_kept_masks() -> None:
    model = tiny.lm().double()
    anchors = {2: PAST[:2], 4: PAST[:4], 8: PAST[:8]}
    given = Evidences(anchors=anchors, num_anchors=4, probes=tiny.rows(6, seed=2), past=PAST, anchor_weight=0.25)
    batches = epoch_batches(METHODS["sft"], MATERIAL, Schedule(epochs=1, batch_size=2), seed=0, epoch=1)
    found = audit(model, AdamW(model.parameters(), **OPTIONS), batches, given, beta=0.8)
    assert same(model, tiny.lm().double())
    assert all(p.grad is None for p in model.parameters())
    assert (found["updates"], found["past"], found["budgets"]) == (5, 15, [2, 4, 8])

    deltas = slow_deltas(model, batches)
    probes, full = gradient(model, list(given.probes)), gradient(model, PAST)
    g = {count: gradient(model, list(rows)) for count, rows in anchors.items()}
    blends = {count: 0.25 * g[count] + 0.75 * probes for count in anchors} | {"past": 0.25 * full + 0.75 * probes}

    def trajectory(g: Flat, beta: float) -> list[Flat]:
        ema, found = np.zeros_like(g), []
        for t, delta in enumerate(deltas, start=1):
            ema = beta * ema + (1 - beta) * mask(g, delta)
            found.append(ema / (1 - beta**t))
        return found

    def slow(first: tuple[Flat, float], second: tuple[Flat, float], at: Any = slice(None)) -> float:
        pairs = zip(deltas, trajectory(*first), trajectory(*second), strict=True)
        apart = sum((d[at] ** 2 * np.abs(a[at] - b[at])).sum() for d, a, b in pairs)
        return 1 - float(apart / sum((d[at] ** 2).sum() for d in deltas))

    rows = [(found, slice(None)), *((row, layer_slices()[row["layer"]]) for row in found["layers"])]
    for row, at in rows:
        for i, count in enumerate((2, 4, 8)):
            assert row["cpl"][i] == pytest.approx(slow((g[count], 0.0), (full, 0.0), at), abs=1e-6)
            assert row["cplus"][i] == pytest.approx(slow((blends[count], 0.8), (blends["past"], 0.8), at), abs=1e-6)
            assert row["cross"][i] == pytest.approx(slow((blends[count], 0.8), (full, 0.0), at), abs=1e-6)
    vectors = {"anchors": g[4], "probes": probes, "blend": blends[4], "past": full, "past blend": blends["past"]}
    assert len(found["references"]) == 10
    for row in found["references"]:
        expected = slow((vectors[row["first"]], 0.0), (vectors[row["second"]], 0.0))
        assert row["agreement"] == pytest.approx(expected, abs=1e-6)

    # The coordinates are those with the most energy, and the masks there its update-weighted means.
    view, names = found["coordinates"], [(name, p.numel()) for name, p in model.named_parameters()]
    here = np.concatenate([np.full(count, name == view["tensor"]) for name, count in names])
    at = [int(i) for i in view["indices"].split()]
    energies = [d[here] ** 2 for d in deltas]
    energy = sum(energies)
    assert set(at) == set(np.argsort(-energy)[:512].tolist()) or min(energy[at]) >= np.sort(energy)[-512]
    means = sum(e * c[here] for e, c in zip(energies, trajectory(blends[4], 0.8), strict=True)) / energy
    assert [float(x) for x in view["cplus"]["4"].split()] == pytest.approx(means[at].tolist(), abs=2e-3)
    assert set(view["cplus"]) == {"2", "4", "8", "past"}


# --- from a spec ---


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Comparison]:
    """The toy model on a corner of one domain."""
    base = models.load("toy-s", device="cpu")
    bound = build("cloze", base.tokenizer)
    examples = load_task("harbours").examples[:160]
    halves = split(examples, predict(base.model, bound, examples))
    spec = RunSpec(
        model="toy-s", task="harbours", interface="cloze", method="cplus", seed=0, num_anchors=6, num_probes=12,
        num_new=16, optimizer="adamw", lr=1e-3, weight_decay=0.0, epochs=2, batch_size=8,
    )  # fmt: skip
    return spec, set_up(spec, base, (bound, halves), tmp_path_factory.mktemp("banks"))


def test_a_run_is_the_same_with_all_diagnostics_and_its_record_stays_small(
    setting: tuple[RunSpec, Comparison], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, given = setting
    weights, measure = [], runs.measure

    def measured(given: Comparison, model: Any, *known: Any) -> dict[str, float]:
        weights.append(flat(model.parameters()))
        return measure(given, model, *known)

    monkeypatch.setattr(runs, "measure", measured)
    plain = runs.run(spec, given)
    asked = dataclasses.replace(spec, diagnose=(*OBSERVED, "audit"))
    observed = runs.run(asked, given)
    assert np.array_equal(*weights)
    assert (plain.retention, plain.acquisition) == (observed.retention, observed.acquisition)
    assert plain.diagnostics == {}
    assert set(observed.diagnostics) == {*OBSERVED, "audit"}
    assert observed.seconds > 0
    assert observed.diagnostics["audit"]["budgets"] == [4, 6, 8, 16, 32, 64]
    path = save_result(observed, tmp_path)
    assert load_result(path).diagnostics == json.loads(json.dumps(observed.diagnostics))
    assert path.stat().st_size < 80_000
    assert all(0 <= row["agreement"] <= 1 for row in observed.diagnostics["audit"]["references"])
    for changes, message in (
        ({"diagnose": ("admision",)}, "unknown diagnostic 'admision'; expected some of admission"),
        ({"diagnose": ("admission",), "method": "sft"}, "method 'sft' has no gate"),
        ({"diagnose": ("reference",), "method": "agem"}, "method 'agem' has no gate"),
    ):
        with pytest.raises(ValueError, match=message):
            runs.run(dataclasses.replace(spec, **changes), given)
    with pytest.raises(ValueError, match="there are no probes"):
        Evidences(anchors={4: PAST[:4]}, num_anchors=4, probes=(), past=PAST)
