"""`cplus split`: which rows of a task a model already answers correctly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cplus.cli import options


def split(
    model: options.Model,
    task: Annotated[
        str, typer.Option(help="A named task, a file or owner/name on the hub.", autocompletion=options.tasks)
    ],
    out: Annotated[Path, typer.Option(help="JSON file for the predictions.")] = Path("split.json"),
    interface: options.InterfaceName = None,
    data_dir: options.DataDir = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first rows.")] = None,
    judge: options.Judge = "exact",
    max_new_tokens: options.MaxNewTokens = 256,
    plain: options.Plain = False,
    too_long: options.TooLong = "refuse",
    device: options.Device = "auto",
    compute_dtype: options.ComputeDtype = "float32",
    json: options.Json = False,
) -> None:
    """Split a task into rows the model answers correctly (past) and incorrectly (new), and store its answers."""
    options.check({"model": model, "task": task})

    from collections import Counter

    from cplus import models
    from cplus.base.terminal import clean, output, print_json
    from cplus.data import interfaces
    from cplus.data.tasks import load_task, save_split, stack
    from cplus.data.tasks import split as divide
    from cplus.evaluation import judges
    from cplus.models.scoring import fitting, predict

    judged = judges.chosen(judge)
    found = load_task(task, data_dir)
    loaded = models.load(model, device=device)
    bound = interfaces.build(interface or found.interface, loaded.tokenizer, wording=found.wording, chat=not plain)
    examples = found.examples[:limit]
    kept = fitting(bound, examples, loaded.window, too_long)
    with models.computing(compute_dtype, loaded.device):
        predicted = predict(loaded.model, bound, kept, judge=judged, max_new_tokens=max_new_tokens, what=found.name)
    precision = str(models.as_dtype(compute_dtype)).removeprefix("torch.")
    made = divide(
        kept,
        predicted,
        model_fingerprint=loaded.fingerprint,
        interface=bound.name,
        stack=stack(device=loaded.device.type, compute_dtype=precision),
    )
    save_split(made, out)
    answers = Counter(str(prediction.answer) for prediction in made.predictions).most_common(8)
    report = {
        "model": model,
        "task": task,
        "interface": bound.name,
        "past": len(made.past),
        "new": len(made.new),
        "excluded": len(examples) - len(kept),
        "answers": dict(answers),
        "model_fingerprint": made.model_fingerprint,
        "data_fingerprint": made.data_fingerprint,
        "out": str(out),
    }
    if json:
        print_json(report)
        return
    output.print(f"past (correct) {len(made.past)}, new (incorrect) {len(made.new)}")
    output.print("answers: " + ", ".join(f"{clean(text)} x {count}" for text, count in answers), markup=False)
    output.print(f"excluded as too long: {report['excluded']}; written to {out}", markup=False)
