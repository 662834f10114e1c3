"""Every figure of these pages is computed from a record, as the comment before its paragraph, list or table says.

    <!-- figures: tuned("cplus"); interval(above("cplus")) -->   the numbers of the next block, in order
    <!-- each row: tuned(row, "updates"); tuned(row) -->         the same for each row of a table, named by its cells

In such a block every number outside code must be that of its expression, to the digits shown. In other blocks no
decimal and no percentage may stand. What is not measured says what it is: `setting`, `published` or `formula`.
"""

from __future__ import annotations

import ast
import json
import math
import re
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cplus.evaluation.statistics import Estimate, estimate
from cplus.lab import chat as chats
from cplus.lab import frontier
from cplus.lab.records import RunResult
from cplus.lab.report import collect, markdown
from cplus.lab.study import Collected
from cplus.lab.summaries import pick

ROOT = Path(__file__).parent.parent
NAMED = ("method", "results", "costs", "choose", "repair")
PAGES = ["README.md", *(f"docs/{name}.md" for name in NAMED)]
QWEN = "qwen2.5-coder-1.5b"


class Seeds(dict[int, float]):
    """A figure by seed; on a page, its mean and its standard error."""

    def __sub__(self, other: Seeds) -> Seeds:
        assert self.keys() == other.keys()
        return Seeds({seed: value - other[seed] for seed, value in self.items()})

    @property
    def estimate(self) -> Estimate:
        return estimate(list(self.values()))


@cache
def results(scale: str = "desk") -> Collected:
    return collect(ROOT / "results" / scale)


def bench(name: str, *keys: str | int) -> Any:
    """A field of a record in benchmarks/results."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for key in keys:
        found = found[key]
    return found


FIELDS: dict[str, Callable[[RunResult], float | None]] = {
    "updates": frontier.updates,
    "FLOPs": frontier.flops,
    "rate": lambda run: run.spec.lr,
    "covered": lambda run: 100 * run.counts["overlap"] / run.counts["past"],
    "of the bank": lambda run: 100 * run.counts["overlap"] / run.counts["probes"],
    "kept": lambda run: run.retention * run.counts["asked"] / 100,
}
"""Figures that follow from a record; others are its fields."""


def by_seed(runs: list[RunResult], field: str) -> Seeds:
    assert runs, "no record has these settings"
    assert len({run.spec.seed for run in runs}) == len(runs), "more than one record of a seed"
    return Seeds({run.spec.seed: FIELDS.get(field, lambda r: getattr(r, field))(run) for run in runs})


@cache
def ladders() -> list[RunResult]:
    return [run for run in results().studies["frontier"].results if not frontier.as_in_the_demo(run)]


@cache
def chosen() -> dict[str, list[RunResult]]:
    return frontier.reported(ladders())


def budget(field: str = "retention") -> Seeds:
    """SFT whose number of updates is the budget of every method on the frontier."""
    return sft(0.0003, frontier.WARMUP, field)


def sft(rate: float, warmup: float, field: str = "retention") -> Seeds:
    """A rung of SFT's ladder on the seeds that report."""
    rung = [run for run in pick(ladders(), method="sft", warmup=warmup) if math.isclose(run.spec.lr, rate)]
    return by_seed([run for run in rung if run.spec.seed not in frontier.TUNING_SEEDS], field)


def tuned(method: str, field: str = "retention") -> Seeds:
    """A method at its own best rate."""
    return by_seed(chosen()[method], field)


def above(method: str, cost: str = "updates") -> Seeds:
    """Retention less that of SFT's line at the same cost."""
    plain = [run for run in pick(ladders(), method="sft") if run.spec.seed not in frontier.TUNING_SEEDS]
    return Seeds(frontier.distances(chosen()[method], plain, frontier.COSTS[cost]))


def rotated(field: str, use: str = "128, 1, 0") -> Seeds:
    """CPLUS on the fresh seeds of e12, by its use of the bank: probes, parts and memory."""
    probes, parts, memory = map(float, use.split(","))
    runs = pick(results().studies["e12"].results, method="cplus", refresh=None, seed=(5, 6, 7, 8, 9))
    return by_seed(pick(runs, num_probes=probes, parts=parts, memory=memory), field)


