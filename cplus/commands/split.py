"""`cplus split`: what a model already knows of a task, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def split(
    model: Annotated[str, typer.Argument(help="Hub id, folder, GGUF file or built-in name.")],
    task: Annotated[str, typer.Option(help="A named task, a file or owner/name on the hub.")],
    out: Annotated[Path, typer.Option(help="Where the predictions are stored, as JSON.")] = Path("split.json"),
    interface: Annotated[
        str | None, typer.Option(help="letter, cloze or freeform; the task's own if not given.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the named tasks; else CPLUS_DATA, else the hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first examples.")] = None,
    judge: Annotated[
        str,
        typer.Option(
            help="Free text: exact, normalised, contains, number, choice, json, schema:FILE, regex:PATTERN, "
            "python:module:function or model:NAME."
        ),
    ] = "exact",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Free text: where an answer is cut off.")] = 256,
    plain: Annotated[bool, typer.Option("--plain", help="Ask in plain text, without a chat template.")] = False,
    too_long: Annotated[
        Literal["refuse", "exclude"], typer.Option(help="What to do with rows longer than the model's window.")
    ] = "refuse",
    device: Annotated[str, typer.Option(help="auto, cuda, mps or cpu.")] = "auto",
    compute_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Part a task into what the model answers rightly (past) and wrongly (new), and store its answers."""
    from collections import Counter

    from cplus import interfaces, models
    from cplus.data.split import save_split, stack
    from cplus.data.split import split as part
    from cplus.data.tasks import load_task
    from cplus.evaluation import judges
    from cplus.scoring import fitting, predict
    from cplus.terminal import clean, output, print_json

    judged = judges.chosen(judge)
    found = load_task(task, data_dir)
    loaded = models.load(model, device=device)
    bound = interfaces.build(interface or found.interface, loaded.tokenizer, wording=found.wording, chat=not plain)
    examples = found.examples[:limit]
    kept = fitting(bound, examples, loaded.window, too_long)
    with models.computing(compute_dtype, loaded.device):
        predicted = predict(loaded.model, bound, kept, judge=judged, max_new_tokens=max_new_tokens, what=found.name)
    precision = str(models.as_dtype(compute_dtype)).removeprefix("torch.")
    made = part(
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
    output.print(f"past (answered rightly) {len(made.past)}, new (answered wrongly) {len(made.new)}")
    output.print("answers given: " + ", ".join(f"{clean(text)} x {count}" for text, count in answers), markup=False)
    output.print(f"excluded as too long: {report['excluded']}; written to {out}", markup=False)
