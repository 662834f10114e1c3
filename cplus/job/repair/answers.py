"""The tuned model's figures, stored for a resumed repair; its free text is generated only for a judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch import nn

from cplus import files
from cplus.data.examples import fingerprint
from cplus.evaluation.judges import judge
from cplus.experiment.measure import GroupAnswers, evaluate
from cplus.experiment.rows import Group
from cplus.job.answers import Before, read_stored
from cplus.job.repair.outputs import tuned_set
from cplus.job.settings import AdaptConfig
from cplus.models import Loaded
from cplus.receipts.receipt import TunedSet
from cplus.scoring import log_likelihoods


def tuned_sets(
    path: Path, tuned: Loaded, groups: Sequence[Group], before: Before, config: AdaptConfig
) -> list[TunedSet]:
    """The tuned model's figures on every group, from the file or measured now and written to it."""
    identity = files.fingerprint([tuned.fingerprint, *(fingerprint(group.examples) for group in groups)])
    if (stored := read_stored(path)) is not None:
        if stored["identity"] != identity:
            raise ValueError("the tuned model or the rows changed since the repair began; start a new repair")
        return [TunedSet(**own) for own in stored["sets"]]
    found = [tuned_set(group, before.answers[group.name], _answers(tuned.model, group, config)) for group in groups]
    files.write_json(path, files.sealed({"identity": identity, "sets": [asdict(own) for own in found]}))
    return found


def _answers(model: nn.Module, group: Group, config: AdaptConfig) -> GroupAnswers:
    what, chosen = f"tuned: {group.name}", judge(config.judge)
    if group.closed or chosen is not None:
        return evaluate(model, group, judge=chosen, max_new_tokens=config.max_new_tokens, what=what)
    return GroupAnswers(predictions=(), scores=tuple(log_likelihoods(model, group.encoded(), what=what)))
