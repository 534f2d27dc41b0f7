"""What goes together: documents into rows, pairs into shapes."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

_MOST_SHAPES = 5  # each is compiled
_SHAPE_MULTIPLE = 8

Whole = TypeVar("Whole", int, np.ndarray)


def choose_shapes(
    source_lengths: np.ndarray, target_lengths: np.ndarray, tokens_per_batch: int, rows_multiple: int
) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """At most five shapes for pairs, such that an epoch computes as few positions as possible.

    Pairs are ordered by the longer of their two sides, rounded up to a multiple of 8, and this order is cut into
    buckets. A bucket's M and T are its longest source and target, rounded up likewise. Of all ways to cut, the one is
    taken whose batches have the fewest positions, M + T in every row, padding rows included. (Dynamic programming:
    the best way to cut the first j sizes into k buckets extends a best way to cut fewer sizes into k - 1.)

    Returns:
      The longest side of each bucket, i64[K], and the (rows, M, T) of each.
    """
    sizes, size_of = np.unique(
        round_up(np.maximum(source_lengths, target_lengths), _SHAPE_MULTIPLE), return_inverse=True
    )
    longest = np.zeros((2, len(sizes)), np.int64)
    np.maximum.at(longest[0], size_of, source_lengths)
    np.maximum.at(longest[1], size_of, target_lengths)
    ends = np.cumsum(np.bincount(size_of))
    starts = ends - np.bincount(size_of)

    # For the bucket of the sizes i to j, at [i, j]: M and T, its pairs, its rows in a batch, its positions.
    i, j = np.indices((len(sizes), len(sizes)))
    width = np.maximum.accumulate(np.where(i <= j, round_up(longest, _SHAPE_MULTIPLE)[:, None, :], 0), axis=2)
    rows = np.maximum(tokens_per_batch // np.maximum(width[1], 1) // rows_multiple, 1) * rows_multiple
    positions = -(-(ends[j] - starts[i]) // rows) * rows * width.sum(axis=0)
    cost = np.where(i <= j, positions.astype(np.float64), np.inf)

    best, first = [cost[0]], [np.zeros(len(sizes), np.int64)]
    for _ in range(min(_MOST_SHAPES, len(sizes)) - 1):
        before = np.append(np.inf, best[-1][:-1])
        total = before[:, None] + cost
        first.append(total.argmin(axis=0))
        best.append(total.min(axis=0))
    last, bounds, shapes = len(sizes) - 1, [], []
    for k in range(int(np.argmin([costs[-1] for costs in best])), -1, -1):
        start = int(first[k][last])
        bounds.append(int(sizes[last]))
        shapes.append((int(rows[start, last]), int(width[0, start, last]), int(width[1, start, last])))
        last = start - 1
    return np.array(bounds[::-1]), shapes[::-1]


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Which row each document goes into, i64[n]: the one it fills best of those with room, else a new one.

    >>> best_fit(np.array([3, 4, 2, 1]), 6).tolist()
    [0, 1, 1, 0]
    """
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: there is a row with room for r tokens
    row_of = np.empty(len(lengths), np.int64)
    rows = 0
    for document, length in enumerate(lengths.tolist()):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            rooms ^= 0 if rows_with_room[room] else 1 << room
        else:
            room, row = capacity, rows
            rows += 1
        row_of[document] = row
        if left := room - length:
            rows_with_room[left].append(row)
            rooms |= 1 << left
    return row_of


def round_up(value: Whole, multiple: int) -> Whole:
    """The next multiple at or above a whole number or an array of them."""
    return -(-value // multiple) * multiple
