"""The receipt: a sealed record, and one self-contained page rendered from it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic import TypeAdapter, ValidationError

from cplus.base import files
from cplus.evaluation.requirements import Requirement
from cplus.evaluation.requirements import sentence as required
from cplus.receipts.contents import (
    BankAudit,
    ComparedRun,
    GateShare,
    Losses,
    ModelId,
    Overlap,
    Point,
    Receipt,
    Repair,
    RowComparison,
    RowSet,
    SampleProbe,
    TunedSet,
    rows,
)
from cplus.receipts.figures import COLOURS, OTHER, figures, flat, label, runs, shown, state, unequal
from cplus.receipts.verdict import lead, p_value, percent, sentences, signed

if TYPE_CHECKING:
    from cplus.receipts.contents import Point, Receipt


# What every page shares: templates that escape all text, one base style, a policy that lets nothing else in.


TEMPLATES = Path(__file__).parent / "templates"


def environment() -> Environment:
    """Templates with autoescape on; an unknown name is an error, not a blank."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def policy(script: str | None = None) -> str:
    """A page's content security policy: no network, and of scripts this one alone, by its hash."""
    rules = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    if script is None:
        return rules
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{rules}; script-src 'sha256-{digest}'"


# Learning curves as the lines, ticks and words of the page's charts.


Series: TypeAlias = Mapping[str, list[tuple[float, float]]]

WIDTH, HEIGHT = 340.0, 210.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 42.0, 12.0, 8.0, 34.0
_DASHES = ("6 3", "2 2", "9 3 2 3", "1 3", "12 4")
_TRAINED, _HELD_OUT = "rows trained on", "rows held out"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line in coordinates of the drawing; only the run's own is solid, so colour is not the only sign."""

    label: str
    colour: str
    dash: str | None
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a template draws: lines and ticks in coordinates of the drawing, and words.

    `caveat` says why the lines are not comparable as they are; an axis that does not begin at 0 is marked as cut.
    """

    title: str
    caveat: str
    x_label: str
    x_cut: bool
    y_cut: bool
    summary: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def charts(receipt: Receipt) -> list[Chart]:
    """One chart for each quantity that has at least two points.

    The past loss comes first and is drawn against the new loss, and Retention of several runs against Acquisition, so
    that methods are compared where they have learned equally well. Lines of runs at unequal rates or of unequal
    learning have a caveat.
    """
    caveat = "; ".join(dict.fromkeys(said.partition(":")[0] for said in unequal(receipt)))
    drawn = []
    for title, x_label, series in _quantities(receipt):
        known = {name: points for name, points in series.items() if len(points) > 1}
        if known:
            beside = len(known) > 1 and _HELD_OUT not in known
            drawn.append(_chart(title, x_label, known, list(series), caveat if beside else ""))
    return drawn


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`.

    >>> ticks(0.0, 9.3)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    width = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(width / most))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if width / (power * m) <= most)
    first = math.floor(low / step)
    last = math.ceil(round(high / step, 9))
    return [round(step * i, 10) for i in range(first, max(last, first + 1) + 1)]


def _quantities(receipt: Receipt) -> Iterator[tuple[str, str, Series]]:
    """Each chart's title, the name of its horizontal axis, and its lines by method."""
    methods = runs(receipt)
    yield (
        "Rise of the past loss against the new loss",
        "new loss, nats per token (learning goes left)",
        {name: _losses(points) for name, points in methods.items()},
    )
    if len(methods) > 1:
        yield (
            "Retention (%) against Acquisition",
            "Acquisition, % (learning goes right)",
            {name: _shares(points) for name, points in methods.items()},
        )
    own, shown = receipt.curve, set()
    for title, trained, unseen in (
        ("New loss", "new_nll", "validation_nll"),
        ("Acquisition (%)", "acquisition", "validation"),
    ):
        if any(getattr(point, unseen) is not None for point in own):
            apart = {_TRAINED: _by_epoch(own, trained), _HELD_OUT: _by_epoch(own, unseen)}
            yield f"{title}: trained on and held out", "epoch", apart
            shown.add(title)
    epochs = (
        ("Retention (%)", "retention"),
        ("Acquisition (%)", "acquisition"),
        ("Divergence from the base model on new rows, nats per token", "divergence"),
        ("Training loss", "loss"),
    )
    for title, quantity in epochs:
        if title in shown and len(methods) == 1:
            continue  # the same line again
        yield title, "epoch", {name: _by_epoch(points, quantity) for name, points in methods.items()}


