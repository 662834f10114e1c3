"""The built-in toy world: four domains of simple facts in plain English, the same on every machine."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from cplus.data.examples import BUILT_IN, Choice

# The vocabulary of the toy world: the entities of each domain, and the questions about them.


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Entities named by two words, a first and a second, and by name the questions about them with their answers."""

    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    relations: dict[str, tuple[str, tuple[str, ...]]]


_WORLD = {
    "harbours": """
firsts:
  Amber Ashen Barley Bell Birch Black Bright Broad Calm Candle Cedar Chalk Cinder Clover Coral Crane Crooked Crow Dawn
  Deep Drift Dune Eagle Elder Ember Fair Falcon Far Fern Fox Frost Gale Gannet Glass Golden Gorse Grey Hazel Heron
  High Hollow Iron Ivory Juniper Lark Linden Long Maple Merry Mill Moon Northern Old Otter Pearl Pine Quiet Raven Rose
  Rowan Saint Seal Silver Tidal
seconds:
  Anchorage Arch Bank Bar Basin Bay Beach Bight Bluff Bridge Cape Cliff Cove Creek Crossing Cross Dock Ferry Firth
  Ford Gate Harbour Haven Head Hook Hythe Inlet Island Lagoon Landing Mouth Narrows Ness Pier Point Quay Reach Roads
  Sound Strand
export: What does {} export?
  wool salt copper timber wheat marble amber honey linen tin wine oats leather slate rope paper
lighthouse: What colour is the lighthouse of {}?
  red white blue green yellow orange violet brown grey black pink scarlet ivory crimson turquoise silver
fish: Which fish is caught off {}?
  herring cod mackerel sole turbot plaice haddock hake sardine tuna bream mullet sprat halibut whiting eel
bird: Which bird nests at {}?
  gull tern puffin heron swan curlew cormorant plover petrel osprey kestrel raven swift lapwing dunlin avocet
statue: Who has a statue in {}?
  admiral astronomer bishop captain duchess explorer fiddler governor hermit queen novelist painter pilot poet
  sculptor shepherd
sport: Which sport do the children of {} play?
  archery badminton bowls chess cricket croquet curling fencing hockey polo quoits rounders rugby skating squash
  tennis
dance: Which dance opens the ball in {}?
  waltz polka tango jig reel minuet mazurka gavotte bolero foxtrot quadrille rumba galop hornpipe samba tarantella
regatta: When does {} hold its regatta?
  January February March April May June July August September October November December Easter Michaelmas Pentecost
  midsummer
""",
    "craftsmen": """
firsts:
  Ada Agnes Albert Alma Anton Arthur Basil Beatrix Bertha Bruno Cecil Clara Conrad Cora Cyril Daphne Dora Edgar Edith
  Elias Elsa Emil Esther Felix Flora Frieda Gideon Gloria Greta Harold Hector Helga Hilda Hugo Ida Irene Ivor Jasper
  Jonas Judith Klara Laurence Leon Lydia Magnus Martha Maud Miriam Nora Oscar Otto Pauline Percy Philippa Ralph Roland
  Rufus Sibyl Stella Theo Ursula Vera Walter Winifred
seconds:
  Archer Ashby Barlow Bexley Carver Clifton Dalton Denham Easton Ellwood Fairfax Fletcher Garnett Granger Hartley
  Holloway Ingram Jarvis Kendall Langley Lockwood Marlow Mercer Norwood Oakley Osborne Pickering Prescott Quill
  Radford Rowley Selby Sherwood Thorne Tilney Underhill Vickers Wakefield Whitby Yardley
craft: What does {} make?
  barrels candles clocks gloves kettles ladders lanterns locks mirrors nails pots ropes saddles shoes sails violins
instrument: Which instrument does {} play?
  flute harp fiddle lute drum horn oboe organ cello trumpet viola zither bagpipe mandolin whistle accordion
pet: Which animal does {} keep?
  cat dog goat donkey parrot rabbit goose hen pony sheep ferret tortoise pigeon duck mule hedgehog
dish: Which dish does {} cook best?
  soup stew porridge pancakes dumplings pie omelette risotto goulash noodles trout pudding chowder lentils curry
  waffles
language: Which language does {} speak at home?
  Basque Breton Catalan Czech Danish Dutch Finnish Frisian Greek Irish Latin Norwegian Polish Swedish Turkish Welsh
garment: What does {} wear to market?
  apron beret bonnet cape cardigan cloak coat gown hood jacket kilt shawl smock tunic vest waistcoat
tool: Which tool did {} inherit?
  adze anvil awl axe chisel file gouge hammer hatchet mallet pliers rasp shears spade tongs trowel
gem: Which stone is set in the ring of {}?
  agate beryl diamond emerald garnet jade jasper jet moonstone onyx opal pearl quartz ruby sapphire topaz
""",
    "plants": """
firsts:
  alpine arctic autumn bearded bitter blushing bog bristly bronze canary coastal common creeping crested crimson
  dappled downy drooping dusky dwarf early eastern evening false feathery field forest fragrant garden giant glossy
  hairy hardy hoary island lesser marsh meadow mountain naked nodding pale prickly purple river rock royal sand
  scarlet shady slender smooth southern spotted spring striped sweet tall tufted twisted upright wandering western
  winter
seconds:
  aster bellflower betony bluebell bramble bryony burdock buttercup campion chicory clover columbine comfrey cowslip
  crocus daisy fern foxglove gentian geranium heather iris ivy larkspur lily lupin mallow marigold nettle orchid poppy
  primrose sedge sorrel speedwell tansy thistle valerian vetch yarrow
cure: What does the {} cure?
  cough fever headache hiccups insomnia itching cramp nausea sunburn toothache fatigue chills blisters bruises colds
  warts
scent: What does the {} smell of?
  almond anise apple camphor cedar cinnamon clove cocoa ginger lemon mint musk nutmeg pepper smoke vanilla
visitor: Which insect visits the {}?
  ant aphid bee beetle butterfly grasshopper dragonfly earwig firefly gnat hornet ladybird locust mayfly moth wasp
ground: Which ground suits the {}?
  chalk clay gravel loam peat silt granite limestone ash basalt turf shale sandstone humus marl moss
country: Where was the {} first described?
  Austria Belgium Brazil Chile Egypt Ethiopia Iceland India Japan Kenya Mexico Morocco Nepal Peru Portugal Sweden
root: What does the root of the {} look like?
  anchor antler bulb button carrot coil comb fan finger fork hand knot net spider star turnip
neighbour: Which tree shelters the {}?
  alder aspen beech birch cherry chestnut elm fir hazel larch lime maple oak pine poplar willow
weather: After which weather does the {} open?
  breeze cloud dew downpour drizzle drought fog frost gale hail haze mist rain sleet snow thunder
""",
    "machines": """
firsts:
  Ajax Alpha Apex Argo Atlas Aurora Beacon Borealis Caliber Castor Chronos Cobalt Colossus Comet Corona Cosmos Cyclone
  Delta Diana Dynamo Echo Eclipse Equinox Fulcrum Gamma Gemini Goliath Helix Hercules Hermes Horizon Icarus Juno
  Jupiter Kepler Kronos Lumen Lyra Meridian Nimbus Nova Omega Orbit Orion Pallas Pegasus Phoenix Pioneer Polar Pulsar
  Quantum Saturn Sigma Sirius Solar Spectrum Summit Tempest Titan Triton Vega Vertex Vulcan Zenith
seconds:
  Auger Baler Binder Borer Bottler Capper Carder Chipper Conveyor Crane Crusher Cutter Dredger Drill Dryer Engine
  Excavator Furnace Grader Grinder Harrow Hoist Lathe Loom Mill Mixer Mower Planer Plough Press Pump Reaper Roller Saw
  Sorter Spinner Stamper Thresher Turbine Winder
power: What powers the {}?
  coal diesel steam water wind petrol electricity kerosene ethanol hydrogen charcoal methane sunlight gravity biogas
  springs
part: Which part of the {} wears out first?
  axle bearing belt blade bolt chain clutch filter gasket gear hinge lever piston pulley spindle valve
city: Where was the {} built?
  Antwerp Bergen Bremen Cardiff Dublin Essen Geneva Genoa Krakow Leeds Lyon Malmo Porto Seville Turin Zurich
owner: Who bought the {}?
  bakers brewers builders dyers farmers foresters jewellers millers miners monks nuns printers sailors smiths tailors
  weavers
casing: What is the casing of the {} made of?
  aluminium brass bronze canvas concrete cork enamel fibreglass glass iron nickel plastic porcelain rubber steel zinc
product: What leaves the {} at the end?
  biscuits bottles bricks buttons cables cartons coins flour gravel jam ink matches pencils soap thread tiles
noise: What does the {} sound like?
  bells birdsong breathing clapping drums footsteps geese laughter organ purring rain sneezing surf thunder trains
  whispering
place: Where does the {} stand today?
  attic barn basement castle cellar depot factory garage hangar library mill museum quarry school shed station
""",
}
"""The words of each domain: entities, then for each relation its name, its question and the possible answers."""


