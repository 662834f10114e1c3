"""From anchors, or from nothing, to probes: sample, parse, remove copies and label until there are enough."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import ceil, inf
from typing import TypeAlias

from cplus.base.files import fingerprint
from cplus.data.examples import Choice, Example, FreeForm, Message
from cplus.data.interfaces import Freeform, Interface, Rejected
from cplus.data.prompts import Chat, opening, special_texts
from cplus.evaluation.abilities import GENERAL, MIN_YIELD, THINKING, Ability, ability
from cplus.models import Loaded
from cplus.models.decoding import Engine, LocalEngine, Request, Sampling, request_seed
from cplus.probes import settings as probe_settings
from cplus.probes.bank import Probe
from cplus.probes.labels import Label, Labeller, label
from cplus.probes.settings import BLOCK, MAX_NEW_TOKENS, TOPICS, ProbeSettings, RequestPlan, in_turn, normalise

# What the frozen model is shown so that it writes new inputs, and how its texts are read.


LONGER, STEP = 1.25, 64
"""A new question may have this many times the tokens of the longest anchor's prompt, rounded up to whole steps."""


@dataclass(frozen=True, kw_only=True)
class FromAnchors:
    """Each request shows a few anchors, in the interface's own words.

    Paper: App. C.1.
    """

    interface: Interface
    anchors: Sequence[Example]
    settings: ProbeSettings

    def block(self, missing: int) -> int:
        """The number of requests to sample together, whatever the size of the bank."""
        return BLOCK

    @property
    def max_new_tokens(self) -> int:
        """Maximum length of an input: more where an anchor's own is long, as MedQA's case descriptions are."""
        least = MAX_NEW_TOKENS[self.interface.name]
        if self.interface.name == "freeform":
            return least
        longest = max((len(self.interface.prompt(anchor)) for anchor in self.anchors), default=0)
        return max(least, STEP * ceil(LONGER * longest / STEP))

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that may end an input."""
        return self.interface.stop(self.anchors)

    def plan(self, index: int) -> RequestPlan:
        """The anchors and the topic of a request."""
        return probe_settings.plan(index, self.anchors, self.settings)

    def request(self, plan: RequestPlan) -> tuple[int, ...]:
        """The tokens that the model continues."""
        return self.interface.request(plan.shots, plan.topic)

    def parse(self, text: str, plan: RequestPlan) -> Example | Rejected:
        """The input that was written."""
        return self.interface.parse(text, plan.shots)


# Signs that a model's free text is no use: loops, empty or endless texts, words of the template.


NEAR = 0.7
"""Shared words divided by all words, from which on two self-written texts count as near duplicates."""
MIN_WORDS, MAX_WORDS = 3, 120
ACCEPTED = 0.7
"""About the share of self-written requests that become probes."""
_RUN = re.compile(r"(\S.{0,24}?)\1{5,}", re.DOTALL)
_DISTINCT = 0.5
_SHORTEST = 12


def repeats(text: str) -> bool:
    """Whether a text loops: a piece six times in a row, a line three times in a row, or few different word triples.

    >>> repeats("Sports - none. Sports - none. Sports - none. Sports - none. Sports - none. Sports - none.")
    True
    >>> repeats("What is the role of the cell in the body?")
    False
    """
    if _RUN.search(re.sub(r"\d", "0", text)) is not None:
        return True
    lines = [normalise(line) for line in text.splitlines() if normalise(line)]
    if any(a == b == c for (a, b), (_, c) in pairwise(pairwise(lines))):
        return True
    spoken = normalise(text).split()
    triples = list(zip(spoken, spoken[1:], spoken[2:], strict=False))
    return len(spoken) >= _SHORTEST and len(set(triples)) < _DISTINCT * len(triples)


def text_flaw(text: str, *, most: int = MAX_WORDS) -> str | None:
    """The reason to reject a self-written text, if there is one.

    >>> text_flaw("Hi"), text_flaw("??"), text_flaw("Why is the sky blue?")
    ('too short', 'empty', None)
    """
    spoken = normalise(text).split()
    if not any(character.isalnum() for character in text):
        return "empty"
    if repeats(text):
        return "repetition"
    if len(spoken) < MIN_WORDS:
        return "too short"
    return "too long" if len(spoken) > most else None


def leaks(text: str, template: str) -> bool:
    """Whether a text repeats a line of at least four words that the chat template writes.

    >>> leaks("Sure. You are a helpful AI assistant!", "system\\nYou are a helpful AI assistant\\nuser")
    True
    """
    own = normalise(text)
    lines = (normalise(line) for line in template.splitlines())
    return any(len(line.split()) >= 4 and line in own for line in lines)


def near(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether two sets of words belong to nearly the same text.

    >>> near(frozenset("how do i bake bread".split()), frozenset("how do i bake a bread".split()))
    True
    """
    return len(one & other) >= NEAR * len(one | other) > 0


