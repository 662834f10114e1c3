"""`protect`: the gate on any torch optimizer, through step hooks; the optimizer object itself is unchanged."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, SupportsIndex, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cplus.base.environment import check_versions
from cplus.core import algorithm, kernels
from cplus.core.evidence import (
    Entry,
    Evidence,
    LossGradient,
    MeanGradient,
    Reference,
    Source,
    Storage,
    memory_of,
    named,
    sources,
    storage,
)
from cplus.core.gates import Average, Collaborative, Gate, Proposal
from cplus.core.health import ZERO_EVIDENCE
from cplus.core.kernels import Signs
from cplus.core.optim import AdamW, Armed, first_moments, in_model, nested
from cplus.core.rows import Encoded
from cplus.core.shards import (
    Fragment,
    Layout,
    Lazily,
    Zero,
    bare,
    check_engine,
    check_predicts_tokens,
    check_supported,
    every_part,
    inside,
    is_engine,
    layout,
    local,
    local_rows,
    trainable,
    unwrapped,
)

# Training some rows of a parameter, such as new vocabulary entries, while its other rows keep every bit.


OnlyRows: TypeAlias = Mapping[str, Sequence[int]]
"""The rows that train, by the name of their parameter; all rows of the other parameters do."""


@dataclass(frozen=True, kw_only=True)
class RowChoice:
    """The rows of one parameter that train, in order, of all that it has; `size` counts the coordinates of a row."""

    name: str
    rows: list[int]
    total: int
    size: int

    def others(self) -> list[tuple[int, int]]:
        """The rows that do not train, as runs from a first row to one after the last.

        >>> RowChoice(name="w", rows=[2, 3, 6], total=8, size=1).others()
        [(0, 2), (4, 6), (7, 8)]
        """
        edges = [-1, *self.rows, self.total]
        return [(a + 1, b) for a, b in pairwise(edges) if a + 1 < b]


class Untrained(Protocol):
    """The part of a tensor that does not train."""

    def put_back(self, param: Tensor, theta: Tensor) -> None:
        """In place: what does not train has its value before the step, whatever the optimizer did to it."""
        ...

    def only(self, evidence: Tensor) -> Tensor:
        """The evidence with 0 for what does not train: nothing is proposed for it, so it counts as admitted."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainedRows:
    """The rows of one parameter that train: `here` are those that this process holds, by their local numbers."""

    here: Tensor

    def put_back(self, param: Tensor, theta: Tensor) -> None:
        """In place: every other row has its value before the step, whatever the optimizer did to it.

        param[i] = param[i] if i in rows else theta[i]
        """
        moved = param.index_select(0, self.here)
        param.copy_(theta)
        param.index_copy_(0, self.here, moved)

    def only(self, evidence: Tensor) -> Tensor:
        """The evidence with 0 for every other row: nothing is proposed for it, so it counts as admitted."""
        return torch.zeros_like(evidence).index_copy_(0, self.here, evidence.index_select(0, self.here))


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The coordinates of a flat ZeRO partition that do not train, as runs from a first one to one after the last."""

    runs: tuple[tuple[int, int], ...]

    def put_back(self, param: Tensor, theta: Tensor) -> None:
        """In place: every coordinate of a run has its value before the step."""
        for first, end in self.runs:
            param[first:end] = theta[first:end]

    def only(self, evidence: Tensor) -> Tensor:
        """The evidence with 0 in every run."""
        found = evidence.clone()
        for first, end in self.runs:
            found[first:end] = 0
        return found


def chosen_rows(only: OnlyRows, model: nn.Module, trained: Sequence[nn.Parameter]) -> list[RowChoice]:
    """The rows by the first name of their parameter; tied parameters may be named by either name."""
    known = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    trains = {id(p) for p in trained}
    found: dict[str, RowChoice] = {}
    asked: dict[str, str] = {}
    for name, rows in only.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "; model.named_parameters() lists them"
            raise ValueError(f"only_rows names {name!r}, and the model has no such parameter{hint}")
        p = known[name]
        if id(p) not in trains:
            raise ValueError(
                f"only_rows names {name!r}, which the optimizer does not train; give it to the optimizer and make it "
                "require gradients"
            )
        shape: torch.Size = getattr(p, "ds_shape", p.shape)  # ZeRO 3 leaves the parameter itself empty
        numbers = checked(name, shape, rows)
        one = first[id(p)]
        same = found.setdefault(one, RowChoice(name=one, rows=numbers, total=shape[0], size=shape[1:].numel()))
        if same.rows != numbers:
            raise ValueError(
                f"only_rows gives {asked[one]!r} and {name!r} different rows, but they are one tied parameter"
            )
        asked[one] = name
    return list(found.values())


def rows_here(
    chosen: Sequence[RowChoice], model: nn.Module, params: Sequence[nn.Parameter], zero: Zero | None
) -> dict[int, Untrained]:
    """What does not train of the part that this process holds, by the position of the parameter or partition."""
    if zero is not None:
        return dict(runs_here(chosen, zero.fragments))
    known = dict(model.named_parameters())
    positions = {id(p): i for i, p in enumerate(params)}
    found: dict[int, Untrained] = {}
    for choice in chosen:
        p = known[choice.name]
        trains = torch.zeros(choice.total, dtype=torch.bool)
        trains[choice.rows] = True
        found[positions[id(p)]] = TrainedRows(here=local_rows(trains, p).nonzero().flatten().to(local(p).device))
    return found


def runs_here(chosen: Sequence[RowChoice], fragments: Sequence[Fragment]) -> dict[int, Runs]:
    """What does not train, by the number of the partition; a partition may hold a part of a row."""
    others = {choice.name: [(a * choice.size, b * choice.size) for a, b in choice.others()] for choice in chosen}
    found: dict[int, list[tuple[int, int]]] = {}
    for f in fragments:
        for first, end in others.get(f.name, ()):
            first, end = max(first, f.start), min(end, f.start + f.size)
            if first < end:
                found.setdefault(f.partition, []).append((first - f.start + f.offset, end - f.start + f.offset))
    return {partition: Runs(runs=tuple(runs)) for partition, runs in found.items()}


def checked(name: str, shape: torch.Size, rows: Sequence[int]) -> list[int]:
    """The row numbers in order, each once."""
    if not shape:
        raise ValueError(f"only_rows names {name!r}, which is a single number and has no rows")
    if not isinstance(rows, Iterable):
        raise TypeError(f"the rows of {name!r} must be a list of whole numbers, got {type(rows).__name__}")
    listed = rows.tolist() if isinstance(rows, Tensor) else list(rows)
    wrong = [row for row in listed if isinstance(row, bool) or not isinstance(row, SupportsIndex)]
    if wrong:
        raise TypeError(f"the rows of {name!r} must be whole numbers counted from 0, got {wrong[0]!r}")
    outside = [row for row in listed if not 0 <= row < shape[0]]
    if outside:
        raise ValueError(
            f"{name!r} has the rows 0 to {shape[0] - 1}, and only_rows names {outside[0]}; after adding tokens, call "
            "model.resize_token_embeddings() before building the optimizer"
        )
    if not listed:
        raise ValueError(f"only_rows gives {name!r} no row to train; set requires_grad=False instead to freeze it")
    return sorted({int(row) for row in listed})


Projection: TypeAlias = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]]], None]
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Observer: TypeAlias = Callable[[int, Proposal, Tensor], None]
"""Called with each tensor's index among the parameters, its proposal and its coefficients, to read but not to keep."""
THOROUGH = False
"""Whether parameters outside the optimizer are compared by value after each step, not only by torch's version counter.

The counter costs nothing but misses writes through `.data`; the tests compare values.
"""


