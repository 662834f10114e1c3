"""The table of methods: a method is its training rows, its objective, its evidence, its projection and its gate."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cplus.base.environment import user_module
from cplus.core.rows import Encoded

if TYPE_CHECKING:
    from torch import nn

    from cplus.core.evidence import Evidence, Source
    from cplus.core.gates import Gate
    from cplus.core.guard import Projection


# The rows of a training, by what they are for: new rows to learn, and each past task's rows.


Rows: TypeAlias = Literal["new", "anchors", "probes", "beginnings", "synthetic", "constant", "balanced"]
"""The kinds of rows."""
BANK: frozenset[Rows] = frozenset({"probes", "beginnings", "synthetic", "constant", "balanced"})
"""The kinds of rows that come from the bank."""
ANSWER_TOKENS = 16
"""Tokens that a beginning keeps of its probe's answer."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The rows of one past task; `synthetic` are probes answered again by the latest model."""

    name: str
    anchors: Sequence[Encoded] = ()
    probes: Sequence[Encoded] = ()
    synthetic: Sequence[Encoded] = ()

    @property
    def beginnings(self) -> list[Encoded]:
        """The probes with the first tokens of their answers alone: nearly as good evidence at half the cost."""
        return [probe.beginning(ANSWER_TOKENS) for probe in self.probes]

    @property
    def constant(self) -> list[Encoded]:
        """A control: the probes with the most frequent answer in place of their own."""
        answers = Counter(probe.target for probe in self.probes).most_common(1)
        return [Encoded(probe.prompt, answer) for probe in self.probes for answer, _ in answers]

    @property
    def balanced(self) -> list[Encoded]:
        """A control: the first probes of each answer, no answer having more than an even share.

        >>> [row.target for row in Past(name="", probes=[Encoded((1,), (t,)) for t in (7, 7, 7, 8)]).balanced]
        [(7,), (7,), (8,)]
        """
        share = math.ceil(len(self.probes) / max(1, len({probe.target for probe in self.probes})))
        seen: Counter[tuple[int, ...]] = Counter()
        kept = []
        for probe in self.probes:
            seen[probe.target] += 1
            if seen[probe.target] <= share:
                kept.append(probe)
        return kept