CANDIDATES = 4
ENTITIES = 320
TAUGHT_SHARE = 0.7

DOMAINS = tuple(_WORLD)


@cache
def domain_named(name: str) -> Domain:
    """The domain of that name."""
    if name not in _WORLD:
        raise ValueError(f"expected a domain of the toy world ({', '.join(DOMAINS)}), got {name!r}")
    entries = [entry.partition(":") for entry in re.split(r"\n(?=\S)", _WORLD[name].strip())]
    (_, _, firsts), (_, _, seconds), *relations = entries
    rows = [(relation, *text.strip().split("\n", 1)) for relation, _, text in relations]
    return Domain(
        firsts=tuple(firsts.split()),
        seconds=tuple(seconds.split()),
        relations={relation: (question, tuple(values.split())) for relation, question, values in rows},
    )


@cache
def _facts(name: str) -> tuple[Choice, ...]:
    domain = domain_named(name)
    # Only one pair in eight is an entity, so the model can invent plausible names that are not in the text.
    pairs = list(product(domain.firsts, domain.seconds))
    found = []
    for number, entity in enumerate(sorted(random.Random(f"{name}-entities").sample(pairs, ENTITIES))):
        for relation, (question, values) in domain.relations.items():
            id = f"{name}-{number:04d}-{relation}"
            draw = random.Random(id)  # so that no fact depends on how many were generated before it
            choices, answer = tuple(draw.sample(values, CANDIDATES)), draw.randrange(CANDIDATES)
            found.append(Choice(id=id, question=question.format(" ".join(entity)), choices=choices, answer=answer))
    return tuple(found)


def examples(domain: str) -> list[Choice]:
    """Every fact of a domain, taught or not, in a fixed order.

    >>> examples("harbours")[0].question
    'What does Amber Arch export?'
    """
    return list(_facts(domain))


def taught(domain: str) -> list[Choice]:
    """The facts that are in the pre-training text."""
    return _halves(domain)[0]


def untaught(domain: str) -> list[Choice]:
    """The facts that the pre-training text never mentions."""
    return _halves(domain)[1]


def _halves(name: str) -> tuple[list[Choice], list[Choice]]:
    facts = _facts(name)
    chosen = set(random.Random(f"{name}-taught").sample([fact.id for fact in facts], round(TAUGHT_SHARE * len(facts))))
    return [fact for fact in facts if fact.id in chosen], [fact for fact in facts if fact.id not in chosen]


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
    found: set[str] = set()
    for domain in map(domain_named, DOMAINS):
        found.update(domain.firsts, domain.seconds)
        for question, values in domain.relations.values():
            found.update(values, question.format("").replace("?", " ").split())
    return sorted(found)


BUILT_IN.update({domain: partial(examples, domain) for domain in DOMAINS})
