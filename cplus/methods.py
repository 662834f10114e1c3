"""THE TABLE: a method is what it trains on, its objective, its evidence, its projection and its gate.

A row states what differs from SFT. A user's own method is one more row; an ablation is `dataclasses.replace`.
A row may also train adapters in place of the model's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor, nn

from cplus import adapters, objectives
from cplus.attach import Projection
from cplus.data.encoded import Encoded
from cplus.evidence import Evidence, LogitBasis, MeanGradient, NormAligned, Remembered, Source, Tail
from cplus.gates import Collaborative, Gate, NormMatched, Shuffled
from cplus.projections import agem, collaborative_gradient, ogd

Rows: TypeAlias = objectives.Kind
Refresh: TypeAlias = Literal["once", "epoch"] | int


@dataclass(frozen=True, kw_only=True)
class Past:
    """What is at hand of one past task.

    `synthetic` are probes answered anew by the latest model; `constant` are probes that all have one answer, and
    `balanced` those left when no answer may have more than its share: both are controls.
    """

    name: str
    anchors: Sequence[Encoded] = ()
    probes: Sequence[Encoded] = ()
    synthetic: Sequence[Encoded] = ()
    constant: Sequence[Encoded] = ()
    balanced: Sequence[Encoded] = ()

    def rows(self, kind: Rows) -> Sequence[Encoded]:
        """The rows of one kind."""
        assert kind != "new", "new rows belong to no past task"
        rows: Sequence[Encoded] = getattr(self, kind)
        return rows


@dataclass(frozen=True, kw_only=True)
class Material:
    """New data to learn and the past tasks to keep."""

    new: Sequence[Encoded]
    past: tuple[Past, ...] = ()

    def __post_init__(self) -> None:
        if not self.new:
            raise ValueError("there is no new data to learn: expected at least one row, got none")

    def rows(self, kind: Rows) -> list[Encoded]:
        """The rows of one kind over all past tasks."""
        return list(self.new) if kind == "new" else [row for past in self.past for row in past.rows(kind)]


BuildEvidence: TypeAlias = Callable[[nn.Module, tuple[Source, ...]], Evidence]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table."""

    name: str
    summary: str
    paper: str
    train_on: tuple[Rows, ...] = ("new",)
    objective: objectives.Build = objectives.answers
    evidence: tuple[tuple[float, Rows], ...] = ()
    parts: int = 1
    refresh: Refresh = "epoch"
    reduction: BuildEvidence = lambda model, sources: MeanGradient(model=model, sources=sources)
    projection: Projection | None = None
    gate: Callable[[int], Gate] | None = None
    adapter: adapters.Adapter | None = None

    @property
    def needs(self) -> tuple[Rows, ...]:
        """The kinds of rows the method cannot do without, in the order of first use."""
        kinds = (*self.train_on, *self.objective.needs, *(kind for _, kind in self.evidence))
        return tuple(dict.fromkeys(kinds))

    def trained(self, model: nn.Module, seed: int) -> nn.Module:
        """What the optimizer is made for: the model itself, or the model with the row's adapters."""
        return model if self.adapter is None else self.adapter(model, seed)

    def check(self, material: Material) -> None:
        """Refuse material that lacks a kind of rows the method needs."""
        for kind in self.needs:
            if not material.rows(kind):
                advice = f"give some {kind}" if kind == "anchors" else "build a bank with 'cplus probe'"
                raise ValueError(f"method {self.name!r} needs {kind} and got none; {advice}")

    def sources(self, material: Material) -> tuple[Source, ...]:
        """The evidence's sources: task-level gradients are averaged over the past tasks.

        Paper: App. E.9.    g_hat = mean over past tasks of (w * g_anchor + (1 - w) * g_probe)
        """
        return tuple(
            Source(
                name=f"{past.name} {kind}" if len(material.past) > 1 else kind,
                weight=weight / len(material.past),
                rows=past.rows(kind),
                parts=self.parts if kind == "probes" else 1,
            )
            for past in material.past
            for weight, kind in self.evidence
        )


def _first_vector(project: Callable[[Sequence[Tensor], Sequence[Tensor]], None]) -> Projection:
    return lambda gradients, vectors: project(gradients, vectors[0])


def _logit_basis(model: nn.Module, sources: tuple[Source, ...]) -> Evidence:
    return LogitBasis(model=model, rows=[row for source in sources for row in source.rows])


BLEND: tuple[tuple[float, Rows], ...] = ((0.5, "anchors"), (0.5, "probes"))
CPL_PAPER = "Yang et al. 2026, CPL"

