"""The receipt in the README: the top of its page as Chromium shows it, and the answers that one of its models lost.

python tools/docs_receipt.py out docs/receipt.png benchmarks/results/before-after.json     # of a job with --compare sft
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser import browser

WIDTH, HEIGHT = 980, 385


def main(job: Path, picture: Path, answers: Path) -> None:
    """Keep the first screen of a finished job's receipt, and the figures of both models with what either lost."""
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
    with browser() as tab:
        tab.size(WIDTH, HEIGHT)
        tab.media(scheme="light")
        tab.open(job / "receipt.html")
        picture.write_bytes(base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