def protect(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    anchors: Sequence[Encoded] = (),
    probes: Sequence[Encoded] = (),
    anchor_weight: float = 0.5,
    evidence: Sequence[Entry] = (),
    beta: float = 0.9,
    ema: kernels.EmaType = "float32",
    refresh_every: int | None = None,
    only_rows: OnlyRows | None = None,
    allow_16bit: bool = False,
) -> Guard:
    """CPLUS on this optimizer: call `guard.refresh()` at the start of each epoch, then train as before.

    The evidence is rows of tokens, `anchors` and `probes`, or any loss: `evidence` lists a weight, the batches and a
    function `loss(model, batch)` for each source. Either anchors or probes may be empty; the other then has all the
    weight. `refresh_every=n` refreshes automatically before the first and every n-th step.
    `only_rows={"model.embed_tokens.weight": [50000, 50001]}` trains these rows of a parameter; its others stay.
    """
    check_versions()
    model = bare(model)
    chosen = past_behaviour(model, anchors, probes, anchor_weight, evidence)
    guard = Guard(
        optimizer,
        model,
        evidence=chosen,
        gate=Collaborative(beta=beta, ema=ema),
        refresh_every=refresh_every,
        only_rows=only_rows,
        allow_16bit=allow_16bit,
    )
    held = {id(in_model(p)) for p in guard.params}
    outside = [name for name, p in inside(model).named_parameters() if p.requires_grad and id(p) not in held]
    if outside and guard.zero is None:
        warnings.warn(
            f"{len(outside)} trainable parameters of the model, such as {outside[0]}, are not in this optimizer and "
            "will not be gated by it; if another optimizer trains them, protect that one too",
            stacklevel=2,
        )
    if isinstance(chosen, LossGradient):
        try:
            chosen.rehearse(guard.params)
        except BaseException:
            guard.detach()
            raise
    return guard


