"""Does lm-evaluation-harness give the same answers on the same rows and prompt?

OMP_NUM_THREADS=1 python benchmarks/agreement.py MODEL --task csqa --interface letter --limit 50 --out FILE

Both score the same loaded model; the answers are compared row by row. Needs the extra `lm-eval`.
"""

from __future__ import annotations

import argparse
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from cplus import models
from cplus.base.files import write_json
from cplus.base.terminal import print_json
from cplus.data import interfaces
from cplus.data.tasks import load_task
from cplus.evaluation import judges
from cplus.evaluation.task import BoundTask, evaluate_task
from cplus.integrations.lm_eval import evaluate_with_harness


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """The answers of both, row by row, with the rows on which they differ."""
    base = models.load(options.model)
    task = load_task(options.task, options.data_dir)
    bound = interfaces.build(
        options.interface, base.tokenizer, wording=task.wording, chat=bool(base.tokenizer.chat_template)
    )
    rows = task.examples[: options.limit]
    asked = BoundTask(name=task.name, interface=bound, examples=rows, judge=judges.exact_match)
    begun = time.perf_counter()
    ours, summary = evaluate_task(base.model, asked)
    middle = time.perf_counter()
    theirs, harness = evaluate_with_harness(base.model, asked)
    ended = time.perf_counter()
    pairs = zip(ours, theirs, strict=True)
    differ = [{"id": a.id, "cplus": a.answer, "lm-eval": b.answer} for a, b in pairs if a.answer != b.answer]
    return {
        "model": options.model,
        "task": options.task,
        "interface": options.interface,
        "rows": len(ours),
        "same": len(ours) - len(differ),
        "differ": differ,
        "accuracy": summary["accuracy"],
        "answers": summary["answers"],
        "harness": harness["harness"],
        "seconds": {"cplus": middle - begun, "lm-eval": ended - middle},
        "versions": {name: metadata.version(name) for name in ("lm-eval", "transformers", "torch")},
    }


def main() -> None:
    """Compare and print; exit code 1 where a row differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="csqa")
    parser.add_argument("--interface", choices=("letter", "cloze"), default="letter")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = compared(options)
    if options.out is not None:
        write_json(options.out, found)
    print_json(found)
    raise SystemExit(1 if found["differ"] else 0)


if __name__ == "__main__":
    main()
