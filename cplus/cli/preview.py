"""`cplus preview`: where plain fine-tuning would do damage, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cplus.cli import options as names
from cplus.cli.options import Json, Model, given, with_settings

if TYPE_CHECKING:
    from cplus.lab.preview import Forecast


_SETTINGS = (
    "new", "anchors", "keep", "split", "num_anchors", "num_new", "bank", "anchor_weight", "interface", "optimizer",
    "lr", "weight_decay", "plain", "max_length", "too_long", "data_dir", "device", "compute_dtype", "seed",
)  # fmt: skip


@with_settings(_SETTINGS)
def preview(model: Model, json: Json = False, **options: Any) -> None:
    """Show for each layer how much of the first plain update works against the rows to keep."""
    from cplus.jobs.settings import settings

    config = settings(given(options, model=model), where="preview")
    names.check(config.model_dump())

    from dataclasses import asdict

    from cplus import models
    from cplus.base.terminal import print_json
    from cplus.jobs.choices import default_rate, with_chosen
    from cplus.jobs.keep import checked_bank, with_written
    from cplus.jobs.prepare import bind_rows, load, row_of
    from cplus.jobs.rows import read
    from cplus.jobs.settings import settings
    from cplus.lab.preview import preview as look
    from cplus.training.driver import build_optimizer

    method = row_of(config)
    tasks = read(config, method, Path.cwd())
    base = load(config, Path.cwd())
    rows = bind_rows(config, tasks, base)
    with models.computing(config.compute_dtype, base.device):
        rows, written = with_written(config, method, rows, base)
        assert rows.anchors is not None, "the method needs anchors, and read() requires them"
        own = () if written is None else written.probes
        probes: list[Any] = [rows.anchors.interface.encode(probe.example) for probe in own]
        if config.bank is not None:
            sealed = checked_bank(config.bank, base, rows.anchors)
            probes = [rows.anchors.interface.encode(example) for example in sealed.examples]
        if not isinstance(config.lr, float):
            rate = default_rate(config, sum(p.numel() for p in base.model.parameters()))
            config = with_chosen(config, [rate])
        found = look(
            base.model,
            build_optimizer(config.settings(), base.model),
            new=rows.trained.encoded(),
            anchors=rows.anchors.encoded(),
            probes=probes,
            anchor_weight=next(weight for weight, kind in method.evidence if kind == "anchors"),
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

    from cplus.base.terminal import clean, output

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
        "the squared update that the evidence opposes. by SFT, gated: the first-order change of the anchors' loss "
        f"({report['loss']:.4f} now) from the whole update and from the part that the gate's mask admits.",
        markup=False,
    )


def _row(layer: Forecast) -> tuple[str, ...]:
    from cplus.base.terminal import clean

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