def past_behaviour(
    model: nn.Module,
    anchors: Sequence[Encoded],
    probes: Sequence[Encoded],
    anchor_weight: float,
    evidence: Sequence[Entry],
) -> LossGradient | MeanGradient:
    """What `protect` is given, as evidence: losses, or rows of tokens."""
    if not evidence:
        return rows_of_tokens(model, anchors, probes, anchor_weight)
    if anchors or probes:
        raise ValueError(
            "give anchors and probes, or evidence, not both; rows of tokens become evidence by the loss "
            "lambda model, rows: cplus.core.losses.answer_losses(model, rows).mean()"
        )
    return LossGradient(model=model, sources=sources(evidence))


def rows_of_tokens(
    model: nn.Module, anchors: Sequence[Encoded], probes: Sequence[Encoded], anchor_weight: float
) -> MeanGradient:
    """The paper's evidence: the cross-entropy of anchors and probes."""
    if not 0.0 <= anchor_weight <= 1.0:
        raise ValueError(f"anchor_weight must lie in [0, 1], got {anchor_weight}")
    if not anchors and not probes:
        raise ValueError("protect needs evidence of past behaviour: give anchors, probes or both; got neither")
    check_predicts_tokens(model)
    weight = anchor_weight if anchors and probes else float(bool(anchors))
    parts = (("anchors", weight, anchors), ("probes", 1.0 - weight, probes))
    return MeanGradient(
        model=model, sources=tuple(Source(name=name, weight=w, rows=rows) for name, w, rows in parts if rows)
    )


