"""`cplus preview`: where plain fine-tuning would hurt, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from cplus.diagnostics.preview import Forecast


def preview(
    model: Annotated[str, typer.Argument(help="Alias, hub id, folder or GGUF file.")],
    new: Annotated[str | None, typer.Option(help="Rows to learn: a file, a named task or owner/name.")] = None,
    anchors: Annotated[str | None, typer.Option(help="Rows to keep: a file or a named task.")] = None,
    split: Annotated[
        str | None, typer.Option(help="In place of both: a task the model parts into right and wrong rows.")
    ] = None,
    num_anchors: Annotated[int, typer.Option(min=1, help="With --split: how many anchors to draw.")] = 8,
    num_new: Annotated[int | None, typer.Option(min=1, help="With --split: how many wrong rows to learn.")] = None,
    bank: Annotated[Path | None, typer.Option(help="A sealed bank: the evidence is then the blend.")] = None,
    anchor_weight: Annotated[float, typer.Option(min=0, max=1, help="With --bank: weight of the anchors.")] = 0.5,
    interface: Annotated[
        Literal["letter", "cloze", "freeform"] | None, typer.Option(help="How multiple choice is asked.")
    ] = None,
    optimizer: Annotated[Literal["adamw", "sgd"], typer.Option(help="What proposes the update.")] = "adamw",
    lr: Annotated[float, typer.Option(help="Learning rate; changes of the loss are in proportion to it.")] = 3e-5,
    weight_decay: Annotated[float, typer.Option(min=0, help="Part of the proposed update.")] = 0.0,
    plain: Annotated[bool, typer.Option("--plain", help="Ask in plain text, without a chat template.")] = False,
    too_long: Annotated[
        Literal["refuse", "exclude"], typer.Option(help="What to do with rows longer than the model's window.")
    ] = "refuse",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the named tasks.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, mps or cpu.")] = "auto",
    compute_dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of the passes.")] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Of the draw of anchors.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Show, layer by layer, how much of the first plain update works against the rows to keep."""
    from dataclasses import asdict

    from cplus import models
    from cplus.diagnostics.preview import preview as look
    from cplus.experiment.driver import build_optimizer
    from cplus.job.bank import checked
    from cplus.job.prepare import load, row_of
    from cplus.job.rows import gather, read
    from cplus.job.settings import settings
    from cplus.terminal import print_json

    asked = {
        "model": model, "new": new, "anchors": anchors, "split": split, "num_anchors": num_anchors, "num_new": num_new,
        "bank": bank, "interface": interface, "optimizer": optimizer, "lr": lr, "weight_decay": weight_decay,
        "plain": plain, "too_long": too_long, "data_dir": data_dir, "device": device, "compute_dtype": compute_dtype,
        "seed": seed, "anchor_weight": anchor_weight, "method": "cplus",
    }  # fmt: skip
    config = settings(asked, where="preview")
    method = row_of(config)
    tasks = read(config, method, Path.cwd())
    base = load(config, Path.cwd())
    with models.computing(config.compute_dtype, base.device):
        rows = gather(config, tasks, base)
        assert rows.anchors is not None, "the method needs anchors, and read() has asked for them"
        probes: list[Any] = []
        if bank is not None:
            sealed = checked(bank, base, rows.anchors)
            probes = [rows.anchors.interface.encode(example) for example in sealed.examples]
        found = look(
            base.model,
            build_optimizer(config.settings(), base.model),
            new=rows.new.encoded(),
            anchors=rows.anchors.encoded(),
            probes=probes,
            anchor_weight=anchor_weight,
        )
    report = {
        "model": model,
        "optimizer": config.optimizer,
        "lr": config.lr,
        "counts": {"new": len(rows.new.examples), "anchors": len(rows.anchors.examples), "probes": len(probes)},
        **asdict(found),
    }
    print_json(report) if json else _show(report, found.whole, found.layers)


def _show(report: dict[str, Any], whole: Forecast, layers: tuple[Forecast, ...]) -> None:
    from rich.table import Table

    from cplus.terminal import clean, output

    counts = report["counts"]
    hurt = sum(layer.change > 0 for layer in layers)
    title = f"SFT will hurt here: {hurt} of {len(layers)} layers" if hurt else "SFT's first update hurts no layer"
    table = Table(title=f"{clean(report['model'])}. {title}", title_justify="left")
    for column in ("layer", "coordinates", "conflict", "energy", "by SFT", "gated"):
        table.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
    for layer in layers:
        table.add_row(*_row(layer), style="red" if layer.change > 0 else None)
    table.add_section()
    table.add_row(*_row(whole), style="bold")
    output.print(table)
    output.print(
        f"First {report['optimizer']} update on {counts['new']} new rows at rate {report['lr']:g}, against "
        f"{counts['anchors']} anchors and {counts['probes']} probes. conflict, energy: the share of coordinates and of "
        "squared update that the evidence speaks against. by SFT, gated: the change of the anchors' loss "
        f"({report['loss']:.4f} now) to first order, by the whole update and by what the gate's mask leaves of it.",
        markup=False,
    )


def _row(layer: Forecast) -> tuple[str, ...]:
    from cplus.terminal import clean

    def percent(part: float | None) -> str:
        return "" if part is None else f"{100 * part:.1f} %"

    return (
        clean(layer.name),
        f"{layer.coordinates:,}",
        percent(layer.conflict),
        percent(layer.conflicting_energy),
        f"{layer.change:+.2e}",
        f"{layer.gated_change:+.2e}",
    )
