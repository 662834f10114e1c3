"""Every figure of these pages is computed from a record, as the comment before its paragraph, list or table says.

    <!-- figures: tuned("cplus"); interval(above("cplus")) -->     the numbers of the next block, in order
    <!-- each row: tuned(row, "updates"); tuned(row) -->           the same for each row of a table; `row` is its first cell

In such a block every number outside code must be that of its expression, to the digits shown. In other blocks no decimal
and no percentage may stand. What is not measured says what it is: `setting`, `published` or `formula`.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from scipy.special import stdtrit

from cplus.studies.collected import collect
from cplus.studies.readme import markdown

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import page as performance  # noqa: E402

PAGES = ["README.md", *(f"docs/{name}.md" for name in "studies results performance limits repair costs".split())]
PAGES += ["docs/guides/choose_a_method.md"]
TUNING = 100
"""The seed that chose the rates of the frontier and reports nothing."""
BUDGET = {"method": "sft", "stop_at": 99, "lr": 3e-4, "warmup": 0.15}
QWEN = "qwen2.5-coder-1.5b"
LEVEL = 0.85
"""The loss of new answers at which the chat study compares."""
Record: TypeAlias = dict[str, Any]


class Seeds(dict[int, float]):
    """A figure by seed; on a page, its mean and its standard error."""

    def __sub__(self, other: Seeds) -> Seeds:
        assert self.keys() == other.keys()
        return Seeds({seed: value - other[seed] for seed, value in self.items()})

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values())

    @property
    def error(self) -> float:
        return statistics.stdev(self.values()) / len(self) ** 0.5


@cache
def records(scale: str) -> list[Record]:
    """The records of a scale: settings under `spec`, figures beside it."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results" / scale).glob("*.json"))]


def bench(name: str, *keys: str | int) -> Any:
    """A field of a record in benchmarks/results."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for key in keys:
        found = found[key]
    return found


def figure(record: Record, field: str) -> float:
    """A field of a record, or what follows from several."""
    counts, cost, spec = record["counts"], record["cost"], record["spec"]
    losses = [(point["new_nll"], point["past_nll"]) for point in record["curve"] if "new_nll" in point]
    match field:
        case "updates" | "past" | "new":
            return counts[field]
        case "flops":
            return cost["training_flops"] + cost["preservation_flops"]
        case "kept":
            return round(record["retention"] * counts["asked"] / 100)
        case "covered":  # the share of the past facts that are in the bank, and the share of the bank that are past facts
            return 100 * counts["overlap"] / counts["past"]
        case "of the bank":
            return 100 * counts["overlap"] / counts["probes"]
        case "time of repair":
            after = record["diagnostics"]["seconds_after_training"]
            return after / (record["seconds"] - after)
        case "risen" if spec["method"].endswith("-repair"):
            return record["past_nll"] - losses[0][1]
        case "risen" | "until":
            at, (new, past), (lower, later) = next(
                (n, *both) for n, both in enumerate(itertools.pairwise(losses)) if both[1][0] <= LEVEL
            )
            part = (new - LEVEL) / (new - lower)
            return past + part * (later - past) - losses[0][1] if field == "risen" else (at + part) * counts["updates"] / (len(losses) - 1)
    return record[field]


def select(scale: str, field: str, seeds: range, **wanted: Any) -> Seeds:
    """A field by seed; settings that are nothing may be missing, as in records older than the setting."""

    def fits(spec: Record) -> bool:
        own = ((spec.get(name) or 0, value or 0) for name, value in wanted.items())
        return spec["seed"] in seeds and all(a == b or (isinstance(b, float) and math.isclose(a, b)) for a, b in own)

    found = [record for record in records(scale) if fits(record["spec"])]
    by_seed = Seeds({record["spec"]["seed"]: figure(record, field) for record in found})
    assert found, f"no record has {wanted}"
    assert len(by_seed) == len(found), f"{wanted} is more than one setting"
    return by_seed


def desk(field: str, seeds: range = range(5, 10), **wanted: Any) -> Seeds:
    return select("desk", field, seeds, **wanted)


def budget(field: str = "retention") -> Seeds:
    """SFT whose number of updates is the budget of every method on the frontier."""
    return desk(field, **BUDGET)


@cache
def chosen(method: str) -> Record:
    """The settings that keep most within the budget on the tuning seed; the fewest updates if none is within it."""
    ladders = [r for r in records("desk") if r["spec"].get("stop_at") and r["spec"]["seed"] == TUNING]
    mine = [r for r in ladders if r["spec"]["method"] == method and r["acquisition"] >= 99]
    [limit] = select("desk", "updates", range(TUNING, TUNING + 1), **BUDGET).values()
    within = [r for r in mine if figure(r, "updates") <= limit]
    best = (
        max(within, key=lambda r: (r["retention"], r["spec"]["warmup"]))
        if within
        else min(mine, key=lambda r: figure(r, "updates"))
    )
    return {name: best["spec"][name] for name in ("method", "lr", "warmup", "beyond", "stop_at")}


def tuned(method: str, field: str = "retention") -> Seeds:
    """A method at its own best rate."""
    return desk(field, **chosen(method))


def above(method: str, cost: str = "updates") -> Seeds:
    """Retention less that of SFT's line at the same cost; the line is the best that SFT keeps at no more than a cost."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for r in records("desk"):
        if r["spec"].get("method") == "sft" and r["spec"].get("stop_at") and r["acquisition"] >= 99:
            lines.setdefault(r["spec"]["seed"], []).append((figure(r, cost), r["retention"]))
    return tuned(method) - Seeds({seed: height(sorted(lines[seed]), x) for seed, x in tuned(method, cost).items()})


