"""A receipt's figures in words: one headline, and the sentences that say how sure it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cplus.plotting import label


def headline(found: Mapping[str, Any]) -> str:
    """What was kept and what was learned, in one sentence."""
    kept, learned = found["retention"], found["acquisition"]
    trained = any(own["kind"] == "acquisition" for own in found["sets"])
    past = any(own["kind"] == "retention" for own in found["sets"])
    parts = []
    if kept:
        parts.append(f"kept {percent(kept['percent'])} of {'what it knew' if past else 'the right answers'}")
    if learned and trained:
        parts.append(f"learned {percent(learned['percent'])} of what is new")
    elif learned:
        parts.append(f"corrected {percent(learned['percent'])} of the wrong ones")
    return " and ".join(parts).capitalize() + "." if parts else "No answer was judged: measured by loss alone."


def sentences(found: Mapping[str, Any]) -> list[str]:
    """How sure the headline is: counts, 95 % bounds, the exact test, losses."""
    said = []
    if kept := found["retention"]:
        said.append(f"{_counts(kept)} answers that were right before are still right{_bounds(kept)}.")
    if learned := found["acquisition"]:
        said.append(f"{_counts(learned)} answers that were wrong before are right now{_bounds(learned)}.")
    if found["unselected"]:
        said.append(_changed(found["unselected"]))
    said += [_loss(own) for own in found["sets"] if own["nll"]]
    if found["matched"]:
        said += _compared(found["matched"])
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
    error = "" if nll["error"] is None else f" ± {nll['error']:.2f}"
    return (
        f"Loss of the given responses of {own['name']}: {nll['before']:.2f} nats a token before, {nll['after']:.2f} "
        f"after ({nll['rise']:+.2f}{error} a response, {nll['rows']:,} responses)."
    )


def _compared(found: Mapping[str, Any]) -> list[str]:
    rises = ", ".join(f"{label(row['method'])} {row['rise']:+.2f}" for row in found["rows"])
    return [f"At the same loss on new rows ({found['new_nll']:.2f}), the past rows' loss changed by: {rises}."]
