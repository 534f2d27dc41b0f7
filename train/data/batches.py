"""Batches from examples: plans that say which tokens stand where in every batch of every epoch.

A plan is a pure function of examples, settings and a seed: `batch(index)` of any index, in any order and in any
process, is always the same. Index counts on over the epochs: epoch = index // batches_per_epoch.

Rows are spread evenly over the batches of an epoch, so that no batch is nearly empty: 17 rows in batches of at most
8 make batches of 5, 6 and 6. Rows that are missing are padding rows: weights, tokens, positions and segments 0, the
source one <eos>, `examples` -1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from train.data.examples import Examples, Ragged
from train.data.packing import best_fit, choose_shapes, round_up

Batch = dict[str, np.ndarray]

_ORDER, _PACKING = 0, 1  # what random numbers are for


class Plan(Protocol):
    """Which batch comes when.

    Attributes:
      batches_per_epoch: how many batches show every example once.
      waste: share of the target positions of an epoch without a target, padding rows included (of shuffled windows,
        in an epoch at phase 0).
    """

    batches_per_epoch: int
    waste: float

    def batch(self, index: int) -> Batch:
        """The batch of any index from 0 on; see `make_plan` for what it holds."""
        ...

    def examples_of(self, index: int) -> np.ndarray:
        """The places in the split of all examples that a batch holds something of, ascending, i64[n]."""
        ...


def make_plan(examples: Examples, settings: Mapping[str, Any], seed: int, shuffle: bool, rows_multiple: int) -> Plan:
    """The plan of a config's `data` part.

    Batches of text ("windows" and "packed", all [B, T]): tokens i32, targets i32 (the next token), weights f32 (1
    where there is a target, else 0), positions i32, segments i32 (0 for padding, else the document within the row).
    Batches of pairs ("bucketed"): source i32[B, M], source_lengths i32[B], tokens i32[B, T] (<bos> and the target
    without its last token), targets i32[B, T], weights f32[B, T].
    Both: examples i64[B], the place in the split of the (first) example of each row, -1 for a padding row.

    Args:
      examples: from `tokenise` with the same settings.
      settings: `batching`, `length`, and `rows_per_batch` (of text) or `tokens_per_batch` (of pairs).
      seed: of the order; at least 0.
      shuffle: whether the order is random and new in every epoch, as for training.
      rows_multiple: B is a multiple of it: the number of shards that rows are divided over.

    Raises:
      ValueError: a setting cannot be used, or there is too little text for one window.
    """
    if rows_multiple < 1:
        raise ValueError(f"rows_multiple={rows_multiple}: must be at least 1")
    batching = settings["batching"]
    if batching == "bucketed":
        return Bucketed(examples, _positive(settings, "tokens_per_batch"), seed, shuffle, rows_multiple)
    if batching not in ("windows", "packed"):
        raise ValueError(f"data.batching={batching!r}: must be 'windows', 'packed' or 'bucketed'")
    kind = Windows if batching == "windows" else Packed
    length, rows_per_batch = _positive(settings, "length"), _positive(settings, "rows_per_batch")
    return kind(examples, length, rows_per_batch, seed, shuffle, rows_multiple)


class Windows:
    """The documents as one stream, cut into windows one behind the other.

    With windows of 4 the stream a b c d e f g makes

        tokens  a b c d   e f . .
        targets b c d e   f g . .
        weights 1 1 1 1   1 1 0 0

    so that every token but the first is predicted once. A shuffled epoch has as many windows as fit whole, here one.
    They begin at a phase that is drawn anew for every epoch, from 0 to `length` - 1, and come in random order: at
    phase 1 the window is b c d e, at phase 3 it is d e f . (the last window reaches past the end of the stream, but
    always predicts something).
    """

    def __init__(
        self, examples: Examples, length: int, rows_per_batch: int, seed: int, shuffle: bool, rows_multiple: int
    ) -> None:
        self._text, self._places = examples.fields["text"], examples.places
        self._length, self._seed, self._shuffle = length, seed, shuffle
        self._predicted = len(self._text.tokens) - 1
        if self._predicted < length:
            raise ValueError(
                f"split {examples.split!r} has {self._predicted + 1} tokens, too few for one window of data.length="
                f"{length} and the token behind it; lower data.length or give more text"
            )
        self._windows = self._predicted // length if shuffle else -(-self._predicted // length)
        self._rows = round_up(rows_per_batch, rows_multiple)
        self.batches_per_epoch = -(-self._windows // rows_per_batch)
        at_phase_0 = min(self._predicted, self._windows * length)
        self.waste = 1 - at_phase_0 / (self.batches_per_epoch * self._rows * length)
        self._starts = functools.lru_cache(maxsize=2)(self._draw_starts)

    def batch(self, index: int) -> Batch:
        return _with_padding_rows(self._fill(self._starts_of(index)), self._rows)

    def examples_of(self, index: int) -> np.ndarray:
        starts = self._starts_of(index)
        ends = np.minimum(starts + self._length, self._predicted)  # the last token that is predicted
        first, last = (np.searchsorted(self._text.offsets, at, side="right") - 1 for at in (starts, ends))
        return self._places[np.unique(_ranges(first, last - first + 1))]

    def _starts_of(self, index: int) -> np.ndarray:
        epoch, at = divmod(index, self.batches_per_epoch)
        return self._starts(epoch)[_share(self._windows, self.batches_per_epoch, at)]

    def _fill(self, starts: np.ndarray) -> Batch:
        column = np.arange(self._length)
        places = starts[:, None] + column
        real = places < self._predicted
        places = np.minimum(places, self._predicted - 1)
        documents = np.searchsorted(self._text.offsets, starts, side="right") - 1
        return {
            "tokens": np.where(real, self._text.tokens[places], 0),
            "targets": np.where(real, self._text.tokens[places + 1], 0),
            "weights": real.astype(np.float32),
            "positions": np.where(real, column, 0).astype(np.int32),
            "segments": real.astype(np.int32),
            "examples": self._places[documents],
        }

    def _draw_starts(self, epoch: int) -> np.ndarray:
        starts = np.arange(self._windows) * self._length
        if not self._shuffle:
            return starts
        random = _generator(self._seed, _ORDER, epoch)
        return random.permutation(starts + random.integers(self._length))


class Packed:
    """Documents side by side in rows of `length`, each with its own positions, predicting nothing across.

    The documents a b c, d e and f g h i in rows of 6 make

        tokens    a b c d e .   f g h i . .
        targets   b c . e . .   g h i . . .
        weights   1 1 0 1 0 0   1 1 1 0 0 0
        positions 0 1 2 0 1 0   0 1 2 3 0 0
        segments  1 1 1 2 2 0   1 1 1 1 0 0

    Documents come in an order that the seed fixes (or as they are, unshuffled), and each goes into the row that it
    fills best. What a row holds is the same in every epoch, the order of the rows is not.
    """

    def __init__(
        self, examples: Examples, length: int, rows_per_batch: int, seed: int, shuffle: bool, rows_multiple: int
    ) -> None:
        self._text, self._places = examples.fields["text"], examples.places
        self._length, self._seed, self._shuffle = length, seed, shuffle
        longest = int(self._text.lengths.max())
        if longest > length:
            raise ValueError(
                f"split {examples.split!r} has a document of {longest} tokens, longer than data.length={length}; "
                "tokenise it with these settings"
            )
        order = np.arange(len(examples))
        if shuffle:
            order = _generator(seed, _PACKING, 0).permutation(order)
        row_of = best_fit(self._text.lengths[order], length)
        by_row = np.argsort(row_of, kind="stable")
        self._documents = order[by_row]
        self._first = np.searchsorted(row_of[by_row], np.arange(row_of.max() + 2))
        rows = len(self._first) - 1
        self._rows = round_up(rows_per_batch, rows_multiple)
        self.batches_per_epoch = -(-rows // rows_per_batch)
        predicted = len(self._text.tokens) - len(examples)
        self.waste = 1 - predicted / (self.batches_per_epoch * self._rows * length)
        self._order = functools.lru_cache(maxsize=2)(functools.partial(self._draw_order, rows))

    def batch(self, index: int) -> Batch:
        return _with_padding_rows(self._fill(*self._documents_of(index)), self._rows)

    def examples_of(self, index: int) -> np.ndarray:
        return np.sort(self._places[self._documents_of(index)[0]])

    def _documents_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of a batch, row by row, and how many each row has."""
        epoch, at = divmod(index, self.batches_per_epoch)
        order = self._order(epoch)
        rows = order[_share(len(order), self.batches_per_epoch, at)]
        counts = self._first[rows + 1] - self._first[rows]
        return self._documents[_ranges(self._first[rows], counts)], counts

    def _fill(self, documents: np.ndarray, counts: np.ndarray) -> Batch:
        lengths = self._text.lengths[documents]
        # How many tokens stand before each document, in all and in its row.
        before = np.cumsum(lengths) - lengths
        first_of_row = np.cumsum(counts) - counts
        column = before - np.repeat(before[first_of_row], counts)
        row = np.repeat(np.arange(len(counts)), counts)

        to = _ranges(row * self._length + column, lengths)
        source = _ranges(self._text.offsets[documents], lengths)
        place = source - np.repeat(self._text.offsets[documents], lengths)
        last = place == np.repeat(lengths, lengths) - 1
        segment = np.arange(len(documents)) - np.repeat(first_of_row, counts) + 1
        tokens = self._text.tokens[source]
        values = {
            "tokens": tokens,
            "targets": np.where(last, 0, np.append(tokens[1:], 0)),
            "weights": (~last).astype(np.float32),
            "positions": place,
            "segments": np.repeat(segment, lengths),
        }
        batch = {}
        for name, value in values.items():
            flat = np.zeros(len(counts) * self._length, np.float32 if name == "weights" else np.int32)
            flat[to] = value
            batch[name] = flat.reshape(len(counts), self._length)
        return batch | {"examples": self._places[documents[first_of_row]]}

    def _draw_order(self, rows: int, epoch: int) -> np.ndarray:
        return _generator(self._seed, _ORDER, epoch).permutation(rows) if self._shuffle else np.arange(rows)


