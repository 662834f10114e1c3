"""Requirements of a job, checked against its rows before any training."""

from __future__ import annotations

from collections.abc import Mapping

from cplus.evaluation.requirements import Measured, possible
from cplus.experiment.measure import GroupAnswers
from cplus.experiment.rows import Group
from cplus.job.settings import AdaptConfig


def check_requirements(config: AdaptConfig, groups: tuple[Group, ...], before: Mapping[str, GroupAnswers]) -> None:
    """Refuse a requirement that these rows cannot judge or no result could meet, before the training."""
    parts = [
        Measured(
            kind=group.part,
            rows=len(group.examples),
            right=None
            if any(p.correct is None for p in before[group.name].predictions)
            else sum(p.right for p in before[group.name].predictions),
            scored=0 if group.closed else len(group.examples),
            anchors=group.name == "anchors",
        )
        for group in groups
    ]
    for requirement in config.requirements:
        if (problem := possible(requirement, parts)) is not None:
            raise ValueError(problem)