def demo(method: str, field: str = "retention") -> Seeds:
    """The demo with every method."""
    return Seeds({row["seed"]: row[field] for row in bench("demo-all", "rows") if row["method"] == method})


def chat(way: str, figure: str = "divergence", rate: float = 0.0) -> Seeds:
    """A way of the chat study at its chosen rate on the seeds that report, or a rung of its ladder."""
    assert chats.LEVEL is not None
    found, runs = chats.metrics(chats.LEVEL)[figure], results("desk-real").studies["chat"].results
    own = [run for run in runs if chats.way_of(run.spec) == way and (run.spec.seed == chats.SELECTION) == bool(rate)]
    return Seeds({run.spec.seed: found(run) for run in own if not rate or math.isclose(run.spec.lr, rate)})


def ratio(own: Seeds, other: Seeds) -> Seeds:
    """Ours as a multiple of another's, seed by seed."""
    return Seeds({seed: value / other[seed] for seed, value in own.items() if seed in other})


def less(own: Seeds, other: Seeds) -> Seeds:
    """Ours less another's, on the seeds of both."""
    return Seeds({seed: value - other[seed] for seed, value in own.items() if seed in other})


def facts(method: str, field: str = "retention", model: str = "gemma-3-270m") -> Seeds:
    return by_seed(pick(results("desk-real").studies["facts"].results, method=method, model=model), field)