class Bucketed:
    """Pairs of similar length together, in a few shapes.

    With <bos> written as ^ the pairs (a b ., v w x .) and (c ., y .) make in the shape (M, T) = (4, 5)

        source  a b . 0   source_lengths 3   tokens ^ v w x 0   targets v w x . 0   weights 1 1 1 1 0
                c . 0 0                  2          ^ y 0 0 0           y . 0 0 0           1 1 0 0 0

    `choose_shapes` says how the shapes are found. A batch of the shape (M, T) has tokens_per_batch // T rows, rounded
    down to `rows_multiple` and at least that. Each epoch draws anew which pairs of a bucket share a batch, and the
    order of the batches.

    Attributes:
      shapes: the (rows, M, T) of the buckets, smallest first.
    """

    def __init__(self, examples: Examples, tokens_per_batch: int, seed: int, shuffle: bool, rows_multiple: int) -> None:
        self._source, self._target = examples.fields["source"], examples.fields["target"]
        self._places, self._eos_id, self._start_id = examples.places, examples.eos_id, examples.start_id
        self._seed, self._shuffle = seed, shuffle
        lengths = self._source.lengths, self._target.lengths
        bounds, self.shapes = choose_shapes(*lengths, tokens_per_batch, rows_multiple)
        bucket = np.searchsorted(bounds, np.maximum(*lengths))
        self._members = [np.flatnonzero(bucket == k) for k in range(len(bounds))]
        shapes_and_members = list(zip(self.shapes, self._members, strict=True))
        batches = [-(-len(members) // rows) for (rows, _, _), members in shapes_and_members]
        # The bucket of every batch, and which of the bucket's batches it is.
        self._batches = [(k, n) for k, count in enumerate(batches) for n in range(count)]
        self._count = batches
        self.batches_per_epoch = len(self._batches)
        positions = sum(count * rows * width for count, (rows, _, width) in zip(batches, self.shapes, strict=True))
        self.waste = 1 - len(self._target.tokens) / positions
        self._epoch = functools.lru_cache(maxsize=2)(self._draw_epoch)

    def batch(self, index: int) -> Batch:
        pairs, (rows, source_width, width) = self._pairs_of(index)
        targets, real = _padded(self._target, pairs, width)
        tokens = np.roll(targets, 1, axis=1)
        tokens[:, 0] = self._start_id
        batch = {
            "source": _padded(self._source, pairs, source_width)[0],
            "source_lengths": self._source.lengths[pairs].astype(np.int32),
            "tokens": np.where(real, tokens, 0),
            "targets": targets,
            "weights": real.astype(np.float32),
            "examples": self._places[pairs],
        }
        batch = _with_padding_rows(batch, rows)
        batch["source"][len(pairs) :, 0] = self._eos_id
        batch["source_lengths"][len(pairs) :] = 1
        return batch

    def examples_of(self, index: int) -> np.ndarray:
        return np.sort(self._places[self._pairs_of(index)[0]])

    def _pairs_of(self, index: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        """The pairs of a batch, and its (rows, M, T)."""
        epoch, at = divmod(index, self.batches_per_epoch)
        order, members = self._epoch(epoch)
        k, n = self._batches[order[at]]
        return members[k][_share(len(members[k]), self._count[k], n)], self.shapes[k]

    def _draw_epoch(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        if not self._shuffle:
            return np.arange(self.batches_per_epoch), self._members
        random = _generator(self._seed, _ORDER, epoch)
        return random.permutation(self.batches_per_epoch), [random.permutation(members) for members in self._members]


def _share(count: int, parts: int, at: int) -> slice:
    """Part `at` of `count` things in `parts` parts of nearly the same size."""
    return slice(count * at // parts, count * (at + 1) // parts)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for every start, one behind the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _padded(ragged: Ragged, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as i32[len(rows), width] with 0 behind them, and where they are real, bool of the same shape."""
    column = np.arange(width)
    real = column < ragged.lengths[rows][:, None]
    places = np.minimum(ragged.offsets[rows][:, None] + column, len(ragged.tokens) - 1)
    return np.where(real, ragged.tokens[places], 0), real


def _with_padding_rows(batch: Batch, rows: int) -> Batch:
    filled = {}
    for name, value in batch.items():
        filled[name] = np.full((rows, *value.shape[1:]), -1 if name == "examples" else 0, value.dtype)
        filled[name][: len(value)] = value
    return filled


def _generator(seed: int, purpose: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(purpose, epoch))))


def _positive(settings: Mapping[str, Any], name: str) -> int:
    value = settings[name]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"data.{name}={value!r}: must be a whole number of at least 1")
    return value
