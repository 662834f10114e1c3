"""The gate in `transformers.Trainer` and TRL's trainers: a callback that attaches, refreshes, logs and saves it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from cplus.base.environment import check_versions
from cplus.base.files import read_json, write_json, write_state
from cplus.base.terminal import console
from cplus.core.engine import REFUSED, bare, shape_of, trainable
from cplus.core.evidence import Entry, LossFunction, LossGradient, LossSource, evaluating
from cplus.core.guard import Guard, OnlyRows, past_behaviour, protect, rows_that_train
from cplus.core.kernels import EmaType, read
from cplus.core.losses import at_targets, target_logits
from cplus.core.rows import MAX_TOKENS, Encoded, like_length

# Adapters under the gate: trained parameters are gated, frozen or quantised ones are left unchanged.


def scope(model: nn.Module, guard: Guard) -> str:
    """What the gate acts on, in one sentence."""
    params = guard.engine.trained(guard.params)
    gated = {id(p) for p in params}
    frozen = [p for p in model.parameters() if id(p) not in gated]
    packed = sum(not p.is_floating_point() for p in frozen)
    count = sum(getattr(p, "ds_numel", p.numel()) for p in params)  # ZeRO 3 leaves the parameters themselves empty
    sentence = f"the gate acts on {len(params)} tensors of {count:,} coordinates"
    if frozen:
        quantised = f", {packed} of them quantised," if packed else ""
        sentence += f"; {len(frozen)} tensors{quantised} are frozen and do not change"
    shapes = {name: shape_of(p) for name, p in guard.engine.module.named_parameters()}
    for name, rows in guard.training_rows.items():
        sentence += f"; of {name} only {len(rows):,} of {shapes[name][0]:,} rows train"
    return sentence


# Held-out past behaviour, measured at each of a trainer's evaluations: its loss and, for rows of tokens, Retention.


Past: TypeAlias = Sequence[Encoded] | tuple[Iterable[Any], LossFunction]
"""Rows of tokens, or batches of anything with their loss."""
PAST_FORMAT, PAST_FILE = "cplus-past/1", "cplus_past.json"
LOSS, RETENTION = "cplus/past_loss", "cplus/retention"


class HeldOut:
    """Held-out past rows or batches, and which rows the model answered correctly before training."""

    def __init__(self, past: Past) -> None:
        self.rows: Sequence[Encoded] = ()
        self.batches: LossSource | None = None
        if isinstance(past, tuple) and len(past) == 2 and callable(past[1]):
            self.batches = LossSource(name="past", weight=1.0, batches=past[0], loss=past[1])
        else:
            self.rows = list(past)
            if not self.rows or not all(isinstance(row, Encoded) for row in self.rows):
                raise TypeError(
                    "past must be rows of tokens, such as cplus.encode gives, or a pair (batches, loss function), got "
                    + (type(self.rows[0]).__name__ if self.rows else "no row")
                )
        self.right: list[bool] = []

    def begin(self, model: nn.Module) -> None:
        """Note which rows are answered correctly before training."""
        self.right = measured(model, self.rows)[1] if self.rows else []

    def figures(self, model: nn.Module) -> dict[str, float]:
        """The mean loss and the share of the rows answered correctly at first that still are; without such rows, none.

        A row of tokens is answered correctly if each scored token is the most likely one.
        """
        if self.batches is not None:
            return {LOSS: mean_loss(model, self.batches)}
        losses, right = measured(model, self.rows)
        found = {LOSS: sum(losses) / len(losses)}
        if any(self.right):
            kept = sum(now for now, before in zip(right, self.right, strict=True) if before)
            found[RETENTION] = kept / sum(self.right)
        return found

    def save(self, folder: Path) -> None:
        """Write the answers before training into a checkpoint, so that a resumed run compares with them."""
        write_json(folder / PAST_FILE, {"format": PAST_FORMAT, "right": self.right})

    def load(self, folder: Path) -> None:
        """Restore the answers before training; refuse those of other rows."""
        about = read_json(folder / PAST_FILE) if (folder / PAST_FILE).is_file() else {}
        right = about.get("right") if isinstance(about, dict) and about.get("format") == PAST_FORMAT else None
        if not isinstance(right, list) or len(right) != len(self.rows):
            raise ValueError(
                f"expected the answers to {len(self.rows)} past rows before training in {folder / PAST_FILE}, found "
                f"{'none' if right is None else len(right)}; resume with the past rows that the run was started with"
            )
        self.right = right


@torch.no_grad()
def measured(model: nn.Module, rows: Sequence[Encoded]) -> tuple[list[float], list[bool]]:
    """Each row's loss and whether it is answered correctly, in evaluation mode."""
    losses, right = [0.0] * len(rows), [False] * len(rows)
    with evaluating(model):
        for batch in like_length(rows, MAX_TOKENS):
            logits, labels = target_logits(model, [rows[i] for i in batch])
            inside = labels != -100
            means = at_targets(logits, labels).sum(1) / inside.sum(1)
            hits = ((logits.argmax(-1) == labels) | ~inside).all(1)
            for i, loss, hit in zip(batch, means.tolist(), hits.tolist(), strict=True):
                losses[i], right[i] = loss, hit
    return losses, right


