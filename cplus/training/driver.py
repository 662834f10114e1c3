"""The driver: one training from its settings to its last update, with a log and a state to save."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map_only

from cplus import models
from cplus.base.cost import Work
from cplus.base.environment import give_back
from cplus.core.engine import local
from cplus.core.optim import AdamW
from cplus.distributed import processes
from cplus.methods import adapters
from cplus.methods.repair import Repaired
from cplus.methods.table import Material, Method
from cplus.models import Loaded
from cplus.training import loop, sharding
from cplus.training.gateshares import layer_shares
from cplus.training.loop import Cursor, Event, Prepared, Refreshed, Stepped, adapt, build_scheduler
from cplus.training.measure import UNIFORM, Health
from cplus.training.rows import Group, PastTask, material
from cplus.training.settings import OptimizerName, TrainSettings
from cplus.training.sharding import Held

# The driver: one training from its settings to its last update, with a log of what happened and a state to save.
#
# Studies, sequences and jobs all train through it; a job adds evaluations, early stopping and checkpoints.


Evaluate: TypeAlias = Callable[[int], dict[str, float]]
"""Evaluates the model after the epoch of this number; returns figures for the curve."""
Ending: TypeAlias = Literal["learned", "lost"]
Done: TypeAlias = Callable[[dict[str, float]], Ending | None]
"""Why the figures of an epoch end the training: everything is learned, or too much is lost; None if they do not."""


STATE_BYTES: dict[OptimizerName, int] = {"adamw": 8, "adamw8bit": 2, "sgd": 0}
"""Bytes per parameter of each optimizer's own state."""


