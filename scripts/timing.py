"""What the measuring scripts share: bare model calls, decodes without their prefill, outputs that loop."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decoding_jax as dj
from decoding_jax.loop import ALL_STEPS, run, start
from decoding_jax.masks import causal_mask
from decoding_jax.prepare import prepare


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of a call and of everything it started on the device."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def model_steps(spec: Any, params: Any, cache: Any, steps: jax.Array, width: int) -> Any:
    """Bare calls of the model on `width` positions, each fed by the one before: what no method can avoid."""
    batch, capacity = jax.tree.leaves(cache.slots)[0].shape[:2]

    def body(carry: Any) -> Any:
        index, token, cache = carry
        positions = jnp.broadcast_to(index + jnp.arange(width)[None], (batch, width))
        tokens = jnp.broadcast_to(token, (batch, width))
        inputs = dj.Inputs(tokens, positions, causal_mask(positions, capacity), slots=positions)
        out = spec.apply(params, inputs, cache)
        logits = spec.readout(params, out.hidden)
        best = jnp.argmax(logits, axis=-1).max(axis=1, keepdims=True)  # of all, or XLA leaves the others out
        return index + 1, best.astype(jnp.int32), out.cache

    init = (jnp.int32(0), jnp.zeros((batch, 1), jnp.int32), cache)
    return jax.lax.while_loop(lambda carry: carry[0] < steps, body, init)[2]


class Stepper:
    """Times bare model calls in caches of a given capacity."""

    def __init__(self, model: dj.Model, capacity: int, batch: int = 1):
        self.model, self.capacity, self.batch = model, capacity, batch

    def step_seconds(self, width: int, steps: int = 7, repeats: int = 3) -> float:
        """Seconds of a call on `width` positions of each row: the median of several runs; compiled beforehand."""
        spec, params = self.model.spec, self.model.params
        cache = model_steps(spec, params, self.model.init_cache(self.batch, self.capacity), jnp.int32(1), width)
        took = []
        for _ in range(repeats):
            began = time.perf_counter()
            cache = jax.block_until_ready(model_steps(spec, params, cache, jnp.int32(steps), width))
            took.append((time.perf_counter() - began) / steps)
        return statistics.median(took)


def decode_rounds(
    model: dj.Model,
    ids: Sequence[int],
    decoder: dj.Decoder,
    new_tokens: int,
    drafter: dj.Model | None = None,
) -> tuple[dj.DecodeOutput, float]:
    """A greedy decode of one prompt, and the seconds that it took without its prefill."""
    out, _, took = decode_phases(model, list(ids), decoder, new_tokens, drafter=drafter)
    return out, took


def decode_phases(
    model: dj.Model,
    prompts: Any,
    decoder: dj.Decoder,
    new_tokens: int,
    lengths: Sequence[int] | None = None,
    drafter: dj.Model | None = None,
) -> tuple[dj.DecodeOutput, float, float]:
    """A greedy decode, and the seconds before its first round (prefill or encoder) and those of its rounds."""
    call = prepare(
        model, prompts, new_tokens, dj.Sampling(), dj.Stop(), 0, None, None, drafter=drafter, lengths=lengths
    )
    began = time.perf_counter()
    state = jax.block_until_ready(start(decoder, call.ctx))
    ready = time.perf_counter()
    state = jax.block_until_ready(run(decoder, call.ctx, state, jnp.int32(ALL_STEPS)))
    took = time.perf_counter() - ready
    return decoder.finalize(call.ctx, state), ready - began, took


def call_widths(
    model: dj.Model, ids: Sequence[int], decoder: Any, new_tokens: int, drafter: dj.Model | None = None
) -> list[int]:
    """How many positions each of the model's calls in a greedy decode of one prompt has."""
    call = prepare(model, list(ids), new_tokens, dj.Sampling(), dj.Stop(), 0, None, None, drafter=drafter)
    state, found = start(decoder, call.ctx), []
    while not bool(state.done.all()):
        state = run(decoder, call.ctx, state, jnp.int32(1))
        used = int(np.flatnonzero(state.record.verifiable[0]).max(initial=-1)) + 1
        found.append(1 + next(width for width in decoder.widths if width >= used))
    return found


def buffer_size(model: dj.Model, ids: Sequence[int], new_tokens: int) -> int:
    """The cache slots that plain decoding of this prompt has."""
    return prepare(model, list(ids), new_tokens, dj.Sampling(), dj.Stop(), 0, None, None).ctx.prompts.shape[1]


def loops(tokens: Sequence[int], tail: int = 32, longest: int = 16) -> bool:
    """Whether an output ends in a loop: its last 32 tokens repeat with a period of at most 16."""
    end = list(tokens[-tail:])
    return len(end) == tail and any(end[p:] == end[:-p] for p in range(1, longest + 1))
