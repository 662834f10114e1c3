"""What a model writes from nothing: general requests or those for a named ability, without degenerate text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Any

from cplus.base.files import fingerprint
from cplus.data.examples import Example, FreeForm, Message
from cplus.data.interfaces import Freeform, Interface, Rejected
from cplus.data.prompts import Chat, opening, special_texts
from cplus.probes.settings import TOPICS, ProbeSettings, RequestPlan, in_turn, normalise

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


# What a model can be told to write from nothing: its general behaviour, or requests for one named ability.


_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?```\s*\Z", re.DOTALL | re.IGNORECASE)
_CALL = re.compile(r"\{.*\}", re.DOTALL)
_PROSE = 20

GENERAL = "general"
MIN_YIELD = 0.25
"""The smallest share of a model's texts that must be fit for use; below it, it cannot write what to keep."""
_GENERAL = (
    "What", "How", "Explain", "Write a", "Why", "Give me", "Can you", "List", "Compare", "Describe", "I need", "Which",
    "Tell me", "Suggest", "Is it", "Summarize",
)  # fmt: skip
_JSON = (
    "Return a JSON object with", "Give me a JSON list of", "Write a JSON record for", "Answer in JSON:",
    "Create a JSON object that describes", "Represent this as JSON:",
)  # fmt: skip
_STYLE = (
    "Tell me about", "Write a short paragraph about", "What do you think about", "Explain in your own words",
    "Write a short letter about", "Give me advice on", "Describe how it feels", "Write a few sentences about",
)  # fmt: skip
_THINKING = (
    "How many", "If", "Solve", "Prove that", "Which is larger", "What is the next", "Find", "A train", "Calculate",
    "Is it possible",
)  # fmt: skip
_TOOLS = (
    "What is the weather", "Send an email", "Search for", "Convert", "Remind me", "How much is", "Translate",
    "What time", "Find the nearest", "Calculate",
)  # fmt: skip


def _tool(name: str, about: str, **properties: str) -> dict[str, Any]:
    typed = {key: {"type": kind} for key, kind in properties.items()}
    schema = {"type": "object", "properties": typed, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


OFFERED = json.dumps(
    [
        _tool("get_weather", "The weather in a place.", location="string"),
        _tool("search", "Search the web.", query="string"),
        _tool("calculate", "The value of an arithmetic expression.", expression="string"),
        _tool("convert_units", "Convert a quantity.", value="number", from_unit="string", to_unit="string"),
        _tool("send_email", "Send an email.", to="string", subject="string", body="string"),
        _tool("set_reminder", "Set a reminder.", text="string", time="string"),
        _tool("translate", "Translate a text.", text="string", language="string"),
        _tool("get_time", "The local time in a place.", location="string"),
    ]
)
"""The tools that requests for tool calls offer."""


def no_json(example: FreeForm) -> str | None:
    """The reason to reject an answer that is no JSON object or list, in code fences or not."""
    fenced = _FENCE.match(example.response)
    return None if isinstance(_value(fenced[1] if fenced else example.response), dict | list) else "answer is no JSON"


def no_call(example: FreeForm) -> str | None:
    """The reason to reject an answer that calls none of the offered tools."""
    found = _CALL.search(example.response)
    call = _value(found[0]) if found else None
    known = {tool["function"]["name"] for tool in json.loads(OFFERED)}
    called = isinstance(call, dict) and call.get("name") in known and ("arguments" in call or "parameters" in call)
    return None if called else "answer is no tool call"


def no_thought(example: FreeForm) -> str | None:
    """The reason to reject an answer that does not first think and then answer."""
    thought, ended, answer = example.response.partition("</think>")
    whole = ended and thought.replace("<think>", "").strip() and answer.strip()
    return None if whole else "answer without thinking"


def no_prose(example: FreeForm) -> str | None:
    """The reason to reject an answer that is too short to show a style."""
    return None if len(example.response.split()) >= _PROSE else "answer too short"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, kw_only=True)
class Ability:
    """How requests for an ability begin, how long answers may be, and which answers show the ability.

    `cut` admits answers that reach the limit; `bare` is how often a request begins from nothing at all: every so many.
    """

    openers: tuple[str, ...]
    answer_tokens: int
    cut: bool
    flaw: Callable[[FreeForm], str | None] = lambda example: None
    bare: int | None = None
    tools: str = ""
    short: tuple[int, int] | None = None
    """Limits of the requests and answers that a job has written: the first tokens of an answer are good evidence."""

    @property
    def written_tokens(self) -> int:
        """The longest answer that a job has written."""
        return self.short[1] if self.short else self.answer_tokens


ABILITIES = {
    GENERAL: Ability(openers=_GENERAL, answer_tokens=64, cut=True, bare=4, short=(24, 16)),
    "json": Ability(openers=_JSON, answer_tokens=256, cut=False, flaw=no_json),
    "style": Ability(openers=_STYLE, answer_tokens=96, cut=True, flaw=no_prose),
    "thinking": Ability(openers=_THINKING, answer_tokens=1024, cut=False, flaw=no_thought),
    "tools": Ability(openers=_TOOLS, answer_tokens=128, cut=False, flaw=no_call, tools=OFFERED),
}


def ability(name: str) -> Ability:
    """The ability of that name."""
    if name not in ABILITIES:
        raise ValueError(f"expected an ability of {', '.join(ABILITIES)}, got {name!r}")
    return ABILITIES[name]


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
    if not example.is_text and repeats(example.response):
        return "repetition"
    return ability(name).flaw(example) if not example.is_text else None


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
        if settings.ability == "thinking" and not interface.form.thinking:
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
