"""What `cplus adapt` does to a real small model: facts by cloze, chat style, and a fixed format, method by method.

python benchmarks/real.py {facts,style,format} [--methods sft cplus] [--data-dir DIR] [--out benchmarks/results]

python benchmarks/real.py style --draw docs/style      the curves of past against new loss

A finished job is not repeated and an interrupted one goes on, so the same line can be given again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cplus import models
from cplus.base.files import read_json, read_sealed, write_json, write_text
from cplus.base.terminal import console, print_json
from cplus.data import interfaces
from cplus.data.examples import Choice, from_row, to_row
from cplus.data.tasks import load_task
from cplus.evaluation.statistics import common_level, rise
from cplus.jobs.adapt import adapt, resume
from cplus.jobs.prepare import with_own_answers
from cplus.jobs.settings import AdaptConfig
from cplus.methods.table import METHODS
from cplus.receipts.contents import Point
from cplus.receipts.figures import COLOURS, label, new_figure, save
from cplus.receipts.page import read_receipt
from cplus.training.rows import Group

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
    return {**_terse(options, 96), **_kept(options, kept), "lr": 3e-5, "epochs": options.epochs, "max_asked": 32}


def format_(options: argparse.Namespace) -> dict[str, Any]:
    """The same new rows; past are requests that the model answers with JSON, right if the answer is JSON."""
    asked = [to_row(example) for example in load_task("json_requests").examples]
    kept = random.Random("format").sample(asked, 72)
    return {
        **_terse(options, 96),
        **_kept(options, kept),
        "judge": "python:real:holds_json",
        "lr": 3e-5,
        "epochs": options.epochs,
        "max_asked": 64,
    }


def holds_json(answer: str, _: str) -> bool:
    """Whether an answer is a JSON object, bare or as a fenced block."""
    text = answer.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _terse(options: argparse.Namespace, count: int) -> dict[str, Any]:
    chosen = random.Random("terse").sample(load_task("arc_easy", options.data_dir).examples, count)
    rows = [{"prompt": e.question, "response": e.choices[e.answer]} for e in chosen if isinstance(e, Choice)]
    return {"new": _rows(options.work / "new.jsonl", rows), "stop": "never", "max_new_tokens": 128}


def _kept(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ended = _ended(rows)
    anchors = [row for row, ends in zip(rows, ended, strict=True) if ends][:8]
    past = [row for row in rows if row not in anchors]
    return {
        "anchors": _rows(options.work / f"{options.what}-anchors.jsonl", anchors),
        "past": _rows(options.work / f"{options.what}-past.jsonl", past),
        "own_answers": True,
        "num_probes": 64,
        "evaluate_rows": 48,
    }


def _ended(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Which requests the base model answers to an end; an anchor without one would be left out by the job."""
    base = models.load(MODEL)
    examples = tuple(from_row(row, where="asked", id=str(number)) for number, row in enumerate(rows))
    interface = interfaces.build("freeform", base.tokenizer)
    group, _ = with_own_answers(Group(name="asked", part="retention", interface=interface, examples=examples), base)
    answered = {example.id for example in group.examples}
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


def draw(path: Path, stem: Path) -> None:
    """Past against new loss, epoch by epoch, for each method of a written comparison."""
    found = read_json(path)
    figure, axis = new_figure(5.6, 3.4)
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
    parser.add_argument("what", choices=("facts", "style", "format"))
    parser.add_argument("--methods", nargs="+", default=["sft", "cplus"])
    parser.add_argument("--epochs", type=int, default=8, help="of style and format")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/real"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--draw", type=Path, metavar="STEM", help="draw what was written to --out, and run nothing")
    options = parser.parse_args()
    if options.draw is not None:
        draw((options.out or Path("benchmarks/results")) / f"real-{options.what}.json", options.draw)
        return
    settings = {"facts": facts, "style": style, "format": format_}[options.what](options)
    records: dict[str, Any] = {}
    folders: list[Path] = []
    for method in options.methods:
        folder = options.work / f"{options.what}-{method}"
        if (folder / "settings.json").exists():
            resume(folder)
        else:
            given = settings if METHODS[method].needs_bank else {k: v for k, v in settings.items() if k != "num_probes"}
            adapt(AdaptConfig(model=MODEL, method=method, out=folder, compare=tuple(folders), **given))
        folders.append(folder)
        records[method] = read_sealed(folder / "record.json")
    curves = {method: read_receipt(folder).curve for method, folder in zip(options.methods, folders, strict=True)}
    figures: dict[str, Any] = {
        "what": options.what,
        "model": MODEL,
        "methods": {
            name: {"figures": record["figures"], "curve": [vars(point) for point in curves[name]]}
            for name, record in records.items()
        },
    }
    if options.what != "facts":
        figures["matched"] = matched(curves)
        console.print(figures["matched"])
    if options.out is not None:
        write_json(options.out / f"real-{options.what}.json", figures)
    if options.json:
        print_json(figures)


if __name__ == "__main__":
    main()