def _losses(points: Sequence[Point]) -> list[tuple[float, float]]:
    known = [(p.new_nll, p.past_nll) for p in points if p.new_nll is not None and p.past_nll is not None]
    return [(new, past - known[0][1]) for new, past in known] if points[0].epoch == 0 else []


def _shares(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(p.acquisition, p.retention) for p in points if p.acquisition is not None and p.retention is not None]


def _by_epoch(points: Sequence[Point], quantity: str) -> list[tuple[float, float]]:
    return [(p.epoch, getattr(p, quantity)) for p in points if getattr(p, quantity) is not None]


def _chart(title: str, x_label: str, series: Series, order: list[str], caveat: str) -> Chart:
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x_values = ticks(min(xs), max(xs))
    # A line that stays at 100 % needs an axis that does not go beyond it.
    y_values = ticks(min(*ys, 90.0), 100.0, most=4) if "(%)" in title else ticks(min(ys), max(ys), most=4)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_values[0]) / ((x_values[-1] - x_values[0]) or 1.0)
        up = (y - y_values[0]) / ((y_values[-1] - y_values[0]) or 1.0)  # a line that does not move
        return (
            round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM), 1),
        )

    dashes = dict(zip(order, chain((None,), cycle(_DASHES)), strict=False))
    lines = tuple(
        Line(
            label=label(name),
            colour=COLOURS["cplus"] if name == _TRAINED else COLOURS.get(name, OTHER),
            dash=dashes[name],
            points=tuple(place(x, y) for x, y in points),
        )
        for name, points in series.items()
    )
    ends = "; ".join(f"{label(name)} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in series.items())
    return Chart(
        title=title,
        caveat=caveat,
        x_label=x_label,
        x_cut=x_values[0] > 0,
        y_cut=y_values[0] > 0,
        summary=f"{title}{f' ({caveat})' if caveat else ''} by {x_label}: {ends}",
        lines=lines,
        x_ticks=tuple((place(x, y_values[0])[0], f"{x:g}") for x in x_values),
        y_ticks=tuple((place(x_values[0], y)[1], f"{y:g}") for y in y_values),
    )


# The audit of a probe bank as one page that needs nothing else; all generated text in it is escaped.


def render_audit(audit: Mapping[str, Any], *, name: str) -> str:
    """The page of one audit, as `cplus.probes.audit.audit` gives it."""
    pages = environment()
    pages.filters["percent"] = lambda share: f"{100 * share:.2f} %"
    return pages.get_template("audit.html").render(audit=audit, name=name, policy=policy())


# A receipt as the sealed JSON record that its page is rendered from, and back.


SCHEMA = 2


def to_json(receipt: Receipt) -> dict[str, Any]:
    """The record as plain values, with the figures its rows give and the hash of it all."""
    _check(receipt)
    body = {"schema": SCHEMA, **asdict(receipt), "figures": figures(receipt)}
    body = json.loads(files.canonical_json(body))  # tuples become lists, as they will be read
    return {**body, "sha256": files.fingerprint(body)}


def from_json(raw: Any, *, where: str = "the receipt") -> Receipt:
    """Read a record made by `to_json`; one that was altered, or that another version wrote, is refused."""
    if not isinstance(raw, Mapping) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, Mapping) else None
        raise ValueError(
            f"{where}: expected a receipt of schema {SCHEMA}, got schema {found!r:.20}: another version wrote it; "
            "make the receipt again with this version"
        )
    body = {key: value for key, value in raw.items() if key != "sha256"}
    if raw.get("sha256") != files.fingerprint(body):
        raise ValueError(
            f"{where}: the record was altered: its content has the hash {files.fingerprint(body)[:16]}, "
            f"but it was written with {str(raw.get('sha256'))[:16]}; make the receipt again"
        )
    fields = {key: value for key, value in body.items() if key not in ("schema", "figures")}
    try:
        receipt = TypeAdapter(Receipt).validate_json(files.canonical_json(fields))
    except ValidationError as error:
        raise ValueError(f"{where}: {_first(error)}") from error
    _check(receipt)
    if not _alike(body["figures"], json.loads(files.canonical_json(figures(receipt)))):
        raise ValueError(f"{where}: its figures do not follow from its rows; make the receipt again")
    return receipt


