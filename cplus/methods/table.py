"""The table of methods: a method is its training rows, its objective, its evidence, its projection and its gate."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from cplus.base.environment import user_module
from cplus.methods import adapters, after, objectives
from cplus.methods.objectives import BANK as BANK
from cplus.methods.objectives import Material as Material
from cplus.methods.objectives import Past as Past
from cplus.methods.objectives import Rows as Rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cplus.core.evidence import Evidence, Source
    from cplus.core.gates import Gate
    from cplus.core.guard import Projection


# A row states what differs from SFT, which settings the method has, and the rows and memory it needs; no other code in
# this package tests for a method by name. A user's own method is one more row, given as `python:module:ROW` in place of
# a name; an ablation is `dataclasses.replace`. A row may also train adapters instead of the model's own weights.


Refresh: TypeAlias = Literal["once", "epoch"] | int


class BuildEvidence(Protocol):
    """Evidence of a model from its sources."""

    def __call__(self, *, model: nn.Module, sources: tuple[Source, ...]) -> Evidence: ...


def _named(path: str, *args: Any, **more: Any) -> Any:
    return resolve_name(f"cplus.{path}")(*args, **more)


def lazy(path: str, **more: Any) -> Any:
    """What the function or class at this path returns; it is imported when first called, for torch takes seconds."""
    return partial(_named, path, **more)


mean_gradient: BuildEvidence = lazy("core.evidence:MeanGradient")
"""The paper's evidence."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table.

    `beta` is the smoothing of a gate that has this setting and `ema` the type its average is kept in, `memory` the
    weight of earlier evidence at a refresh, and `parts` the number of parts the bank is split into, one per refresh.
    `vectors` states whether the evidence is one vector or one per anchor. `gate` builds the gate from the row itself
    and a seed. `after` changes the trained weights once, at the end.
    """

    name: str
    summary: str
    paper: str
    train_on: tuple[Rows, ...] = ("new",)
    objective: objectives.Build = objectives.answers
    evidence: tuple[tuple[float, Rows], ...] = ()
    parts: int = 1
    refresh: Refresh = "epoch"
    reduction: BuildEvidence = mean_gradient
    memory: float = 0.0
    vectors: Literal["one", "one per anchor"] = "one"
    projection: Projection | None = None
    beta: float | None = None
    ema: Literal["float32", "bfloat16", "uint8"] = "float32"
    gate: Callable[[Method, int], Gate] | None = None
    adapter: adapters.Adapter | None = None
    after: after.After | None = None

    def __post_init__(self) -> None:
        if self.gate is None and self.projection is None and self.evidence:
            raise ValueError(f"method {self.name!r} has evidence but no gate or projection that uses it; add one")

    @property
    def guarded(self) -> bool:
        """Whether anything acts around the optimizer's step."""
        return self.gate is not None or self.projection is not None

    @property
    def needs_bank(self) -> bool:
        """Whether the method uses self-probes in any form."""
        return any(kind in BANK for kind in self.needs)

    @property
    def needs_anchors(self) -> bool:
        """Whether the method uses anchors, directly or to generate a bank."""
        return self.needs_bank or "anchors" in self.needs

    @property
    def draws(self) -> bool:
        """Whether the seed has an effect: on the choice of anchors, the order of replayed rows or the adapters."""
        return self.needs_anchors or self.adapter is not None

    def build_gate(self, seed: int) -> Gate | None:
        """A new instance of the row's gate."""
        return None if self.gate is None else self.gate(self, seed)

    def build_evidence(self, model: nn.Module, material: Material) -> Evidence | None:
        """The evidence that the row's gate or projection reads; None if it reads none."""
        if not self.evidence:
            return None
        from cplus.methods.variants import Remembered

        found = self.reduction(model=model, sources=self.sources(material))
        return Remembered(found, self.memory) if self.memory else found

    @property
    def needs(self) -> tuple[Rows, ...]:
        """The kinds of rows that the method requires, in the order of first use."""
        last = () if self.after is None else self.after.needs
        kinds = (*self.train_on, *self.objective.needs, *(kind for _, kind in self.evidence), *last)
        return tuple(dict.fromkeys(kinds))

    @property
    def part_with_strength(self) -> str | None:
        """The field whose part has the setting `strength`; None if no part has it."""
        names = ("objective", "reduction", "gate", "adapter", "after")
        return next((name for name in names if hasattr(getattr(self, name), "strength")), None)

    @property
    def strength(self) -> float | None:
        """The strength of the part that has one: what it is depends on the method (docs/methods.md)."""
        return None if (name := self.part_with_strength) is None else getattr(self, name).strength

    @property
    def bytes_per_parameter(self) -> float:
        """The memory held besides the model and the guard, in float32; what `after` needs is the base's weights."""
        return self.objective.bytes_per_parameter + (0.0 if self.after is None else 4.0)

    def trained(self, model: nn.Module, seed: int) -> nn.Module:
        """The module that the optimizer trains: the model itself, or the model with the row's adapters."""
        return model if self.adapter is None else self.adapter(model, seed)

    def check(self, material: Material) -> None:
        """Refuse material that lacks a kind of rows the method needs."""
        for kind in self.needs:
            if not material.rows(kind):
                advice = f"give some {kind}" if kind == "anchors" else "build a bank with 'cplus probe'"
                raise ValueError(f"method {self.name!r} needs {kind} and got none; {advice}")

    def sources(self, material: Material) -> tuple[Source, ...]:
        """The sources of the evidence: task-level gradients are averaged over the past tasks.

        Paper: App. E.9.    g_hat = mean over past tasks of (w * g_anchor + (1 - w) * g_probe)
        """
        from cplus.core.evidence import Source

        return tuple(
            Source(
                name=f"{past.name} {kind}" if len(material.past) > 1 else kind,
                weight=weight / len(material.past),
                rows=past.rows(kind),
                parts=self.parts if kind in BANK else 1,
            )
            for past in material.past
            for weight, kind in self.evidence
        )


