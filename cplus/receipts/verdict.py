"""A receipt's figures in words: a headline, and the sentences with counts, intervals and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cplus.evaluation.abilities import STOPPING, Line, least
from cplus.evaluation.requirements import sentence
from cplus.evaluation.statistics import RateRow
from cplus.receipts.figures import Figures, shown

_PLACES = 3
"""Decimals of a loss."""
_NAMED = 8
"""Lost rows that a sentence names."""


def headline(found: Figures) -> str:
    """The verdict in a few sentences: past behaviour first, then what was learned."""
    return " ".join(lead(found))


def lead(found: Figures) -> list[str]:
    """The sentences of the headline: that nothing was learned, what was kept, then what was learned."""
    learned, repair = found["learned"], found.get("repair")
    said = [*_shares(found), *_new(found)]
    if repair is not None:
        first = ["The repair helped." if repair["helped"] else ""] if repair["helped"] is not None else []
        said = [*filter(None, first), *_kept(found, damaged="Still damaged"), *said, *repair_sentences(repair)]
    elif learned and learned["nothing"]:
        said = ["Nothing was learned.", *said, *_kept(found)]
    else:
        said = [*_kept(found), *said]
    if learned and learned["memorising"] is not None:
        said.append(
            f"Memorising from epoch {learned['memorising']} on: the held-out loss rose while the trained one fell."
        )
    return said or ["No answer was judged."]


def _kept(found: Figures, *, damaged: str = "Damaged") -> list[str]:
    """The verdict over all lines, with the lines that decide it."""
    lines = found["lines"]
    by = {verdict: [one for one in lines if one["verdict"] == verdict] for verdict in ("damaged", "unclear", "kept")}
    if not lines:
        return []
    if found["verdict"] == "damaged":
        return [f"{damaged}: {'; '.join(_lost(one) for one in by['damaged'])}."]
    few = [one["name"] for one in lines if one["verdict"] == "not judged"]
    unseen = f"the base model shows too little of {_listed(few)} to judge" if few else ""
    if found["verdict"] == "kept":
        said = [f"Kept: {_listed([_still(one) for one in lines if one['verdict'] == 'kept'])}."]
        return [*said, f"T{unseen[1:]}."] if unseen else said
    if found["verdict"] == "unclear":
        why = [f"{_lost(one, named=False)}, {one['gained']} gained, which may be chance" for one in by["unclear"]]
        why += [unseen] if unseen else []
        return [f"Unclear whether all was kept: {'; '.join(why)}."]
    right = ", ".join(
        f"{one['kept']['total'] if one['kept'] else 0} of {one['rows']} {_what(one)} "
        f"({least(one['name'], one['rows'])} needed)"
        for one in lines
    )
    return [f"Not judged whether abilities were kept: the base model gets {right}."]


def _what(line: Line) -> str:
    return "answers to end" if line["name"] == STOPPING else f"{line['name']} requests right"


def _still(line: Line) -> str:
    kept = line["kept"]
    assert kept is not None
    if line["name"] == STOPPING:
        return f"{_counts(kept)} answers that ended still end"
    return f"{_counts(kept)} {line['name']} answers still right"


def _lost(line: Line, *, named: bool = True) -> str:
    assert line["kept"] is not None
    count = f"{line['lost']} of {line['kept']['total']}"
    if line["name"] == STOPPING:
        return f"{count} answers no longer end"
    few, more = ", ".join(line["missed"][:_NAMED]), len(line["missed"]) - _NAMED
    which = f" ({few}{f' and {more} more' if more > 0 else ''})" if named else ""
    return f"{count} {line['name']} answers lost{which}"


def _listed(parts: Sequence[str]) -> str:
    """Parts in a row, as a sentence lists them.

    >>> _listed(["a", "b", "c"]), _listed(["a"])
    ('a, b and c', 'a')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def chance(line: Line) -> str:
    """What one line could have seen, in a sentence."""
    if line["verdict"] == "not judged":
        return f"the base model must get {least(line['name'], line['rows'])} right"
    return (
        f"{line['needed']} lost rows or more can be called damage; a loss of up to {line['high']:.0f} points is not "
        "excluded"
    )