def writing(interface: Interface, name: str, count: int, *, temperature: float, seed: int) -> ProbeSettings:
    """How a model writes rows of an ability for a job or a check; plain texts, which have no answer, are not short."""
    chat = isinstance(interface, Freeform) and isinstance(interface.form, Chat)
    request, answer = (ability(name).short if chat else None) or (None, None)
    return ProbeSettings(
        num_probes=count, temperature=temperature, topics=TOPICS, seed=seed, min_yield=MIN_YIELD, ability=name,
        max_new_tokens=request, answer_tokens=answer,
    )  # fmt: skip


def answer_flaw(name: str, example: FreeForm) -> str | None:
    """The reason to reject a model's answer to its own request, if there is one."""
    if example.is_text:
        return None
    if repeats(example.response):
        return "repetition"
    return None if ability(name).shown(example.response) else ability(name).unlike


# Requests that a model writes from nothing: it continues the bare start of its chat template, the user's turn open.
#
# A topic line and a first word steer most requests; the topic line is not part of the request. A model without a chat
# template continues plain text. Source: Xu et al. 2024, Magpie.


_TEXT_OPENERS = ("The", "In", "A", "When", "Many", "How", "It", "One")
_SENTENCE_ENDS = (". ", "? ", "! ", ".\n", "?\n", "!\n", "\n\n")