def _logit_basis(*, model: nn.Module, sources: tuple[Source, ...]) -> Evidence:
    from cplus.methods.variants import LogitBasis

    return LogitBasis(model=model, rows=[row for source in sources for row in source.rows])


def _agem(gradients: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]]) -> None:
    _named("methods.variants:agem", gradients, vectors[0])


def _masked_gradient(gradients: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]]) -> None:
    _named("methods.variants:collaborative_gradient", gradients, vectors[0])


def smoothed(row: Method, seed: int) -> Gate:
    """The paper's gate with the row's smoothing."""
    from cplus.core.gates import Collaborative

    assert row.beta is not None, f"method {row.name} has no beta"
    return Collaborative(beta=row.beta, ema=row.ema)


def binary(row: Method, seed: int) -> Gate:
    """The paper's gate without smoothing, by definition of the row."""
    from cplus.core.gates import Collaborative

    return Collaborative(beta=0.0)


def _norm_matched(row: Method, seed: int) -> Gate:
    from cplus.core.gates import NormMatched

    return NormMatched(smoothed(row, seed))


def _shuffled(row: Method, seed: int) -> Gate:
    from cplus.core.gates import Shuffled

    return Shuffled(smoothed(row, seed), seed=seed)


def _elementwise(path: str, uses: Literal["nothing", "signs", "coefficients"], row: Method, seed: int) -> Gate:
    from cplus.core.gates import Elementwise

    return Elementwise(resolve_name(f"cplus.{path}"), uses=uses, whole=False)


@dataclass(frozen=True)
class LargestMomenta(objectives.Strength):
    """MoFO's gate; `strength` is the share of each tensor's coordinates that moves."""

    strength: float
    within = "(0, 1]"

    def __call__(self, row: Method, seed: int) -> Gate:
        """A new gate."""
        from cplus.core.gates import Elementwise, largest_momenta

        return Elementwise(lambda step: largest_momenta(step, self.strength), uses="nothing")


@dataclass(frozen=True)
class Shield(objectives.Strength):
    """SSU's evidence; `strength` is the share of each linear layer's columns that is frozen."""

    strength: float
    within = "[0, 1]"

    def __call__(self, *, model: nn.Module, sources: tuple[Source, ...]) -> Evidence:
        """The columns of this model that matter to these sources."""
        from cplus.methods.curvature import ColumnShield

        return ColumnShield(model=model, sources=sources, share=self.strength)