_ROWS = (
    Method(name="sft", summary="Supervised fine-tuning on the new data alone.", paper="Sec. 4.1"),
    Method(
        name="replay",
        summary="Trains on new data and anchors, the anchors repeated to equal weight.",
        paper="Rolnick et al. 2019",
        train_on=("new", "anchors"),
    ),
    Method(
        name="probe-replay",
        summary="Trains on new data and self-probes with the frozen model's answers.",
        paper="Resta et al. 2024; Fig. 5",
        train_on=("new", "probes"),
    ),
    Method(
        name="anchor-probe-replay",
        summary="Trains on new data, self-probes and anchors, the anchors repeated to the probes' weight.",
        paper="Fig. 5; App. C.3",
        train_on=("new", "probes", "anchors"),
    ),
    Method(
        name="ssr",
        summary="Trains on new data and synthetic rows whose answers the latest model refined.",
        paper="Huang et al. 2024, SSR",
        train_on=("new", "synthetic"),
    ),
    Method(
        name="agem",
        summary="Removes the gradient's component that conflicts with the anchors' gradient, at each step.",
        paper="Chaudhry et al. 2019",
        evidence=((1.0, "anchors"),),
        refresh=1,
        projection=_first_vector(agem),
    ),
    Method(
        name="ogd",
        summary="Projects the gradient orthogonally to the anchors' ground-truth-logit gradients.",
        paper="Farajtabar et al. 2020, OGD-GTL",
        evidence=((1.0, "anchors"),),
        refresh="once",
        reduction=_logit_basis,
        projection=ogd,
    ),
    Method(
        name="distillation",
        summary="Adds the divergence from the frozen model's output on the anchors to the loss.",
        paper="Hinton et al. 2015",
        objective=objectives.Distillation(weight=1.0),
    ),
    Method(
        name="ewc",
        summary="Adds a penalty on moving the weights that mattered for the anchors.",
        paper="Kirkpatrick et al. 2017",
        objective=objectives.ElasticWeights(weight=10.0),
    ),
    Method(
        name="lora",
        summary="Supervised fine-tuning of low-rank adapters on every linear layer, the model frozen.",
        paper="Hu et al. 2022",
        adapter=adapters.lora,
    ),
    Method(
        name="osf",
        summary="Supervised fine-tuning of each layer's smaller singular directions, orthogonal to the larger.",
        paper="Nayak et al. 2025",
        adapter=adapters.osf,
    ),
    Method(
        name="cpl",
        summary="Blocks every coordinate of the update that the anchors' gradient says is harmful.",
        paper=CPL_PAPER,
        evidence=((1.0, "anchors"),),
        gate=lambda seed: Collaborative(beta=0.0),
    ),
    Method(
        name="cplus",
        summary="Scales down the coordinates that anchors and self-probes say are harmful, smoothed over steps.",
        paper="Algorithm 1",
        evidence=BLEND,
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="norm-matched",
        summary="Control: the plain update's direction at the norm CPLUS would apply.",
        paper="App. E.6",
        evidence=BLEND,
        gate=lambda seed: NormMatched(Collaborative(beta=0.9)),
    ),
    Method(
        name="shuffled",
        summary="Control: CPLUS's coefficients permuted inside each tensor at every step.",
        paper="App. E.6",
        evidence=BLEND,
        gate=lambda seed: Shuffled(Collaborative(beta=0.9), seed=seed),
    ),
    Method(
        name="constant-label",
        summary="Control: CPLUS with every probe's answer replaced by the bank's most frequent one.",
        paper="docs/interpretations.md",
        evidence=((0.5, "anchors"), (0.5, "constant")),
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="balanced-label",
        summary="Control: CPLUS with no answer holding more than its even share of the probes.",
        paper="docs/interpretations.md",
        evidence=((0.5, "anchors"), (0.5, "balanced")),
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="cplus-anchors",
        summary="Ablation: the anchors' gradient alone, smoothed.",
        paper="Table 1",
        evidence=((1.0, "anchors"),),
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="cplus-probes",
        summary="Ablation: the self-probes' gradient alone, smoothed.",
        paper="Table 1",
        evidence=((1.0, "probes"),),
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="cplus-no-ema",
        summary="Ablation: CPLUS with the binary mask of each step.",
        paper="Table 1; Table 3",
        evidence=BLEND,
        gate=lambda seed: Collaborative(beta=0.0),
    ),
    Method(
        name="cplus-norm-aligned",
        summary="Ablation: the probes' gradient scaled to the anchors' norm before the blend.",
        paper="Table 1",
        evidence=BLEND,
        reduction=lambda model, sources: NormAligned(model=model, sources=sources),
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="cplus-cvar",
        summary="Ablation: each source's gradient over its worst quarter of examples only.",
        paper="Table 3",
        evidence=BLEND,
        reduction=lambda model, sources: Tail(model=model, sources=sources),
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="cplus-rotating",
        summary="Variant: each epoch sees another quarter of the bank, at a quarter of the cost.",
        paper="docs/interpretations.md",
        evidence=BLEND,
        parts=4,
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="cplus-remembering",
        summary="Variant: as cplus-rotating, and what was seen before keeps half its weight.",
        paper="docs/interpretations.md",
        evidence=BLEND,
        parts=4,
        reduction=lambda model, sources: Remembered(MeanGradient(model=model, sources=sources), 0.5),
        gate=lambda seed: Collaborative(beta=0.9),
    ),
    Method(
        name="cplus-gradient",
        summary="Ablation: the blended mask on the raw gradient instead of the optimizer's update.",
        paper="Sec. 3.2.3",
        evidence=BLEND,
        projection=_first_vector(collaborative_gradient),
    ),
    Method(
        name="replay-cplus",
        summary="Replay's training rows and CPLUS's gate together.",
        paper="docs/interpretations.md",
        train_on=("new", "anchors"),
        evidence=BLEND,
        gate=lambda seed: Collaborative(beta=0.9),
    ),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def method(name: str) -> Method:
    """The row of that name; a wrong name is answered with the nearest ones."""
    if name not in METHODS:
        from difflib import get_close_matches

        near = get_close_matches(name, METHODS, n=3) or list(METHODS)
        raise ValueError(f"unknown method {name!r}; did you mean {', '.join(near)}? 'cplus methods' lists them all")
    return METHODS[name]
