"""A receipt's figures in words: a headline, and the sentences with counts, intervals and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cplus.receipts import figures
from cplus.receipts.figures import LARGE, label

_PLACES = 3
"""Decimals of a loss."""


def headline(found: Mapping[str, Any]) -> str:
    """The verdict in a few sentences: past behaviour first, then what was learned."""
    return " ".join(lead(found))


def lead(found: Mapping[str, Any]) -> list[str]:
    """The sentences of the headline: judged answers by their shares, free text without a judge by its losses."""
    said = [*_shares(found), *_past(found), *_new(found)]
    if "repair" in found:
        said += figures.sentences(found["repair"])
    return said or ["No answer was judged, and no loss was measured."]


def sentences(found: Mapping[str, Any]) -> list[str]:
    """What the headline leaves out: counts, 95 % intervals, the exact test, other losses, comparisons."""
    said = []
    if kept := found["retention"]:
        said.append(f"{_counts(kept)} answers that were right before are still right{_bounds(kept)}.")
    if learned := found["acquisition"]:
        said.append(f"{_counts(learned)} answers that were wrong before are right now{_bounds(learned)}.")
    if unseen := found["validation"]:
        said.append(f"{_counts(unseen)} held-out new answers that were wrong before are right now{_bounds(unseen)}.")
        said += [_held_out(own) for own in found["sets"] if own["kind"] == "validation" and own["after"]]
    if found["unselected"]:
        said.append(_changed(found["unselected"]))
    said += [_loss(own) for own in found["sets"] if own["nll"] and not _in_lead(own)]
    if found["matched"] and (len(found["matched"]["rows"]) > 2 or not (found["free"]["past"] and _plain(found))):
        said += _compared(found["matched"])
    said += [f"The runs compared have {sentence}." for sentence in found["unequal"]]
    return said


def _held_out(own: Mapping[str, Any]) -> str:
    """All held-out new rows, those right before included: what is learned of some may be lost on others."""
    before, after = percent(own["before"]["percent"]), percent(own["after"]["percent"])
    return f"Of all held-out new rows, {before} were answered right before and {after} are now."


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


def _shares(found: Mapping[str, Any]) -> list[str]:
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


def _past(found: Mapping[str, Any]) -> list[str]:
    """What became of past answers in free text: their loss against the noise floor and plain SFT, then their texts."""
    past = found["free"]["past"]
    if past is None:
        return []
    counts, total = past["answers"], past["rows"]
    if counts is None:  # plain texts have losses alone
        return [] if past["loss"] is None else [*_effect(past, found["noise_floor"]), *_plain(found)]
    others = f"{counts['same']:,} the same, {counts['changed']:,} changed"
    answers = f"{'Its' if past['whole_task'] else 'Past'} answers: {others}, of {total:,}."
    if past["on_anchors"]:
        answers = f"Answers on the anchors: {others}, of {total:,}."
    if past["loss"] is None:
        return [answers]
    return [*_effect(past, found["noise_floor"]), *_plain(found), answers]


def _effect(past: Mapping[str, Any], floor: float | None) -> list[str]:
    loss, effect = past["loss"], past["effect"]
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
    interval = "one row gives no interval"
    if loss["low"] is not None:
        interval = f"95\u00a0% interval {signed(loss['low'])} to {signed(loss['high'])}"
    return [
        f"{verdict}.",
        f"The loss of {what} {verb} from {_moved(loss)} nats per token "
        f"({signed(loss['rise'])}, {interval}; {_against(loss['rise'], floor)}).",
    ]


def _against(rise: float, floor: float | None) -> str:
    if floor is None:
        return "no noise floor was measured"
    if rise <= 0 or (rise > LARGE and rise <= floor):
        return f"noise floor {floor:.{_PLACES}f}"
    return f"{'beyond' if rise > floor else 'within'} the noise floor of {floor:.{_PLACES}f}"


def _plain(found: Mapping[str, Any]) -> list[str]:
    """What plain fine-tuning cost, where a comparison says so."""
    if not found["matched"] or found["matched"]["own"] in (None, "sft"):
        return []
    rises = {row["method"]: row["rise"] for row in found["matched"]["rows"]}
    if "sft" not in rises:
        return []
    unequal = " (their learning rates differ)" if any("rates" in said for said in found["unequal"]) else ""
    return [
        f"Where both reach a new loss of {found['matched']['new_nll']:.2f}, the past loss changed by "
        f"{signed(rises['sft'])} with plain fine-tuning and by {signed(rises[found['matched']['own']])} here{unequal}."
    ]


def _new(found: Mapping[str, Any]) -> list[str]:
    """What the loss of new rows did, on the rows trained on and on those held out apart."""
    trained, unseen = found["free"]["new"], found["free"]["validation"]
    parts = []
    if trained and trained["loss"] and not trained["whole_task"]:
        parts.append(f"{_moved(trained['loss'])} on the rows trained on")
    if unseen and unseen["loss"]:
        parts.append(f"{_moved(unseen['loss'])} on rows held out")
    return [f"New rows: loss {', '.join(parts)}."] if parts else []


def _moved(loss: Mapping[str, Any]) -> str:
    return f"{loss['before']:.{_PLACES}f} to {loss['after']:.{_PLACES}f}"


def _counts(rate: Mapping[str, Any]) -> str:
    return f"{rate['right']:,} of {rate['total']:,}"


def _bounds(rate: Mapping[str, Any]) -> str:
    return f" (95\u00a0% interval {rate['low']:.1f} to {rate['high']:.1f}\u00a0%)"


def _changed(pooled: Mapping[str, Any]) -> str:
    chance = "more than chance explains" if pooled["mcnemar_p"] < 0.05 else "no more than chance explains"
    return (
        f"Among {pooled['rows']:,} rows not chosen by earlier answers, {pooled['lost']:,} lost and "
        f"{pooled['gained']:,} gained: {chance} (exact McNemar p {p_value(pooled['mcnemar_p'])})."
    )


def _loss(own: Mapping[str, Any]) -> str:
    nll = own["nll"]
    interval = ""
    if nll["low"] is not None:
        interval = f", 95\u00a0% interval {signed(nll['low'])} to {signed(nll['high'])}"
    responses = f"{nll['rows']:,} response{'s' if nll['rows'] > 1 else ''}"
    return (
        f"Loss of the given responses of {own['name']}: {nll['before']:.{_PLACES}f} nats per token before, "
        f"{nll['after']:.{_PLACES}f} after ({signed(nll['rise'])}{interval}; {responses}, mean over {nll['tokens']:,} "
        "tokens)."
    )


def _in_lead(own: Mapping[str, Any]) -> bool:
    """Whether the headline gives the loss of a set: free text without a judge, but for external rows."""
    return own["before"] is None and own["interface"] == "freeform" and own["kind"] != "external"


def _compared(found: Mapping[str, Any]) -> list[str]:
    rises = ", ".join(f"{label(row['method'])} {signed(row['rise'])}" for row in found["rows"])
    return [f"At the same loss on new rows ({found['new_nll']:.2f}), the past rows' loss changed by: {rises}."]