@dataclass(frozen=True, kw_only=True)
class SelfWritten:
    """Writes requests for one ability, or plain texts where the model has no chat template."""

    interface: Freeform
    settings: ProbeSettings

    def block(self, missing: int) -> int:
        """The number of requests to sample together: about as many as the missing probes need."""
        return min(96, 16 * ceil(missing / (16 * ACCEPTED)))

    @staticmethod
    def of(interface: Interface, settings: ProbeSettings) -> SelfWritten:
        """The writer of the settings' ability, if the model can show it."""
        assert settings.ability is not None
        ability(settings.ability)
        if not isinstance(interface, Freeform):
            raise ValueError(f"self-written rows are free text, but the interface is {interface.name}; use freeform")
        if settings.ability != GENERAL and not isinstance(interface.form, Chat):
            name = getattr(interface.tokenizer, "name_or_path", "") or "this model"
            raise ValueError(
                f"keeping {settings.ability} needs a chat template, and {name} has none or plain text was chosen; "
                "keep general, which is plain text then, or give a template with --set chat_template=FILE"
            )
        if settings.ability == THINKING and not interface.form.thinking:
            raise ValueError("keeping thinking needs answers with thoughts in them; add --set thinking=keep")
        return SelfWritten(interface=interface, settings=settings)

    @property
    def max_new_tokens(self) -> int:
        """Maximum length of a request or a text."""
        return 64 if self.chat else 96

    @cached_property
    def chat(self) -> Chat | None:
        """The chat template, if there is one."""
        return self.interface.form if isinstance(self.interface.form, Chat) else None

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends a user's turn; plain text ends where the model or the limit ends it."""
        return (self._frame[1],) if self.chat else ()

    def plan(self, index: int) -> RequestPlan:
        """The topic and the first words of a request; some begin from nothing. It depends on seed and index alone."""
        seed = f"{self.settings.seed}/{self.settings.ability}"
        every = self._ability.bare
        if every and index % every == every - 1:
            return RequestPlan(index=index, shots=(), topic=None)
        steered = index - (index // every if every else 0)
        openers = self._ability.openers if self.chat else _TEXT_OPENERS
        topic = in_turn(self.settings.topics, steered, f"{seed}/topics") if self.settings.topics else None
        return RequestPlan(index=index, shots=(), topic=topic, opener=in_turn(openers, steered, f"{seed}/openers"))

    def request(self, plan: RequestPlan) -> tuple[int, ...]:
        """The tokens that the model continues."""
        if self.chat:
            about = "" if plan.topic is None else f"Topic: {plan.topic}\n\n"
            return self.chat.tokens(f"{self._frame[0]}{about}{plan.opener}")
        about = "" if plan.topic is None else f"{plan.topic.capitalize()}\n\n"
        tokenizer = self.interface.tokenizer
        return opening(tokenizer, f"{about}{plan.opener}") or (tokenizer.eos_token_id,)

    def parse(self, text: str, plan: RequestPlan) -> Example | Rejected:
        """The request or the text that was written, if it is fit to be answered."""
        before, mark = self._frame if self.chat else ("", "")
        text, ended, _ = f"{plan.opener}{text}".partition(mark) if mark else (f"{plan.opener}{text}", "", "")
        text = text.strip() if ended else _whole_sentences(text.strip())
        if any(special in text for special in special_texts(self.interface.tokenizer)) or leaks(text, before):
            return Rejected("template leakage")
        if (reason := text_flaw(text)) is not None:
            return Rejected(reason)
        if not self.chat:
            return FreeForm(id=f"text-{fingerprint(text)[:12]}", messages=(), response=text)
        if not ended and not text.endswith((".", "?", "!")):
            return Rejected("no end")
        return FreeForm(
            id=f"{self.settings.ability}-{fingerprint(text)[:12]}",
            messages=(Message(role="user", content=text),),
            response="",
            tools=self._ability.tools,
        )

    @property
    def _ability(self) -> Ability:
        assert self.settings.ability is not None
        return ability(self.settings.ability)

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """What the template writes before and after a user's words."""
        assert self.chat is not None
        return self.chat.asking(self._ability.tools)


def _whole_sentences(text: str) -> str:
    """The text up to its last sentence end, if that leaves half of it.

    >>> _whole_sentences("It rains. We stay at home. Tomorr")
    'It rains. We stay at home.'
    """
    end = max(text.rfind(mark) for mark in _SENTENCE_ENDS)
    return text[: end + 1].strip() if end + 1 > len(text) / 2 else text


Writer: TypeAlias = FromAnchors | SelfWritten
"""Plans, writes and reads the requests of one bank."""


def writer(interface: Interface, anchors: Sequence[Example], settings: ProbeSettings) -> Writer:
    """The writer of these settings: from anchors, or from nothing where they name an ability."""
    if settings.ability is None:
        return FromAnchors(interface=interface, anchors=anchors, settings=settings)
    return SelfWritten.of(interface, settings)


_PATIENCE = 2
_CUT_OFF = "cut off at the token limit"
_UNFINISHED = ("no options", "wrong number of options", "empty option")
"""Reasons that a question has which was cut off; the limit is then what to change."""


class TooFewProbes(ValueError):
    """The model produces too few valid probes to continue."""


Block: TypeAlias = dict[int, Probe | Rejected]
"""What became of consecutive requests, by index: a probe, or the reason why there is none."""
Outcome: TypeAlias = Example | Rejected | Block
"""What a request gave before it is compared and labelled, or a whole block."""


class Tally:
    """The probes accepted so far, and the rules for accepting more."""

    def __init__(self, anchors: Sequence[Example], interface: Interface, settings: ProbeSettings) -> None:
        self._anchors, self._interface, self._settings = anchors, interface, settings
        self._seen = {self._key(anchor) for anchor in anchors}
        self._quota: int | None = None
        if settings.label_balanced:
            counts = {len(anchor.choices) for anchor in anchors if isinstance(anchor, Choice)}
            if interface.name != "letter" or len(counts) != 1:
                raise ValueError(
                    "label-balanced banks need one fixed set of answers: the letter interface and anchors with the "
                    f"same number of choices; got the {interface.name} interface and {sorted(counts) or 'no'} choices"
                )
            self._quota = ceil(settings.num_probes / counts.pop())
        self.blocks: list[Block] = []
        self.probes: list[Probe] = []
        self._count()

    def add(self, block: Block) -> None:
        """Add a block, new or from a journal."""
        self.blocks.append(block)
        self.probes += [result for result in block.values() if isinstance(result, Probe)]
        self._count()

    def generate(self, engine: Engine, labeller: Labeller) -> Iterator[Outcome]:
        """Continue from the last block until there are enough; a block is added before it is yielded.

        Paper: Algorithm 1, line 1; App. C.1, construction of the bank S_A.
        """
        settings = self._settings
        written = writer(self._interface, self._anchors, settings)
        sampling = Sampling(
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens or written.max_new_tokens,
            stop=written.stop,
        )
        while len(self.probes) < settings.num_probes:
            self._check_yield()
            first = sum(map(len, self.blocks))
            count = written.block(settings.num_probes - len(self.probes))
            plans = {index: written.plan(index) for index in range(first, first + count)}
            requests = [
                Request(index=index, prompt=written.request(plan), seed=request_seed(settings.seed, index))
                for index, plan in plans.items()
            ]
            read: dict[int, Example | Rejected] = {}
            for sample in engine.sample(requests, sampling):
                text = sample.text
                if sampling.stop and sample.end == "end of text":
                    text += sampling.stop[0]
                elif sampling.stop and sample.end == "limit" and "\n" in text:
                    text = text.rpartition("\n")[0]  # without the line that the limit cut
                parsed = written.parse(text, plans[sample.index])
                if sample.end == "limit" and isinstance(parsed, Rejected) and parsed.reason in _UNFINISHED:
                    parsed = Rejected(_CUT_OFF)
                read[sample.index] = parsed
                yield parsed
            # The outcomes in the order of the requests, whatever order they finished in.
            inputs = {index: self._new_input(read[index]) for index in plans}
            labels = iter(labeller([x for x in inputs.values() if not isinstance(x, Rejected)]))
            block: Block = {}
            for index, plan in plans.items():
                own = inputs[index]
                found = own if isinstance(own, Rejected) else self._new_label(next(labels))
                block[index] = (
                    found
                    if isinstance(found, Rejected)
                    else Probe(
                        example=found.example,
                        # Six digits: more would make a bank's bytes depend on the last bit of a sum.
                        confidence=round(found.confidence, 6),
                        request=index,
                        shots=tuple(shot.id for shot in plan.shots),
                        topic=plan.topic,
                    )
                )
            self.add(block)
            yield block

    def _new_input(self, example: Example | Rejected) -> Example | Rejected:
        """The input, which is then remembered, or the reason to reject it before it is labelled."""
        if isinstance(example, Rejected):
            return example
        key = self._key(example)
        if key in self._seen:
            return Rejected("copy of an anchor")
        if key in self._keys:
            return Rejected("duplicate")
        if self._settings.ability is not None:
            spoken = _words(example)
            if any(near(spoken, other) for other in self._words):
                return Rejected("near duplicate")
            self._words.append(spoken)
        self._keys.add(key)
        return example

    def _new_label(self, labelled: Label | Rejected) -> Label | Rejected:
        """The label, unless the settings reject it."""
        if isinstance(labelled, Rejected):
            return labelled
        example = labelled.example
        if self._settings.ability is not None and isinstance(example, FreeForm):
            reason = answer_flaw(self._settings.ability, example)
            if reason is not None:
                return Rejected(reason)
        if self._quota is not None and isinstance(example, Choice):
            if self._answers[example.answer] >= self._quota:
                return Rejected("enough of this label")
            self._answers[example.answer] += 1
        return labelled

    def _count(self) -> None:
        """What new inputs and labels are compared with."""
        examples = [probe.example for probe in self.probes]
        self._keys = set(map(self._key, examples))
        self._words = [] if self._settings.ability is None else list(map(_words, examples))
        self._answers = Counter(example.answer for example in examples if isinstance(example, Choice))

    def _check_yield(self) -> None:
        """Stop if the last requests gave almost no probes, so that generation always ends."""
        recent = [result for block in self.blocks[-_PATIENCE:] for result in block.values()]
        gained = sum(isinstance(result, Probe) for result in recent)
        if len(self.blocks) < _PATIENCE or gained >= self._settings.min_yield * len(recent):
            return
        counts = rejections(self.blocks)
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        remedy = "Use other anchors, another interface or fewer probes"
        if counts and counts.most_common(1)[0][0] == _CUT_OFF:
            remedy = "Give new questions more room with --set max_new_tokens=N"
        if self._settings.ability is not None:
            remedy = f"It cannot show by itself what to keep ({self._settings.ability}): give rows with --anchors FILE"
        raise TooFewProbes(
            f"the model gave {len(self.probes)} of {self._settings.num_probes} probes in "
            f"{sum(map(len, self.blocks))} requests and {gained} in the last {len(recent)}, "
            f"below {self._settings.min_yield:.0%}; rejected: {reasons}. {remedy}"
        )

    def _key(self, example: Example) -> str:
        return probe_settings.input_key(example, options=self._interface.name == "letter")


def _words(example: Example) -> frozenset[str]:
    return probe_settings.words(probe_settings.input_text(example, options=False))


def rejections(blocks: Iterable[Block], up_to: float = inf) -> Counter[str]:
    """The number of rejections for each reason, among requests up to an index."""
    found = ((index, result) for block in blocks for index, result in block.items())
    return Counter(result.reason for index, result in found if isinstance(result, Rejected) and index <= up_to)


def write_probes(
    base: Loaded, interface: Interface, anchors: Sequence[Example], settings: ProbeSettings
) -> list[Probe]:
    """The probes that a model writes from its anchors, in memory and without a seal."""
    tally = Tally(anchors, interface, settings)
    for _ in tally.generate(LocalEngine(base.model, base.tokenizer), labeller_of(base, interface, settings)):
        pass
    return tally.probes[: settings.num_probes]


def labeller_of(base: Loaded, interface: Interface, settings: ProbeSettings) -> Labeller:
    """The frozen model as it answers its own inputs; for an ability, answers may be cut off at its limit."""
    if settings.ability is None:
        return partial(label, base.model, interface)
    own = ability(settings.ability)
    return partial(label, base.model, interface, max_tokens=settings.answer_tokens or own.answer_tokens, cut=own.cut)
