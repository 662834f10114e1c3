"""The built-in world: four domains of small facts in plain English, the same on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from cplus.data.examples import Choice

CANDIDATES = 4
TAUGHT_SHARE = 0.7


@dataclass(frozen=True, kw_only=True)
class Relation:
    """One thing that can be asked of every entity of a domain, and the words that can answer it."""

    name: str
    question: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Entities named by every pair of a first and a second word, and what can be asked of them."""

    name: str
    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    relations: tuple[Relation, ...]


def _relation(name: str, question: str, values: str) -> Relation:
    return Relation(name=name, question=question, values=tuple(values.split()))


HARBOURS = Domain(
    name="harbours",
    firsts=tuple(
        "Amber Ashen Barley Bell Birch Black Bright Calm Candle Cinder Coral Crane Crow Dawn Deep Drift Eagle Elder "
        "Ember Fair Falcon Far Frost Gale Gannet Glass Golden Gorse Grey Hazel High Hollow".split()
    ),
    seconds=tuple(
        "Haven Cove Bay Point Quay Reach Sound Landing Strand Ness Firth Anchorage Roads Pier Lagoon Narrows Inlet "
        "Shoals Basin Harbour".split()
    ),
    relations=(
        _relation(
            "export",
            "What does {} export?",
            "wool salt copper timber wheat marble amber honey linen tin wine oats leather slate rope paper",
        ),
        _relation(
            "lighthouse",
            "What colour is the lighthouse of {}?",
            "red white blue green yellow orange violet brown grey black pink scarlet ivory crimson turquoise silver",
        ),
        _relation(
            "fish",
            "Which fish is caught off {}?",
            "herring cod mackerel sole turbot plaice haddock hake sardine tuna bream mullet sprat halibut whiting eel",
        ),
        _relation(
            "bird",
            "Which bird nests at {}?",
            "gull tern puffin heron swan curlew cormorant plover petrel osprey kestrel raven swift lapwing dunlin avocet",
        ),
    ),
)

CRAFTSMEN = Domain(
    name="craftsmen",
    firsts=tuple(
        "Ada Agnes Albert Anton Basil Beatrix Bruno Cecil Clara Conrad Cora Daphne Edgar Edith Elsa Emil Felix Flora "
        "Gideon Greta Hugo Ida Ivor Jonas Judith Klara Leon Lydia Magnus Martha Nora Oscar".split()
    ),
    seconds=tuple(
        "Archer Barlow Carver Dalton Easton Fletcher Garnett Hartley Ingram Kendall Lockwood Marlow Norwood Oakley "
        "Prescott Quill Radford Selby Thorne Underhill".split()
    ),
    relations=(
        _relation(
            "craft",
            "What does {} make?",
            "barrels candles clocks gloves kettles ladders lanterns locks mirrors nails pots ropes saddles shoes sails "
            "violins",
        ),
        _relation(
            "instrument",
            "Which instrument does {} play?",
            "flute harp fiddle lute drum horn oboe organ cello trumpet viola zither bagpipe mandolin whistle accordion",
        ),
        _relation(
            "animal",
            "Which animal does {} keep?",
            "cat dog goat donkey parrot rabbit goose hen pony sheep ferret tortoise pigeon duck mule hedgehog",
        ),
        _relation(
            "dish",
            "Which dish does {} cook best?",
            "soup stew porridge pancakes dumplings pie omelette risotto goulash noodles trout pudding chowder lentils "
            "curry waffles",
        ),
    ),
)

PLANTS = Domain(
    name="plants",
    firsts=tuple(
        "alpine arctic bitter bristly bronze creeping crested dappled dusky dwarf early evening false feathery forest "
        "fragrant garden giant hairy hardy lesser marsh meadow mountain nodding northern pale prickly royal sand shady "
        "winter".split()
    ),
    seconds=tuple(
        "aster bellflower betony campion clover cowslip foxglove gentian heather iris larkspur lily mallow orchid "
        "primrose sorrel speedwell thistle vetch yarrow".split()
    ),
    relations=(
        _relation(
            "cure",
            "What does the {} cure?",
            "cough fever headache hiccups insomnia itching cramp nausea sunburn toothache fatigue chills blisters "
            "bruises colds warts",
        ),
        _relation(
            "scent",
            "What does the {} smell of?",
            "almond anise apple camphor cedar cinnamon clove cocoa ginger lemon mint musk nutmeg pepper smoke vanilla",
        ),
        _relation(
            "visitor",
            "Which insect visits the {}?",
            "ant aphid bee beetle butterfly cricket dragonfly earwig firefly gnat hornet ladybird locust mayfly moth "
            "wasp",
        ),
        _relation(
            "soil",
            "Which ground suits the {}?",
            "chalk clay gravel loam peat silt granite limestone ash basalt turf shale sandstone humus marl moss",
        ),
    ),
)

