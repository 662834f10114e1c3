"""What a model can be told to write from nothing: its general behaviour, or requests for one named ability."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cplus.data.examples import FreeForm
from cplus.probes.degenerate import repeats

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


ABILITIES = {
    GENERAL: Ability(openers=_GENERAL, answer_tokens=64, cut=True, bare=4),
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


def answer_flaw(name: str, example: FreeForm) -> str | None:
    """The reason to reject a model's answer to its own request, if there is one."""
    if not example.is_text and repeats(example.response):
        return "repetition"
    return ability(name).flaw(example) if not example.is_text else None
