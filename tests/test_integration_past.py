"""Held-out past behaviour inside the user's trainer: logged, tracked, used to stop early and to choose the best."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from any_models import encoder_decoder
from torch import nn
from torch.optim import AdamW
from trained import ANCHORS, PROBES, Stop, flat, trainer
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from cplus.core.guard import protect
from cplus.core.losses import target_logits
from cplus.core.rows import Encoded
from cplus.integrations.transformers import LOSS, RETENTION, HeldOut, measured, preserve
from cplus.methods.variants import example_losses


def known(model: nn.Module) -> list[Encoded]:
    """Eight rows that the model answers correctly and two that it does not."""
    rows = []
    for row in tiny.rows(10, seed=9, longest_target=1):
        best = int(target_logits(model, [row])[0][0, -1].argmax())
        rows.append(Encoded(row.prompt, (best if len(rows) < 8 else (best + 1) % tiny.VOCABULARY,)))
    return rows


def evaluating(folder: Path, callbacks: Any = None, **changes: Any) -> Trainer:
    return trainer(folder, callbacks=callbacks, eval_strategy="epoch", **changes)


class Tracker(TrainerCallback):
    """What a tracker of `report_to` sees, and the weights at each evaluation."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **_: Any) -> None:
        self.seen.append(dict(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        losses = example_losses(model, known(tiny.lm()))
        self.losses.append(statistics.fmean(losses))


def test_each_evaluation_logs_past_loss_and_retention_to_every_tracker_and_changes_no_weight(tmp_path: Path) -> None:
    tracker, past = Tracker(), known(tiny.lm())
    run, blind = evaluating(tmp_path, [tracker], learning_rate=2e-2), evaluating(tmp_path, learning_rate=2e-2)
    preserve(run, anchors=ANCHORS, probes=PROBES, past=past)
    preserve(blind, anchors=ANCHORS, probes=PROBES)
    run.train()
    blind.train()
    assert torch.equal(flat(run.model), flat(blind.model))
    logs = [entry for entry in tracker.seen if "eval_loss" in entry]
    assert len(logs) == 3
    assert [entry[f"eval_{LOSS}"] for entry in logs] == pytest.approx(tracker.losses)
    assert [e[f"eval_{LOSS}"] for e in run.state.log_history if "eval_loss" in e] == [e[f"eval_{LOSS}"] for e in logs]
    right = measured(run.model, past)[1]
    assert logs[-1][f"eval_{RETENTION}"] == sum(right[:8]) / 8
    assert run.evaluate()[f"eval_{RETENTION}"] == sum(right[:8]) / 8


@pytest.mark.parametrize("metric", [LOSS, RETENTION])
def test_the_trainer_stops_early_and_loads_its_best_model_by_it(metric: str, tmp_path: Path) -> None:
    past = known(tiny.lm())
    options = {"metric_for_best_model": metric, "load_best_model_at_end": True, "save_strategy": "epoch"}
    # No improvement is large enough: it stops as soon as it has a figure to compare, whatever the training does.
    stop = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e9)
    run = evaluating(tmp_path, [stop], num_train_epochs=12, learning_rate=2e-2, **options)
    preserve(run, anchors=ANCHORS, probes=PROBES, past=past)
    run.train()
    values = [entry[f"eval_{metric}"] for entry in run.state.log_history if f"eval_{metric}" in entry]
    best = min(values) if metric == LOSS else max(values)
    assert len(values) <= 2
    assert run.state.best_metric == best
    assert run.evaluate()[f"eval_{metric}"] == pytest.approx(best)


def test_a_resumed_run_compares_with_the_answers_before_training(tmp_path: Path) -> None:
    past = known(tiny.lm())

    def start(callbacks: Any = None) -> Trainer:
        run = evaluating(tmp_path, callbacks, learning_rate=2e-2, save_strategy="steps", save_steps=4)
        preserve(run, anchors=ANCHORS, past=past)
        return run

    with pytest.raises(InterruptedError):
        start([Stop(5)]).train()
    resumed = start()
    resumed.train(resume_from_checkpoint=True)
    right = measured(resumed.model, past)[1]
    assert resumed.state.log_history[-2][f"eval_{RETENTION}"] == sum(right[:8]) / 8
    other = evaluating(tmp_path)
    preserve(other, anchors=ANCHORS, past=past[:3])
    with pytest.raises(ValueError, match=r"expected the answers to 3 past rows before training in .*, found 10"):
        other.train(resume_from_checkpoint=True)


def test_past_batches_of_any_loss_are_measured_too() -> None:
    case = encoder_decoder()
    with torch.no_grad():
        expected = sum(float(case.loss(case.model.eval(), batch)) for batch in case.past) / 4
    held = HeldOut((case.past, case.loss))
    held.begin(case.model)
    assert held.figures(case.model) == {LOSS: pytest.approx(expected)}
    with pytest.raises(TypeError, match="T5ForConditionalGeneration is an encoder and a decoder; pass evidence="):
        protect(AdamW(case.model.parameters()), case.model, anchors=ANCHORS)


def test_past_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    run = evaluating(tmp_path, metric_for_best_model=RETENTION)
    with pytest.raises(TypeError, match=r"past must be rows of tokens, .* got str"):
        preserve(run, anchors=ANCHORS, past=["a row"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="got no row"):
        preserve(run, anchors=ANCHORS, past=[])
    with pytest.raises(TypeError, match=r"preserve needs a transformers.Trainer .* got Linear"):
        preserve(nn.Linear(1, 1), anchors=ANCHORS)  # type: ignore[arg-type]
    preserve(run, anchors=ANCHORS, past=known(tiny.lm())[8:])
    with pytest.raises(ValueError, match=r"cplus/retention, and none of the 2 past rows is answered correctly"):
        run.train()
    run.args.eval_strategy = "no"
    with pytest.warns(UserWarning, match="eval_strategy is 'no'"):
        preserve(run, anchors=ANCHORS, past=known(tiny.lm()))