def repair_sentences(repair: Mapping[str, Any]) -> list[str]:
    """What the repair changed, from the tuned model to the repaired one."""
    moved = ", ".join(
        f"{row['quantity']} on {row['name']} {shown(row, row['tuned'])} to {shown(row, row['repaired'])}"
        for row in repair["rows"]
        if row["kind"] != "external"
    )
    said = [
        f"The repair reset {repair['percent']:.1f}\u00a0% of the weights that training had changed"
        + (f"; from tuned to repaired: {moved}." if moved else ".")
    ]
    return said if repair["helped"] is not False else [*said, "It did not improve the past rows measured here."]


def sentences(found: Figures) -> list[str]:
    """What the headline leaves out: counts, 95 % intervals, the exact test, losses, divergence, plain fine-tuning."""
    shares = (
        (found["retention"], "answers that were right before are still right"),
        (found["acquisition"], "answers that were wrong before are right now"),
        (found["validation"], "held-out new answers that were wrong before are right now"),
    )
    said = [
        f"{_counts(rate)} {what} (95\u00a0% interval {rate['low']:.1f} to {rate['high']:.1f}\u00a0%)."
        for rate, what in shares
        if rate
    ]
    if found["validation"]:
        # Those right before are included: what is learned of some may be lost on others.
        said += [
            f"Of all held-out new rows, {percent(own['before']['percent'])} were answered right before and "
            f"{percent(own['after']['percent'])} are now."
            for own in found["sets"]
            if own["kind"] == "validation" and own["before"] and own["after"]
        ]
    said += [_loss(own["name"], own["nll"]) for own in found["sets"] if own["nll"] and own["kind"] != "ability"]
    if moved := found["divergence"]:
        said.append(
            f"The model has moved {moved['after']:.{_PLACES}f} nats per token (KL) from its base at {moved['rows']:,} "
            f"held-out past rows; its weights in bfloat16 give {moved['bfloat16']:.1g}, in Q8_0 {moved['q8_0']:.1g}."
        )
    return [*said, *_beside(found)]


def _beside(found: Figures) -> list[str]:
    """What plain fine-tuning learned and kept on the same rows."""
    if (other := found["beside"]) is None:
        return []
    parts = [_given(other["given"])] if other["given"] and other["given"]["how"] != "loss" else []
    if other["acquisition"]:
        parts.append(f"{_counts(other['acquisition'])} new answers learned")
    parts += [_still(one) for one in other["lines"] if one["kept"]]
    if other["divergence"] is not None:
        parts.append(f"KL {other['divergence']:.{_PLACES}f} from the base")
    reached = "at the same loss of new rows" if other["reached"] else "it did not reach the same loss of new rows"
    return [f"Plain fine-tuning ({other['updates']:,} updates, {reached}): {'; '.join(parts) or 'nothing was judged'}."]


def percent(value: float) -> str:
    """A percentage to one decimal; only all is 100 and only none is 0.

    >>> [percent(value).replace("\\u00a0", " ") for value in (100.0, 99.97, 45.04, 0.01, 0.0)]
    ['100 %', '99.9 %', '45.0 %', '0.1 %', '0 %']
    """
    if value in (0.0, 100.0):
        return f"{value:.0f}\u00a0%"
    return f"{min(max(value, 0.1), 99.9):.1f}\u00a0%"


def p_value(value: float) -> str:
    """A p-value as it is written after `p`.

    >>> p_value(0.0312), p_value(1e-9)
    ('= 0.031', '< 0.0001')
    """
    return "< 0.0001" if value < 1e-4 else f"= {value:.2g}"