@dataclass(frozen=True, kw_only=True)
class Material:
    """New data to learn and the past tasks to keep."""

    new: Sequence[Encoded]
    past: tuple[Past, ...] = ()
    choices: Mapping[Encoded, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """The tokens of every choice of a new row, its target among them, where the row has choices."""

    def __post_init__(self) -> None:
        if not self.new:
            raise ValueError("there is no new data to learn: expected at least one new row, got none")

    def rows(self, kind: Rows) -> list[Encoded]:
        """The rows of one kind over all past tasks."""
        return list(self.new) if kind == "new" else [row for past in self.past for row in getattr(past, kind)]


# A row states what differs from SFT, which settings the method has, and the rows and memory it needs; no other code in
# this package tests for a method by name. A user's own method is one more row, given as `python:module:ROW` in place of
# a name; an ablation is `dataclasses.replace`. A row may also train adapters instead of the model's own weights.


Refresh: TypeAlias = Literal["once", "epoch"] | int


@dataclass(frozen=True)
class Part:
    """A function that is imported when first called, for torch takes seconds, and what it needs.

    With a range in `within` it has one number to choose, `strength`, which is passed on.
    """

    path: str
    strength: float | None = None
    within: str = ""
    needs: tuple[Rows, ...] = ()
    """The kinds of past rows it requires."""
    bytes_per_parameter: float = 0.0
    """The memory it holds besides the model and the guard when training in float32."""
    anchor_passes: float = 0.0
    """Forward-and-backward passes over the anchors per update; a forward pass alone counts one third."""
    read_by_base: tuple[Rows, ...] = ()
    """The kinds of trained rows that the frozen model reads too: one more forward pass each."""
    read_once: tuple[Rows, ...] = ()
    """The kinds of rows read before training: a forward pass for each mention, of which a backward pass counts two."""

    def __post_init__(self) -> None:
        if self.strength is None:
            return
        low, high = map(float, self.within[1:-1].split(","))
        above = self.strength > low or (self.strength == low and self.within[0] == "[")
        if not above or not (self.strength < high or (self.strength == high and self.within[-1] == "]")):
            name = self.path.partition(":")[2]
            raise ValueError(f"the strength of {name} must lie in {self.within}, got {self.strength}")

    def __call__(self, *args: Any, **more: Any) -> Any:
        """What the function returns."""
        own = {} if self.strength is None else {"strength": self.strength}
        return resolve_name(self.path)(*args, **own, **more)


ANSWERS = Part("cplus.methods.objectives:answers")
"""SFT's objective, the only one whose batches processes can share row by row."""
REPAIR = Part("cplus.methods.after:repaired", needs=("anchors", "probes"))


@dataclass(frozen=True)
class Method:
    """One row of the table.

    `beta` is the smoothing of a gate that has this setting, None for a binary mask, and `ema` the type its average is
    kept in, `memory` the weight of earlier evidence at a refresh, and `parts` the number of parts the bank is split
    into, one per refresh. `vectors` states whether the evidence is one vector or one per anchor. `objective` and
    `reduction` build loss and evidence of a model, `gate` builds the gate from the row itself and a seed, `adapter`
    gives the model as it trains, and `after` changes the trained weights once, at the end. With a `share` each batch
    has that many kept rows for each new one, at least one, drawn in turn; without, all rows of an epoch are mixed.
    """

    name: str
    summary: str
    paper: str
    train_on: tuple[Rows, ...] = ("new",)
    share: float = 0.0
    objective: Part = ANSWERS
    evidence: tuple[tuple[float, Rows], ...] = ()
    parts: int = 1
    refresh: Refresh = "epoch"
    reduction: Callable[..., Evidence] = Part("cplus.core.evidence:MeanGradient")
    memory: float = 0.0
    vectors: Literal["one", "one per anchor"] = "one"
    projection: Projection | None = None
    beta: float | None = None
    ema: Literal["float32", "bfloat16", "uint8"] = "float32"
    gate: Callable[[Method, int], Gate] | None = None
    adapter: Callable[[nn.Module, int], nn.Module] | None = None
    after: Any = None

    def __post_init__(self) -> None:
        if self.gate is None and self.projection is None and self.evidence:
            raise ValueError(f"method {self.name!r} has evidence but no gate or projection that uses it; add one")

    @property
    def guarded(self) -> bool:
        """Whether anything acts around the optimizer's step."""
        return self.gate is not None or self.projection is not None

    @property
    def needs(self) -> tuple[Rows, ...]:
        """The kinds of rows that the method requires, in the order of first use."""
        kinds = (*self.train_on, *self.objective.needs, *(kind for _, kind in self.evidence))
        return tuple(dict.fromkeys((*kinds, *(self.after.needs if self.after else ()))))

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

    @property
    def part_with_strength(self) -> str | None:
        """The field whose part has the setting `strength`; None if no part has it."""
        for name in ("objective", "reduction", "gate", "adapter", "after"):
            part: Any = getattr(self, name)
            if hasattr(part, "strength") and getattr(part, "within", True):
                return name
        return None

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
                rows=getattr(past, kind),
                parts=self.parts if kind in BANK else 1,
            )
            for past in material.past
            for weight, kind in self.evidence
        )

    def build_gate(self, seed: int) -> Gate | None:
        """A new instance of the row's gate."""
        return None if self.gate is None else self.gate(self, seed)

    def build_evidence(self, model: nn.Module, material: Material) -> Evidence | None:
        """The evidence that the row's gate or projection reads; None if it reads none."""
        if not self.evidence:
            return None
        found = self.reduction(model=model, sources=self.sources(material))
        if not self.memory:
            return found
        remembered: Evidence = Part("cplus.methods.variants:Remembered")(found, self.memory)
        return remembered


