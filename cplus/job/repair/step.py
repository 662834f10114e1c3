"""The repair itself, on a job's rows: what must stay known, the rows of importance, and the repaired model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cplus import files, models
from cplus.data.encoded import Encoded
from cplus.evaluation import acquisition
from cplus.experiment.material import PastTask
from cplus.experiment.measure import GroupAnswers, changes
from cplus.experiment.rows import Group
from cplus.job.interruption import Interruption
from cplus.job.progress import say
from cplus.job.repair.settings import MAX_ROWS
from cplus.job.repair.store import SumsOnDisk
from cplus.job.settings import AdaptConfig
from cplus.models import Loaded
from cplus.repairing.checks import FALL, LOSS_ROWS, POINTS, Check, Unrepairable, loss_check
from cplus.repairing.model import By, repair_model
from cplus.repairing.search import Repaired
from cplus.scoring import predict


def trial_rows(group: Group, max_rows: int) -> int:
    """The number of a group's rows that every trial of a share evaluates."""
    return min(len(group.examples), max_rows if group.closed else min(max_rows, LOSS_ROWS))


def group_check(group: Group, before: GroupAnswers, tolerance: float | None, max_rows: int, seed: int) -> Check | None:
    """What of a group of new rows must stay known; None for held-out rows that the base model answers correctly."""
    held_out = group.part == "validation"
    if not group.closed:
        few = group.drawn(trial_rows(group, max_rows), seed)
        return loss_check(
            few.encoded(), name=group.name, tolerance=FALL if tolerance is None else tolerance, held_out=held_out
        )
    wrong = {prediction.id for prediction in before.predictions if not prediction.right}
    examples = [example for example in group.drawn(max_rows, seed).examples if example.id in wrong]
    if not examples and held_out:
        return None
    if not examples:
        raise Unrepairable(
            f"the base model already answers every one of {len(group.examples)} {group.name} rows correctly, so the "
            "tuned model has learned nothing from them; give the rows it was trained on"
        )
    known = [prediction for prediction in before.predictions if prediction.id in wrong]

    def measure(model: nn.Module) -> float:
        answers = predict(model, group.interface, examples, what=f"repair: {group.name}")
        return 100 - acquisition(changes(known, answers)).percent

    points = POINTS if tolerance is None else 100 * tolerance
    return Check(name=group.name, unit="% not known", measure=measure, tolerance=points, held_out=held_out)


def ranked_by(new: Group) -> By:
    """How weights are ranked, as measured: facts by importance, free text by blame (docs/repair.md)."""
    return "importance" if new.closed else "blame"


def past_rows(tasks: Sequence[PastTask], max_rows: int, seed: int) -> list[Encoded]:
    """Every anchor, and probes drawn by the seed, up to the maximum."""
    anchors = [task.interface.encode(example) for task in tasks for example in task.anchors]
    probes = [task.interface.encode(example) for task in tasks for example in task.probes]
    return [*_drawn(anchors, max_rows, seed), *_drawn(probes, max(0, max_rows - len(anchors)), seed)]


def _drawn(rows: Sequence[Encoded], count: int, seed: int) -> list[Encoded]:
    if len(rows) <= count:
        return list(rows)
    chosen = random.Random(f"{seed}/repair").sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def repair_groups(
    model: Any,
    base: Loaded,
    new: Sequence[Group],
    before: Mapping[str, GroupAnswers],
    past: Sequence[PastTask],
    config: AdaptConfig,
    folder: Path,
    interruption: Interruption,
    *,
    tolerance: float | None = None,
    rounds: int = 1,
    max_rows: int = MAX_ROWS,
) -> Repaired:
    """Repair a tuned model in place; `new` are the groups to keep known, the rows trained on first."""
    found = [group_check(group, before[group.name], tolerance, max_rows, config.seed) for group in new]
    rows = past_rows(past, max_rows, config.seed)
    trained = new[0].drawn(max_rows, config.seed).encoded()
    tuned = models.fingerprint(model)
    by = ranked_by(new[0])
    identity = files.fingerprint([base.fingerprint, tuned, config.compute_dtype, by, *map(_tokens, (rows, trained))])
    store = SumsOnDisk(folder, identity, config.checkpoint_minutes, interruption)

    def notify(sentence: str) -> None:
        say(sentence)
        store.check("stopped while searching for the share; the importance is saved")

    weights: dict[str, Tensor] = dict(base.model.named_parameters())
    with interruption.patient():
        done = repair_model(
            model,
            weights,
            rows,
            trained,
            checks=[check for check in found if check is not None],
            by=by,
            rounds=rounds,
            computing=lambda: models.computing(config.compute_dtype, base.device),
            store=store,
            notify=notify,
        )
    say(f"repair: {done}")
    return done


def _tokens(rows: Sequence[Encoded]) -> list[list[int]]:
    return [[*row.prompt, -1, *row.labels] for row in rows]
