"""Put the figures of benchmarks/results into docs/costs.md, between its markers.

python benchmarks/page.py
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from cplus.base.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def per(what: str) -> str:
    """A record's name for what was measured, in ordinary words."""
    return what.replace(" a second", " per second")


def bars(*records: dict[str, Any]) -> str:
    """Every bar with what was measured: of several runs the median, the range, and how many held it."""
    rows = []
    for what, bar in (each for record in records for each in record["bars"].items()):
        runs = sorted([bar["measured"], *bar.get("repeats", ())])
        held = sum(run <= bar["bar"] if bar["relation"] == "<=" else run >= bar["bar"] for run in runs)
        spread = f" ({runs[0]:.3g} to {runs[-1]:.3g} in {len(runs)} runs)" if len(runs) > 1 else ""
        verdict = "held" if held == len(runs) else f"missed in {len(runs) - held} of {len(runs)}"
        rows.append([per(what), f"{median(runs):.3g}{spread}", f"{bar['relation']} {bar['bar']:g}", verdict])
    return table(["what", "measured", "bar", ""], rows)


def processor(record: dict[str, Any]) -> str:
    """On what a record was measured, and which kernels ran."""
    told = record["processor"]
    where = f"{told['vector_bits']}-bit vectors, {told['name']}, {record['environment']['threads']} threads"
    return f"{where}; kernels: {told['kernels']}"


def steps_on(record: dict[str, Any]) -> str:
    """The step on one processor; the record has it by size."""
    return f"### The step with {processor(record)}\n\n{bars(record)}"


def epochs(record: dict[str, Any]) -> str:
    """An epoch of CPLUS by an epoch of SFT."""
    found = record["epoch"]
    rows = [
        [f"{size}", f"{seconds:.1f}", f"{found['ratio'][size]:.3f}", f"{found['flop_formula'][size]:.3f}"]
        for size, seconds in found["refresh_seconds"].items()
    ]
    text = (
        f"{found['new_rows']} new rows of csqa by letter, batch {found['batch_size']}, A=8: an epoch of SFT takes "
        f"{found['sft_seconds']:.0f} s, the steps of CPLUS {found['cplus_step_seconds']:.0f} s.\n\n"
    )
    return text + table(["N", "refresh, s", "epoch of CPLUS / of SFT", "by FLOPs"], rows)


def speed(scoring: dict[str, Any], generation: dict[str, Any]) -> str:
    """Scoring and writing, against one text at a time."""
    rows = [
        [f"scoring csqa by {r['interface']}", f"{r['ratio']:.2f}", f">= {r['bar']:g}", f"{r['flop_limit']:.2f}"]
        for r in scoring["results"]
    ]
    rows.append(["writing probes, new tokens per second", f"{generation['ratio']:.2f}", ">= 6", "-"])
    return table(["what, times one at a time", "measured", "bar", "limit by FLOPs"], rows)


def figures() -> str:
    """The part of the page that the records give; of the step there is one record per vector width."""
    folder = ROOT / "benchmarks/results"
    found = {n: read_json(folder / f"{n}.json") for n in ("training", "scoring", "generation")}
    records = [read_json(path) for path in sorted(folder.glob("steps-*.json"))]
    widths = [record for record in records if record["processor"]["kernels"] == "C++"]  # not those of earlier kernels
    parts = (
        *map(steps_on, widths),
        "### Training on smollm2-135m\n\n" + bars(found["training"]),
        "### An epoch on smollm2-135m\n\n" + epochs(found["training"]),
        "### Scoring and probes on smollm2-135m\n\n" + speed(found["scoring"], found["generation"]),
    )
    return "\n".join(parts)


def main() -> None:
    """Rewrite the page."""
    page = ROOT / "docs/costs.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    write_text(page, before + BEGIN + "\n" + figures() + "\n" + END + after)


if __name__ == "__main__":
    main()