def build_optimizer(settings: TrainSettings, model: nn.Module) -> Optimizer:
    """The optimizer that proposes the updates; adamw8bit keeps tensors of fewer than 4,096 weights in 32 bits."""
    assert isinstance(settings.lr, float), "the learning rate is chosen before training"
    kinds: dict[str, Any] = {"adamw": AdamW, "sgd": SGD}
    if settings.optimizer == "adamw8bit":
        try:
            kinds["adamw8bit"] = import_module("bitsandbytes.optim").AdamW8bit
        except ImportError as error:
            raise ImportError("the optimizer adamw8bit needs bitsandbytes: pip install 'cplus[bnb]'") from error
    found: Optimizer = kinds[settings.optimizer](model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    return found


def begin(
    settings: TrainSettings,
    base: Loaded,
    new: Group,
    past: Sequence[PastTask],
    place: sharding.Place = sharding.copied,
) -> Training:
    """Prepare the base model for training: adapters, material, optimizer and guard. Training changes its weights.

    `place` distributes it over the processes of a job.
    """
    rows = material(settings.row, new, past, base)
    return start(settings, settings.row, adapted(settings, settings.row, base.model), rows, place)


def adapted(settings: TrainSettings, row: Method, model: nn.Module) -> Any:
    """The model as it trains: itself, or with the adapters of the settings or of the method's row."""
    if settings.lora is not None:
        model = adapters.lora(model, settings.seed, **settings.lora.model_dump(exclude={"merge"}))
    model = row.trained(model, settings.seed)
    if settings.gradient_checkpointing:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def start(
    settings: TrainSettings, row: Method, model: nn.Module, material: Material, place: sharding.Place = sharding.copied
) -> Training:
    """Optimizer, guard and learning-rate schedule around a model that is still the base model."""
    torch.manual_seed(settings.seed)  # dropout, where a model has it
    twin = place(model)
    optimizer = build_optimizer(settings, model)
    computing = partial(models.computing, settings.compute_dtype, next(model.parameters()).device)
    return Training(
        settings=settings,
        model=model,
        optimizer=optimizer,
        prepared=loop.prepare(row, optimizer, model, material, seed=settings.seed, computing=computing),
        scheduler=build_scheduler(settings, optimizer, len(material.new)),
        twin=twin,
    )


def _accelerator(model: nn.Module) -> Any:
    """torch's module for the kind of device that the model is on; None for the CPU."""
    device = next(model.parameters()).device
    return None if device.type == "cpu" else torch.get_device_module(device)


@dataclass(kw_only=True)
class TrainingLog:
    """What has happened so far; every checkpoint holds all of it."""

    cursor: Cursor = field(default_factory=Cursor)
    training: Work = field(default_factory=Work)
    preservation: Work = field(default_factory=Work)
    once: Work = field(default_factory=Work)
    """What the method read before its first update."""
    losses: list[float] = field(default_factory=list)
    """The losses of this epoch's updates."""
    counted: tuple[int, int] = (0, 0)
    """Coordinates that the mask admitted in this epoch, and all coordinates."""
    curve: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    extra_bytes: int = 0
    done: bool = False
    learned: bool = False
    """Whether training stopped because everything was learned."""
    lost: bool = False
    """Whether training stopped because past rows lost too much; the last update is then not wanted."""
    watch: Health = field(default_factory=Health)


@dataclass(kw_only=True)
class Training:
    """A model in training: everything that a checkpoint must hold."""

    settings: TrainSettings
    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    prepared: Prepared
    log: TrainingLog = field(default_factory=TrainingLog)
    judged: int = 0
    """The guard's step up to which its masks were checked."""
    twin: nn.Module | None = None
    """Where the model is sharded: the same model without weights, which gets them where a whole model is needed."""
    finishing: float = 0.0
    """Seconds that the method took after training."""
    repaired: Repaired | str | None = None
    """What the method's repair did, or why it did nothing."""

    def state_dict(self) -> dict[str, Any]:
        """All that the next update depends on, as this process holds it; frozen weights are the base model's."""
        guard, device = self.prepared.guard, _accelerator(self.model)
        return {
            "weights": self._weights(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "guard": None if guard is None else guard.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": [device.get_rng_state(i) for i in range(device.device_count())] if device else [],
            "log": dataclasses.asdict(self.log),
        }

    def held(self) -> Held:
        """What this process holds, by the names and numbers of a saved state."""
        guard = self.prepared.guard
        optimized = [p for group in self.optimizer.param_groups for p in group["params"]]
        return Held(weights=self._weights(), optimized=optimized, guarded=[] if guard is None else guard.params)

    def own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """This process's part of the state of one process."""
        return state if self.twin is None else sharding.own_state(state, self.held())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state as this process holds it, bitwise; the model must still be the base model."""
        here, guard = self._weights(), self.prepared.guard
        if state["weights"].keys() != here.keys():
            raise ValueError(
                f"the checkpoint holds {len(state['weights'])} trained tensors, this model has {len(here)}"
            )
        self.model.load_state_dict(state["weights"], strict=False)
        # An optimizer keeps the very tensors it is given, and these may be a file's.
        self.optimizer.load_state_dict(tree_map_only(Tensor, Tensor.clone, state["optimizer"]))
        self.scheduler.load_state_dict(state["scheduler"])
        if guard is not None:
            guard.load_state_dict(state["guard"])
        torch.set_rng_state(state["random"])
        if device := _accelerator(self.model):
            for number, own in zip(range(device.device_count()), state["random_cuda"], strict=False):
                device.set_rng_state(own, number)
        self.log = TypeAdapter(TrainingLog).validate_python(state["log"])
        self.judged = 0 if guard is None else guard.steps

    def weights(self) -> dict[str, Tensor]:
        """The state of everything that trains, whole in the first process; every process must call it."""
        return self._weights() if self.twin is None else sharding.one_weights(self._weights())

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Load what `weights` returned."""
        if self.twin is not None:
            weights = sharding.own_weights(weights, self._weights())
        self.model.load_state_dict(weights, strict=False)

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The model for an evaluation: itself, or where it is sharded a whole copy for as long as the block lasts."""
        if self.twin is None:
            yield self.model
            return
        self.optimizer.zero_grad(set_to_none=True)  # the next update would empty them; until then they take memory
        try:
            yield sharding.gathered(self.model, self.twin)
        finally:
            sharding.emptied(self.twin)

    def _weights(self) -> dict[str, Tensor]:
        """The state of everything that trains, as this process holds it; frozen weights are the base model's."""
        frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        # The scales of a packed weight are named after it.
        return {
            name: value
            for name, value in self.model.state_dict().items()
            if name not in frozen and name.partition(".weight.")[0] + ".weight" not in frozen
        }

    def finish(self) -> nn.Module:
        """Remove the guard, merge adapters unless they stay separate, and apply what the method does after training.

        Called once; the state that a checkpoint holds is the one before it, so a resumed training ends alike.
        """
        if self.prepared.guard is not None:
            self.prepared.guard.detach()
        if self.twin is not None:
            # The whole model takes the memory of what only training needed; the last checkpoint has that.
            self.optimizer.state.clear()
            self.optimizer.zero_grad(set_to_none=True)
            self.prepared = dataclasses.replace(self.prepared, guard=None)
            give_back()
            self.model, self.twin = sharding.gathered(self.model, self.twin), None
        separate = self.settings.lora is not None and not self.settings.lora.merge
        model = self.model.eval() if separate else adapters.merged(self.model).eval().requires_grad_(True)
        begun = time.perf_counter()
        work, self.repaired = self.prepared.finish(model)
        self.log.preservation += work
        self.finishing = time.perf_counter() - begun
        self.log.seconds += self.finishing
        return model

    def finite(self) -> bool:
        """Whether every trained weight is a number."""
        norms = torch._foreach_norm([local(p) for p in self.model.parameters() if p.requires_grad])
        here = bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())
        return processes.largest([int(not here)]) == [0]

    def run(self, evaluate: Evaluate = lambda epoch: {}, done: Done = lambda point: None) -> Iterator[Event]:
        """Train from the log's position, updating the log; the state may be saved between two events."""
        log, guard = self.log, self.prepared.guard
        if log.done:
            return
        if not log.cursor.step:
            log.once = self.prepared.once
        clock = time.perf_counter()
        schedule, seed = loop.build_schedule(self.settings), self.settings.seed
        training = self.model, self.optimizer, self.prepared
        for event in adapt(*training, schedule=schedule, seed=seed, scheduler=self.scheduler, start=log.cursor):
            log.seconds += time.perf_counter() - clock
            if isinstance(event, Refreshed):
                log.preservation += event.work
                log.once += event.once
            elif isinstance(event, Stepped):
                log.training += event.work
                log.losses.append(event.loss)
                log.cursor = Cursor(epoch=event.epoch, batch=event.batch, step=event.step)
                if guard is not None:
                    log.extra_bytes = max(log.extra_bytes, guard.nbytes + guard.step_nbytes)
            else:
                log.cursor = Cursor(epoch=event.epoch + 1, batch=0, step=event.step)
                self._end_epoch(event.epoch, evaluate, done)
            yield event
            clock = time.perf_counter()  # time that the caller spends between events is not training
            if log.done:
                break
        log.done = True
        self.optimizer.zero_grad(set_to_none=True)

    def _end_epoch(self, epoch: int, evaluate: Evaluate, done: Done) -> None:
        """Add a point to the curve, and decide whether it is the last."""
        log = self.log
        self.tally()
        point = {"epoch": float(epoch), "loss": sum(log.losses) / len(log.losses)}
        if self.admitted is not None:
            point["admitted"] = self.admitted
        self.model.eval()
        begun = time.perf_counter()
        point |= evaluate(epoch)
        ending = done(point)
        log.done, log.learned, log.lost = ending is not None, ending == "learned", ending == "lost"
        log.evaluation_seconds += time.perf_counter() - begun
        self.model.train()
        log.curve.append(point)
        log.losses, log.counted = [], (0, 0)

    def tally(self) -> None:
        """Add the gate's counts since the last call, and check whether it admits everything or nothing.

        This waits for the device. A compiled pass counts nothing, but knows the shares by layer.
        """
        guard = self.prepared.guard
        if guard is None or guard.gate is None:
            return
        counts: list[float] = list(guard.gate.tally())
        if guard.engine.sharded:
            counts = guard.engine.sums(counts, guard.params[0].device)
        self.log.counted = (self.log.counted[0] + int(counts[0]), self.log.counted[1] + int(counts[1]))
        steps = guard.steps - self.judged
        if not counts[1] and steps >= UNIFORM and (shares := layer_shares(guard)):
            counts = [round(sum(own.admitted * own.coordinates for own in shares)), sum(s.coordinates for s in shares)]
        if counts[1] and steps:
            self.log.watch.gated(counts[0] / counts[1], steps)
            self.judged = guard.steps

    @property
    def admitted(self) -> float | None:
        """The share of coordinates the mask admitted in this epoch, as far as it was counted."""
        admitted, offered = self.log.counted
        return admitted / offered if offered else None
