"""A receipt's figures in words: a headline, and the sentences with counts, intervals and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from cplus.evaluation.requirements import sentence
from cplus.evaluation.statistics import RateRow
from cplus.receipts.figures import LARGE, Figures, FreeText, Losses, label, shown

_PLACES = 3
"""Decimals of a loss."""


def headline(found: Figures) -> str:
    """The verdict in a few sentences: past behaviour first, then what was learned."""
    return " ".join(lead(found))


def lead(found: Figures) -> list[str]:
    """The sentences of the headline: judged answers by their shares, free text without a judge by its losses."""
    said = [*_shares(found), *_past(found), *_new(found)]
    if "repair" in found:
        said += repair_sentences(found["repair"])
    return said or ["No answer was judged, and no loss was measured."]


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
    """What the headline leaves out: counts, 95 % intervals, the exact test, other losses, comparisons."""
    said = []
    if kept := found["retention"]:
        said.append(f"{_counts(kept)} answers that were right before are still right{_bounds(kept)}.")
    if learned := found["acquisition"]:
        said.append(f"{_counts(learned)} answers that were wrong before are right now{_bounds(learned)}.")
    if unseen := found["validation"]:
        said.append(f"{_counts(unseen)} held-out new answers that were wrong before are right now{_bounds(unseen)}.")
        # Those right before are included: what is learned of some may be lost on others.
        said += [
            f"Of all held-out new rows, {percent(own['before']['percent'])} were answered right before and "
            f"{percent(own['after']['percent'])} are now."
            for own in found["sets"]
            if own["kind"] == "validation" and own["before"] and own["after"]
        ]
    if pooled := found["unselected"]:
        chance = "more than chance explains" if pooled["mcnemar_p"] < 0.05 else "no more than chance explains"
        said.append(
            f"Among {pooled['rows']:,} rows not chosen by earlier answers, {pooled['lost']:,} lost and "
            f"{pooled['gained']:,} gained: {chance} (exact McNemar p {p_value(pooled['mcnemar_p'])})."
        )
    for own in found["sets"]:
        # The headline gives the loss of free text without a judge, but for external rows.
        in_lead = own["before"] is None and own["interface"] == "freeform" and own["kind"] != "external"
        if own["nll"] and not in_lead:
            said.append(_loss(own["name"], own["nll"]))
    matched = found["matched"]
    if matched and (len(matched["rows"]) > 2 or not (found["free"]["past"] and _plain(found))):
        rises = ", ".join(f"{label(row['method'])} {signed(row['rise'])}" for row in matched["rows"])
        said.append(
            f"At the same loss on new rows ({matched['new_nll']:.2f}), the past rows' loss changed by: {rises}."
        )
    said += [f"The runs compared have {reason}." for reason in found["unequal"]]
    return said


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
    if not parts:
        return []
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return [f"{text[0].upper()}{text[1:]}."]


def _past(found: Figures) -> list[str]:
    """What became of past answers in free text: their loss against the noise floor and plain SFT, then their texts."""
    past = found["free"]["past"]
    if past is None:
        return []
    said = [] if past["loss"] is None else [*_effect(past, past["loss"], found["noise_floor"]), *_plain(found)]
    if (counts := past["answers"]) is not None:  # plain texts have losses alone
        whose = "Its answers" if past["whole_task"] else "Past answers"
        whose = "Answers on the anchors" if past["on_anchors"] else whose
        said.append(f"{whose}: {counts['same']:,} the same, {counts['changed']:,} changed, of {past['rows']:,}.")
    return said


def _effect(past: FreeText, loss: Losses, floor: float | None) -> list[str]:
    effect = past["effect"]
    what, where = "past answers", ""
    if past["on_anchors"]:
        what, where = "their answers", " on the anchors it was protected by"
    elif past["whole_task"]:
        what, where = "the given responses", " on these rows"
    verdict = {
        "damaged": f"{'The model got worse' if past['whole_task'] else 'Past behaviour was damaged'}{where}",
        "slight": f"Behaviour drifted slightly{where}",
        "unclear": f"No clear change was found{where}",
        "kept": f"No damage was found{where}",
    }[effect]
    if past["answers"] is not None and past["answers"]["changed"] > past["rows"] / 2 and effect != "damaged":
        rise = "a rise of the loss within noise" if effect == "slight" else "no clear rise of the loss"
        verdict = f"Most answers changed{where}, with {rise}"
    verb = "went" if signed(loss["rise"]) == signed(0.0) else "rose" if loss["rise"] > 0 else "fell"
    interval = _interval(loss) or "one row gives no interval"
    return [
        f"{verdict}.",
        f"The loss of {what} {verb} from {_moved(loss)} nats per token "
        f"({signed(loss['rise'])}, {interval}; {_against(loss['rise'], floor)}).",
    ]


def _interval(loss: Losses) -> str:
    if loss["low"] is None or loss["high"] is None:
        return ""
    return f"95\u00a0% interval {signed(loss['low'])} to {signed(loss['high'])}"


def _against(rise: float, floor: float | None) -> str:
    if floor is None:
        return "no noise floor was measured"
    if rise <= 0 or (rise > LARGE and rise <= floor):
        return f"noise floor {floor:.{_PLACES}f}"
    return f"{'beyond' if rise > floor else 'within'} the noise floor of {floor:.{_PLACES}f}"


def _plain(found: Figures) -> list[str]:
    """What plain fine-tuning cost, where a comparison says so."""
    if not found["matched"] or found["matched"]["own"] in (None, "sft"):
        return []
    rises = {row["method"]: row["rise"] for row in found["matched"]["rows"]}
    if "sft" not in rises:
        return []
    unequal = " (their learning rates differ)" if any("rates" in reason for reason in found["unequal"]) else ""
    return [
        f"Where both reach a new loss of {found['matched']['new_nll']:.2f}, the past loss changed by "
        f"{signed(rises['sft'])} with plain fine-tuning and by {signed(rises[found['matched']['own']])} here{unequal}."
    ]


def _new(found: Figures) -> list[str]:
    """What the loss of new rows did, on the rows trained on and on those held out apart."""
    trained, unseen = found["free"]["new"], found["free"]["validation"]
    parts = []
    if trained and trained["loss"] and not trained["whole_task"]:
        parts.append(f"{_moved(trained['loss'])} on the rows trained on")
    if unseen and unseen["loss"]:
        parts.append(f"{_moved(unseen['loss'])} on rows held out")
    return [f"New rows: loss {', '.join(parts)}."] if parts else []


def _moved(loss: Losses) -> str:
    return f"{loss['before']:.{_PLACES}f} to {loss['after']:.{_PLACES}f}"


def _counts(rate: RateRow) -> str:
    return f"{rate['right']:,} of {rate['total']:,}"


def _bounds(rate: RateRow) -> str:
    return f" (95\u00a0% interval {rate['low']:.1f} to {rate['high']:.1f}\u00a0%)"


def _loss(name: str, nll: Losses) -> str:
    interval = f", {_interval(nll)}" if _interval(nll) else ""
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
