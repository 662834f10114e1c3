"""What `cplus adapt` does to a real small model that learns facts by cloze, method by method.

python benchmarks/real.py [--methods sft cplus] [--data-dir DIR] [--out benchmarks/results]

A finished job is not repeated and an interrupted one goes on, so the same line can be given again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from timing import finish

from cplus.base.files import read_sealed
from cplus.jobs.adapt import adapt, resume
from cplus.jobs.settings import AdaptConfig
from cplus.methods.table import METHODS
from cplus.receipts.page import read_receipt

MODEL = "smollm2-135m"


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """48 questions of arc_easy the model has wrong, by cloze; past are those it has right."""
    return {
        "split": "arc_easy",
        "interface": "cloze",
        "num_new": 48,
        "num_anchors": 8,
        "num_probes": 64,
        "lr": 5e-5,
        "epochs": 15,
        "evaluate_rows": 64,
        "data_dir": options.data_dir,
    }


def main() -> None:
    """Run the jobs one after another, then put their figures side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["sft", "cplus"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/real"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    methods = {}
    for method in options.methods:
        folder = options.work / f"facts-{method}"
        if (folder / "settings.json").exists():
            resume(folder)
        else:
            given = facts(options)
            if not METHODS[method].needs_bank:
                del given["num_probes"]
            adapt(AdaptConfig(model=MODEL, method=method, out=folder, **given))
        curve = [vars(point) for point in read_receipt(folder).curve]
        methods[method] = {"figures": read_sealed(folder / "record.json")["figures"], "curve": curve}
    finish("real-facts", {"what": "facts", "model": MODEL, "methods": methods}, options.out)


if __name__ == "__main__":
    main()
