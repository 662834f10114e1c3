"""Two models on the same rows: those of files, or, without any data, requests that the model before writes itself."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from cplus import models
from cplus.base.environment import environment
from cplus.data import interfaces
from cplus.data.tasks import Task
from cplus.jobs.keep import interface_of, self_written
from cplus.jobs.outputs import answer, measured, reference
from cplus.jobs.progress import say
from cplus.jobs.settings import AdaptConfig
from cplus.models import Loaded
from cplus.models.scoring import fitting
from cplus.probes.abilities import GENERAL, ability, writing
from cplus.receipts.contents import ModelId, Receipt, compare
from cplus.training.measure import GroupAnswers
from cplus.training.rows import Group

NAME = "self-written"

Groups: TypeAlias = Callable[[Loaded, Sequence[Group]], list[Group]]
"""The rows for a model; the second argument are those of the model before, if this is not it."""


def compare_models(
    before: str, after: str, groups: Groups, config: AdaptConfig, settings: Mapping[str, Any], title: str
) -> Receipt:
    """What both models answer to the same rows, as a receipt; one model at a time is in memory."""
    say(f"loading {before}")
    loaded = models.load(before, device=config.device)
    first, asked = ModelId(name=before, fingerprint=loaded.fingerprint), groups(loaded, ())
    with models.computing(config.compute_dtype, loaded.device):
        was = [answer(loaded.model, group, config, "before") for group in asked]
    known = reference(loaded, config, next((group for group in asked if group.by_base), None))
    del loaded
    say(f"loading {after}")
    loaded = models.load(after, device=config.device)
    second, fitting_both = ModelId(name=after, fingerprint=loaded.fingerprint), groups(loaded, asked)
    notes = ["Both models have the same weights."] if first.fingerprint == second.fingerprint else []
    sets = []
    for group, whole, answers in zip(fitting_both, asked, was, strict=True):
        ids = {example.id for example in group.examples}  # the model after may have a smaller window
        own = GroupAnswers(
            predictions=tuple(prediction for prediction in answers.predictions if prediction.id in ids),
            scores=tuple(s for e, s in zip(whole.examples, answers.scores, strict=False) if e.id in ids),
        )
        with models.computing(config.compute_dtype, loaded.device):
            then = answer(loaded.model, group, config, "after")
        sets.append(compare(group, own, then, judge=config.judge))
        notes += [group.note] if group.note else []
        if any(one.num_tokens != other.num_tokens for one, other in zip(own.scores, then.scores, strict=True)):
            notes.append(
                f"The models split the responses of {group.name} into different tokens: their losses do not compare."
            )
    abilities, moved = measured(known, loaded, config, [row for group in asked for row in group.examples])
    return Receipt(
        title=title,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=first,
        after=second,
        sets=(*sets, *abilities),
        settings=dict(settings),
        environment=environment(threads=torch.get_num_threads(), device=str(models.choose_device(config.device))),
        divergence=moved,
        requirements=config.requirements,
        notes=tuple(notes),
    )


def given_rows(tasks: Sequence[Task], limit: int | None, config: AdaptConfig) -> Groups:
    """The rows of tasks that fit the windows of both models."""

    def groups(loaded: Loaded, known: Sequence[Group]) -> list[Group]:
        found = []
        for place, task in enumerate(tasks):
            kind = config.interface or task.interface
            bound = interfaces.build(kind, loaded.tokenizer, wording=task.wording, chat=not config.plain)
            asked = task.examples[:limit]
            fit = fitting(bound, asked, loaded.window, config.too_long)
            if known:
                ids = {example.id for example in known[place].examples}
                fit = [example for example in fit if example.id in ids]
            if not fit:
                raise ValueError(
                    f"{task.name}: none of {len(asked)} rows fits the window of {loaded.name}, {loaded.window} tokens"
                )
            left, count = len(asked) - len(fit), len(asked)
            note = f"{left:,} of {count:,} rows of {task.name} are longer than a window and were excluded."
            found.append(
                Group(name=task.name, part="task", interface=bound, examples=tuple(fit), note=note if left else "")
            )
        return found

    return groups


def written_rows(num_probes: int, config: AdaptConfig) -> Groups:
    """Requests that the model before writes and answers itself; the model after reads the same tokens."""

    def groups(loaded: Loaded, known: Sequence[Group]) -> list[Group]:
        if known:
            vocabulary = loaded.tokenizer.get_vocab()  # added tokens at the end do no harm
            if any(vocabulary.get(token) != id for token, id in known[0].interface.tokenizer.get_vocab().items()):
                raise ValueError(
                    f"{loaded.name} has another vocabulary than {config.model}, so their losses do not compare; give "
                    "the base model that it was tuned from"
                )
            return list(known)
        bound = interface_of(config, loaded)
        asked = writing(bound, GENERAL, num_probes, temperature=config.temperature, seed=config.seed)
        bank = self_written(loaded, bound, asked)
        return [
            Group(
                name=NAME,
                part="retention",
                interface=bound,
                examples=bank.examples[:num_probes],
                max_new_tokens=ability(GENERAL).written_tokens,
                by_base=True,
            )
        ]

    return groups
