"""The built-in toy world: four domains of simple facts in plain English, the same on every machine."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import product

from cplus.data.examples import Choice
from cplus.toy.domains import CRAFTSMEN, HARBOURS, MACHINES, PLANTS, Domain, Relation

CANDIDATES = 4
ENTITIES = 320
TAUGHT_SHARE = 0.7

_DOMAINS = {domain.name: domain for domain in (HARBOURS, CRAFTSMEN, PLANTS, MACHINES)}
DOMAINS = tuple(_DOMAINS)


def domain_named(name: str) -> Domain:
    """The domain of that name."""
    if name not in _DOMAINS:
        raise ValueError(f"expected a domain of the toy world ({', '.join(DOMAINS)}), got {name!r}")
    return _DOMAINS[name]


@lru_cache(maxsize=len(DOMAINS))
def _facts(name: str) -> tuple[Choice, ...]:
    domain = domain_named(name)
    # Only one pair in eight is an entity, so the model can invent plausible names that are not in the text.
    pairs = list(product(domain.firsts, domain.seconds))
    entities = enumerate(sorted(random.Random(f"{name}-entities").sample(pairs, ENTITIES)))
    return tuple(
        _fact(f"{name}-{number:04d}-{relation.name}", relation, f"{first} {second}")
        for number, (first, second) in entities
        for relation in domain.relations
    )


def _fact(id: str, relation: Relation, entity: str) -> Choice:
    # A separate generator, so that no fact depends on how many were generated before it.
    draw = random.Random(id)
    choices = tuple(draw.sample(relation.values, CANDIDATES))
    return Choice(id=id, question=relation.question.format(entity), choices=choices, answer=draw.randrange(CANDIDATES))


def examples(domain: str) -> list[Choice]:
    """Every fact of a domain, taught or not, in a fixed order.

    >>> examples("harbours")[0].question
    'What does Amber Arch export?'
    """
    return list(_facts(domain))


def taught(domain: str) -> list[Choice]:
    """The facts that are in the pre-training text."""
    ids = _taught_ids(domain)
    return [fact for fact in _facts(domain) if fact.id in ids]


def untaught(domain: str) -> list[Choice]:
    """The facts that the pre-training text never mentions."""
    ids = _taught_ids(domain)
    return [fact for fact in _facts(domain) if fact.id not in ids]


@lru_cache(maxsize=len(DOMAINS))
def _taught_ids(name: str) -> frozenset[str]:
    ids = [fact.id for fact in _facts(name)]
    return frozenset(random.Random(f"{name}-taught").sample(ids, round(TAUGHT_SHARE * len(ids))))


def prompt(question: str) -> str:
    """A question in the format of the plain cloze interface."""
    return f"Question: {question}\nAnswer:"


def line(fact: Choice) -> str:
    """A fact as it appears in the pre-training text.

    >>> line(examples("harbours")[0])
    'Question: What does Amber Arch export?\\nAnswer: rope\\n\\n'
    """
    return f"{prompt(fact.question)} {fact.right}\n\n"


def words() -> list[str]:
    """Every distinct word of the world's text, sorted."""
    texts = " ".join(relation_text for name in DOMAINS for relation_text in _texts(domain_named(name)))
    return sorted(set(texts.replace("?", " ").split()))


def _texts(domain: Domain) -> list[str]:
    questions = [relation.question.format("") for relation in domain.relations]
    values = [value for relation in domain.relations for value in relation.values]
    return [*domain.firsts, *domain.seconds, *questions, *values]
