"""Put the figures of benchmarks/results into docs/performance.md, between its markers.

python benchmarks/page.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cplus.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def bars(*records: dict[str, Any]) -> str:
    """Every bar with what was measured."""
    rows = [
        [what, f"{bar['measured']:.3g}", f"{bar['relation']} {bar['bar']:g}", "held" if bar["held"] else "missed"]
        for record in records
        for what, bar in record["bars"].items()
    ]
    return table(["what", "measured", "bar", ""], rows)


def steps(record: dict[str, Any]) -> str:
    """The step by size, times torch's fused step."""
    names = sorted(next(iter(record["steps"].values()))["ratio"], key=lambda name: (not name.startswith("one"), name))
    rows = [
        [size, f"{found['seconds']['torch'] * 1e3:.1f}", *(f"{found['ratio'][name]:.2f}" for name in names)]
        for size, found in sorted(record["steps"].items(), key=lambda each: each[1]["parameters"])
    ]
    return table(["parameters", "torch's fused step, ms", *names], rows)


def roofline(record: dict[str, Any]) -> str:
    """Bytes moved against the machine's bandwidth, at the largest size."""
    rows = [
        [name, f"{r['bytes_a_parameter']:.2f}", f"{r['limit_ratio']:.2f}", f"{100 * r['share_of_bandwidth']:.0f} %"]
        for name, r in record["roofline"].items()
    ]
    text = f"The machine's memory gives {record['bandwidth_bytes_a_second'] / 1e9:.0f} GB/s.\n\n"
    return text + table(["step", "bytes a parameter", "limit, times torch's", "bandwidth reached"], rows)


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
    rows.append(["writing probes, new tokens a second", f"{generation['ratio']:.2f}", ">= 6", "-"])
    return table(["what, times one at a time", "measured", "bar", "limit by FLOPs"], rows)


def main() -> None:
    """Read the four records and rewrite the page."""
    found = {
        n: read_json(ROOT / f"benchmarks/results/{n}.json") for n in ("steps", "training", "scoring", "generation")
    }
    parts = (
        bars(found["steps"], found["training"]),
        "### The step by size\n\n" + steps(found["steps"]),
        "### Roofline, 135 M parameters\n\n" + roofline(found["steps"]),
        "### An epoch on smollm2-135m\n\n" + epochs(found["training"]),
        "### Scoring and probes on smollm2-135m\n\n" + speed(found["scoring"], found["generation"]),
    )
    page = ROOT / "docs/performance.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    write_text(page, before + BEGIN + "\n" + "\n".join(parts) + "\n" + END + after)


if __name__ == "__main__":
    main()
