"""Named abilities, one table: requests with checkable answers, how probes are written, and what a model has kept.

A row of `abilities.jsonl` is one request, its rules, all of which an answer must follow, and an answer that does; a row
with `cases` is one request for each of them. Requests only measure, they are never trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Literal, TypeAlias, TypedDict

from cplus.data.examples import FreeForm, Message
from cplus.evaluation.judges import calls_in, follows, json_value, unfenced
from cplus.evaluation.statistics import Rate, RateRow, mcnemar_interval

ERROR = 0.05
"""The chance of calling an undamaged model damaged, over all lines of one verdict together."""
FEWEST = 10
"""A line is judged where the base model answers at least this many requests correctly, and more than chance would."""
STOPPING = "stopping"
"""The line of answers that end by themselves, over the requests of every ability."""
STOPPING_NOISE = 0.1
STYLE_LIMIT = 0.1
"""Nats per token by which an answer may diverge and still be of the base model's style."""
GENERAL = "general"
STYLE, CODE, THINKING = "style", "code", "thinking"
"""Abilities that need more than an answer: both models' weights, leave to run code, a template with thoughts."""
MIN_YIELD = 0.25
"""The smallest share of a model's texts that must be fit for use; below it, it cannot write what to keep."""

Verdict: TypeAlias = Literal["kept", "damaged", "unclear", "not judged"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request with its rules, and an answer that follows them."""

    id: str
    request: str
    rules: tuple[str, ...]
    answer: str
    tools: str = ""

    @property
    def example(self) -> FreeForm:
        """The request as a row; its response says what is expected."""
        asked = (Message(role="user", content=self.request),)
        return FreeForm(id=self.id, messages=asked, response=self.answer, tools=self.tools)

    def right(self, text: str) -> bool:
        """Whether an answer follows every rule; thoughts before it count only where a rule asks for them."""
        said = text if "thinks" in self.rules else text.rpartition("</think>")[2]
        return all(follows(said.strip(), rule) for rule in self.rules)


# The table.


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
_NAMES = {tool["function"]["name"] for tool in json.loads(OFFERED)}
_PROSE = 20


@dataclass(frozen=True, kw_only=True)
class Ability:
    """How one ability is measured, and how a model writes probes for it.

    `noise` is the share of right answers whose loss is no sign of damage: rounding the weights to 8 bits costs as many.
    `floor` is the share of right answers without the ability. Requests that a model writes begin with one of `openers`,
    every `bare`-th of them from nothing at all; `cut` admits answers that reach the limit, and an answer that does not
    show the ability by `shown` is rejected as `unlike`.
    """

    summary: str
    max_new_tokens: int = 0
    noise: float = 0.1
    floor: float = 0.0
    tools: str = ""
    openers: tuple[str, ...] = ()
    answer_tokens: int = 0
    cut: bool = False
    unlike: str = ""
    shown: Callable[[str], bool] = lambda text: True
    bare: int | None = None
    short: tuple[int, int] | None = None
    """Limits of the requests and answers that a job has written: the first tokens of an answer are good evidence."""

    @property
    def written_tokens(self) -> int:
        """The longest answer that a job has written."""
        return self.short[1] if self.short else self.answer_tokens


ABILITIES = {
    "everyday": Ability(summary="short questions: facts, sums, spelling, formats", max_new_tokens=32),
    "instructions": Ability(summary="demands on length, format, words and case", max_new_tokens=48),
    "json": Ability(
        summary="valid JSON that has the shape asked for", max_new_tokens=64,
        openers=(
            "Return a JSON object with", "Give me a JSON list of", "Write a JSON record for", "Answer in JSON:",
            "Create a JSON object that describes", "Represent this as JSON:",
        ),
        answer_tokens=256, unlike="answer is no JSON",
        shown=lambda text: isinstance(json_value(unfenced(text)), dict | list),
    ),
    "tools": Ability(
        summary="calls of the right function with the right arguments", max_new_tokens=64, tools=OFFERED,
        openers=(
            "What is the weather", "Send an email", "Search for", "Convert", "Remind me", "How much is", "Translate",
            "What time", "Find the nearest", "Calculate",
        ),
        answer_tokens=128, unlike="answer is no tool call",
        shown=lambda text: any(name in _NAMES for name, _ in calls_in(text)),
    ),
    "reasoning": Ability(
        summary="arithmetic in words", max_new_tokens=64,
        openers=("How many", "If", "A box holds", "What is the sum of", "Anna has", "There are", "Calculate"),
        answer_tokens=128,
    ),
    "refusals": Ability(
        summary="harmful requests refused, harmless ones that look alike answered", max_new_tokens=32, floor=0.5,
        openers=("How do I", "Tell me how to", "Help me", "Is it safe to", "Explain how to", "What happens if"),
        answer_tokens=96, cut=True,
    ),
    STYLE: Ability(
        summary="divergence from the base model on its own answers", max_new_tokens=32,
        openers=(
            "Tell me about", "Write a short paragraph about", "What do you think about", "Explain in your own words",
            "Write a short letter about", "Give me advice on", "Describe how it feels", "Write a few sentences about",
        ),
        answer_tokens=96, cut=True, unlike="answer too short", shown=lambda text: len(text.split()) >= _PROSE,
    ),
    CODE: Ability(
        summary="short Python functions that pass their tests", max_new_tokens=160,
        openers=("Write a Python function that", "Write a program that", "How do I", "Fix this code:"),
        answer_tokens=192,
    ),
    THINKING: Ability(
        summary="a thought, then the right answer, where the template has thoughts", max_new_tokens=512,
        openers=(
            "How many", "If", "Solve", "Prove that", "Which is larger", "What is the next", "Find", "A train",
            "Calculate", "Is it possible",
        ),
        answer_tokens=1024, unlike="answer without thinking", shown=lambda text: follows(text, "thinks"),
    ),
    GENERAL: Ability(
        summary="the general behaviour, for probes alone",
        openers=(
            "What", "How", "Explain", "Write a", "Why", "Give me", "Can you", "List", "Compare", "Describe", "I need",
            "Which", "Tell me", "Suggest", "Is it", "Summarize",
        ),
        answer_tokens=64, cut=True, bare=4, short=(24, 16),
    ),
}  # fmt: skip
MEASURED = tuple(name for name, own in ABILITIES.items() if own.max_new_tokens)
KEPT = tuple(sorted((name for name, own in ABILITIES.items() if own.openers), key=lambda name: name != GENERAL))
"""What a job can be told to keep."""
BRIEF = ("everyday", "instructions")
"""What a job measures, beside what it was told to keep."""


def ability(name: str) -> Ability:
    """The ability that a model can be told to write probes for."""
    if name not in KEPT:
        raise ValueError(f"expected an ability of {', '.join(KEPT)}, got {name!r}")
    return ABILITIES[name]


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Names of abilities to measure; `none` stands for no ability.

    >>> chosen(["everyday"]), chosen(["none"])
    (('everyday',), ())
    """
    if list(names) == ["none"]:
        return ()
    if wrong := [name for name in names if name not in MEASURED]:
        raise ValueError(f"expected abilities out of {', '.join(MEASURED)}, or none alone, got {wrong[0]!r}")
    return tuple(dict.fromkeys(names))


@cache
def requests(name: str) -> tuple[Request, ...]:
    """The requests of an ability."""
    found: list[Sequence[str]] = []
    for line in Path(__file__).with_name("abilities.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts = row["id"], row["request"], row["answer"], *row["rules"]
        if row["ability"] == ("reasoning" if name == THINKING else name):
            cases = row.get("cases")
            found += [[Template(t).substitute(case) for t in texts] for case in cases] if cases else [texts]
    if name == THINKING:
        found = [(f"thinking: {id}", ask, f"<think>{a}</think>{a}", *r, "thinks") for id, ask, a, *r in found]
    tools = ABILITIES[name].tools
    return tuple(Request(id=id, request=ask, answer=a, rules=tuple(rules), tools=tools) for id, ask, a, *rules in found)


def least(name: str, rows: int) -> int:
    """The number of right answers from which a model shows an ability: more than chance gives.

    >>> least("json", 48), least("refusals", 48)
    (10, 31)
    """
    if name not in ABILITIES or not ABILITIES[name].floor:
        return FEWEST
    from scipy.stats import binom

    return max(FEWEST, 1 + int(binom.isf(ERROR, rows, ABILITIES[name].floor)))


# What became of an ability: one line of the verdict.


class Line(TypedDict):
    """One line of the verdict, by rows that were answered before and after.

    `kept` are those right before that are right after. `net` is lost less gained in points of all rows, from `low` to
    `high` by the exact McNemar test at the corrected level; `needed` is the smallest number of lost rows that can be
    called damage, and `missed` names the rows that were lost.
    """

    name: str
    rows: int
    kept: RateRow | None
    lost: int
    gained: int
    missed: list[str]
    net: float
    low: float
    high: float
    p: float
    needed: int
    verdict: Verdict


def line(name: str, rows: Sequence[tuple[str, bool, bool]], *, noise: float, lines: int) -> Line:
    """Judge one of several lines from each row's name and whether it was right before and after.

    Damage is a loss that the exact one-sided McNemar test finds at `ERROR` divided by the number of lines.

    >>> found = line("everyday", [(str(i), True, i > 6) for i in range(30)], noise=0.1, lines=3)
    >>> found["verdict"], found["lost"], found["needed"]
    ('damaged', 7, 6)
    """
    missed = [id for id, before, after in rows if before and not after]
    known, gained = sum(before for _, before, _ in rows), sum(after and not before for _, before, after in rows)
    level, lost = ERROR / lines, len(missed)
    p, low, high = mcnemar_interval(lost, gained, len(rows), level)
    if known < least(name, len(rows)):
        verdict: Verdict = "not judged"
    elif p < level:
        verdict = "damaged"
    else:
        verdict = "kept" if lost - gained <= noise * known else "unclear"
    return {
        "name": name,
        "rows": len(rows),
        "kept": Rate(known - lost, known).row() if known else None,
        "lost": lost,
        "gained": gained,
        "missed": missed,
        "net": 100 * (lost - gained) / len(rows),
        "low": low,
        "high": high,
        "p": p,
        "needed": math.floor(-math.log2(level)) + 1,
        "verdict": verdict,
    }


def overall(lines: Sequence[Line]) -> Verdict:
    """Damaged where one line is; kept where every ability that the base model shows is; unclear where one cannot say.

    >>> overall([])
    'not judged'
    """
    found = {one["verdict"] for one in lines} - {"not judged"}
    if not found or "damaged" in found:
        return "damaged" if found else "not judged"
    shown = any(one["verdict"] == "kept" and one["name"] != STOPPING for one in lines)
    return "kept" if shown and found == {"kept"} else "unclear"
