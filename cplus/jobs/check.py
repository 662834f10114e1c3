"""A quick verdict on a fine-tuned model without data: the base model's own requests, answered by both."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cplus import models
from cplus.base.environment import environment
from cplus.data import interfaces
from cplus.data.examples import Example, FreeForm
from cplus.data.interfaces import Interface
from cplus.evaluation.requirements import Measured, Requirement, possible
from cplus.jobs.progress import bank_view, say
from cplus.models import Loaded
from cplus.models.decoding import LocalEngine
from cplus.models.scoring import Score, log_likelihoods
from cplus.probes.abilities import GENERAL, MIN_YIELD
from cplus.probes.build import bank_folder, cached_bank
from cplus.probes.labels import without_stop
from cplus.probes.settings import TOPICS, ProbeSettings
from cplus.receipts.page import Losses, ModelId, Receipt, RowSet, rows
from cplus.training.measure import response_of, unjudged

NAME = "self-written"


@dataclass(frozen=True, kw_only=True)
class Checking:
    """How two models are compared: the number of probes, the length of answers, the seed and the requirements."""

    num_probes: int = 24
    answer_tokens: int = 48
    seed: int = 0
    plain: bool = False
    device: str = "auto"
    requirements: tuple[Requirement, ...] = ()

    def __post_init__(self) -> None:
        parts = [Measured(kind="retention", rows=self.num_probes, scored=self.num_probes)]
        for requirement in self.requirements:
            if (problem := possible(requirement, parts)) is not None:
                raise ValueError(problem)

    @property
    def settings(self) -> ProbeSettings:
        """How the base model writes the probes."""
        return ProbeSettings(
            num_probes=self.num_probes,
            topics=TOPICS,
            seed=self.seed,
            min_yield=MIN_YIELD,
            ability=GENERAL,
            answer_tokens=self.answer_tokens,
        )


def check(base: str, tuned: str, asked: Checking) -> Receipt:
    """The base model's losses and answers on probes of its own, and those of the tuned model on the same ones."""
    first = models.load(base, device=asked.device)
    chat = bool(getattr(first.tokenizer, "chat_template", None)) and not asked.plain
    bound = interfaces.build("freeform", first.tokenizer, chat=chat)
    examples = probes(first, bound, asked)
    was = losses(first, bound, examples)
    vocabulary, before = first.tokenizer.get_vocab(), ModelId(name=base, fingerprint=first.fingerprint)
    del first  # one model at a time in memory
    second = models.load(tuned, device=asked.device)
    _check_vocabulary(vocabulary, base, second)
    # The tuned model reads the same tokens, in the base model's chat template.
    now = losses(second, bound, examples)
    said = answers(second, bound, examples, asked.answer_tokens)
    return _receipt(asked, examples, before, ModelId(name=tuned, fingerprint=second.fingerprint), was, now, said)


def probes(base: Loaded, bound: Interface, asked: Checking) -> tuple[Example, ...]:
    """The base model's probes, from the cache or written now."""
    if bank_folder(base, bound, (), asked.settings).exists():
        return cached_bank(base, bound, (), asked.settings).examples
    say(f"{base.name} writes {asked.num_probes} requests of its own; they are cached")
    with bank_view(asked.num_probes) as watch:
        return cached_bank(base, bound, (), asked.settings, watch=watch, notify=say).examples


def losses(loaded: Loaded, bound: Interface, examples: Sequence[Example]) -> list[Score]:
    """The likelihood of every probe's answer."""
    return log_likelihoods(loaded.model, [bound.encode(example) for example in examples], what=loaded.name)


def answers(loaded: Loaded, bound: Interface, examples: Sequence[Example], limit: int) -> list[str]:
    """The model's own answers, by the rule and the engine that wrote the base model's; a text has none but itself."""
    if all(isinstance(example, FreeForm) and example.is_text for example in examples):
        return [response_of(example) for example in examples]
    engine = LocalEngine(loaded.model, bound.tokenizer)
    prompts = [bound.prompt(example) for example in examples]
    rows = engine.greedy(prompts, max_new_tokens=limit, stop=bound.answer_stop)
    return [without_stop(row.text, bound.answer_stop) for row in rows]


def _check_vocabulary(known: dict[str, int], base: str, tuned: Loaded) -> None:
    """Refuse a tuned model that reads other tokens; added ones at the end do no harm."""
    own = tuned.tokenizer.get_vocab()
    if any(own.get(token) != id for token, id in known.items()):
        raise ValueError(
            f"{tuned.name} has another vocabulary than {base}, so their losses do not compare; give the base model "
            "that it was tuned from"
        )


def _receipt(
    asked: Checking,
    examples: Sequence[Example],
    before: ModelId,
    after: ModelId,
    was: Sequence[Score],
    now: Sequence[Score],
    said: Sequence[str],
) -> Receipt:
    """The comparison; both confidences are of the base model's answer."""
    found = [
        Losses(before=max(0.0, -a.mean), after=max(0.0, -b.mean), tokens=a.num_tokens)
        for a, b in zip(was, now, strict=True)
    ]
    compared = rows(
        examples,
        [unjudged(example, response_of(example), score) for example, score in zip(examples, was, strict=True)],
        [unjudged(example, text, score) for example, text, score in zip(examples, said, now, strict=True)],
        interface="freeform",
        losses=found,
        answers=found,
    )
    return Receipt(
        title=f"{after.name} checked against {before.name}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=before,
        after=after,
        sets=(RowSet(name=NAME, kind="retention", interface="freeform", rows=compared),),
        settings={"num_probes": asked.num_probes, "answer_tokens": asked.answer_tokens, "seed": asked.seed},
        environment=environment(threads=torch.get_num_threads(), device=asked.device),
        requirements=asked.requirements,
        notes=("Both models have the same weights.",) if before.fingerprint == after.fingerprint else (),
    )