def signed(value: float) -> str:
    """A difference of losses with its sign; one that rounds to 0 has none.

    >>> signed(-0.00712), signed(0.25), signed(-0.0001)
    ('−0.007', '+0.250', '0.000')
    """
    text = f"{value:+.{_PLACES}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def _shares(found: Figures) -> list[str]:
    """What was kept and learned, of judged answers."""
    kept, learned, unseen = found["retention"], found["acquisition"], found["validation"]
    kinds = {own["kind"] for own in found["sets"] if own["before"]}
    parts = []
    if kept:
        whose = "what it knew" if "retention" in kinds else "the right answers"
        if found["on_anchors"]:
            whose = "its right answers on the anchors it was protected by"
        parts.append(f"kept {percent(kept['percent'])} of {whose}")
    if learned and "acquisition" in kinds:
        parts.append(f"learned {percent(learned['percent'])} of the new rows it had wrong")
    elif learned:
        parts.append(f"corrected {percent(learned['percent'])} of the wrong ones")
    if unseen:
        parts.append(f"learned {percent(unseen['percent'])} of the new rows held out")
    text = _listed(parts) if parts else ""
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def _new(found: Figures) -> list[str]:
    """How many new rows are answered as given, and what their loss did: trained on, and held out apart."""
    trained, unseen = found["free"]["new"], found["free"]["validation"]
    given = found["learned"]["given"] if found["learned"] else None
    parts = []
    if given:
        parts.append(_given(given))
    if trained and trained["loss"] and not trained["whole_task"]:
        parts.append(f"loss {_moved(trained['loss'])} on the rows trained on")
    if unseen and unseen["loss"]:
        parts.append(f"{'' if len(parts) > 1 else 'loss '}{_moved(unseen['loss'])} on rows held out")
    return [f"New rows: {', '.join(parts)}."] if parts else []


def _given(given: Mapping[str, Any]) -> str:
    """Answers as given, and how they were compared."""
    if given["how"] == "loss":
        return "long answers, compared by their loss"
    how = "" if given["how"] == "text" else f" (compared as {given['how']}{'s' * (given['how'] == 'number')})"
    return f"{given['right']:,} of {given['rows']:,} answers as given{how}"


def _moved(loss: Mapping[str, Any]) -> str:
    return f"{loss['before']:.{_PLACES}f} to {loss['after']:.{_PLACES}f}"


def _counts(rate: RateRow) -> str:
    return f"{rate['right']:,} of {rate['total']:,}"


def _loss(name: str, nll: Mapping[str, Any]) -> str:
    low, high = nll["low"], nll["high"]
    interval = "" if low is None else f", 95\u00a0% interval {signed(low)} to {signed(high)}"
    responses = f"{nll['rows']:,} response{'s' if nll['rows'] > 1 else ''}"
    return (
        f"Loss of the given responses of {name}: {nll['before']:.{_PLACES}f} nats per token before, "
        f"{nll['after']:.{_PLACES}f} after ({signed(nll['rise'])}{interval}; {responses}, mean over {nll['tokens']:,} "
        "tokens)."
    )


def of_figures(headline: str, found: Figures, links: Mapping[str, str]) -> str:
    """A small table for a notebook: the headline, each set of rows before and after, requirements, and files."""
    rows = []
    for own in found["sets"]:
        name = f"{own['name']} ({own['rows']:,})"
        if own["before"] and own["after"]:
            values = [f"{rate['percent']:.1f} %" for rate in (own["before"], own["after"])]
            rows.append((name, "right", *values))
        if own["nll"]:
            rows.append((name, "loss per token", f"{own['nll']['before']:.3f}", f"{own['nll']['after']:.3f}"))
    cells = ("".join(f"<td>{escape(text)}</td>" for text in row) for row in rows)
    table = "".join(f"<tr>{row}</tr>" for row in ("<th>rows</th><th></th><th>before</th><th>after</th>", *cells))
    said = "".join(f"<br>{escape(sentence(one))}" for one in found["requirements"])
    files = " · ".join(f"{escape(name)}: <code>{escape(path)}</code>" for name, path in links.items())
    return f"<div><b>{escape(headline)}</b>{said}<table>{table}</table><small>{files}</small></div>"