@torch.no_grad()
def mean_loss(model: nn.Module, source: LossSource) -> float:
    """The mean loss over the batches, in evaluation mode."""
    with evaluating(model), torch.random.fork_rng():
        losses = [float(source.loss(model, batch)) for batch in source.batches]
    if not losses:
        raise ValueError("past has no batch; give a list or a DataLoader that can be read at each evaluation")
    return sum(losses) / len(losses)


# Saving a guard's state between runs, in a trainer's checkpoint.


FORMAT = "cplus-guard/1"
FILE, FOLDER, ABOUT = "cplus_guard.pt", "cplus_guard", "cplus_guard.json"


def save_guard(guard: Guard, folder: Path, *, first: bool) -> None:
    """Write a guard's state into a checkpoint folder; called by every process, the `first` writes what is unsharded."""
    sharded = guard.engine.sharded
    about = {"format": FORMAT, "weights": guard.engine.sums_of_weights(guard.params)}
    if sharded:
        from cplus.distributed import checkpoint

        checkpoint.save(guard, folder / FOLDER)
    elif first:
        write_state(folder / FILE, guard.state_dict())
    if first:
        write_json(folder / ABOUT, about)  # written last: a folder that has it is complete


def load_guard(guard: Guard, folder: Path) -> None:
    """Restore a state written by `save_guard`; refuse one that was saved with other weights than the model has now."""
    about = read_json(folder / ABOUT)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{folder / ABOUT}: expected the format {FORMAT}; it was written by another version")
    now = guard.engine.sums_of_weights(guard.params)
    if about["weights"].keys() != now.keys() or any(
        not math.isclose(now[name], kept, rel_tol=1e-6, abs_tol=1e-6) for name, kept in about["weights"].items()
    ):
        raise ValueError(
            f"{folder} has the guard state of other weights than the model's; pass the checkpoint that the trainer "
            "resumed from as PreservationCallback(resume_from=...)"
        )
    if (folder / FOLDER).is_dir():
        from cplus.distributed import checkpoint

        checkpoint.load(guard, folder / FOLDER)
    elif guard.engine.sharded and guard.engine.world > 1:
        raise ValueError(
            f"{folder / FILE} was saved by one process and this run shards over {guard.engine.world}; continue with "
            "one process, or save it with cplus.distributed.checkpoint.save, which supports any number of processes"
        )
    else:
        guard.load_state_dict(torch.load(folder / FILE, map_location="cpu", weights_only=True))


Refresh: TypeAlias = Literal["epoch"] | int


