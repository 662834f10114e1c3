"""Ctrl-C and SIGTERM: the job stops at once where nothing is lost, else after the current update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cplus import world
from cplus.terminal import console


class Interrupted(KeyboardInterrupt):
    """The job was stopped by a signal; its state is saved. `agreed`: all its processes stop at the same point."""

    def __init__(self, number: int, sentence: str = "stopped", *, agreed: bool = False) -> None:
        super().__init__(sentence)
        self.number, self.agreed = number, agreed

    @property
    def exit_code(self) -> int:
        """What a shell expects: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number


class Interruption:
    """Signals received while the job runs."""

    def __init__(self) -> None:
        self._patient = False
        self._received: int | None = None

    @contextmanager
    def watching(self) -> Iterator[Interruption]:
        """Handle the signals; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[int, Callable[..., Any] | int | None] = {
            number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        except BaseException:
            if world.size() > 1:  # a launcher stops the others as soon as one fails; let this one report in peace
                before = dict.fromkeys(before, signal.SIG_IGN)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, the first signal only sets `received`; the second stops at once."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    @property
    def received(self) -> int | None:
        """The signal received, if any."""
        return self._received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._patient and self._received is None:
            self._received = number
            console.print("stopping after this update; press again to stop at once")
            return
        raise Interrupted(number)