def height(points: list[tuple[float, float]], x: float) -> float:
    """The highest Retention so far along the points, interpolated over the logarithm of the cost."""
    best = list(zip((cost for cost, _ in points), itertools.accumulate((kept for _, kept in points), max), strict=True))
    best = list(dict(best).items())
    for (low, kept), (high, more) in itertools.pairwise(best):
        if low <= x <= high:
            return kept + (more - kept) * math.log(x / low) / math.log(high / low)
    return best[0][1] if x < best[0][0] else best[-1][1]


def rotated(field: str, use: str = "128, 1, 0") -> Seeds:
    """CPLUS on the fresh seeds of e12, by its use of the bank: probes, parts and memory."""
    probes, parts, memory = map(float, use.split(","))
    return desk(field, method="cplus", stop_at=None, refresh=None, num_probes=probes, parts=parts, memory=memory)


def demo(method: str, field: str = "retention") -> Seeds:
    """The demo with every method."""
    return Seeds({row["seed"]: row[field] for row in bench("demo-all", "rows") if row["method"] == method})


def chat(method: str, keep: str = "anchors", field: str = "risen", lr: float = 3e-5, past: str = "instruct_short", new: int = 40) -> Seeds:
    given = {"keep": keep, "lr": lr, "anchor_task": past, "num_new": new}
    return select("desk-real", field, range(5, 8), method=method, interface="freeform", **given)


def facts(method: str, field: str = "retention", model: str = "gemma-3-270m") -> Seeds:
    return select("desk-real", field, range(3), method=method, model=model)


def interval(found: Seeds) -> tuple[float, float]:
    """The 95 % interval of the mean by Student's t."""
    half = float(stdtrit(len(found) - 1, 0.975)) * found.error
    return found.mean - half, found.mean + half


