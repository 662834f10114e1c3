"""Numbers watched: each fault is noticed within an update or an epoch, explained, and the last good state is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toyjob import asked

import cplus
from cplus.core.evidence import MeanGradient, Source
from cplus.core.gates import Collaborative
from cplus.core.guard import Guard
from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded
from cplus.jobs.folder import Folder
from cplus.training.measure import PATIENCE, UNIFORM, Exploded, Health

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

# Pure


def test_an_explosion_is_noticed_at_its_update_and_noise_is_not() -> None:
    health = Health()
    for step, loss in enumerate([2.0, 0.1, 3.0, 0.5, 6.0, 0.2, 1.0, 2.5, 7.0, 0.1, 0.1, 4.0], start=1):
        health.stepped(step, loss)
    with pytest.raises(Exploded, match=r"at step 13, after 2\.000 at the first"):
        health.stepped(13, 80.0)


@pytest.mark.parametrize(("share", "words"), [(0.0, "blocked every coordinate"), (1.0, "admitted every coordinate")])
def test_a_mask_that_is_the_same_everywhere_is_said_once(share: float, words: str) -> None:
    health = Health()
    assert health.gated(share, UNIFORM - 1) is None
    assert words in (health.gated(share, 1) or "")
    assert health.gated(share, UNIFORM) is None
    assert len(health.said) == 1
    health = Health()  # a mask that differs anywhere is never said
    for _ in range(10):
        assert health.gated(1.0, UNIFORM - 1) is None
        assert health.gated(0.999999, 10 * UNIFORM) is None


def test_stalling_needs_looks_without_progress() -> None:
    health = Health()
    for value in (10.0, 20.0, 20.0, 20.0):
        assert health.evaluated({"loss": 1.0, "acquisition": value}) is None
        assert health.evaluated({"loss": 9.0}) is None  # an epoch without an evaluation does not count
    assert "Acquisition is 15.0 %" in (health.evaluated({"acquisition": 15.0}) or "")
    learned = Health()
    for _ in range(3 * PATIENCE):
        assert learned.evaluated({"acquisition": 100.0, "loss": 0.5}) is None


# In a job


def test_a_job_that_explodes_keeps_its_last_good_update(here: Path) -> None:
    config = asked(here, method="sft", lr=3.0, epochs=8, warmup_steps=0, checkpoint_steps=1, lr_schedule="constant")
    with pytest.raises(Exploded, match=r"exploded: a mean of .* at step 2, .*; update 1 is kept in"):
        cplus.adapt(config)
    assert not Folder(here / "out").record.exists()
    assert torch.load(Folder(here / "out").checkpoint, weights_only=True)["state"]["log"]["cursor"]["step"] == 1


def test_an_update_that_is_no_number_is_noticed_at_the_next(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import AdamW

    real, steps = AdamW.step, [0]

    def step(self: Any, closure: Any = None) -> Any:
        found = real(self, closure)
        steps[0] += 1
        if steps[0] == 4:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0] = float("nan")
        return found

    monkeypatch.setattr(AdamW, "step", step)
    # The fourth update is not saved: its step is the last that the checkpoints may not hold.
    with pytest.raises(FloatingPointError, match=r"a weight is not finite after step 4.*update 3 is kept"):
        cplus.adapt(asked(here, method="sft", checkpoint_steps=1))
    assert torch.load(Folder(here / "out").checkpoint, weights_only=True)["state"]["log"]["cursor"]["step"] == 3


def test_a_job_that_learns_nothing_says_so_in_its_receipt(here: Path) -> None:
    done = cplus.adapt(asked(here, method="sft", lr=1e-12, epochs=5, evaluate_every=1))
    assert any(note.startswith("Learning stalled: Acquisition is 0.0 %") for note in done.record["notes"])


# In the library


def test_evidence_of_no_length_warns_whoever_protects(make_tiny: Any) -> None:
    model = make_tiny("qwen3").model
    source = Source(name="anchors", weight=1.0, rows=[Encoded((5, 6, 7), (8, 9))])
    zero = MeanGradient(model=model, sources=(source,), losses=lambda m, rows: 0.0 * answer_losses(m, rows))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match="The evidence is zero everywhere"):
        assert Guard(optimizer, model, evidence=zero, gate=Collaborative(beta=0.9)).refresh().norm == 0.0
    assert Health().refreshed(0.0) is not None
