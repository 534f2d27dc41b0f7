"""What a step did, read off the state behind it: the trace of `decode`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from decoding_jax.decoders.canvas import HIDDEN, PAD, WRITTEN
from decoding_jax.prepare import Call
from decoding_jax.types import Model, TraceStep


def trace_steps(model: Model, call: Call, state: Any) -> list[TraceStep]:
    """The step that `state` ends with, one entry per row that it moved."""
    rows = state.rows
    record, tokens, length, calls = jax.device_get((state.record, rows.tokens, rows.length, state.model_calls))
    steps = []
    for row in range(call.batch):
        if count := int(record.emitted[row]):
            emitted = tuple(tokens[row, length[row] - count : length[row]].tolist())
            proposed = tuple(record.proposed[row][record.verifiable[row]].tolist())
            text = None
            if model.tokenizer is not None:
                text = bytes_of(model, emitted).decode("utf-8", errors="replace")
            steps.append(TraceStep(int(calls[row]) - 1, row, proposed, int(record.accepted[row]), emitted, text))
    return steps


def trace_canvases(model: Model, call: Call, before: tuple[np.ndarray, ...], state: Any) -> list[TraceStep]:
    """The step that `state` ends with, one entry per row whose first candidate it moved.

    Args:
      model, call: of the decode.
      before: the steps i32[C], status u8[C, L] and tokens i32[C, L] that the step found.
      state: after it.
    """
    tokens, status, steps_done = jax.device_get((state.tokens, state.status, state.steps))
    candidates = len(tokens) // len(call.ctx.prompts)
    steps = []
    for row in range(call.batch):
        at = row * candidates
        if steps_done[at] == before[0][at]:
            continue
        shown = tuple(
            None if how == HIDDEN else int(token)
            for token, how in zip(tokens[at], status[at], strict=True)
            if how != PAD
        )
        new = (before[1][at] == HIDDEN) | (before[2][at] != tokens[at])
        written = tuple(tokens[at][new & (status[at] == WRITTEN)].tolist())
        text = None
        if model.tokenizer is not None:
            pieces = (b"_" if token is None else bytes_of(model, [token]) for token in shown)
            text = b"".join(pieces).decode("utf-8", errors="replace")
        steps.append(TraceStep(int(steps_done[at]) - 1, row, (), 0, written, text, shown))
    return steps


def bytes_of(model: Model, tokens: Iterable[int]) -> bytes:
    """What tokens add to the text; ids of a padded vocabulary that no token has add nothing."""
    table = model.tokenizer.token_bytes
    return b"".join(table[t] for t in tokens if t < len(table))