def _check(receipt: Receipt) -> None:
    """Refuse values that could not be read again, and names and ids that occur twice."""
    try:
        TypeAdapter(Receipt).validate_python(receipt)
    except ValidationError as error:
        raise ValueError(f"the receipt: {_first(error)}") from error
    groups = {"set names": [own.name for own in receipt.sets]}
    groups |= {f"ids in set {own.name!r}": [row.id for row in own.rows] for own in receipt.sets}
    for what, names in groups.items():
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"the receipt: expected different {what}, got {twice[0]!r} more than once")


def _alike(left: Any, right: Any) -> bool:
    """Equal, up to what another build of the statistics library may round."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    return bool(left == right)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.60}"


# The receipt as one self-contained page, rendered from a record and from nothing else.


_COSTS = {
    "seconds": "time of the adaptation",
    "extra_bytes": "extra memory of the gate",
    "training_flops": "training",
    "preservation_flops": "preservation",
    "training_rows": "rows trained on",
    "training_tokens": "tokens trained on",
    "training_padded": "the same with padding",
    "training_forward": "tokens in forward passes of training",
    "preservation_rows": "rows of evidence",
    "preservation_tokens": "tokens of evidence",
    "preservation_padded": "the same with padding",
    "preservation_forward": "tokens in forward passes of preservation",
}


def render(record: Any) -> str:
    """The page of a record as `Receipt.to_json` gives it; an altered record is refused."""
    receipt = from_json(record)
    found = record["figures"]
    ledger = [*(name for name in _COSTS if name in receipt.cost), *sorted(receipt.cost.keys() - _COSTS)]
    drawn = charts(receipt)
    every = [row for own in receipt.sets for row in own.rows]
    table = _rows(receipt)
    script = (TEMPLATES / "receipt.js").read_text(encoding="utf-8")
    pages = environment()
    pages.filters |= {"percent": percent, "p_value": p_value, "method": label, "signed": signed, "required": required}
    pages.globals["shown"] = shown
    return pages.get_template("receipt.html").render(
        receipt=receipt,
        sha256=record["sha256"],
        figures=found,
        lead=lead(found),
        sentences=sentences(found),
        charts=drawn,
        legend=list({line.label: line for chart in drawn for line in chart.lines}.values()),
        size=(WIDTH, HEIGHT),
        costs=[(_COSTS.get(name, name.replace("_", " ")), cost(name, receipt.cost[name])) for name in ledger],
        settings=flat(receipt.settings),
        environment=flat(receipt.environment),
        kinds=Counter(row[1] for row in table),
        differing=found["differing"],
        labels=sorted({row.label for row in every if row.label is not None}),
        losses=any(row.nll_after is not None for row in every),
        rows=table,
        script=Markup(script),  # our own file, the only script the policy admits
        policy=policy(script),
    )


def cost(name: str, value: float) -> str:
    """A figure of the ledger with its unit, which its name ends in.

    >>> cost("training_flops", 3_210_000_000_000), cost("seconds", 3725.0), cost("training_rows", 9600)
    ('3.21 TFLOP', '1 h 2 min', '9,600')
    """
    if name.endswith("flops"):
        return scaled(value, "FLOP")
    if name.endswith("bytes"):
        return scaled(value, "B")
    if name.endswith("seconds"):
        minutes, seconds = divmod(value, 60)
        if minutes < 60:
            return f"{minutes:.0f} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"
        return f"{minutes // 60:.0f} h {minutes % 60:.0f} min"
    return f"{value:,}"


def scaled(value: float, unit: str = "") -> str:
    """A number of three digits with the prefix of its thousands.

    >>> scaled(134_515_008), scaled(999)
    ('135 M', '999')
    """
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".strip()


def _rows(receipt: Receipt) -> list[list[Any]]:
    """The table of rows in the order that `receipt.js` reads."""
    return [
        [
            place,
            _outcome(own, row),
            row.id,
            row.input,
            row.gold,
            row.before,
            row.after,
            row.confidence_before,
            row.confidence_after,
            row.label,
            row.nll_before,
            row.nll_after,
            row.answer_nll_before,
            row.answer_nll_after,
        ]
        for place, own in enumerate(receipt.sets)
        for row in own.rows
    ]


def _outcome(own: RowSet, row: RowComparison) -> str:
    """A judged row's outcome, or the state of an answer that was to be kept."""
    if own.followed:
        return state(row)
    return row.kind if own.judged and row.kind else "unjudged"


