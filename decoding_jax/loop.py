"""The driver: one compiled loop runs every decoder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from decoding_jax.rows import Context
from decoding_jax.types import Array, DecodeOutput, PyTree

ALL_STEPS = 2**31 - 1


class Decoder(Protocol):
    """A way of generating. Structural numbers are static fields, numeric knobs are leaves.

    Every leaf of a state has the rows (or their candidates) as its first axis: that is what a mesh splits.
    """

    def init(self, ctx: Context) -> Any:
        """Prefill, or an empty canvas: the first state, a pytree with `done` bool[B]."""

    def step(self, ctx: Context, state: Any) -> Any:
        """One propose, score and commit round, the same shapes in and out."""

    def finalize(self, ctx: Context, state: Any) -> DecodeOutput:
        """The result, on the host."""


@jax.jit
def start(decoder: Decoder, ctx: Context) -> PyTree:
    """The first state: prefill."""
    return ctx.settle(decoder.init(ctx))


@functools.partial(jax.jit, donate_argnames="state")
def run(decoder: Decoder, ctx: Context, state: PyTree, n_steps: Array) -> PyTree:
    """Up to `n_steps` more steps: all = decode, 1 = streaming and tracing, a few dozen = the batch job.

    `n_steps` is traced, so these are one program and give the same tokens. The state's buffers are
    donated and updated in place; the old state must not be used again.
    """

    def going(carry: tuple[Array, PyTree]) -> Array:
        return (carry[0] < n_steps) & ~carry[1].done.all()

    def body(carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        return carry[0] + 1, decoder.step(ctx, carry[1])

    return ctx.settle(jax.lax.while_loop(going, body, (jnp.int32(0), state))[1])


@dataclasses.dataclass(eq=False)
class CompileClock:
    """Seconds spent tracing and compiling `start`, `run` and scoring, and how many of them were compiled."""

    seconds: float = 0.0
    programs: int = 0


_clocks: list[CompileClock] = []


def _on_compile_event(event: str, duration_secs: float, **metadata: str | int) -> None:
    # Inner functions report their own tracing too, which the outer one's includes: only ours count.
    fun_name = str(metadata.get("fun_name", ""))
    if _clocks and event.startswith("/jax/core/compile/") and fun_name.removeprefix("jit(").rstrip(")") in _TIMED:
        for clock in _clocks:
            clock.seconds += duration_secs
            clock.programs += event.endswith("backend_compile_duration")


_TIMED = {"start", "run", "score_tokens", "_endings", "_joined"}
jax.monitoring.register_event_duration_secs_listener(_on_compile_event)


@contextlib.contextmanager
def compile_clock() -> Iterator[CompileClock]:
    """Counts how often and how long the library's own programs are compiled inside the block."""
    clock = CompileClock()
    _clocks.append(clock)
    try:
        yield clock
    finally:
        _clocks.remove(clock)


def enable_compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a folder, so that the next process starts at once.

    Treat the folder as code: whoever can write to it can run programs here.
    """
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
