"""Two models, here or behind servers: on the same rows, on abilities, on requests that the model before writes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from cplus import models
from cplus.base import files
from cplus.base.environment import environment
from cplus.data import interfaces
from cplus.data.tasks import Task
from cplus.evaluation.abilities import ABILITIES, GENERAL, STYLE, ability, requests
from cplus.jobs.keep import interface_of, self_written
from cplus.jobs.outputs import answer, measured, reference, why_unmeasured
from cplus.jobs.progress import duration, say
from cplus.jobs.settings import AdaptConfig
from cplus.methods.adapters import merged_from
from cplus.models import Loaded
from cplus.models.loading import without_bars
from cplus.models.names import ADAPTER, is_address
from cplus.models.scoring import fitting
from cplus.models.served import Served, served
from cplus.probes.writing import writing
from cplus.receipts.contents import ModelId, Receipt, compare
from cplus.training.measure import GroupAnswers
from cplus.training.rows import Group

NAME = "self-written"

Groups: TypeAlias = Callable[[Loaded, Sequence[Group]], list[Group]]
"""The rows for a model; the second argument are those of the model before, if this is not it."""


def opened(name: str, config: AdaptConfig, base: str | None = None) -> Loaded | Served:
    """A model by name, behind the address of a server, or as an adapter on the base it is compared with or names."""
    if is_address(name):
        return served(name)
    place = Path(name).expanduser()
    if not (place / ADAPTER).is_file():
        return models.load(name, device=config.device)
    if base is None or is_address(base):
        base = str(files.read_json(place / ADAPTER)["base_model_name_or_path"])
    under = models.load(base, device=config.device)
    with without_bars():
        whole = models.of(merged_from(place, under.model).eval(), under.tokenizer)
    return replace(whole, name=name, device=under.device)


def paced(names: Sequence[str], rounds: int) -> Callable[[Iterable[str]], Iterator[str]]:
    """Iterate over abilities, each time telling which one it is and how long all rounds of them will still take."""
    weight = {name: len(requests(name)) * ABILITIES[name].max_new_tokens for name in names}
    begun, done, whole = 0.0, 0, rounds * sum(weight.values())

    def each(own: Iterable[str]) -> Iterator[str]:
        nonlocal begun, done
        begun = begun or time.monotonic()
        for name in own:
            left = (time.monotonic() - begun) * (whole / done - 1) if done else 0.0
            if name in weight:
                say(f"asking {len(requests(name))} requests: {name}{f', about {duration(left)} left' if done else ''}")
            yield name
            done += weight.get(name, 0)

    return each


def compare_models(
    before: str,
    after: str,
    groups: Groups,
    config: AdaptConfig,
    settings: Mapping[str, Any],
    title: str,
    names: Sequence[str] = (),
) -> Receipt:
    """What both models answer to the same rows and to the requests of abilities, as a receipt.

    One model at a time is in memory. Of a server there are answers and no losses, and so it is asked no rows.
    """
    notes, sets = [], []
    behind = served(after) if is_address(after) else None  # what is not there is told before anything is asked
    say(f"loading {before}")
    loaded = opened(before, config)
    first = ModelId(name=before, fingerprint=loaded.fingerprint)
    in_time = paced([name for name in names if why_unmeasured(config, loaded, name) is None], 2)
    whole = [] if isinstance(loaded, Served) or behind else groups(loaded, ())
    if not isinstance(loaded, Served):
        with models.computing(config.compute_dtype, loaded.device):
            was = [answer(loaded.model, group, config, "before") for group in whole]
    known = reference(loaded, config, next((group for group in whole if group.by_base), None), in_time(names))
    del loaded
    say(f"loading {after}")
    loaded = behind or opened(after, config, before)
    second, both = ModelId(name=after, fingerprint=loaded.fingerprint), []
    if whole and not isinstance(loaded, Served):
        both = groups(loaded, whole)
    if first.fingerprint == second.fingerprint and both:
        notes.append("Both models have the same weights.")
    missing = {name: problem for name in known.answers if (problem := why_unmeasured(config, loaded, name))}
    if both and not isinstance(loaded, Served) and not getattr(loaded.tokenizer, "chat_template", None):
        missing = {}  # one that was saved without its template is asked through that of its base
    if not both:
        missing |= {STYLE: "it needs the weights of both models and one vocabulary"} if STYLE in known.answers else {}
        known = replace(known, rows=())
    answers = {name: own for name, own in known.answers.items() if name not in missing}
    if not both and not answers:
        raise ValueError(
            f"{after} has another vocabulary than {before}, so their losses do not compare, and no ability can be "
            "asked of both; give the base model that it was tuned from"
            if whole
            else f"no ability can be asked of both {before} and {after}: {'; '.join(known.notes) or missing}"
        )
    if whole and not both:
        notes.append(f"{after} has another vocabulary than {before}: answers are compared, losses and style are not.")
    notes += [*known.notes, *(f"The ability {name} was not measured: {why}." for name, why in missing.items())]
    known = replace(known, answers=answers)
    for group, own, answers_before in zip(both, whole, was, strict=True) if both else ():
        assert not isinstance(loaded, Served)
        ids = {example.id for example in group.examples}  # the model after may have a smaller window
        then_before = GroupAnswers(
            predictions=tuple(prediction for prediction in answers_before.predictions if prediction.id in ids),
            scores=tuple(s for e, s in zip(own.examples, answers_before.scores, strict=False) if e.id in ids),
        )
        with models.computing(config.compute_dtype, loaded.device):
            then = answer(loaded.model, group, config, "after")
        sets.append(compare(group, then_before, then, judge=config.judge))
        notes += [group.note] if group.note else []
        if any(one.num_tokens != other.num_tokens for one, other in zip(then_before.scores, then.scores, strict=True)):
            notes.append(
                f"The models split the responses of {group.name} into different tokens: their losses do not compare."
            )
    given = [row for group in whole for row in group.examples]
    abilities, moved = measured(known, loaded, config, given, paced=in_time, cached=True)
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
            own = known[0].interface.tokenizer.get_vocab()
            return list(known) if all(vocabulary.get(token) == id for token, id in own.items()) else []
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