class Guard:
    """Evidence, projection and gate around one optimizer's step; owns all of its state.

    Evidence is required by a projection and by every gate that reads it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        evidence: Evidence | None = None,
        gate: Gate | None = None,
        projection: Projection | None = None,
        refresh_every: int | None = None,
        only_rows: OnlyRows | None = None,
        allow_16bit: bool = False,
    ) -> None:
        self.model, self.evidence, self.gate, self.projection = bare(model), evidence, gate, projection
        self.optimizer = unwrapped(optimizer, self.model)
        self.zero = Zero(self.model, self.optimizer) if is_engine(self.model) else None
        hooks = self.optimizer._optimizer_step_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), Guard) for hook in hooks):
            raise ValueError(
                "this optimizer is already protected; call detach() on its guard before another is attached"
            )
        if refresh_every is not None and refresh_every < 1:
            raise ValueError(f"refresh_every must be at least 1, got {refresh_every}")
        if evidence is None and (projection is not None or gate is None or gate.uses != "nothing"):
            raise ValueError("this gate or projection reads evidence of past behaviour, and none was given")
        if self.zero is not None and refresh_every is not None:
            raise ValueError("inside its step ZeRO cannot compute evidence; call guard.refresh() between two updates")
        self.refresh_every, self.allow_16bit = refresh_every, allow_16bit
        self.only_rows = dict(only_rows or {})
        self.refreshes = 0
        self.steps = 0
        self.observers: list[Observer] = []
        self._kept: list[list[Tensor | Signs]] = []
        self._storage: Storage | None = None
        self.theta: list[Tensor] = []
        self.params: list[nn.Parameter] = []
        self.chosen: list[RowChoice] = []
        self.rows: dict[int, Untrained] = {}
        self.names: dict[int, str] = {}
        self.where = Layout()
        self._others: dict[int, Tensor] = {}
        self._unseen: list[nn.Parameter] = []
        self._marks: list[tuple[int, Tensor | None]] = []
        self._versions: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._proposing = False
        self._coefficients: Iterator[Tensor] = iter(())
        self._bind()
        self.hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    def refresh(self) -> Reference:
        """Compute the evidence at the current parameters and use it until the next refresh."""
        self._bind()
        if self.evidence is None:
            raise ValueError("this guard's gate reads no evidence, so there is nothing to refresh")
        if self._versions and self._versions != self._now():
            warnings.warn(
                "parameters have changed since the last gated step, outside the gate; that is right after loading or "
                "averaging weights, but an optimizer, wrapper or hook that writes them itself is not gated: protect "
                "the optimizer whose step() is called",
                stacklevel=2,
            )
        reference = self.evidence(self.params, self.refreshes)
        if reference.norm == 0.0:
            warnings.warn(ZERO_EVIDENCE, stacklevel=2)
        self.vectors = reference.vectors
        self.refreshes += 1
        self._versions = self._now()
        return reference

    def _now(self) -> list[int]:
        """The parameters' version counters, which any write but one through `.data` raises; shards have none of use."""
        return [] if self.zero is not None or self.where.sharded else [p._version for p in self.params]

    @property
    def vectors(self) -> list[list[Tensor]]:
        """The evidence in use: gradients, or their signs if the gate reads nothing else."""
        return [[g.unpacked() if isinstance(g, Signs) else g for g in vector] for vector in self._kept]

    @vectors.setter
    def vectors(self, vectors: Sequence[Sequence[Tensor]]) -> None:
        packs = self.gate is not None and self.gate.uses == "signs" and self.projection is None
        if self.projection is not None:
            vectors = self._stored(vectors)
        self._kept = [[self._signs(i, g) if packs else g for i, g in enumerate(vector)] for vector in vectors]

    def _stored(self, vectors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """A projection's vectors where memory suffices for them; the first ones decide for all."""
        if self._storage is None and vectors:
            there = sum(v.nbytes for vector in vectors for v in vector if v.device == self.params[0].device)
            self._storage = storage(len(vectors), [local(p) for p in self.params], there=there)
        where = self._storage
        # A basis that its evidence has already moved stays where it is.
        return [
            list(vector) if where is None or vector[0].dtype == torch.bfloat16 else where.stored(vector)
            for vector in vectors
        ]

    def _signs(self, position: int, g: Tensor) -> Signs:
        return Signs.of(self.rows[position].only(g) if position in self.rows else g)

    def evidence_at(self, position: int) -> Tensor:
        """The evidence for one parameter, or its signs if only those are stored."""
        if not self._kept:
            raise RuntimeError("no evidence yet: call guard.refresh() first")
        g = self._kept[0][position]
        return g.unpacked() if isinstance(g, Signs) else g

    @property
    def nbytes(self) -> int:
        """The memory held between steps: evidence and gate."""
        memory = memory_of(self.evidence)
        evidence = sum(g.nbytes for vector in self._kept for g in vector) + (memory.nbytes if memory else 0)
        return evidence + (0 if self.gate is None else self.gate.nbytes)

    @property
    def step_nbytes(self) -> int:
        """The additional memory during a step: any optimizer but our AdamW needs a copy of the parameters."""
        copied = range(len(self.params)) if self._copies else self.rows
        sizes = [local(self.params[i]).nbytes for i in copied]
        return sum(sizes) if self.zero is None else max(sizes, default=0)

    @property
    def _copies(self) -> bool:
        """Whether a step copies all parameters, not only those of which some rows stay."""
        return self.gate is not None and not self.one_pass

    def detach(self) -> None:
        """Remove the hooks: the optimizer is plain again."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.theta = []
        self._others = {}

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs besides the state of the model and of the optimizer."""
        return {
            "ranks": self.where.world if self.where.sharded else 1,
            "gate": None if self.gate is None else self.gate.state_dict(),
            "vectors": [
                [g if isinstance(k, Signs) else g.clone() for g, k in zip(vector, kept, strict=True)]
                for vector, kept in zip(self.vectors, self._kept, strict=True)
            ],
            "memory": None if (memory := memory_of(self.evidence)) is None else memory.state_dict(),
            "refreshes": self.refreshes,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; its parameters must have the same shapes and the same number of shards."""
        self._bind()
        ranks = self.where.world if self.where.sharded else 1
        if state["ranks"] != ranks:
            raise ValueError(
                f"the saved guard state is one of {state['ranks']} shards and this run has {ranks}; to change the "
                "number of processes, save and load it with cplus.distributed.checkpoint.save and load"
            )
        params, vectors = [local(p) for p in self.params], state["vectors"]
        for vector in vectors:
            if [g.shape for g in vector] != [p.shape for p in params]:
                raise ValueError("the saved guard state belongs to other parameters: their shapes differ")
        if self.gate is not None:
            self.gate.load_state_dict(state["gate"], params)
        places = [p.device for p in params]
        if self.projection is not None and vectors:
            self._storage = self._storage or storage(len(vectors), params)
            places = [self._storage.device] * len(params)
        self.vectors = [[g.to(d, copy=True) for g, d in zip(vector, places, strict=True)] for vector in vectors]
        if (memory := memory_of(self.evidence)) is not None:
            memory.load_state_dict(state["memory"], params)
        self.refreshes, self.steps = int(state["refreshes"]), int(state["steps"])

    def _bind(self) -> None:
        """Bind the optimizer's parameters; they may be replaced, as sharding does, only before the first refresh."""
        params = trainable(self.optimizer) if self.zero is None else self.zero.params
        if self.zero is not None:
            self.zero.follow()
        if len(params) == len(self.params) and all(p is q for p, q in zip(params, self.params, strict=True)):
            if [p.dtype for p in params] != self._dtypes:
                raise ValueError(
                    "the parameters' precision changed after protect(); convert the model before protect()"
                )
            return
        if self._kept:
            raise ValueError("the optimizer's parameters changed after protect(); detach the guard and protect again")
        self.names, self.params, self._dtypes = named(self.model), params, [p.dtype for p in params]
        self.names |= {id(p): self.names[id(q)] for p in params if id(q := in_model(p)) in self.names}
        for p in params:
            check_supported(p, self.names.get(id(p), "a parameter outside the model"), allow_16bit=self.allow_16bit)
        self.where = layout(params, self.names)
        whole = self.gate is not None and self.gate.whole
        whole = whole or self.projection is not None or memory_of(self.evidence) is not None
        check_engine(self.model, self.where, whole=whole)
        trained = params if self.zero is None else self.zero.trained
        self.chosen = chosen_rows(self.only_rows, inside(self.model), trained)
        self.rows = rows_here(self.chosen, self.model, params, self.zero)
        seen = {id(p) for p in params}
        held = [*self.model.parameters(), *(p for group in self.optimizer.param_groups for p in group["params"])]
        if self.zero is None:  # ZeRO writes the model's parameters itself, from the partitions
            self._unseen = list({id(p): p for p in held if id(p) not in seen}.values())

    @torch.no_grad()
    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Copy the parameters and check the gradients; with a closure, they are checked after it has run."""
        if nested(self.optimizer):
            return None
        self._bind()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._check_gradients()
        if self.evidence is not None and not self._idle:
            if self.refresh_every is not None and self.steps % self.refresh_every == 0:
                with torch.enable_grad():
                    self.refresh()
            if not self._kept:
                raise RuntimeError(
                    "no evidence yet: call guard.refresh() before the first step, or pass refresh_every=n"
                )
        now = list(range(len(self.params))) if self.zero is None else [self.zero.position]
        if self._copies:
            self.theta = kernels.copies([local(self.params[i]) for i in now])
        others = [(k, i) for k, i in enumerate(now) if i in self.rows]
        self._others = {i: self.theta[k] if self.theta else local(self.params[i]).clone() for k, i in others}
        self._proposing = False
        if closure is None:
            self._ready()
            return None
        wrapped = self._wrapped(closure)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _wrapped(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with the gradients checked and projected after each call; if it raises, the step is undone."""

        def evaluate() -> Any:
            try:
                loss = closure()
                with torch.no_grad():
                    self._check_gradients()
                    self._ready()
            except BaseException as error:
                self._undo()
                error.add_note(f"raised by the closure of step {self.steps + 1}; the parameters are unchanged")
                raise
            return loss

        return evaluate

    def _ready(self) -> None:
        """With the new data's gradients computed: project them, arm our AdamW, record what must not change."""
        for p in self._unseen:
            if p.grad is not None and any(p is q for group in self.optimizer.param_groups for q in group["params"]):
                raise RuntimeError(
                    f"{self._name(p)} does not require a gradient but has one, which the optimizer would apply "
                    "without the gate; set its .grad to None, or make it require gradients before protect()"
                )
        self._proposing = any(p.grad is not None for p in self.params)
        if self.projection is not None and self._kept:
            self._project(self.projection)
        if self.one_pass and self._proposing and not self._idle:
            self._arm()
        if not self.where.sharded:
            self._marks = [(p._version, p.detach().clone() if THOROUGH else None) for p in self._unseen]

    @torch.no_grad()
    def _undo(self) -> None:
        """Restore the parameters to their values before a step that failed."""
        for p, theta in zip(self.params, self.theta, strict=False):
            local(p).copy_(theta)
        self._put_back()
        self.theta, self._others = [], {}
        if isinstance(self.optimizer, AdamW):
            self.optimizer.armed = None

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        """The optimizer has done line 9 of the algorithm; apply lines 10-13 to its proposal.

        Paper: Algorithm 1, line 9.    delta = proposed - theta, momentum and weight decay included
        """
        if nested(self.optimizer):
            return
        gate = self.gate
        self._check_unseen()
        self._put_back()
        try:
            if self.zero is not None and gate is not None:
                self._after_partition(gate)
            else:
                self._gate_step()
        finally:
            self._put_back()  # interpolating between two equal numbers may still turn -0.0 into 0.0
            self._others = {}
            self._versions = self._now()

    def _put_back(self) -> None:
        """Undo what was done to rows that do not train."""
        for i, theta in self._others.items():
            self.rows[i].put_back(local(self.params[i]), theta)

    def _gate_step(self) -> None:
        """Gate the proposal that the parameters hold; our AdamW has gated its own."""
        gate = self.gate
        theta, self.theta = self.theta, []
        if gate is None or self.one_pass:
            if isinstance(self.optimizer, AdamW) and self.optimizer.armed is not None:
                self.optimizer.armed = None
                raise RuntimeError(
                    "the step did not run the gated kernel of cplus.optim.AdamW, so the parameters moved without the "
                    "gate; load the last checkpoint and call optimizer.step() as it is, neither compiled nor overridden"
                )
            counts = self._proposing and not self._idle and (self.zero is None or self.zero.position == 0)
            self.steps += counts
            if gate is not None and gate.average is not None:
                gate.average.step += counts
            return
        proposed = [local(p) for p in self.params]
        if not self._stepped(theta, proposed):
            return
        if self.evidence is not None and not self._kept:
            torch._foreach_copy_(proposed, theta)
            raise RuntimeError(
                "the optimizer moved parameters at learning rate 0; call guard.refresh() before the first step"
            )
        proposals = self._proposals(theta, proposed)
        if self.compiled:
            self._apply_compiled(proposals)
        else:
            for i, (proposal, c) in enumerate(zip(proposals, gate.coefficients(proposals), strict=True)):
                self._show(i, proposal, c)
                proposal.proposed.copy_(algorithm.apply(proposal.theta, proposal.proposed, c))
        self.steps += 1

    def _after_partition(self, gate: Gate) -> None:
        """Gate the partition that ZeRO has stepped; all partitions together are one step."""
        assert self.zero is not None
        position = self.zero.position
        proposal = self._of_partition(position)
        if self._idle:
            if not torch.equal(proposal.theta, proposal.proposed):
                raise RuntimeError("the optimizer moved parameters at learning rate 0, where nothing is gated")
            return
        if position == 0:
            self._coefficients = gate.coefficients(Lazily(len(self.params), self._of_partition))
        c = next(self._coefficients)
        self._show(position, proposal, c)
        proposal.proposed.copy_(algorithm.apply(proposal.theta, proposal.proposed, c))
        self.steps += position == len(self.params) - 1
        self.theta = []

    def _of_partition(self, position: int) -> Proposal:
        """The proposal for a partition; one that is not being stepped proposes nothing."""
        assert self.zero is not None
        p, moment = self.params[position], None
        now = position == self.zero.position
        if now and self.gate is not None and self.gate.average is None:
            (moment,) = first_moments(self.optimizer, [p])
        return self._proposal(position, self.theta[0] if now else local(p), local(p), moment)

    def _proposals(self, theta: Sequence[Tensor], proposed: Sequence[Tensor]) -> list[Proposal]:
        moments: list[Tensor | None] = [None] * len(self.params)
        if self.gate is not None and self.gate.average is None:  # the paper's gate does not read them
            moments = first_moments(self.optimizer, self.params)
        return [self._proposal(i, t, q, m) for i, (t, q, m) in enumerate(zip(theta, proposed, moments, strict=True))]

    def _proposal(self, position: int, theta: Tensor, proposed: Tensor, momentum: Tensor | None) -> Proposal:
        gradient = self.params[position].grad
        return Proposal(
            theta=theta,
            proposed=proposed,
            g_hat=self._kept[0][position] if self._kept else None,
            gradient=None if gradient is None else local(gradient),
            momentum=None if momentum is None else local(momentum),
        )

    @property
    def _idle(self) -> bool:
        """Whether the learning rate is 0: the first warm-up step, or a step that only creates optimizer state."""
        if self.zero is not None:
            return self.zero.idle
        return all(group.get("lr") == 0 for group in self.optimizer.param_groups)

    @cached_property
    def compiled(self) -> bool:
        """Whether the gate runs as one compiled pass."""
        return self.compiles(sum(p.numel() for p in self.params))

    def compiles(self, parameters: int) -> bool:
        """Whether the gate would be compiled with this many parameters; for small models compiling costs too much."""
        gate = self.gate
        if gate is None or self.projection is not None or self.zero is not None:
            return False
        if gate.average is None and gate.uses != "coefficients":
            return False
        if parameters < kernels.WORTH_COMPILING or not all(kernels.fits(local(p)) for p in self.params):
            return False
        if self.where.sharded and not all(every_part(p, self.where.world) for p in self.params):
            return False  # all processes must decide alike
        return kernels.can_compile(self.params[0].device.type)

    @property
    def one_pass(self) -> bool:
        """Whether the optimizer gates its own proposal, without a copy of the parameters."""
        return isinstance(self.optimizer, AdamW) and self.compiled

    def _arm(self) -> None:
        """Pass the step's evidence and average to our AdamW; `_after` counts the step."""
        optimizer = self.optimizer
        assert isinstance(optimizer, AdamW)
        signs, averages, numbers = self._kernel_inputs([local(p) for p in self.params])
        ids = [id(p) for p in self.params]
        optimizer.armed = Armed(
            signs=dict(zip(ids, signs, strict=True)),
            ema=dict(zip(ids, averages, strict=True)) if averages else {},
            numbers=numbers,
            watch=self._show_armed if self.observers else None,
        )

    def _kernel_inputs(self, like: Sequence[Tensor]) -> tuple[list[Signs], list[Tensor], tuple[float, ...]]:
        """Signs, averages and scalars of this step; coefficients that are stored are an average that does not move."""
        assert self.gate is not None
        if self.gate.uses == "coefficients":
            coefficients = [c for c in self._kept[0] if isinstance(c, Tensor)]
            return [Signs.none(c) for c in coefficients], coefficients, kernels.STILL
        average = self._average()
        average.allocate(like)
        signs = [g for g in self._kept[0] if isinstance(g, Signs)]
        return signs, average.tensors, kernels.gate_numbers(average.beta, average.step + 1)

    def _apply_compiled(self, proposals: Sequence[Proposal]) -> None:
        """Lines 10-13 in one pass per tensor, in place."""
        signs, averages, numbers = self._kernel_inputs([proposal.theta for proposal in proposals])
        step = 0
        if self.gate is not None and self.gate.average is not None:
            self.gate.average.step += 1
            step = self.gate.average.step
        for i, proposal in enumerate(proposals):
            seen = replace(proposal, proposed=proposal.proposed.clone()) if self.observers else proposal
            kernels.gate(proposal.theta, proposal.proposed, signs[i], averages[i] if averages else None, numbers)
            self._show_applied(i, seen, step)

    def _average(self) -> Average:
        assert self.gate is not None
        assert self.gate.average is not None
        return self.gate.average

    def _show(self, position: int, proposal: Proposal, c: Tensor) -> None:
        for observer in self.observers:
            observer(position, proposal, c)

    def _show_applied(self, position: int, proposal: Proposal, step: int) -> None:
        """Show what a compiled pass applied: its coefficients are stored, or computed from the average it stored."""
        if not self.observers:
            return
        if self.gate is not None and self.gate.uses == "coefficients":
            self._show(position, proposal, proposal.sign.float())
        elif (average := self._average()).tensors:
            ema = kernels.read(average.tensors[position])
            self._show(position, proposal, algorithm.coefficient(ema, average.beta, step))
        else:
            self._show(position, proposal, algorithm.collaborates(proposal.sign, proposal.delta))

    def _show_armed(self, p: nn.Parameter, theta: Tensor, proposed: Tensor) -> None:
        position = next(i for i, q in enumerate(self.params) if q is p)
        if position in self.rows:
            self.rows[position].put_back(proposed, theta)
        proposal = Proposal(theta=theta, proposed=proposed, g_hat=self._kept[0][position], gradient=p.grad)
        average = None if self.gate is None else self.gate.average
        self._show_applied(position, proposal, 0 if average is None else average.step + 1)

    def _stepped(self, theta: Sequence[Tensor], proposed: Sequence[Tensor]) -> bool:
        """Whether this was a step: there were gradients at a learning rate above 0, or parameters moved anyway.

        A fused optimizer fires its hooks even if the gradient scaler makes it skip; that is not a step.
        """
        found_inf = getattr(self.optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)
        stepped = not skipped and (
            (self._proposing and not self._idle)
            or not all(torch.equal(t, p) for t, p in zip(theta, proposed, strict=True))
        )
        if not self.where.sharded:
            return stepped
        return any(self.where.sums([stepped], proposed[0].device))  # all processes count the same steps

    def _check_unseen(self) -> None:
        """Refuse a step that changed a parameter without the gate: one that the optimizer does not list."""
        marks, self._marks = self._marks, []
        for p, (version, copy) in zip(self._unseen, marks, strict=False):
            if p._version != version or (copy is not None and not torch.equal(p.detach(), copy)):
                self._undo()
                raise RuntimeError(
                    f"the optimizer's step moved {self._name(p)}, which is not among the parameters it was protected "
                    "with and so bypassed the gate; protect the optimizer that lists it. The listed parameters are "
                    "restored to their values before the step"
                )

    def _name(self, p: nn.Parameter) -> str:
        return repr(self.names.get(id(p), "a parameter outside the model"))

    def _project(self, projection: Projection) -> None:
        used = [i for i, p in enumerate(self.params) if p.grad is not None]
        gradients = [g for i in used if (g := self.params[i].grad) is not None]
        projection(gradients, [[vector[i] for i in used] for vector in self.vectors])

    def _check_gradients(self) -> None:
        if getattr(self.optimizer, "found_inf", None) is not None:
            return  # a gradient scaler checks these and skips the step itself
        gradients = [(p, local(p.grad)) for p in self.params if p.grad is not None]
        if not gradients:
            return
        # A sum reads memory once at full speed; if only the sum overflows, the exact check below finds no error.
        total = torch.stack([g.sum().float() for _, g in gradients]).sum()
        if self.where.sharded:
            self.where.sum(total)  # a NaN in one process stops all of them, so that none waits forever
        if bool(torch.isfinite(total)):
            return
        bad = [p for p, g in gradients if not bool(torch.isfinite(g).all())]
        if self.where.sums([len(bad)], total.device)[0] if self.where.sharded else bad:
            name = self.names.get(id(bad[0]), "a parameter") if bad else "a parameter held by another process"
            raise FloatingPointError(
                f"the gradient of {name} is not finite at step {self.steps + 1}; "
                + ("the parameters are unchanged. " if self.zero is None else "resume from a checkpoint. ")
                + "Lower the learning rate, clip the gradient or check the batch"
            )
