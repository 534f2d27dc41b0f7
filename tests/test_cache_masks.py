"""Slots and masks against plain Python: nothing is written where it does not belong, nobody sees what he may not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoding_jax.cache import compact_path, read_slots, reorder_candidates, write_slots
from decoding_jax.masks import ancestors, causal_mask, tree_mask
from decoding_jax.trees import most_probable
from decoding_jax.types import Cache

EMPTY = jnp.arange(1, 9)[None]  # one row of eight slots


@pytest.mark.parametrize(
    ("slots", "want"),
    [
        ([6, 7], [1, 2, 3, 4, 5, 6, 70, 71]),
        ([6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 70, 71]),
        ([8, 8, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
        ([2, 8, 0], [72, 2, 70, 4, 5, 6, 7, 8]),
        ([2**30, 3], [1, 2, 3, 71, 5, 6, 7, 8]),
    ],
)
def test_writes_past_the_end_are_dropped(slots: list[int], want: list[int]) -> None:
    """A block that reaches past the end loses its tail; nothing moves back over what is there."""
    values = jnp.arange(70, 70 + len(slots))[None]
    assert write_slots(EMPTY, jnp.asarray([slots]), values)[0].tolist() == want


def test_rows_write_and_read_their_own_slots() -> None:
    """Each row has its own slots, deeper axes come along, and values take the buffer's type."""
    buffer = jnp.zeros((2, 3, 2), jnp.bfloat16)
    slots = jnp.asarray([[1, 2], [3, 0]])
    values = jnp.arange(8.0).reshape(2, 2, 2)
    out = write_slots(buffer, slots, values)
    assert out.dtype == jnp.bfloat16
    assert out.tolist() == [[[0, 0], [0, 1], [2, 3]], [[6, 7], [0, 0], [0, 0]]]
    assert read_slots(out, jnp.asarray([[2, 1], [0, 0]]))[..., 0].tolist() == [[2, 0], [6, 6]]


@pytest.mark.parametrize("seed", range(10))
def test_paths_are_compacted_as_in_python(seed: int) -> None:
    """An accepted path moves next to its root: overlapping moves, empty paths and a root near the end included."""
    rng = np.random.default_rng(seed)
    batch, size, depth = 3, 12, 4
    leaves = {"a": rng.integers(0, 99, (batch, size)), "b": rng.normal(size=(batch, size, 2)).astype(np.float32)}
    root = rng.integers(0, size - 5, batch)
    path = np.full((batch, depth), size)
    for row in range(batch):
        length = rng.integers(0, depth + 1)
        after = np.arange(root[row] + 1, size)
        path[row, :length] = np.sort(rng.choice(after, length, replace=False))
    cache = Cache(slots=jax.tree.map(jnp.asarray, leaves), rows=(jnp.arange(batch),))
    moved = compact_path(cache, jnp.asarray(root), jnp.asarray(path))
    for name, leaf in leaves.items():
        want = leaf.copy()
        for row in range(batch):
            for index, slot in enumerate(path[row]):
                if slot < size:
                    want[row, root[row] + 1 + index] = leaf[row, slot]
        assert (np.asarray(moved.slots[name]) == want).all()
    assert moved.rows[0].tolist() == [0, 1, 2]


def test_rows_are_reordered_everywhere() -> None:
    """Beams move with everything they have: per-slot and per-row leaves of any depth."""
    cache = Cache(slots={"k": jnp.arange(16).reshape(4, 2, 2)}, rows=(jnp.asarray([6, 7, 8, 9]),))
    out = reorder_candidates(cache, jnp.asarray([[1, 1], [1, 0]]))
    assert out.rows[0].tolist() == [7, 7, 9, 8]
    assert out.slots["k"][:, 0, 0].tolist() == [4, 4, 12, 8]


def test_a_chain_sees_itself_and_what_comes_before() -> None:
    """Causal, for queries anywhere in their row."""
    mask = causal_mask(jnp.asarray([[0, 3], [2, 9]]), 5)
    assert mask.astype(jnp.int32).sum(axis=2).tolist() == [[1, 4], [3, 5]]
    assert mask[0, 1].tolist() == [True] * 4 + [False]


@functools.partial(jax.jit, static_argnums=2)
def masks(parents: jax.Array, root: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    reach = ancestors(parents)
    return reach, tree_mask(root, reach, capacity)


def way_up(parents: list[int], node: int) -> set[int]:
    """A node and its ancestors."""
    found = {node}
    while node:
        node = parents[node]
        found.add(node)
    return found


@pytest.mark.parametrize("width", [1, 2, 5, 17])
def test_a_tree_shows_each_node_its_ancestors(width: int) -> None:
    """Law 9: random trees, deep chains and stars: a node sees the prefix and its own path, never a sibling."""
    rng = np.random.default_rng(width)
    trees = [[0, *(int(rng.integers(0, i)) for i in range(1, width))] for _ in range(4)]
    trees += [[max(i - 1, 0) for i in range(width)], [0] * width]
    root = np.arange(len(trees)) + 2
    capacity = width + len(trees)  # the last trees reach past the end
    reach, mask = map(np.asarray, masks(jnp.asarray(trees), jnp.asarray(root), capacity))
    for row, parents in enumerate(trees):
        for node in range(width):
            path = way_up(parents, node)
            assert set(np.flatnonzero(reach[row, node]).tolist()) == path
            seen = set(range(root[row])) | {root[row] + i for i in path}
            assert set(np.flatnonzero(mask[row, node]).tolist()) == {s for s in seen if s < capacity}


def test_the_root_has_no_parent() -> None:
    """Node 0's entry is ignored, whatever it says."""
    one, other = ancestors(jnp.asarray([[0, 0, 1]])), ancestors(jnp.asarray([[2, 0, 1]]))
    assert (one == other).all()


@pytest.mark.parametrize("seed", range(6))
def test_the_most_probable_nodes_keep_their_parents(seed: int) -> None:
    """Against sorting by (probability, place) in plain Python, with ties and steps of probability 1."""
    random = np.random.default_rng(seed)
    count, kept = 12, 7
    parents = np.array([random.integers(0, i + 1) for i in range(count)])
    steps = np.log(random.choice([1.0, 0.5, 0.25], count))
    log_probs = np.zeros(count, np.float32)
    for i in range(count):
        log_probs[i] = steps[i] + (log_probs[parents[i] - 1] if parents[i] else 0.0)
    chosen = sorted(sorted(range(count), key=lambda i: (-log_probs[i], i))[:kept])
    want = [0 if parents[i] == 0 else chosen.index(parents[i] - 1) + 1 for i in chosen]  # raises if one is missing
    index, found = most_probable(jnp.asarray(log_probs)[None], jnp.asarray(parents)[None], kept, jax.lax.top_k)
    assert index[0].tolist() == chosen
    assert found[0].tolist() == want


def test_nodes_that_are_none_stand_behind_all_others() -> None:
    """Else a round would take a width that holds them."""
    log_probs = jnp.log(jnp.asarray([[0.6, 0.0, 0.0, 0.5]]))
    index, parents = most_probable(log_probs, jnp.asarray([[0, 0, 0, 1]]), 3, jax.lax.top_k)
    assert index[0, :2].tolist() == [0, 3] and parents[0].tolist() == [0, 1, 0]
