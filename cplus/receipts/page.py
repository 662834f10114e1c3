"""The receipt: a sealed record, and one self-contained page rendered from it."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic import TypeAdapter, ValidationError

from cplus.base import files
from cplus.evaluation.requirements import sentence as required
from cplus.receipts.contents import ModelId as ModelId
from cplus.receipts.contents import Point, Receipt
from cplus.receipts.contents import RowComparison as RowComparison
from cplus.receipts.contents import RowSet as RowSet
from cplus.receipts.figures import COLOURS, OTHER, figures, flat, label, shown, state
from cplus.receipts.verdict import chance, lead, p_value, percent, sentences, signed

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
_TRAINED, _HELD_OUT = "rows trained on", "rows held out"


def charts(receipt: Receipt) -> list[dict[str, Any]]:
    """One chart for each quantity that has at least two points; new rows held out have a line of their own.

    A chart is what a template draws: lines and ticks in coordinates of the drawing, and words. An axis that does not
    begin at 0 is marked as cut. Only the first line is solid, so colour is not the only sign.
    """
    drawn = []
    for title, x_label, series in _quantities(receipt.curve, label(receipt.method or "this run")):
        known = {name: points for name, points in series.items() if len(points) > 1}
        if known:
            drawn.append(_chart(title, x_label, known))
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


def _quantities(points: Sequence[Point], own: str) -> Iterator[tuple[str, str, Series]]:
    """Each chart's title, the name of its horizontal axis, and its lines by name."""

    def pairs(x: str, y: str) -> list[tuple[float, float]]:
        found = [(getattr(point, x), getattr(point, y)) for point in points]
        return [pair for pair in found if None not in pair]

    past = pairs("new_nll", "past_nll")
    rises = [(new, value - past[0][1]) for new, value in past] if points and points[0].epoch == 0 else []
    yield "Rise of the past loss against the new loss", "new loss, nats per token (learning goes left)", {own: rises}
    for title, trained, unseen in (
        ("New loss", "new_nll", "validation_nll"),
        ("Acquisition (%)", "acquisition", "validation"),
    ):
        if held := pairs("epoch", unseen):
            series = {_TRAINED: pairs("epoch", trained), _HELD_OUT: held}
            yield f"{title}: trained on and held out", "epoch", series
        elif trained == "acquisition":
            yield title, "epoch", {own: pairs("epoch", trained)}
    yield "Retention (%)", "epoch", {own: pairs("epoch", "retention")}
    yield "Divergence from the base model on new rows, nats per token", "epoch", {own: pairs("epoch", "divergence")}
    yield "Training loss", "epoch", {own: pairs("epoch", "loss")}


def _chart(title: str, x_label: str, series: Series) -> dict[str, Any]:
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

    lines = [
        {
            "label": name,
            "colour": OTHER if name == _HELD_OUT else COLOURS["cplus"],
            "dash": "6 3" if name == _HELD_OUT else None,
            "points": [place(x, y) for x, y in points],
        }
        for name, points in series.items()
    ]
    ends = "; ".join(f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in series.items())
    return {
        "title": title,
        "x_label": x_label,
        "x_cut": x_values[0] > 0,
        "y_cut": y_values[0] > 0,
        "summary": f"{title} by {x_label}: {ends}",
        "lines": lines,
        "x_ticks": [(place(x, y_values[0])[0], f"{x:g}") for x in x_values],
        "y_ticks": [(place(x_values[0], y)[1], f"{y:g}") for y in y_values],
    }


# The audit of a probe bank as one page that needs nothing else; all generated text in it is escaped.


def render_audit(audit: Mapping[str, Any], *, name: str) -> str:
    """The page of one audit, as `cplus.probes.audit.audit` gives it."""
    pages = environment()
    pages.filters["percent"] = lambda share: f"{100 * share:.2f} %"
    return pages.get_template("audit.html").render(audit=audit, name=name, policy=policy())


# A receipt as the sealed JSON record that its page is rendered from, and back.


SCHEMA = 4
_SHARED = ("created", "environment", "notes", "settings")
"""Parts of a receipt that are at the top of the record."""
PARTS = {"schema", "figures", "receipt", "sha256", "content", "page", *_SHARED}
"""What a record holds besides a job's own."""
_GONE = {"noise_floor", "comparisons", "answer_nll_before", "answer_nll_after", "label"}
"""What receipts and their rows held up to schema 3."""