def preserve(
    trainer: Trainer,
    *,
    anchors: Sequence[Encoded] = (),
    probes: Sequence[Encoded] = (),
    anchor_weight: float = 0.5,
    evidence: Sequence[Entry] = (),
    past: Past | None = None,
    beta: float = 0.9,
    ema: EmaType = "uint8",
    refresh: Refresh = "epoch",
    only_rows: OnlyRows | None = None,
    resume_from: Path | str | None = None,
) -> PreservationCallback:
    """CPLUS on this trainer, before its other callbacks, so that every tracker logs the gate's figures.

    The evidence keeps its own loss, whatever the trainer's is. `past` is held out: it is only measured, at each of the
    trainer's evaluations, as `eval_cplus/past_loss` and `eval_cplus/retention`. `ema` and `only_rows` are those of
    `cplus.protect`.
    """
    check_versions()
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"preserve needs a transformers.Trainer or a subclass of it, got {type(trainer).__name__}; with your own "
            "loop, call cplus.protect(optimizer, model, ...)"
        )
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    for part, kind in (("schedule_free", "schedulefree"), ("lomo", "lomo"), ("layerwise", "LayerWiseDummyOptimizer")):
        if part in optim:  # before the trainer builds it
            raise TypeError(f"optim={optim!r} cannot be protected: {REFUSED[kind]}")
    if past is not None and trainer.args.eval_strategy == "no":
        warnings.warn("past is measured at each evaluation, and eval_strategy is 'no'", stacklevel=2)
    params = [p for p in trainer.model.parameters() if p.requires_grad]
    rows_that_train(only_rows or {}, trainer.model, params)
    callback = PreservationCallback(
        anchors=anchors,
        probes=probes,
        anchor_weight=anchor_weight,
        evidence=evidence,
        past=past,
        beta=beta,
        ema=ema,
        refresh=refresh,
        only_rows=only_rows,
        resume_from=resume_from,
    )
    found = past_behaviour(trainer.model, anchors, probes, anchor_weight, evidence)
    if isinstance(found, LossGradient) and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        built = trainer.optimizer  # the user's own, which may train fewer parameters
        found(trainable(built) if built else params, 0)  # refuses now what a refresh would
    callback.trainer = trainer
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