def each(names: str, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
    return [function(name, *args, **more) for name in names.split()]


def listed(*values: float) -> tuple[float, ...]:
    return values


NAMES = {
    **{f.__name__: f for f in (bench, desk, budget, tuned, above, rotated, demo, chat, facts, interval, each)},
    **dict.fromkeys(("setting", "published", "formula"), listed),
    "means": lambda *found: [seeds.mean for seeds in flat(found, keep=Seeds)],
    "span": lambda found: (min(found.values()), max(found.values())),
    "QWEN": QWEN,
    "range": range,
}


def flat(found: Any, keep: type = float) -> Iterator[Any]:
    """The numbers of a result, in order: of a figure by seed its mean and, of several seeds, its standard error."""
    if isinstance(found, list | tuple):
        yield from (number for each in found for number in flat(each, keep))
    elif isinstance(found, Seeds) and keep is not Seeds:
        yield from (found.mean, found.error) if len(found) > 1 else (found.mean,)
    else:
        yield found


@cache
def numbers(expressions: str, cells: tuple[str, ...] = ()) -> list[float]:
    """What the expressions of a comment give."""
    tree = ast.parse(f"[{expressions.replace(';', ',')}]", mode="eval")
    assert isinstance(tree.body, ast.List)
    assert not any(isinstance(part, ast.Constant) for part in tree.body.elts), f"a bare number in {expressions}"
    row = {"row": cells[0], "cells": cells} if cells else {}
    return list(flat(eval(compile(tree, "figures", "eval"), {"__builtins__": {}, **NAMES, **row})))


MARK = re.compile(r"<!-- (figures|each row): (.*?) -->\n+", re.S)
NUMBER = re.compile(r"(?<![\w.,/-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?(?![\w-]|\.\d|,\d)")
NOT_TEXT = re.compile(r"<!--.*?-->|^ *```.*?^ *```|`[^`]*`|\]\([^)]*\)|95 % interval", re.S | re.M)
MADE: dict[str, tuple[str, str, Callable[[], str]]] = {
    "docs/results.md": ("<!-- studies -->\n", "<!-- /studies -->", cache(lambda: markdown(desk_results()))),
    "docs/performance.md": (performance.BEGIN, performance.END, cache(performance.figures)),
}
"""What a command writes into a page, between which marks."""


def desk_results() -> Any:
    return collect(ROOT / "results" / "desk")


def blocks(text: str) -> Iterator[tuple[int, int, str, tuple[str, ...]]]:
    """Begin and end of each part that a comment is about, the comment's expressions, and the cells of a table's row."""
    for mark in MARK.finditer(text):
        begin = mark.end()
        end = len(text) if (blank := text.find("\n\n", begin)) < 0 else blank
        if mark[1] == "figures":
            yield begin, end, mark[2], ()
            continue
        at = begin
        for n, line in enumerate(text[begin:end].splitlines(keepends=True)):
            cells = tuple(cell.strip(" *`") for cell in line.strip().strip("|").split("|"))
            if n > 1:
                yield at + line.index("|", 1), at + len(line), mark[2], cells
            at += len(line)


def shown_as(text: str, value: float) -> bool:
    """Whether a number's text is the value to the digits shown, with its sign if it has one."""
    if "e" in text:
        return math.isclose(float(text), value)
    sign, digits = "+" if text[0] == "+" else "", len(text.partition(".")[2])
    return f"{value:{sign},.{digits}f}" == text


def problems(page: str, text: str) -> list[str]:
    """What a page says that no record does."""
    found = []
    if page in MADE:
        opens, closes, make = MADE[page]
        head, _, rest = text.partition(opens)
        made, _, tail = rest.partition(closes)
        if made.strip() != make().strip():
            found.append(f"{page}: what stands after {opens.strip()} is not what the records give")
        text = head + re.sub(r"\S", " ", opens + made + closes) + tail
    plain = NOT_TEXT.sub(lambda match: re.sub(r"\S", " ", match[0]), text)
    covered = [False] * len(text)
    for begin, end, expressions, cells in blocks(text):
        covered[begin:end] = [True] * (end - begin)
        shown, values = NUMBER.findall(plain, begin, end), numbers(expressions, cells)
        where = f"{page}:{text[:begin].count(chr(10)) + 1}"
        if len(shown) != len(values):
            found.append(f"{where}: {len(shown)} numbers, {len(values)} values: {shown} {[round(v, 4) for v in values]}")
        found += [f"{where}: {a} is {b:.6g}" for a, b in zip(shown, values, strict=False) if not shown_as(a, b)]
    for match in NUMBER.finditer(plain):
        percent = plain[match.end() :].lstrip(" ").startswith("%")
        if not covered[match.start()] and (percent or not match[0].replace(",", "").lstrip("+-").isdigit()):
            found.append(f"{page}:{text[: match.start()].count(chr(10)) + 1}: nothing says where {match[0]} comes from")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_is_that_of_a_record(page: str) -> None:
    assert problems(page, (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_with_one_other_digit_is_refused(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    plain = NOT_TEXT.sub(lambda match: " " * len(match[0]), text)
    guarded = [match for begin, end, *_ in blocks(text) for match in NUMBER.finditer(plain, begin, end)]
    if page in MADE:
        begin, end = (text.index(mark) for mark in MADE[page][:2])
        guarded += list(NUMBER.finditer(plain, begin, end))[:20]
    assert guarded
    for match in guarded:
        at = match.end() - 1
        other = str((int(text[at]) + 1) % 10)
        assert problems(page, text[:at] + other + text[at + 1 :]) != [], f"{page}: {match[0]} may be anything"
    assert problems(page, f"{text}\nIt keeps 12.5 of them.\n") != []
    assert problems(page, f"{text}\nIt keeps 12 % of them.\n") != []
