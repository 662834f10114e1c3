"""The settings that determine which probes a bank contains, and the texts that are compared to find copies."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from cplus.data.examples import Choice, Example

# Normalised texts and word sets, for finding copies.


# Punctuation. Arithmetic signs stay: 2 + 3 is not 2 - 3.
_MARKS = re.compile(r"""[.,;:!?'"()\[\]{}…‘’“”«»`_]|(?<=[^\W\d])-(?=[^\W\d])""")


def normalise(text: str) -> str:
    """A text with differences in case, blanks, character forms and punctuation removed.

    >>> normalise("  What’s  the\\nＣＡＰＩＴＡＬ of Peru?")
    'what s the capital of peru'
    >>> normalise("2 + 3?") == normalise("2 - 3?")
    False
    """
    return " ".join(_MARKS.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split())


def words(text: str) -> frozenset[str]:
    """The normalised words of a text."""
    return frozenset(normalise(text).split())


def input_text(example: Example, *, options: bool) -> str:
    """The input of an example: its question, with the options if these are part of the input, its
    conversation, or its text."""
    if not isinstance(example, Choice):
        if example.is_text:
            return example.response
        return "\n".join(message.content for message in example.messages)
    if not options or len(example.choices) < 2:
        return example.question
    return "\n".join([example.question, *example.choices])


def input_key(example: Example, *, options: bool) -> str:
    """The normalised input; the order of the options does not matter.

    >>> a = Choice(id="a", question="Is it?", choices=("yes", "No."), answer=0)
    >>> b = Choice(id="b", question="is it", choices=("no", "yes"), answer=0)
    >>> input_key(a, options=True) == input_key(b, options=True)
    True
    """
    if isinstance(example, Choice) and options:
        return "\n".join([normalise(example.question), *sorted(normalise(choice) for choice in example.choices)])
    return normalise(input_text(example, options=options))


# The settings that determine which probes a bank contains, and the plan of its requests.


TOPICS = (
    "elementary math", "algebra", "computer programming", "software debugging", "biology", "medicine", "physics",
    "chemistry", "world history", "civics", "economics", "business", "law", "ethics", "literature", "linguistics",
    "geography", "environmental science", "psychology", "sports", "music", "visual art", "daily life",
    "workplace decisions",
)  # fmt: skip
"""The 24 broad areas of the topic cue. Protocol section 3."""

MAX_NEW_TOKENS = {"letter": 256, "cloze": 96, "freeform": 160}
"""Maximum length of a new input, by interface, unless the settings give one."""

BLOCK = 128
"""The number of requests that are sampled, labelled and recorded together.

Not a setting: it does not depend on the size of the bank, so a bank is a prefix of any larger one with the same seed.
"""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The settings of a bank; the paper does not use the last four.

    Paper: K, T and N in App. C.1.
    """

    num_probes: int = 512
    shots: int = 2
    temperature: float = 0.8
    max_new_tokens: int | None = None
    topics: tuple[str, ...] = ()
    seed: int = 0
    min_yield: float = 0.02
    label_balanced: bool = False
    ability: str | None = None
    """What the model writes from nothing, without anchors: a name in `cplus.evaluation.abilities`."""
    answer_tokens: int | None = None
    """Maximum length of an answer; by default the ability's or the interface's own."""

    def __post_init__(self) -> None:
        for name in ("num_probes", "shots", "max_new_tokens", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.answer_tokens is not None and self.ability is None:
            raise ValueError(f"answer_tokens belongs to an ability, got {self.answer_tokens}")
        if not 0 < self.min_yield <= 1:
            raise ValueError(f"min_yield must be above 0 and at most 1, got {self.min_yield}: writing might never end")


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """What one request shows to the frozen model."""

    index: int
    shots: tuple[Example, ...]
    topic: str | None
    opener: str = ""
    """The first words of the input, where they are given."""


def plan(index: int, anchors: Sequence[Example], settings: ProbeSettings) -> RequestPlan:
    """The context of one request: K newly drawn anchors, and a topic from a new permutation in every round.

    Paper: C_j and c_j in App. C.1. It depends only on the seed and the index, so requests can be made in any order.
    """
    if len(anchors) < settings.shots:
        raise ValueError(
            f"a request shows {settings.shots} anchors, but there are {len(anchors)}; "
            "give more anchors or reduce the number of shots"
        )
    shots = random.Random(f"{settings.seed}/shots/{index}").sample(list(anchors), settings.shots)
    topic = in_turn(settings.topics, index, f"{settings.seed}/topics") if settings.topics else None
    return RequestPlan(index=index, shots=tuple(shots), topic=topic)


def in_turn(values: tuple[str, ...], index: int, seed: str) -> str:
    """The value for this index: every value once per round, in a new order in every round."""
    cycle, position = divmod(index, len(values))
    return random.Random(f"{seed}/{cycle}").sample(values, len(values))[position]