def to_json(receipt: Receipt, job: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The sealed record: the receipt, the figures, which are computed here and nowhere else, and what a job adds."""
    _check(receipt)
    body = asdict(receipt)
    shared = {name: body.pop(name) for name in _SHARED}
    return files.sealed({"schema": SCHEMA, **shared, "figures": figures(receipt), "receipt": body, **job})


def from_json(raw: Any, *, where: str = "the receipt") -> Receipt:
    """The receipt of a record; one that was altered, or that an unknown version wrote, is refused."""
    files.check_seal(where, raw)
    schema = raw.get("schema")
    if schema in (3, SCHEMA):
        fields = {**raw["receipt"], **{name: raw[name] for name in _SHARED}}
    elif schema == 2:  # a file of its own beside a job's record, with everything at the top
        fields = {name: value for name, value in raw.items() if name not in ("schema", "figures", "sha256")}
    else:
        raise ValueError(
            f"{where}: expected a record of schema {SCHEMA}, got schema {schema!r:.20}: another version wrote it; make "
            "the receipt again with this version"
        )
    if schema != SCHEMA:
        sets = [{**own, "rows": [_without_gone(row) for row in own["rows"]]} for own in fields["sets"]]
        fields = {**_without_gone(fields), "sets": sets}
    try:
        return TypeAdapter(Receipt).validate_json(files.canonical_json(fields))
    except ValidationError as error:
        raise ValueError(f"{where}: {_first(error)}") from error


def _without_gone(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _GONE}


def current(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the figures of this version, computed from its rows if an earlier version wrote it."""
    return dict(record) if record["schema"] == SCHEMA else {**record, "figures": figures(from_json(record))}


def _check(receipt: Receipt) -> None:
    """Refuse values that could not be read again, and names and ids that occur twice."""
    try:
        TypeAdapter(Receipt).validate_python(receipt)
    except ValidationError as error:
        raise ValueError(f"the receipt: {_first(error)}") from error
    groups = {"set names": [own.name for own in receipt.sets]}
    groups |= {f"ids in set {own.name!r}": [row.id for row in own.rows] for own in receipt.sets}
    for what, names in groups.items():
        name, count = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
        if count > 1:
            raise ValueError(f"the receipt: expected different {what}, got {name!r} more than once")


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.60}"


# The receipt as one self-contained page, rendered from a record and from nothing else.


def render(record: Any) -> str:
    """The page of a record as `to_json` gives it; an altered record is refused."""
    receipt = from_json(record)
    found = current(record)["figures"]
    drawn = charts(receipt)
    every = [row for own in receipt.sets for row in own.rows]
    table = []
    for place, own in enumerate(receipt.sets):
        asked = own.kind not in ("acquisition", "validation")  # whose answers are evaluated without a judge
        for row in own.rows:
            outcome = row.kind if own.judged else state(row) if asked else None
            table.append([place, outcome or "unjudged", *(getattr(row, name) for name in _COLUMNS)])
    script = (TEMPLATES / "receipt.js").read_text(encoding="utf-8")
    pages = environment()
    pages.filters |= {"percent": percent, "p_value": p_value, "method": label, "signed": signed, "required": required}
    pages.filters |= {"chance": chance}
    pages.globals["shown"] = shown
    return pages.get_template("receipt.html").render(
        receipt=receipt,
        sha256=record.get("content", record["sha256"]),
        figures=found,
        lead=lead(found),
        sentences=sentences(found),
        charts=drawn,
        legend=list({line["label"]: line for chart in drawn for line in chart["lines"]}.values()),
        size=(WIDTH, HEIGHT),
        costs=[(name.replace("_", " "), cost(name, value)) for name, value in sorted(receipt.cost.items())],
        settings=flat(receipt.settings),
        environment=flat(receipt.environment),
        kinds=Counter(row[1] for row in table),
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


_COLUMNS = (
    "id", "input", "gold", "before", "after", "confidence_before", "confidence_after", "nll_before",
    "nll_after",
)  # fmt: skip
"""Of each row after its set and its outcome, in the order that `receipt.js` reads."""


# A folder's record, and the page rendered from it.


RECORD, PAGE = "record.json", "receipt.html"
_BEFORE = "receipt.json"
"""Where the receipt was before the record held it."""
_SAMPLE = 6


def write_receipt(receipt: Receipt, folder: Path) -> dict[str, Any]:
    """Write a receipt's record and page into a folder, and return the record."""
    return write_record(to_json(receipt), folder)


def write_record(record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write a record and its page, each whole or not at all; the record comes last and holds the page's hash."""
    page = render(record)  # before anything is written
    body = {name: value for name, value in record.items() if name != "sha256"}
    written = files.sealed({**body, "content": record["sha256"], "page": _page_hash(page)})
    files.write_text(folder / PAGE, page)
    (folder / _BEFORE).unlink(missing_ok=True)
    files.write_json(folder / RECORD, written)
    return written


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a folder; an edited record or page is refused, a page of another template is not."""
    old = folder / _BEFORE
    record = files.read_sealed(old if old.is_file() else folder / RECORD)
    if "page" in record and _page_hash((folder / PAGE).read_text(encoding="utf-8")) != record["page"]:
        raise ValueError(
            f"{folder / PAGE}: the page was edited, or is of another record; {RECORD} beside it holds the figures"
        )
    return record


def _page_hash(page: str) -> str:
    return hashlib.sha256(page.encode()).hexdigest()


def read_receipt(folder: Path) -> Receipt:
    """The receipt of a folder; an edited record or page is refused."""
    return from_json(read_record(folder), where=str(folder))


def bank_audit(audit: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an audit by `cplus.probes.audit.audit` that a receipt keeps."""
    sample, against = audit["sample"][:_SAMPLE], audit["against"].items()
    return {
        "sha256": audit["bank"]["probes_sha256"],
        "probes": audit["probes"],
        "unique": audit["unique"],
        "requests": audit["counts"]["requests"],
        "rejected": audit["counts"]["rejected"],
        "confidence": audit["confidence"],
        "divergence": audit["labels"]["divergence"],
        "overlaps": [{"name": name, **{key: own[key] for key in ("rows", "exact", "near")}} for name, own in against],
        "sample": [{"input": own["text"], "answer": own["answer"], "confidence": own["confidence"]} for own in sample],
    }
