"""Does lm-evaluation-harness give the same answers on the same rows and prompt?

OMP_NUM_THREADS=1 python benchmarks/agreement.py --model MODEL --task csqa --interface letter --limit 50 --out FOLDER

Both score the same loaded model; the answers are compared row by row. Needs the extra `lm-eval`.
"""

from __future__ import annotations

from importlib import metadata

from timing import finish, in_turn, options

from cplus import models
from cplus.data import interfaces
from cplus.data.tasks import load_task
from cplus.evaluation import judges
from cplus.evaluation.task import BoundTask, evaluate_task
from cplus.integrations.lm_eval import evaluate_with_harness


def main() -> None:
    """Compare and print; exit code 1 where a row differs."""
    asked = options(__doc__, model="gemma-3-270m", task="csqa", interface="letter", limit=50)
    base, task = models.load(asked.model), load_task(asked.task, asked.data_dir)
    chat = bool(base.tokenizer.chat_template)
    bound = interfaces.build(asked.interface, base.tokenizer, wording=task.wording, chat=chat)
    rows = BoundTask(name=task.name, interface=bound, examples=task.examples[: asked.limit], judge=judges.exact_match)
    found = {}
    arms = {
        "cplus": lambda: found.update(ours=evaluate_task(base.model, rows)),
        "lm-eval": lambda: found.update(theirs=evaluate_with_harness(base.model, rows)),
    }
    seconds = {name: each for name, (each,) in in_turn(arms, rounds=1, warm=0).items()}
    (ours, summary), (theirs, harness) = found["ours"], found["theirs"]
    pairs = zip(ours, theirs, strict=True)
    differ = [{"id": a.id, "cplus": a.answer, "lm-eval": b.answer} for a, b in pairs if a.answer != b.answer]
    figures = {
        "model": asked.model,
        "task": asked.task,
        "interface": asked.interface,
        "rows": len(ours),
        "same": len(ours) - len(differ),
        "differ": differ,
        "accuracy": summary["accuracy"],
        "answers": summary["answers"],
        "harness": harness["harness"],
        "seconds": seconds,
        "lm-eval": metadata.version("lm-eval"),
    }
    finish(f"agreement-{asked.model}", figures, asked.out)
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()
