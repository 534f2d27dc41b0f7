"""Ending at a signal: at once where nothing can be lost, between two steps of training."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from train.command import INTERRUPTED


class Stopped(BaseException):
    """A signal asked to stop. No Exception: nothing on the way out may take it for an error of its own.

    Attributes:
      number: of the signal.
    """

    def __init__(self, number: int):
        super().__init__(f"stopped by signal {number}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """That of the command: being told to stop is no failure, but a shell knows Ctrl-C by its code."""
        return INTERRUPTED if self.number == signal.SIGINT else 0


class StopSignals:
    """Within it the first SIGTERM, SIGINT or SIGHUP raises Stopped; a second one ends the process at once.

    SIGHUP, which a closed terminal sends, stays ignored where it was (nohup).

    Several processes that get no SIGTERM at the same step may only stop together: `due` says after which step. JAX has
    a handler of its own for that, which one of Python would replace.

    Args:
      processes: how many processes work together.
    """

    def __init__(self, processes: int = 1) -> None:
        self._alone = processes == 1
        self._held = not self._alone
        self._caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        numbers = [signal.SIGINT]
        if self._alone:
            numbers.append(signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._caught is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._caught = number
        if not self._alone:
            signal.raise_signal(signal.SIGTERM)
        elif not self._held:
            raise Stopped(number)

    def check(self) -> None:
        """Raises Stopped if a signal came while it was held, or got lost, as exceptions in destructors do."""
        if self._alone and self._caught is not None:
            raise Stopped(self._caught)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block that no signal cuts short; one that came and was not asked for by `due` raises Stopped at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = not self._alone
        self.check()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """A part of a held block where a signal raises Stopped after all."""
        self._held = not self._alone
        try:
            self.check()
            yield
        finally:
            self._held = True

    def due(self, step: int) -> bool:
        """Whether to stop after this step of training; all processes answer alike."""
        if self._alone:
            return self._caught is not None
        return bool(multihost_utils.reached_preemption_sync_point(step))

    def stopped(self) -> Stopped:
        """What to raise where `due` says so; by SIGTERM where another process got the signal."""
        return Stopped(signal.SIGTERM if self._caught is None else self._caught)