ANCHORS: tuple[tuple[float, Rows], ...] = ((1.0, "anchors"),)
BLEND: tuple[tuple[float, Rows], ...] = ((0.5, "anchors"), (0.5, "probes"))

_ABOUT = {
    "sft": ("Supervised fine-tuning on the new data alone.", "Sec. 4.1"),
    "replay": ("Trains on new data and anchors, the anchors repeated to equal weight.", "Rolnick et al. 2019"),
    "probe-replay": ("Trains on new data and self-probes, answered by the frozen model.", "Resta et al. 2024; Fig. 5"),
    "anchor-probe-replay": ("Trains on new data, self-probes and as many repeated anchors.", "Fig. 5; App. C.3"),
    "ssr": ("Trains on new data and typical probes, answered by the latest model.", "Huang et al. 2024, SSR"),
    "agem": ("Removes the part of the gradient that conflicts with that of the anchors.", "Chaudhry et al. 2019"),
    "ogd": ("Projects the gradient off the anchors' ground-truth-logit gradients.", "Farajtabar et al. 2020, OGD-GTL"),
    "distillation": ("Adds the divergence from the frozen model on the anchors to the loss.", "Hinton et al. 2015"),
    "probe-distillation": ("Trains on new data and on the frozen model's output on self-probes.", "Hinton et al. 2015"),
    "self-replay": ("Adds the loss of one self-probe for every eight new rows of a batch.", "docs/methods.md"),
    "divergence": ("Adds the divergence from the base model on one self-probe per eight new rows.", "docs/methods.md"),
    "divergence-cplus": ("The objective of divergence and CPLUS's gate together.", "docs/methods.md"),
    "kl-base": ("Adds the divergence from the frozen model's output on the new rows to the loss.", "Zhu et al. 2025"),
    "asft": ("As kl-base, and each token's loss counts as the model expects the token.", "Zhu et al. 2025, ASFT"),
    "eaft": ("Weights each token's loss by the model's uncertainty there.", "Diao et al. 2026, EAFT"),
    "talr": ("Weights each token's loss by how easy it is, relative to the batch.", "Lin et al. 2025, TALR"),
    "stm": ("Leaves out the tokens of the new rows that surprise the base model.", "Wu et al. 2025, STM"),
    "flow": ("Weights each new row by how easy the base model finds it.", "Sanyal et al. 2025, FLOW"),
    "ewc": ("Adds a penalty on moving the weights that mattered for the anchors.", "Kirkpatrick et al. 2017"),
    "lora": ("Trains low-rank adapters on every linear layer, the model frozen.", "Hu et al. 2022"),
    "osf": ("Trains each layer's smaller singular directions, orthogonal to the larger.", "Nayak et al. 2025"),
    "freeze-layers": ("Trains the last half of the blocks, everything else frozen.", "Lee et al. 2019"),
    "cpl": ("Blocks each coordinate that is harmful according to the anchors' gradient.", "Yang et al. 2026, CPL"),
    "cplus": ("Scales down what is harmful according to anchors and self-probes, smoothed over steps.", "Algorithm 1"),
    "norm-matched": ("Control: the plain update's direction at the norm CPLUS would apply.", "App. E.6"),
    "shuffled": ("Control: CPLUS's coefficients permuted inside each tensor at every step.", "App. E.6"),
    "constant-label": ("Control: every probe has the bank's most frequent answer.", "docs/interpretations.md"),
    "balanced-label": ("Control: no answer has more than its even share of the probes.", "docs/interpretations.md"),
    "cplus-anchors": ("Ablation: the anchors' gradient alone, smoothed.", "Table 1"),
    "cplus-probes": ("Ablation: the self-probes' gradient alone, smoothed.", "Table 1"),
    "cplus-no-ema": ("Ablation: CPLUS with the binary mask of each step.", "Table 1; Table 3"),
    "cplus-norm-aligned": ("Ablation: the probes' gradient scaled to the anchors' norm before the blend.", "Table 1"),
    "cplus-cvar": ("Ablation: each source's gradient over its worst quarter of examples only.", "Table 3"),
    "cplus-rotating": ("Variant: each epoch sees another quarter of the bank.", "docs/interpretations.md"),
    "cplus-remembering": ("Variant: cplus-rotating, earlier evidence at half weight.", "docs/interpretations.md"),
    "cplus-curvature": ("Variant: moves each weight the less, the more past rows depend on it.", "docs/methods.md"),
    "cplus-gradient": ("Ablation: the mask on the raw gradient instead of the optimizer's update.", "Sec. 3.2.3"),
    "cautious": ("Blocks each coordinate that does not descend the new data's own gradient.", "Liang et al. 2024"),
    "mofo": ("Updates the 15 % of each tensor's coordinates with the largest momentum.", "Chen et al. 2024, MoFO"),
    "ssu": ("Freezes the half of each linear layer's columns that past rows need most.", "Yamaguchi et al. 2025, SSU"),
    "wise-ft": ("Fine-tunes, then moves weights back as far as new rows stay known.", "Wortsman et al. 2022, WiSE-FT"),
    "sft-repair": ("Fine-tunes, then resets the weights that past rows need more than new ones.", "docs/repair.md"),
    "cplus-repair": ("CPLUS, then resets the weights that past rows need more than new ones.", "docs/repair.md"),
    "replay-cplus": ("Replay's training rows and CPLUS's gate together.", "docs/interpretations.md"),
}


