"""When a row ends: end-of-sequence ids, stop ids, stop strings, budgets.

Stop strings are found in the loop, across token borders, by a byte automaton (Aho & Corasick 1975)
built on the host; its state travels with the row. The automaton reads new text only.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoding_jax.sampling import id_mask
from decoding_jax.types import EOS, STOP, Array

NOT_ENDED = -1


@dataclasses.dataclass(frozen=True)
class Stop:
    """What ends a row besides the model's end-of-sequence ids.

    Attributes:
      token_ids: ids that end a row with reason "stop".
      strings: texts that end a row with reason "stop" as soon as a token completes one; `text` ends before it.
    """

    token_ids: Sequence[int] = ()
    strings: Sequence[str] = ()


class Automaton:
    """Finds any of several byte strings in a stream; `stop_arrays` lays its tables out for the device.

    Attributes:
      next: i32[M, 256], the state after a byte; state 0 is the start.
      match: i32[M], the length of the longest pattern that ends in a state, 0 if none does.
      depth: i32[M], how many of the last bytes may still become a match.
    """

    def __init__(self, patterns: Sequence[bytes]):
        table: list[dict[int, int]] = [{}]
        match, depth = [0], [0]
        for pattern in patterns:
            state = 0
            for byte in pattern:
                if byte not in table[state]:
                    table[state][byte] = len(table)
                    table.append({})
                    match.append(0)
                    depth.append(depth[state] + 1)
                state = table[state][byte]
            match[state] = len(pattern)
        self.next = np.zeros((len(table), 256), np.int32)
        self.match, self.depth = np.array(match, np.int32), np.array(depth, np.int32)
        for byte, child in table[0].items():
            self.next[0, byte] = child
        queue = collections.deque((child, 0) for child in table[0].values())
        while queue:  # breadth first: a state's fallback is complete before the state is
            state, fallback = queue.popleft()
            self.match[state] = self.match[state] or self.match[fallback]
            self.next[state] = self.next[fallback]
            for byte, child in table[state].items():
                queue.append((child, int(self.next[fallback, byte])))
                self.next[state, byte] = child

    def feed(self, state: int, data: bytes) -> tuple[int, int | None]:
        """Reads more bytes: the new state, and where in them the first match ends (None: nowhere)."""
        for at, byte in enumerate(data, start=1):
            state = int(self.next[state, byte])
            if self.match[state]:
                return state, at
        return state, None

    def cut(self, text: bytes) -> bytes:
        """The text before the first completed match."""
        state, end = self.feed(0, text)
        return text if end is None else text[: end - int(self.match[state])]


@struct.dataclass
class StringTables:
    """An automaton and the bytes of every token, on the device.

    Attributes:
      next: i32[M, 256].
      accept: bool[M].
      token_bytes: u8[V, longest token], zero after each length.
      token_lengths: i32[V].
    """

    next: Array
    accept: Array
    token_bytes: Array
    token_lengths: Array


@struct.dataclass
class StopArrays:
    """A checked Stop on the device: bool[V] masks of ids, and string tables where there are strings."""

    eos: Array
    stop: Array
    strings: StringTables | None

    @property
    def ends(self) -> Array:
        """bool[V], ids that end a row."""
        return self.eos | self.stop


def stop_automaton(stop: Stop) -> Automaton | None:
    """The automaton of the stop strings, None where there are none.

    Raises:
      ValueError: a stop string is empty or not a string.
    """
    strings = [stop.strings] if isinstance(stop.strings, str) else list(stop.strings)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop.strings: {text!r} is not a text of at least one character")
    return Automaton([text.encode() for text in strings]) if strings else None


def stop_arrays(
    stop: Stop,
    automaton: Automaton | None,
    eos_ids: Sequence[int],
    vocab_size: int,
    token_bytes: Sequence[bytes] | None,
) -> StopArrays:
    """Checks a Stop and lays it out; the automaton's tables are padded, so that other strings of like size fit.

    Args:
      stop: the rules.
      automaton: from `stop_automaton(stop)`.
      eos_ids: the model's end-of-sequence ids.
      vocab_size: V.
      token_bytes: the bytes each token adds to the text; needed for stop strings.

    Raises:
      ValueError: an id does not exist, or there are stop strings and no tokenizer.
    """
    tables = None
    if automaton is not None:
        if token_bytes is None:
            raise ValueError(f"stop.strings={list(stop.strings)}: the model has no tokenizer; use stop.token_ids")
        token_bytes = token_bytes[:vocab_size]
        states = 32
        while states < len(automaton.match):
            states *= 2
        pad = states - len(automaton.match)
        lengths = np.zeros((vocab_size,), np.int32)
        lengths[: len(token_bytes)] = [len(b) for b in token_bytes]
        joined = np.zeros((vocab_size, max(int(lengths.max()), 1)), np.uint8)
        for row, piece in zip(joined, token_bytes, strict=False):
            row[: len(piece)] = np.frombuffer(piece, np.uint8)
        host: Any = dict(
            next=np.pad(automaton.next, ((0, pad), (0, 0))),
            accept=np.pad(automaton.match > 0, (0, pad)),
            token_bytes=joined,
            token_lengths=lengths,
        )
        tables = StringTables(**host)
    eos: Any = id_mask("eos_ids", eos_ids, vocab_size)
    stop_ids: Any = id_mask("stop.token_ids", stop.token_ids, vocab_size)
    return StopArrays(eos, stop_ids, tables)


def advance_strings(tables: StringTables | None, state: Array, tokens: Array) -> tuple[Array, Array]:
    """Feeds each row's token to its automaton.

    Args:
      tables: None: nothing is looked for.
      state: i32[B], automaton states.
      tokens: i32[B].

    Returns:
      The new states, and bool[B]: whether a stop string was completed inside the token.
    """
    if tables is None:
        return state, jnp.zeros(state.shape, bool)
    data, lengths = tables.token_bytes[tokens], tables.token_lengths[tokens]

    def feed(at: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, hit = carry
        byte = jax.lax.dynamic_index_in_dim(data, at, axis=1, keepdims=False).astype(jnp.int32)
        reading = (at < lengths) & ~hit
        state = jnp.where(reading, tables.next[state, byte], state)
        return state, hit | (reading & tables.accept[state])

    return jax.lax.fori_loop(0, lengths.max(), feed, (state, jnp.zeros(state.shape, bool)))


def ending(stops: StopArrays, state: Array, tokens: Array) -> tuple[Array, Array]:
    """Whether a token ends its row: new automaton states and reasons i32[B] (NOT_ENDED, EOS or STOP)."""
    state, hit = advance_strings(stops.strings, state, tokens)
    reason = jnp.where(hit | stops.stop[tokens], STOP, NOT_ENDED)
    return state, jnp.where(stops.eos[tokens], EOS, reason)