@dataclass(frozen=True)
class PastCurvature(objectives.Strength):
    """The curvature gate's evidence; `strength` is the mean coefficient over all coordinates."""

    strength: float
    within = "(0, 1)"
    kept_bytes: float = 2.0
    """Bytes per parameter that the gate keeps of it: coefficients in bfloat16."""

    def __call__(self, *, model: nn.Module, sources: tuple[Source, ...]) -> Evidence:
        """The coefficients of this model for these sources."""
        from cplus.methods.curvature import Curvature

        return Curvature(model=model, sources=sources, share=self.strength)


BLEND: tuple[tuple[float, Rows], ...] = ((0.5, "anchors"), (0.5, "probes"))
CPL_PAPER = "Yang et al. 2026, CPL"

CPLUS = Method(
    name="cplus",
    summary="Scales down coordinates that are harmful according to anchors and self-probes, smoothed over steps.",
    paper="Algorithm 1",
    evidence=BLEND,
    beta=0.9,
    gate=smoothed,
)
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
        summary="Trains on new data and synthetic rows, chosen by clusters and answered by the latest model.",
        paper="Huang et al. 2024, SSR",
        train_on=("new", "synthetic"),
    ),
    Method(
        name="agem",
        summary="Removes the gradient's component that conflicts with the anchors' gradient, at each step.",
        paper="Chaudhry et al. 2019",
        evidence=((1.0, "anchors"),),
        refresh=1,
        projection=_agem,
    ),
    Method(
        name="ogd",
        summary="Projects the gradient orthogonally to the anchors' ground-truth-logit gradients.",
        paper="Farajtabar et al. 2020, OGD-GTL",
        evidence=((1.0, "anchors"),),
        refresh="once",
        reduction=_logit_basis,
        vectors="one per anchor",
        projection=lazy("methods.variants:ogd"),
    ),
    Method(
        name="distillation",
        summary="Adds the divergence from the frozen model's output on the anchors to the loss.",
        paper="Hinton et al. 2015",
        objective=objectives.Distillation(strength=1.0),
    ),
    Method(
        name="probe-distillation",
        summary="Trains on new data and on the frozen model's output on self-probes.",
        paper="Hinton et al. 2015",
        train_on=("new", "probes"),
        objective=objectives.ReplayedDistillation(strength=1.0),
    ),
    Method(
        name="kl-base",
        summary="Adds the divergence from the frozen model's output on the new rows to the loss.",
        paper="Zhu et al. 2025, ASFT without its token weights",
        objective=objectives.HeldToBase(strength=0.05),
    ),
    Method(
        name="asft",
        summary="As kl-base, and each token's loss counts as much as the model already expects the token.",
        paper="Zhu et al. 2025, ASFT",
        objective=objectives.HeldToBase(strength=0.05, weigh=objectives.own_probability),
    ),
    Method(
        name="eaft",
        summary="Weights each token's loss by the model's uncertainty there.",
        paper="Diao et al. 2026, EAFT",
        objective=objectives.Entropic(strength=1.0),
    ),
    Method(
        name="talr",
        summary="Weights each token's loss by how easy the token is for the model, relative to the batch.",
        paper="Lin et al. 2025, TALR",
        objective=objectives.Tempered(strength=1.0),
    ),
    Method(
        name="stm",
        summary="Leaves out the tokens of the new rows that surprise the base model.",
        paper="Wu et al. 2025, STM",
        objective=objectives.Masked(strength=2.5),
    ),
    Method(
        name="flow",
        summary="Weights each new row by how easy the base model finds it.",
        paper="Sanyal et al. 2025, FLOW",
        objective=objectives.EasyRows(strength=1.0),
    ),
    Method(
        name="ewc",
        summary="Adds a penalty on moving the weights that mattered for the anchors.",
        paper="Kirkpatrick et al. 2017",
        objective=objectives.ElasticWeights(strength=10.0),
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
        name="freeze-layers",
        summary="Supervised fine-tuning of the last half of the blocks, everything else frozen.",
        paper="Lee et al. 2019",
        adapter=adapters.LastBlocks(strength=0.5),
    ),
    Method(
        name="cpl",
        summary="Blocks every coordinate of the update that is harmful according to the anchors' gradient.",
        paper=CPL_PAPER,
        evidence=((1.0, "anchors"),),
        gate=binary,
    ),
    CPLUS,
    replace(
        CPLUS,
        name="norm-matched",
        summary="Control: the plain update's direction at the norm CPLUS would apply.",
        paper="App. E.6",
        gate=_norm_matched,
    ),
    replace(
        CPLUS,
        name="shuffled",
        summary="Control: CPLUS's coefficients permuted inside each tensor at every step.",
        paper="App. E.6",
        gate=_shuffled,
    ),
    replace(
        CPLUS,
        name="constant-label",
        summary="Control: CPLUS with every probe's answer replaced by the bank's most frequent one.",
        paper="docs/interpretations.md",
        evidence=((0.5, "anchors"), (0.5, "constant")),
    ),
    replace(
        CPLUS,
        name="balanced-label",
        summary="Control: CPLUS with no answer holding more than its even share of the probes.",
        paper="docs/interpretations.md",
        evidence=((0.5, "anchors"), (0.5, "balanced")),
    ),
    replace(
        CPLUS,
        name="cplus-anchors",
        summary="Ablation: the anchors' gradient alone, smoothed.",
        paper="Table 1",
        evidence=((1.0, "anchors"),),
    ),
    replace(
        CPLUS,
        name="cplus-probes",
        summary="Ablation: the self-probes' gradient alone, smoothed.",
        paper="Table 1",
        evidence=((1.0, "probes"),),
    ),
    Method(
        name="cplus-no-ema",
        summary="Ablation: CPLUS with the binary mask of each step.",
        paper="Table 1; Table 3",
        evidence=BLEND,
        gate=binary,
    ),
    replace(
        CPLUS,
        name="cplus-norm-aligned",
        summary="Ablation: the probes' gradient scaled to the anchors' norm before the blend.",
        paper="Table 1",
        reduction=lazy("methods.variants:NormAligned"),
    ),
    replace(
        CPLUS,
        name="cplus-cvar",
        summary="Ablation: each source's gradient over its worst quarter of examples only.",
        paper="Table 3",
        reduction=lazy("methods.variants:Tail"),
    ),
    replace(
        CPLUS,
        name="cplus-rotating",
        summary="Variant: each epoch sees another quarter of the bank, at a quarter of the cost.",
        paper="docs/interpretations.md",
        parts=4,
    ),
    replace(
        CPLUS,
        name="cplus-remembering",
        summary="Variant: as cplus-rotating, and what was seen before keeps half its weight.",
        paper="docs/interpretations.md",
        parts=4,
        memory=0.5,
    ),
    Method(
        name="cplus-curvature",
        summary="Variant: moves each weight the less, the more anchors and self-probes depend on it; computed once.",
        paper="docs/methods.md",
        evidence=BLEND,
        refresh="once",
        reduction=PastCurvature(strength=0.5),
        gate=partial(_elementwise, "core.gates:stored", "coefficients"),
    ),
    Method(
        name="cplus-gradient",
        summary="Ablation: the blended mask on the raw gradient instead of the optimizer's update.",
        paper="Sec. 3.2.3",
        evidence=BLEND,
        projection=_masked_gradient,
    ),
    Method(
        name="cautious",
        summary="Blocks every coordinate of the update that does not descend the new data's own gradient.",
        paper="Liang et al. 2024, Cautious Optimizers",
        gate=partial(_elementwise, "core.gates:cautious", "nothing"),
    ),
    Method(
        name="mofo",
        summary="Updates only the 15 % of each tensor's coordinates with the largest momentum.",
        paper="Chen et al. 2024, MoFO",
        gate=LargestMomenta(strength=0.15),
    ),
    Method(
        name="ssu",
        summary="Freezes the half of each linear layer's columns that matters most to anchors and self-probes.",
        paper="Yamaguchi et al. 2025, SSU",
        evidence=BLEND,
        refresh="once",
        reduction=Shield(strength=0.5),
        gate=partial(_elementwise, "methods.curvature:shielded", "signs"),
    ),
    Method(
        name="wise-ft",
        summary="Fine-tunes, then moves the weights back towards the base model as far as new rows stay known.",
        paper="Wortsman et al. 2022, WiSE-FT",
        after=after.Averaged(),
    ),
    Method(
        name="sft-repair",
        summary="Fine-tunes, then resets the weights that past rows need more than new ones.",
        paper="docs/repair.md",
        after=after.Undone(),
    ),
    replace(
        CPLUS,
        name="cplus-repair",
        summary="CPLUS, then resets the weights that past rows need more than new ones.",
        paper="docs/repair.md",
        after=after.Undone(),
    ),
    replace(
        CPLUS,
        name="replay-cplus",
        summary="Replay's training rows and CPLUS's gate together.",
        paper="docs/interpretations.md",
        train_on=("new", "anchors"),
    ),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