def _row(name: str, **own: Any) -> Method:
    return Method(name, *_ABOUT[name], **own)


def _part(path: str, strength: float | None = None, within: str = "", **more: Any) -> Any:
    return Part(f"cplus.methods.{path}", strength, within, **more)


def _loss(name: str, strength: float, within: str = "[0, inf)", **more: Any) -> Part:
    return Part(f"cplus.methods.objectives:{name}", strength, within, **more)


_HELD = _loss("held_to_base", 0.05, bytes_per_parameter=4.0, read_by_base=("new",))
_SMOOTHED = _part("variants:smoothed")
CPLUS = _row("cplus", evidence=BLEND, beta=0.9, gate=_SMOOTHED)
_DIVERGENCE = _loss("kept_divergence", 16.0, bytes_per_parameter=4.0, read_once=("beginnings",))
_BESIDE: tuple[Rows, ...] = ("new", "beginnings")


def _cplus(name: str, **own: Any) -> Method:
    """CPLUS with these changes."""
    return replace(CPLUS, name=name, summary=_ABOUT[name][0], paper=_ABOUT[name][1], **own)


_ROWS = (
    _row("sft"),
    _row("replay", train_on=("new", "anchors")),
    _row("probe-replay", train_on=("new", "probes")),
    _row("anchor-probe-replay", train_on=("new", "probes", "anchors")),
    _row("ssr", train_on=("new", "synthetic")),
    _row("agem", evidence=ANCHORS, refresh=1, projection=_part("variants:agem_step")),
    _row(
        "ogd",
        evidence=ANCHORS,
        refresh="once",
        reduction=_part("variants:logit_basis"),
        vectors="one per anchor",
        projection=_part("variants:ogd"),
    ),
    _row(
        "distillation",
        objective=_loss("distillation", 1.0, needs=("anchors",), bytes_per_parameter=4.0, anchor_passes=4 / 3),
    ),
    _row(
        "probe-distillation",
        train_on=("new", "probes"),
        objective=_loss("replayed_distillation", 1.0, bytes_per_parameter=4.0, read_by_base=("probes",)),
    ),
    _row("self-replay", train_on=_BESIDE, share=1 / 8, objective=_loss("kept_answers", 4.0)),
    _row("divergence", train_on=_BESIDE, share=1 / 8, objective=_DIVERGENCE),
    _cplus("divergence-cplus", train_on=_BESIDE, share=1 / 8, objective=_DIVERGENCE),
    _row("kl-base", objective=_HELD),
    _row("asft", objective=replace(_HELD, path="cplus.methods.objectives:asft")),
    _row("eaft", objective=_loss("entropic", 1.0)),
    _row("talr", objective=_loss("tempered", 1.0, "(0, inf)")),
    _row("stm", objective=_loss("masked", 2.5, "(0, inf)", read_once=("new",))),
    _row("flow", objective=_loss("easy_rows", 1.0, "(0, inf)", read_once=("new",))),
    _row(
        "ewc",
        objective=_loss(
            "elastic_weights", 10.0, needs=("anchors",), bytes_per_parameter=8.0, read_once=("anchors",) * 3
        ),
    ),
    _row("lora", adapter=_part("adapters:lora")),
    _row("osf", adapter=_part("adapters:osf")),
    _row("freeze-layers", adapter=_part("adapters:last_blocks", 0.5, "[0, 1)")),
    _row("cpl", evidence=ANCHORS, gate=_SMOOTHED),
    CPLUS,
    _cplus("norm-matched", gate=_part("variants:norm_matched")),
    _cplus("shuffled", gate=_part("variants:shuffled")),
    _cplus("constant-label", evidence=((0.5, "anchors"), (0.5, "constant"))),
    _cplus("balanced-label", evidence=((0.5, "anchors"), (0.5, "balanced"))),
    _cplus("cplus-anchors", evidence=ANCHORS),
    _cplus("cplus-probes", evidence=((1.0, "probes"),)),
    _cplus("cplus-no-ema", beta=None),
    _cplus("cplus-norm-aligned", reduction=_part("variants:NormAligned")),
    _cplus("cplus-cvar", reduction=_part("variants:Tail")),
    _cplus("cplus-rotating", parts=4),
    _cplus("cplus-remembering", parts=4, memory=0.5),
    _row(
        "cplus-curvature",
        evidence=BLEND,
        refresh="once",
        reduction=_part("curvature:Curvature", 0.5, "(0, 1)", bytes_per_parameter=2.0),
        gate=_part("variants:stored"),
    ),
    _row("cplus-gradient", evidence=BLEND, projection=_part("variants:masked_step")),
    _row("cautious", gate=_part("variants:cautious")),
    _row("mofo", gate=_part("variants:largest_momenta", 0.15, "(0, 1]")),
    _row(
        "ssu",
        evidence=BLEND,
        refresh="once",
        reduction=_part("curvature:ColumnShield", 0.5, "[0, 1]"),
        gate=_part("variants:shielded"),
    ),
    _row("wise-ft", after=_part("after:averaged", within="[0, 1]")),
    _row("sft-repair", after=REPAIR),
    _cplus("cplus-repair", after=REPAIR),
    _cplus("replay-cplus", train_on=("new", "anchors")),
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


USES: dict[str, tuple[Callable[[Method], bool], str]] = {
    "anchor_weight": (
        lambda row: len(row.evidence) == 2 and any(kind == "anchors" for _, kind in row.evidence),
        "it does not blend anchors with probes",
    ),
    "beta": (lambda row: row.beta is not None, "it smooths no mask"),
    "ema": (lambda row: row.beta is not None, "it smooths no mask"),
    "parts": (
        lambda row: any(kind in BANK for _, kind in row.evidence),
        "its evidence has no bank to split into parts",
    ),
    "refresh": (lambda row: bool(row.evidence), "it uses no evidence"),
    # Evidence can be averaged over refreshes if it is one vector, computed more than once.
    "memory": (
        lambda row: bool(row.evidence) and row.vectors == "one" and row.refresh != "once",
        "it does not refresh any evidence",
    ),
    "strength": (lambda row: row.part_with_strength is not None, "it has no penalty, threshold or share to choose"),
}
"""Which methods have a setting, and why the others have none."""
