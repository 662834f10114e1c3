"""The before and after of the README: what plain fine-tuning and `cplus adapt` left of a model's everyday answers.

python tools/before_after.py out benchmarks/results/before-after.json     # of a job with --compare sft
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(job: Path, answers: Path) -> None:
    """Keep the figures of both models of a finished job, and the everyday answers that either lost."""
    record = json.loads((job / "record.json").read_text(encoding="utf-8"))
    ours, plain = record["receipt"], record["receipt"]["beside"]
    found = {
        "model": ours["before"]["name"],
        "new": record["counts"]["new"],
        "method": ours["method"],
        "seconds": record["seconds"],
    }
    for name, whose in (("ours", record["figures"]), ("sft", record["figures"]["beside"])):
        lines = {line["name"]: line["kept"] for line in whose["lines"]}
        found[name] = {
            "kept": lines,
            "divergence": whose["divergence"],
            "given": (whose.get("learned") or whose)["given"],
        }
    [own], [other] = ([each["rows"] for each in whose["sets"] if each["name"] == "everyday"] for whose in (ours, plain))
    beside = {row["id"]: row for row in other}
    found["lost"] = [
        {"request": row["input"], "base": row["before"], "sft": beside[row["id"]]["after"], "ours": row["after"]}
        for row in own
        if "lost" in (row["kind"], beside[row["id"]]["kind"])
    ]
    answers.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
