"""Ending at a signal, but only between two steps."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Interrupted(Exception):
    """A signal asked to stop; the state is saved.

    Attributes:
      number: of the signal.
      step: the steps that are done and saved.
    """

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by signal {number} after step {step}")
        self.number, self.step = number, step


class Signals:
    """Within it the first SIGTERM or SIGINT waits until the step is done; a second one ends the process at once.

    Of several processes that get no SIGTERM at the same step, JAX finds the step after which all stop. It has its own
    handler for that, which one of Python would replace.
    """

    def __init__(self) -> None:
        self._caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else (signal.SIGINT,):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._caught = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)

    @property
    def received(self) -> int:
        """The signal that this process got; SIGTERM where another one did."""
        return signal.SIGTERM if self._caught is None else self._caught

    def stop_after(self, step: int) -> bool:
        """Whether to stop now; all processes answer alike."""
        if jax.process_count() == 1:
            return self._caught is not None
        return bool(multihost_utils.reached_preemption_sync_point(step))