class PreservationCallback(TrainerCallback):  # type: ignore[misc]
    """Owns the guard of one training run.

    Passed as `callbacks=[...]` it works the same, but the trackers of `report_to` run before it and miss its figures;
    `preserve` puts it first and lets it find the engine of DeepSpeed.
    """

    def __init__(
        self,
        *,
        anchors: Sequence[Encoded] = (),
        probes: Sequence[Encoded] = (),
        anchor_weight: float = 0.5,
        evidence: Sequence[Entry] = (),
        past: Past | None = None,
        beta: float = 0.9,
        ema: EmaType = "uint8",
        refresh: Refresh = "epoch",
        only_rows: OnlyRows | None = None,
        resume_from: Path | str | None = None,
        allow_16bit: bool = False,
    ) -> None:
        if not anchors and not probes and not evidence:
            raise ValueError("the callback needs evidence of past behaviour: give anchors, probes or both; got neither")
        if refresh != "epoch" and (not isinstance(refresh, int) or refresh < 1):
            raise ValueError(f"refresh must be 'epoch' or a number of steps of at least 1, got {refresh!r}")
        self.refresh = refresh
        self.given: dict[str, Any] = {
            "anchors": anchors,
            "probes": probes,
            "anchor_weight": anchor_weight,
            "evidence": evidence,
            "beta": beta,
            "ema": ema,
            "only_rows": only_rows,
            "allow_16bit": allow_16bit,
        }
        self.past = None if past is None else HeldOut(past)
        self.resume_from = None if resume_from is None else Path(resume_from)
        self.trainer: Trainer | None = None
        self.optimizer: object = None
        self.guard: Guard | None = None
        self.losses: dict[str, float] = {}
        self.measured: dict[str, float] = {}
        self.within_epoch = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        """Attach to the optimizer in its final, wrapped and sharded form; restore the saved state of a resumed run."""
        self.on_train_end(args, state, control)
        if optimizer is None:
            raise TypeError(
                "the trainer owns no optimizer whose step could be gated; let it build one (create_optimizer), or call "
                "cplus.protect(optimizer, model, ...) on the one that trains"
            )
        engine = None if self.trainer is None else self.trainer.deepspeed
        self.optimizer = None if self.trainer is None else self.trainer.optimizer
        self.guard = protect(optimizer, model if engine is None else engine, **self.given)
        if state.is_world_process_zero:
            console.print(f"cplus: {scope(model, self.guard)}", soft_wrap=True)
        self.within_epoch = False
        if self.past is not None:
            self._begin_past(self.past, args, state, model)
        if state.global_step:
            load_guard(self.guard, self._checkpoint(args, state))
            done = math.modf(state.epoch)[0]
            self.within_epoch = 1e-9 < done < 1 - 1e-9

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refresh the evidence, unless the run was resumed within this epoch and restored its evidence."""
        if self.refresh == "epoch" and not self.within_epoch:
            self._refresh()
        self.within_epoch = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refresh the evidence before every n-th update."""
        if self.refresh != "epoch" and state.global_step % self.refresh == 0:
            self._refresh()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse a step of an optimizer that another callback has put in the place of the protected one."""
        if self.trainer is not None and self.trainer.optimizer is not self.optimizer:
            raise RuntimeError(
                "the trainer's optimizer was replaced after training began, and the gate does not act on the new one; "
                "replace it before trainer.train()"
            )

    on_optimizer_step = on_pre_optimizer_step  # one may be replaced between the two

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **seen: Any) -> None:
        """Log the losses of the evidence and the share of coordinates admitted since the last log.

        The log of an evaluation gains what past behaviour measures; it comes before `on_evaluate`.
        """
        if self.past is not None and any(name.startswith("eval_") for name in logs):
            self.measured = {f"eval_{name}": value for name, value in self.past.figures(bare(seen["model"])).items()}
            logs.update(self.measured)
            state.log_history[-1].update(self.measured)
        if self.guard is None or "loss" not in logs:
            return
        figures = {f"cplus/{name}_loss": loss for name, loss in self.losses.items()}
        share = admitted_share(self.guard)
        if share is not None:
            figures["cplus/admitted_share"] = share
        logs.update(figures)
        state.log_history[-1].update(figures)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: dict[str, float], **_: Any) -> None:
        """Add the same figures to the metrics, from which the trainer chooses its best model and stops early."""
        metrics.update(self.measured)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the guard's state in the trainer's checkpoint folder."""
        if self.guard is None or args.save_only_model:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        save_guard(self.guard, folder, first=state.is_world_process_zero)
        if self.past is not None and state.is_world_process_zero:
            self.past.save(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the gate."""
        if self.guard is not None:
            self.guard.detach()

    def _begin_past(self, past: HeldOut, args: Any, state: Any, model: Any) -> None:
        """Evaluate the past rows before training, or restore the answers of the run that is resumed."""
        if state.global_step:
            past.load(self._checkpoint(args, state))
        else:
            past.begin(bare(model))
        if str(args.metric_for_best_model or "").removeprefix("eval_") == RETENTION and not any(past.right):
            raise ValueError(
                f"metric_for_best_model is {RETENTION}, and none of the {len(past.rows)} past rows is answered "
                f"correctly before training; use {LOSS}, or give rows that the model knows"
            )

    def _refresh(self) -> None:
        assert self.guard is not None
        self.losses = self.guard.refresh().losses

    def _checkpoint(self, args: Any, state: Any) -> Path:
        """The folder that the trainer resumed from; the trainer does not pass it, so the likely places are tried."""
        named = args.resume_from_checkpoint if isinstance(args.resume_from_checkpoint, str) else None
        usual = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder = self.resume_from or (Path(named) if named else usual)
        if not (folder / ABOUT).is_file():
            raise ValueError(
                f"the trainer resumed at step {state.global_step}, but {folder} has no guard state ({ABOUT}); pass the "
                "checkpoint as PreservationCallback(resume_from=...), or start a new run from its weights"
            )
        return folder


def admitted_share(guard: Guard) -> float | None:
    """The share of coordinates with mask 1 since the last call, over all shards; None before the first step."""
    gate = guard.gate
    if gate is None:
        return None
    admitted, offered = map(float, gate.tally())
    if not offered and gate.average is not None and (held := gate.average.tensors):
        # A compiled gate does not count; the mean of its moving average is the share over the last steps.
        admitted = sum(float(read(ema).sum(dtype=torch.float64)) for ema in held)
        admitted /= 1.0 - gate.average.beta**gate.average.step
        offered = float(sum(ema.numel() for ema in held))
    padding = guard.engine.padding * offered / sum(p.numel() for p in guard.params)  # it is always admitted
    admitted, offered = admitted - padding, offered - padding
    if guard.engine.sharded:
        admitted, offered = guard.engine.sums([admitted, offered], guard.params[0].device)
    return admitted / offered if offered else None