# A method by its name, with its settings; a setting that the method does not have is refused.


def method(name: str) -> Method:
    """The method of that name, or a user's own as `python:module:ROW`; an unknown name raises with suggestions."""
    if name.startswith("python:"):
        return replace(_imported(name.removeprefix("python:")), name=name)
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3) or list(METHODS)
        raise ValueError(f"unknown method {name!r}; did you mean {', '.join(near)}? 'cplus methods' lists them all")
    return METHODS[name]


def _imported(name: str) -> Method:
    """A method from a user's module, which is also searched for in the current folder."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"expected python:module:ROW, got 'python:{name}'")
    try:
        found = getattr(user_module(module), attribute, None)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"method 'python:{name}': the module {module!r} cannot be imported: {error}") from error
    if not isinstance(found, Method):
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise ValueError(
            f"method 'python:{name}': expected {attribute} in {module} to be a cplus.methods.table.Method, got {kind}"
        )
    return found


def configured(row: Method, **settings: Any) -> Method:
    """The method with these of `USES`; None keeps its own value, and a setting it does not have is refused by name."""
    changes = {name: value for name, value in settings.items() if value is not None}
    for setting in changes:
        fits, reason = USES[setting]
        if not fits(row):
            others = ", ".join(name for name, other in METHODS.items() if fits(other))
            raise ValueError(
                f"method {row.name!r} has no use for {setting}: {reason}; leave it out, or choose one of {others}"
            )
    if (weight := changes.pop("anchor_weight", None)) is not None:
        kinds = [kind for _, kind in row.evidence]
        changes["evidence"] = tuple((weight if kind == "anchors" else 1.0 - weight, kind) for kind in kinds)
    if (strength := changes.pop("strength", None)) is not None and (name := row.part_with_strength) is not None:
        changes[name] = replace(getattr(row, name), strength=strength)
    return replace(row, **changes)


def blends(row: Method) -> bool:
    """Whether the evidence blends anchors with rows of the bank."""
    kinds = [kind for _, kind in row.evidence]
    return len(kinds) == 2 and "anchors" in kinds


def shows_bank(row: Method) -> bool:
    """Whether the evidence includes rows of the bank."""
    return any(kind in BANK for _, kind in row.evidence)


def remembers(row: Method) -> bool:
    """Whether the evidence can be averaged over refreshes: one vector, computed more than once."""
    return bool(row.evidence) and row.vectors == "one" and row.refresh != "once"


USES: dict[str, tuple[Callable[[Method], bool], str]] = {
    "anchor_weight": (blends, "it does not blend anchors with probes"),
    "beta": (lambda row: row.beta is not None, "it smooths no mask"),
    "ema": (lambda row: row.beta is not None, "it smooths no mask"),
    "parts": (shows_bank, "its evidence has no bank to split into parts"),
    "refresh": (lambda row: bool(row.evidence), "it uses no evidence"),
    "memory": (remembers, "it does not refresh any evidence"),
    "strength": (lambda row: row.part_with_strength is not None, "it has no penalty, threshold or share to choose"),
}
"""Which methods have a setting, and why the others have none."""
