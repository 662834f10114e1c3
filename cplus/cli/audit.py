"""`cplus audit`: what is in a probe bank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cplus.cli import options
from cplus.cli.options import DataDir, Json

if TYPE_CHECKING:
    from rich.table import Table


def audit(
    banks: Annotated[list[Path], typer.Argument(metavar="BANK...", help="Folders of sealed banks.")],
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="File or task to search for copies, such as the evaluation set; repeatable.",
            autocompletion=options.tasks,
        ),
    ] = None,
    data_dir: DataDir = None,
    html: Annotated[Path | None, typer.Option(help="Write the audit as one HTML page.")] = None,
    json: Json = False,
) -> None:
    """Report on a probe bank: copies, leaks, confidence, labels, words, topics, yield; several are shown side by side.

    The anchors are read from `anchors.jsonl` beside the bank, where 'cplus adapt' writes them.
    """
    options.check({"task": against})

    from cplus.base.files import write_text
    from cplus.base.terminal import console, output, print_json
    from cplus.receipts.page import render_audit

    if len(banks) > 1:
        _side_by_side(banks, against or (), data_dir, html=html, json=json)
        return
    [bank] = banks
    found = _audited(bank, against or (), data_dir)
    if html is not None:
        write_text(html, render_audit(found, name=bank.name))
        console.print(f"wrote {html}", markup=False)
    if json:
        print_json(found)
        return
    output.print(_table(found))
    for pair in found["nearest"][:5]:
        output.print(
            f"{pair['jaccard']:.2f}  {_line(pair['probe_text'])}\n      {_line(pair['row_text'])}", markup=False
        )


def _audited(bank: Path, against: Sequence[str], data_dir: Path | None) -> dict[str, Any]:
    from cplus.data.tasks import load_task
    from cplus.probes import audit as figures
    from cplus.probes.bank import Bank

    sealed = Bank.load(bank)
    beside = bank.resolve().parent / "anchors.jsonl"
    sources = [figures.ComparedRows(name=name, examples=load_task(name, data_dir).examples) for name in against]
    if beside.is_file() and not figures.sealed_anchors(sealed, sources):
        anchors = figures.ComparedRows(name=beside.name, examples=load_task(str(beside)).examples)
        sources += [anchors] if figures.sealed_anchors(sealed, [anchors]) else []
    return figures.audit(sealed, sources)


def _side_by_side(
    banks: Sequence[Path], against: Sequence[str], data_dir: Path | None, *, html: Path | None, json: bool
) -> None:
    """Several banks, one column each, and all of them together, as the paper reports its three.

    Paper: App. C.2.
    """
    from rich.table import Table

    from cplus.base.terminal import clean, output, print_json
    from cplus.data.tasks import load_task
    from cplus.probes.audit import short_audit, together
    from cplus.probes.bank import Bank

    if html is not None:
        raise ValueError(f"a page shows one bank, got {len(banks)}; leave --html out, or audit them one by one")
    rows = [example for name in against for example in load_task(name, data_dir).examples]
    found = [short_audit(Bank.load(bank), rows) for bank in banks]
    whole = together(found)
    if json:
        shown = [{"folder": str(bank), **own} for bank, own in zip(banks, found, strict=True)]
        print_json({"banks": shown, "together": whole, "against": list(against)})
        return
    table = Table(box=None, header_style="bold")
    for column in ("", *(bank.name for bank in banks), "together"):
        table.add_column(clean(column).replace("[", "\\["), overflow="fold")
    columns = [together([own]) for own in found]
    for key, words in TOGETHER.items():
        table.add_row(words, *(_number(own[key]) for own in (*columns, whole)))
    output.print(table)


TOGETHER = {
    "probes": "probes",
    "unique": "unique inputs",
    "mean": "confidence, mean",
    "median": "confidence, median",
    "p10": "confidence, p10",
    "exact": "exact copies",
    "near": "near copies",
}


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    from cplus.base.terminal import clean

    confidence, counts, labels = found["confidence"], found["counts"], found["labels"]
    rejected = ", ".join(f"{reason} {share:.1%}" for reason, share in found["rejected_shares"].items())
    shares = ", ".join(f"{_short(clean(answer))} {share:.0%}" for answer, share in list(labels["shares"].items())[:6])
    apart = "anchors not found" if labels["divergence"] is None else f"{labels['divergence']:.3f} bits from the anchors"
    rows = [
        ("unique inputs", f"{found['unique']} of {found['probes']} ({found['distinct_share']:.1%})"),
        (
            "confidence",
            f"mean {confidence['mean']:.3f}, median {confidence['median']:.3f}, p10 {confidence['p10']:.3f}",
        ),
        ("yield", f"{found['yield']:.1%} of {counts['requests']} requests; rejected: {rejected or 'none'}"),
        ("answers", f"{labels['distinct']} different ({shares}); {apart}"),
        ("words", f"{found['lengths']['mean']} per input; {found['vocabulary']['distinct']} different"),
        (
            "topics",
            f"{found['topics']['covered']} of {found['topics']['areas']}" if found["topics"]["areas"] else "no cue",
        ),
    ]
    rows += [
        (clean(name), f"{one['exact']} exact ({one['exact_share']:.2%}), {one['near']} near ({one['near_share']:.2%})")
        for name, one in found["against"].items()
    ]
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _line(text: str) -> str:
    from cplus.base.terminal import clean

    return clean(" ".join(text.split()))[:110]


def _short(answer: str) -> str:
    return answer if len(answer) <= 40 else f"{answer[:39]}…"