# The receipt: fill a `Receipt`, write it as `receipt.json` and as the page `receipt.html`, read it again.
#
# The page shows the record and nothing else; a record that was altered has no page.


__all__ = [
    "PAGE",
    "RECORD",
    "BankAudit",
    "ComparedRun",
    "GateShare",
    "Losses",
    "ModelId",
    "Overlap",
    "Point",
    "Receipt",
    "Repair",
    "Requirement",
    "RowComparison",
    "RowSet",
    "SampleProbe",
    "TunedSet",
    "bank_audit",
    "read_receipt",
    "rows",
    "write_receipt",
]

RECORD, PAGE = "receipt.json", "receipt.html"
_SAMPLE = 6


def write_receipt(receipt: Receipt, folder: Path) -> dict[str, Any]:
    """Write the record and its page into a folder, each whole or not at all, and return the record."""
    record = to_json(receipt)
    page = render(record)  # before anything is written
    files.write_json(folder / RECORD, record)
    files.write_text(folder / PAGE, page)
    return record


def read_receipt(folder: Path) -> Receipt:
    """The receipt of a folder; an altered record, or a page that is not the record's, is refused."""
    raw = files.read_json(folder / RECORD)
    receipt = from_json(raw, where=str(folder / RECORD))
    if (folder / PAGE).read_text(encoding="utf-8") != render(raw):
        raise ValueError(
            f"{folder / PAGE}: expected the page of the {RECORD} beside it; it was edited, or another version "
            f"rendered it: write it again from the record"
        )
    return receipt


def bank_audit(audit: Mapping[str, Any]) -> BankAudit:
    """The part of an audit by `cplus.probes.audit.audit` that a receipt keeps."""
    return BankAudit(
        sha256=audit["bank"]["probes_sha256"],
        probes=audit["probes"],
        unique=audit["unique"],
        requests=audit["counts"]["requests"],
        rejected=dict(audit["counts"]["rejected"]),
        confidence=dict(audit["confidence"]),
        divergence=audit["labels"]["divergence"],
        overlaps=tuple(
            Overlap(name=name, rows=one["rows"], exact=one["exact"], near=one["near"])
            for name, one in audit["against"].items()
        ),
        sample=tuple(
            SampleProbe(input=probe["text"], answer=probe["answer"], confidence=probe["confidence"])
            for probe in audit["sample"][:_SAMPLE]
        ),
    )
