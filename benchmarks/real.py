"""What `cplus adapt` does to a real small model: facts by cloze and chat style, method by method; and `cplus check`.

python benchmarks/real.py {facts,style,check} [--methods sft cplus] [--data-dir DIR] [--out benchmarks/results]
python benchmarks/real.py style --draw docs/style      the curves of past against new loss

`check`: plain fine-tuning and CPLUS learn 40 terse answers without anchors; each model is then checked by a command of
its own. A finished job is not repeated and an interrupted one goes on, so the same line can be given again.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timing import finish

from cplus import models
from cplus.base.files import read_json, read_sealed, write_text
from cplus.data import interfaces
from cplus.data.examples import Choice, to_row
from cplus.data.formats import from_row
from cplus.data.tasks import load_task
from cplus.evaluation.statistics import common_level, rise
from cplus.jobs.adapt import adapt, resume
from cplus.jobs.settings import AdaptConfig
from cplus.lab.drawing import panels
from cplus.methods.table import METHODS
from cplus.probes.labels import own_answers
from cplus.receipts.contents import Point
from cplus.receipts.figures import COLOURS, label, save
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


def style(options: argparse.Namespace) -> dict[str, Any]:
    """96 questions with terse answers, in chat form; past are the model's own answers to short instructions."""
    asked = [to_row(example) for example in load_task("instruct_short", options.data_dir).examples]
    kept = random.Random("style").sample(asked, 96)
    anchors = [row for row, ends in zip(kept, _ended(kept), strict=True) if ends][:8]
    return {
        **terse(options, 96),
        "anchors": _rows(options.work / "style-anchors.jsonl", anchors),
        "past": _rows(options.work / "style-past.jsonl", [row for row in kept if row not in anchors]),
        "own_answers": True,
        "num_probes": 64,
        "evaluate_rows": 48,
        "max_new_tokens": 128,
        "max_asked": 32,
        "lr": 3e-5,
    }


def terse(options: argparse.Namespace, count: int = 40) -> dict[str, Any]:
    """Questions of arc_easy with nothing but the answer."""
    chosen = random.Random("terse").sample(load_task("arc_easy", options.data_dir).examples, count)
    rows = [{"prompt": e.question, "response": e.choices[e.answer]} for e in chosen if isinstance(e, Choice)]
    return {"new": _rows(options.work / "new.jsonl", rows), "stop": "never", "epochs": options.epochs}


def _ended(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Which requests the base model answers to an end; an anchor without one would be left out by the job."""
    base = models.load(MODEL)
    examples = tuple(from_row(row, where="asked", id=str(number)) for number, row in enumerate(rows))
    interface = interfaces.build("freeform", base.tokenizer)
    answered = {example.id for example in own_answers(base, interface, examples, name="asked")}
    return [example.id in answered for example in examples]


def _rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def matched(curves: dict[str, tuple[Point, ...]]) -> dict[str, Any]:
    """Every method's rise of the past answers' loss at the lowest new-data loss that all have reached."""
    looks = {
        name: [(p.new_nll, p.past_nll) for p in curve if p.new_nll is not None and p.past_nll is not None]
        for name, curve in curves.items()
    }
    level = common_level(looks.values())
    rises = {name: rise(curve, level) for name, curve in looks.items()}
    base = rises.get("sft")
    shares = {name: found / base if base else None for name, found in rises.items()}
    return {"new_nll": level, "rise_of_past_nll": rises, "share_of_sft": shares}


def checked(job: Path) -> dict[str, Any]:
    """What `cplus check` says about a job's model, with the seconds it took by the clock and by the processor."""

    def processor() -> float:
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        return spent.ru_utime + spent.ru_stime

    begun, used = time.perf_counter(), processor()
    command = [sys.executable, "-m", "cplus", "check", MODEL, str(job / "model"), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds = {"clock": time.perf_counter() - begun, "processor": processor() - used}
    return {name: found[name] for name in ("kept", "lines", "loss", "divergence")} | {"seconds": seconds}


def draw(path: Path, stem: Path) -> None:
    """Past against new loss, epoch by epoch, for each method of a written comparison."""
    found = read_json(path)
    figure, [axis] = panels(1, width=5.6, height=3.05)
    for name in sorted(found["methods"], key=list(COLOURS).index):
        curve = found["methods"][name]["curve"]
        new, past = ([point[key] for point in curve] for key in ("new_nll", "past_nll"))
        axis.plot(new, past, marker="o", markersize=4, linewidth=1.4, color=COLOURS[name], label=label(name))
    axis.axvline(found["matched"]["new_nll"], color="#999999", linewidth=0.8, linestyle="--")
    axis.invert_xaxis()
    axis.set(xlabel="loss of the new answers (nats a token): learned to the right", ylabel="loss of the past answers")
    axis.legend(frameon=False)
    save(figure, stem)


def main() -> None:
    """Run the jobs one after another, then put their figures side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("facts", "style", "check"))
    parser.add_argument("--methods", nargs="+", default=["sft", "cplus"])
    parser.add_argument("--epochs", type=int, default=5, help="of style and check")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/real"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, metavar="STEM", help="draw what was written to --out, and run nothing")
    options = parser.parse_args()
    if options.draw is not None:
        draw((options.out or Path("benchmarks/results")) / "real-style.json", options.draw)
        return
    settings = {"facts": facts, "style": style, "check": terse}[options.what](options)
    folders: dict[str, Path] = {}
    for method in options.methods:
        folder = options.work / f"{options.what}-{method}"
        if (folder / "settings.json").exists():
            resume(folder)
        else:
            given = settings if METHODS[method].needs_bank else {k: v for k, v in settings.items() if k != "num_probes"}
            adapt(AdaptConfig(model=MODEL, method=method, out=folder, **given))
        folders[method] = folder
    curves = {method: read_receipt(folder).curve for method, folder in folders.items()}
    methods = {
        name: {
            "figures": read_sealed(folder / "record.json")["figures"],
            "curve": [vars(point) for point in curves[name]],
        }
        for name, folder in folders.items()
    }
    figures: dict[str, Any] = {"what": options.what, "model": MODEL, "methods": methods}
    if options.what == "style":
        figures["matched"] = matched(curves)
    if options.what == "check":
        figures["checks"] = {name: checked(folder) for name, folder in folders.items()}
    finish(f"real-{options.what}", figures, options.out)


if __name__ == "__main__":
    main()