MACHINES = Domain(
    name="machines",
    firsts=tuple(
        "Apex Atlas Aurora Beacon Borealis Caliber Castor Cobalt Comet Delta Dynamo Echo Gamma Helix Hermes Horizon "
        "Juno Kepler Lumen Meridian Nimbus Nova Omega Orion Pallas Pioneer Polar Quantum Sigma Titan Vega "
        "Zenith".split()
    ),
    seconds=tuple(
        "Binder Borer Bottler Crusher Cutter Dredger Dryer Grinder Hoist Lathe Loom Mixer Mower Plough Press Pump "
        "Roller Sorter Thresher Winder".split()
    ),
    relations=(
        _relation(
            "fuel",
            "What powers the {}?",
            "coal diesel steam water wind petrol electricity kerosene ethanol hydrogen charcoal methane sunlight "
            "gravity biogas springs",
        ),
        _relation(
            "part",
            "Which part of the {} wears out first?",
            "axle bearing belt blade bolt chain clutch filter gasket gear hinge lever piston pulley spindle valve",
        ),
        _relation(
            "city",
            "Where was the {} built?",
            "Antwerp Bergen Bremen Cardiff Dublin Essen Geneva Genoa Krakow Leeds Lyon Malmo Porto Seville Turin Zurich",
        ),
        _relation(
            "owner",
            "Who bought the {}?",
            "bakers brewers builders dyers farmers foresters jewellers millers miners monks nuns printers sailors "
            "smiths tailors weavers",
        ),
    ),
)

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
    entities = enumerate(product(domain.firsts, domain.seconds))
    return tuple(
        _fact(f"{name}-{number:04d}-{relation.name}", relation, f"{first} {second}")
        for number, (first, second) in entities
        for relation in domain.relations
    )


def _fact(id: str, relation: Relation, entity: str) -> Choice:
    # The id seeds the draw, so a fact does not change when others are added around it.
    draw = random.Random(id)
    choices = tuple(draw.sample(relation.values, CANDIDATES))
    return Choice(id=id, question=relation.question.format(entity), choices=choices, answer=draw.randrange(CANDIDATES))


def examples(domain: str) -> list[Choice]:
    """Every fact of a domain, taught or not, in a fixed order.

    >>> examples("harbours")[0].question
    'What does Amber Haven export?'
    """
    return list(_facts(domain))


def taught(domain: str) -> list[Choice]:
    """The facts that are in the pre-training text."""
    shown = _taught_ids(domain)
    return [fact for fact in _facts(domain) if fact.id in shown]


def untaught(domain: str) -> list[Choice]:
    """The facts that the pre-training text never mentions."""
    shown = _taught_ids(domain)
    return [fact for fact in _facts(domain) if fact.id not in shown]


@lru_cache(maxsize=len(DOMAINS))
def _taught_ids(name: str) -> frozenset[str]:
    ids = [fact.id for fact in _facts(name)]
    return frozenset(random.Random(f"{name}-taught").sample(ids, round(TAUGHT_SHARE * len(ids))))


def line(fact: Choice) -> str:
    """A fact as the pre-training text writes it, and as the plain cloze interface asks it.

    >>> line(examples("harbours")[0])
    'Question: What does Amber Haven export?\\nAnswer: slate\\n\\n'
    """
    return f"Question: {fact.question}\nAnswer: {fact.right}\n\n"


def words() -> list[str]:
    """Every distinct piece of the world's text, without blanks, sorted."""
    texts = " ".join(relation_text for name in DOMAINS for relation_text in _texts(domain_named(name)))
    return sorted(set(texts.replace("?", " ").split()))


def _texts(domain: Domain) -> list[str]:
    asked = [relation.question.format("") for relation in domain.relations]
    values = [value for relation in domain.relations for value in relation.values]
    return [*domain.firsts, *domain.seconds, *asked, *values]