def each(names: str, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
    return [function(name, *args, **more) for name in names.split()]


def listed(*values: float) -> tuple[float, ...]:
    return values


NAMES = {
    **{f.__name__: f for f in (bench, sft, budget, tuned, above, rotated, demo, chat, ratio, less, facts, each)},
    **dict.fromkeys(("setting", "published", "formula"), listed),
    "mean": lambda *found: [seeds.estimate.mean for seeds in flat(found, keep=Seeds)],
    "span": lambda found: (min(found), max(found)),
    "interval": lambda found: found.estimate.interval,
    "QWEN": QWEN,
    "float": float,
}


def flat(found: Any, keep: type = float) -> Iterator[Any]:
    """The numbers of a result, in order: of a figure by seed its mean and, of several seeds, its standard error."""
    if isinstance(found, list | tuple):
        yield from (number for part in found for number in flat(part, keep))
    elif isinstance(found, Seeds) and keep is not Seeds:
        yield found.estimate.mean
        if len(found) > 1:
            yield found.estimate.error
    else:
        yield found


@cache
def numbers(expressions: str, cells: tuple[str, ...]) -> list[float]:
    """What the expressions of a comment give."""
    tree = ast.parse(f"[{expressions.replace(';', ',')}]", mode="eval")
    assert isinstance(tree.body, ast.List)
    assert not any(isinstance(part, ast.Constant) for part in tree.body.elts), f"a bare number in {expressions}"
    row = {"row": cells[0], "cells": cells} if cells else {}
    return list(flat(eval(compile(tree, "figures", "eval"), {"__builtins__": {}, **NAMES, **row})))


MARK = re.compile(r"<!-- (figures|each row): (.*?) -->\n+", re.S)
NUMBER = re.compile(r"(?<![\w.,/-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?(?![\w-]|\.\d|,\d)")
NOT_TEXT = re.compile(r"<!--.*?-->|^ *```.*?^ *```|`[^`]*`|\]\([^)]*\)|^\d+\. |95 % interval", re.S | re.M)


@cache
def written(page: str) -> tuple[str, str, str]:
    """What a command writes into a page, and the marks before and after it."""
    if page == "docs/results.md":
        table = markdown(results()).replace(f" --out {ROOT / 'results'}", "")
        return "<!-- studies -->\n", table, "<!-- /studies -->"
    made = runpy.run_path(str(ROOT / "benchmarks" / "page.py"))
    return made["BEGIN"], made["figures"](), made["END"]


WRITTEN = ("docs/results.md", "docs/costs.md")


def blank(match: re.Match[str]) -> str:
    return re.sub(r"\S", " ", match[0])


def blocks(text: str) -> Iterator[tuple[int, int, str, tuple[str, ...]]]:
    """Begin and end of each part that a comment is about, the comment's expressions, and the cells of a table's row."""
    for mark in MARK.finditer(text):
        begin = mark.end()
        end = len(text) if (empty := text.find("\n\n", begin)) < 0 else empty
        if mark[1] == "figures":
            yield begin, end, mark[2], ()
            continue
        for line in [*re.finditer(r".+\n?", text[begin:end])][2:]:
            cells = tuple(cell.strip(" *`") for cell in line[0].strip().strip("|").split("|"))
            yield begin + line.start() + line[0].index("|", 1), begin + line.end(), mark[2], cells


def shown_as(text: str, value: float) -> bool:
    """Whether a number's text is the value to the digits shown, with its sign if it has one."""
    if "e" in text:
        return math.isclose(float(text), value)
    sign, digits = "+" if text[0] == "+" else "", len(text.partition(".")[2])
    return f"{value:{sign},.{digits}f}" == text


def problems(page: str, text: str) -> list[str]:
    """What a page says that no record does."""
    found = []
    if page in WRITTEN:
        opens, made, closes = written(page)
        head, _, rest = text.partition(opens)
        stands, _, tail = rest.partition(closes)
        if stands.strip() != made.strip():
            found.append(f"{page}: what stands after {opens.strip()} is not what the records give")
        text = head + opens + re.sub(r"\S", " ", stands) + closes + tail
    plain = NOT_TEXT.sub(blank, text)
    covered = [False] * len(text)
    for begin, end, expressions, cells in blocks(text):
        covered[begin:end] = [True] * (end - begin)
        shown, values = NUMBER.findall(plain, begin, end), numbers(expressions, cells)
        where = f"{page}:{text[:begin].count(chr(10)) + 1}"
        if len(shown) != len(values):
            found.append(
                f"{where}: {len(shown)} numbers, {len(values)} values: {shown} {[round(v, 4) for v in values]}"
            )
        found += [f"{where}: {a} is {b:.6g}" for a, b in zip(shown, values, strict=False) if not shown_as(a, b)]
    for match in NUMBER.finditer(plain):
        percent = plain[match.end() :].lstrip(" ").startswith("%")
        if not covered[match.start()] and (percent or not match[0].replace(",", "").lstrip("+-").isdigit()):
            found.append(f"{page}:{text[: match.start()].count(chr(10)) + 1}: nothing says where {match[0]} comes from")
    return found


@pytest.mark.parametrize("page", [*PAGES, "docs/studies.md", "docs/index.md"])
def test_every_figure_of_a_page_is_that_of_a_record(page: str) -> None:
    assert problems(page, (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_with_one_other_digit_is_refused(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    plain = NOT_TEXT.sub(blank, text)
    guarded = [match for begin, end, *_ in blocks(text) for match in NUMBER.finditer(plain, begin, end)]
    changed = list(text)
    for match in guarded:
        changed[match.end() - 1] = str((int(match[0][-1]) + 1) % 10)
    assert 0 < len(guarded) == len(problems(page, "".join(changed)))
    if page in WRITTEN:
        assert problems(page, text.replace(written(page)[1], written(page)[1].replace("1", "2", 1))) != []
    assert problems(page, f"{text}\nIt keeps 12.5 of them.\n") != []
    assert problems(page, f"{text}\nIt keeps 12 % of them.\n") != []


def test_the_answers_in_the_readme_are_those_of_the_record() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("| request | base model | plain fine-tuning | `cplus adapt` |\n")
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in rest.partition("\n\n")[0].splitlines()[1:]
    ]
    known = {row["request"]: row for row in bench("before-after", "lost")}
    assert len(table) >= 3
    for request, *answers in table:
        recorded = [known[request][who].replace("\n", " ") for who in ("base", "sft", "ours")]
        assert [own.startswith(answer.removesuffix(" ...")) for own, answer in zip(recorded, answers, strict=True)] == [
            True
        ] * 3
