"""Progress where there is no terminal: a line every 30 seconds, nothing about what is short."""

from __future__ import annotations

import re

import pytest

from cplus.base import terminal


class Clock:
    """A time that only the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    seen = capsys.readouterr()
    assert seen.out == ""  # standard output is for results
    return seen.err.splitlines()


@pytest.mark.parametrize(
    ("total", "steps", "said"),
    [
        (29, 29, []),
        (
            1000,
            100,
            [
                "rows: 30 of 1,000 after 0:00:30, about 0:16:10 left",
                "rows: 60 of 1,000 after 0:01:00, about 0:15:40 left",
                "rows: 90 of 1,000 after 0:01:30, about 0:15:10 left",
            ],
        ),
    ],
)
def test_a_short_bar_prints_nothing_and_a_long_one_a_line_every_thirty_seconds(
    total: int, steps: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with terminal.progress(clock) as bars:
        bar = bars.add_task("rows", total=total)
        for _ in range(steps):
            clock.now += 1
            bars.advance(bar)
    assert lines(capsys) == said


def test_the_line_holds_the_bars_last_words_without_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with terminal.progress(clock) as bars:
        bar = bars.add_task("begins", total=None)
        clock.now += 31
        bars.update(bar, completed=5, description="epoch 1/3: [bold]loss\x1b[31m 0.5")
    assert lines(capsys) == ["epoch 1/3: [bold]loss 0.5: 5 after 0:00:31"]


def test_tracking_counts_every_item(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_SECONDS", 0)
    assert list(terminal.track("abc", "letters")) == ["a", "b", "c"]
    assert [re.sub(r" after .*", "", line) for line in lines(capsys)] == ["letters: 1 of 3", "letters: 2 of 3"]
