"""Plans of batches, and the feed that hands them out."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.batches import make_plan
from train.data.examples import Examples, Ragged
from train.data.feed import Feed, rows_of_process
from train.data.packing import best_fit, choose_shapes

EOS, BOS = 9, 1


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    tokens = np.array([token for row in rows for token in row], np.int32)
    return Ragged(tokens, np.cumsum([0, *map(len, rows)]))


def examples(**fields: Sequence[Sequence[int]]) -> Examples:
    """Places count from 100, so that they cannot be taken for row numbers."""
    count = len(next(iter(fields.values())))
    sides = {name: ragged(rows) for name, rows in fields.items()}
    return Examples("train", sides, np.arange(100, 100 + count), 0, 0, 0, 0, 0, EOS, BOS)


def stream(tokens: int, documents: int = 1) -> Examples:
    ids = np.arange(1000, 1000 + tokens)
    return examples(text=[part.tolist() for part in np.array_split(ids, documents)])


def documents(lengths: Sequence[int]) -> Examples:
    """Tokens are 1000 * document + place."""
    return examples(text=[list(range(1000 * i, 1000 * i + n)) for i, n in enumerate(lengths, start=1)])


def sentence_pairs(lengths: Sequence[tuple[int, int]]) -> Examples:
    """Source tokens are 1000 * pair + place, those of the target negative; both end with EOS."""
    row = lambda i, n: [*range(1000 * i, 1000 * i + n - 1), EOS]
    sources = [row(i, m) for i, (m, _) in enumerate(lengths, start=1)]
    targets = [[-token if token != EOS else EOS for token in row(i, n)] for i, (_, n) in enumerate(lengths, start=1)]
    return examples(source=sources, target=targets)


def plan_of(found: Examples, batching: str, shuffle: bool = True, multiple: int = 1, seed: int = 0, **changed: Any):
    settings = {"batching": batching, "length": 8, "rows_per_batch": 4, "tokens_per_batch": 64} | changed
    return make_plan(found, settings, seed, shuffle, multiple)


def some_plan(batching: str, **changed: Any):
    random = np.random.default_rng(0)
    found = {
        "windows": lambda: stream(205, 3),
        "packed": lambda: documents(random.integers(1, 9, 60)),
        "bucketed": lambda: sentence_pairs(random.integers(2, 40, (60, 2)).tolist()),
    }[batching]()
    return plan_of(found, batching, **changed)


def epoch_of(plan: Any, epoch: int = 0) -> list[dict[str, np.ndarray]]:
    return [plan.batch(epoch * plan.batches_per_epoch + i) for i in range(plan.batches_per_epoch)]


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


BATCHINGS = ("windows", "packed", "bucketed")
every_batching = pytest.mark.parametrize("batching", BATCHINGS)


# --- Laws of every plan


@every_batching
def test_types_and_shapes(batching):
    batch = some_plan(batching, multiple=3).batch(0)
    pairs = batching == "bucketed"
    names = ["source", "source_lengths"] if pairs else ["positions", "segments"]
    assert set(batch) == {"tokens", "targets", "weights", "examples", *names}
    kinds = {"weights": np.float32, "examples": np.int64}
    assert all(value.dtype == kinds.get(name, np.int32) for name, value in batch.items())
    assert all(len(value) == len(batch["tokens"]) for value in batch.values())
    assert batch["tokens"].shape == batch["targets"].shape == batch["weights"].shape
    assert len(batch["tokens"]) % 3 == 0


@every_batching
def test_a_batch_depends_on_its_index_alone(batching):
    """Not on which batches were made before, nor on threads that make others meanwhile."""
    one, other = some_plan(batching), some_plan(batching)
    count = 3 * one.batches_per_epoch
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one.batch, reversed(range(count))))[::-1]
    assert all(same(found[i], other.batch(i)) for i in range(count))


@every_batching
def test_seeds_and_epochs_have_other_orders(batching):
    plan = some_plan(batching)
    first = np.concatenate([batch["targets"].ravel() for batch in epoch_of(plan)])
    for other in (epoch_of(some_plan(batching, seed=1)), epoch_of(plan, 1)):
        assert not np.array_equal(first, np.concatenate([batch["targets"].ravel() for batch in other]))
    unshuffled = some_plan(batching, shuffle=False)
    assert all(same(a, b) for a, b in zip(epoch_of(unshuffled), epoch_of(unshuffled, 5), strict=True))


@every_batching
@pytest.mark.parametrize("multiple", [1, 4, 7])
def test_waste_is_the_share_of_target_positions_without_a_target(batching, multiple):
    plan = some_plan(batching, shuffle=False, multiple=multiple)
    weights = np.concatenate([batch["weights"].ravel() for batch in epoch_of(plan)])
    assert plan.waste == pytest.approx(1 - weights.mean())


@every_batching
def test_padding_rows_hold_nothing(batching):
    plan = some_plan(batching, shuffle=False, multiple=7)
    seen = 0
    for batch in epoch_of(plan):
        rows = batch["examples"] == -1
        seen += rows.sum()
        for name in ("tokens", "targets", "weights", "positions", "segments"):
            assert not batch.get(name, np.zeros(len(rows)))[rows].any()
        assert batch["weights"][~rows].any(axis=1).all()
        if batching == "bucketed":
            assert (batch["source_lengths"][rows] == 1).all() and (batch["source"][rows, 0] == EOS).all()
            assert not batch["source"][rows, 1:].any()
    assert seen


@every_batching
def test_no_batch_of_an_epoch_is_nearly_empty(batching):
    """Thirteen full rows in batches of at most four are 3, 3, 3 and 4, not 4, 4, 4 and 1."""
    found = {"windows": stream(105), "packed": documents([8] * 13), "bucketed": sentence_pairs([(16, 16)] * 13)}
    rows = [(batch["examples"] >= 0).sum() for batch in epoch_of(plan_of(found[batching], batching))]
    assert sorted(rows) == [3, 3, 3, 4]


@every_batching
def test_settings_that_cannot_be_used(batching):
    name = "tokens_per_batch" if batching == "bucketed" else "rows_per_batch"
    with pytest.raises(ValueError, match=f"data.{name}=0: must be a whole number of at least 1"):
        some_plan(batching, **{name: 0})
    with pytest.raises(ValueError, match="rows_multiple=0"):
        some_plan(batching, multiple=0)


def test_a_batching_that_does_not_exist():
    with pytest.raises(ValueError, match=r"batching='sorted'.*'windows', 'packed' or 'bucketed'"):
        plan_of(stream(20), "sorted")


# --- Windows


def test_windows_as_documented():
    plan = plan_of(examples(text=[[1, 2, 3], [4, 5, 6, 7]]), "windows", shuffle=False, length=4)
    batch = plan.batch(0)
    assert batch["tokens"][:2].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch["targets"][:2].tolist() == [[2, 3, 4, 5], [6, 7, 0, 0]]
    assert batch["weights"][:2].tolist() == batch["segments"][:2].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["positions"][:2].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch["examples"].tolist() == [100, 101, -1, -1]


@pytest.mark.parametrize("tokens", [9, 16, 17, 18, 64, 65, 200])
@pytest.mark.parametrize(("rows_per_batch", "multiple"), [(1, 1), (3, 1), (4, 8)])
def test_unshuffled_windows_predict_every_token_but_the_first_once(tokens, rows_per_batch, multiple):
    plan = plan_of(stream(tokens), "windows", shuffle=False, multiple=multiple, rows_per_batch=rows_per_batch)
    batches = epoch_of(plan)
    predicted = [batch["targets"][batch["weights"] == 1] for batch in batches]
    assert np.concatenate(predicted).tolist() == list(range(1001, 1000 + tokens))
    for batch in batches:
        assert (batch["tokens"] + 1 == batch["targets"])[batch["weights"] == 1].all()


@pytest.mark.parametrize("tokens", [9, 16, 17, 60])
def test_shuffled_windows_begin_at_every_phase_and_never_have_nothing_to_predict(tokens):
    plan = plan_of(stream(tokens), "windows")
    phases = set()
    for epoch in range(80):
        batches = epoch_of(plan, epoch)
        predicted = np.sort(np.concatenate([batch["targets"][batch["weights"] == 1] for batch in batches]))
        phase = predicted[0] - 1001
        phases.add(phase)
        # Without a gap, and each once.
        assert predicted.tolist() == list(range(1001 + phase, min(1000 + tokens, 1001 + phase + (tokens - 1) // 8 * 8)))
        for batch in batches:
            assert (batch["tokens"] + 1 == batch["targets"])[batch["weights"] == 1].all()
            assert batch["weights"][batch["examples"] >= 0].any(axis=1).all()
    assert phases == set(range(8))


def test_a_stream_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match=r"split 'train' has 8 tokens, too few for one window of data.length=8"):
        plan_of(stream(8), "windows")
    assert plan_of(stream(9), "windows").batches_per_epoch == 1


# --- Packed


def test_packed_as_documented():
    found = examples(text=[[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    batch = plan_of(found, "packed", shuffle=False, length=6, rows_per_batch=2).batch(0)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]
    assert batch["targets"].tolist() == [[2, 3, 0, 5, 0, 0], [7, 8, 9, 0, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
    assert batch["examples"].tolist() == [100, 102]


def documents_in(batch: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    """The documents of a batch, read off its segments."""
    found = []
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        found += [tuple(tokens[segments == k].tolist()) for k in range(1, segments.max() + 1)]
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_packed_shows_every_document_once_an_epoch_whole_and_in_rows_of_the_same_make(seed):
    lengths = np.random.default_rng(seed).integers(1, 9, 50)
    found = documents(lengths)
    plan = plan_of(found, "packed", seed=seed, rows_per_batch=3)
    rows_of = lambda epoch: sorted(tuple(row) for batch in epoch_of(plan, epoch) for row in batch["tokens"].tolist())
    for epoch in range(3):
        seen = [document for batch in epoch_of(plan, epoch) for document in documents_in(batch)]
        assert sorted(seen) == [tuple(found.fields["text"][i]) for i in range(50)]
    assert rows_of(0) == rows_of(1)


def test_packed_predicts_nothing_across_documents():
    for batch in epoch_of(some_plan("packed")):
        predicted = batch["weights"] == 1
        assert (batch["targets"] == batch["tokens"] + 1)[predicted].all()
        assert (batch["positions"] == batch["tokens"] % 1000)[batch["segments"] > 0].all()
        ends = (batch["segments"] > 0) & ~predicted
        assert ends.sum() == len(documents_in(batch))


def test_packed_refuses_documents_tokenised_for_longer_rows():
    with pytest.raises(ValueError, match=r"document of 9 tokens, longer than data.length=8"):
        plan_of(documents([9]), "packed")


def test_best_fit_never_overfills_and_leaves_no_two_rows_that_fit_into_one():
    lengths = np.random.default_rng(0).integers(1, 17, 300)
    filled = np.bincount(best_fit(lengths, 16), weights=lengths)
    assert filled.max() <= 16 and filled.min() > 0
    assert np.sort(filled)[:2].sum() > 16


# --- Bucketed


def test_bucketed_as_documented():
    found = examples(source=[[2, 3, EOS], [4, EOS]], target=[[5, 6, 7, EOS], [8, EOS]])
    batch = plan_of(found, "bucketed", shuffle=False, tokens_per_batch=16).batch(0)
    pad = lambda *ids: [*ids, *[0] * (8 - len(ids))]
    assert batch["source"].tolist() == [pad(2, 3, EOS), pad(4, EOS)]
    assert batch["source_lengths"].tolist() == [3, 2]
    assert batch["tokens"].tolist() == [pad(BOS, 5, 6, 7), pad(BOS, 8)]
    assert batch["targets"].tolist() == [pad(5, 6, 7, EOS), pad(8, EOS)]
    assert batch["weights"].tolist() == [pad(1, 1, 1, 1), pad(1, 1)]
    assert batch["examples"].tolist() == [100, 101]


@pytest.mark.parametrize("shuffle", [True, False])
def test_bucketed_shows_every_pair_once_an_epoch_whole(shuffle):
    lengths = np.random.default_rng(1).integers(2, 70, (200, 2)).tolist()
    found = sentence_pairs(lengths)
    plan = plan_of(found, "bucketed", shuffle=shuffle, multiple=2, tokens_per_batch=512)
    for epoch in range(3):
        seen = []
        for batch in epoch_of(plan, epoch):
            for row in np.flatnonzero(batch["examples"] >= 0):
                place = int(batch["examples"][row]) - 100
                seen.append(place)
                length = int(batch["weights"][row].sum())
                source = batch["source"][row, : batch["source_lengths"][row]]
                assert source.tolist() == found.fields["source"][place].tolist()
                assert batch["targets"][row, :length].tolist() == found.fields["target"][place].tolist()
                assert batch["tokens"][row, :length].tolist() == [BOS, *found.fields["target"][place][:-1]]
                assert not batch["targets"][row, length:].any() and not batch["tokens"][row, length:].any()
        assert sorted(seen) == list(range(200))


def test_bucketed_pairs_meet_others_in_every_epoch():
    plan = plan_of(sentence_pairs([(8, 8)] * 64), "bucketed")
    together = lambda epoch: {tuple(sorted(batch["examples"].tolist())) for batch in epoch_of(plan, epoch)}
    assert together(0) != together(1)


@pytest.mark.parametrize("multiple", [1, 4])
def test_bucketed_shapes_are_few_and_within_the_budget(multiple):
    lengths = np.random.default_rng(2).integers(1, 100, (300, 2))
    plan = plan_of(sentence_pairs((lengths + 1).tolist()), "bucketed", multiple=multiple, tokens_per_batch=800)
    seen = {(*batch["tokens"].shape, batch["source"].shape[1]) for batch in epoch_of(plan)}
    assert seen == {(rows, width, source) for rows, source, width in plan.shapes}
    assert 1 < len(seen) <= 5
    for rows, width, source in seen:
        assert width % 8 == source % 8 == rows % multiple == 0
        assert rows * width <= 800 < (rows + multiple) * width


def test_bucketed_has_at_least_one_row_for_each_shard():
    plan = plan_of(sentence_pairs([(30, 30)] * 3), "bucketed", multiple=4, tokens_per_batch=8)
    assert plan.shapes == [(4, 32, 32)]


@pytest.mark.parametrize("seed", range(4))
def test_shapes_are_those_with_the_fewest_positions(seed):
    """Against all ways to cut the sizes into at most five buckets."""
    random = np.random.default_rng(seed)
    lengths = random.geometric(0.05, (2, 80)).clip(2, 64)
    up = lambda value: -(-int(value) // 8) * 8

    def positions(bounds: Sequence[int]) -> int:
        total, below = 0, 0
        for bound in bounds:
            inside = lengths[:, (lengths.max(axis=0) > below) & (lengths.max(axis=0) <= bound)]
            below = bound
            if inside.size:
                source, target = up(inside[0].max()), up(inside[1].max())
                rows = max(160 // target, 1)
                total += -(-inside.shape[1] // rows) * rows * (source + target)
        return total

    longest = up(lengths.max())
    inner = [size for size in range(8, longest, 8)]
    choices = [[*cut, longest] for k in range(5) for cut in itertools.combinations(inner, k)]
    bounds, shapes = choose_shapes(*lengths, tokens_per_batch=160, rows_multiple=1)
    assert positions(bounds.tolist()) == min(map(positions, choices))
    assert len(bounds) == len(shapes)


# --- The feed


@every_batching
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_resuming_at_any_step_goes_on_as_if_never_stopped(batching, prefetch):
    plan = some_plan(batching)
    steps = plan.batches_per_epoch + 3
    uninterrupted = [plan.batch(i) for i in range(steps + 2)]
    feed = Feed(plan, prefetch=prefetch)
    for step in range(steps):
        resumed = Feed(some_plan(batching), prefetch=prefetch)
        resumed.set_state(json.loads(json.dumps(feed.get_state())))
        assert all(same(next(resumed), uninterrupted[step + ahead]) for ahead in range(2))
        resumed.close()
        assert same(next(feed), uninterrupted[step])
    feed.close()


def test_the_state_counts_only_what_was_handed_out():
    """However far ahead the threads are; and a feed can be set back."""
    made = []

    class Counting:
        batches_per_epoch, waste = 4, 0.0

        def batch(self, index: int) -> dict[str, np.ndarray]:
            made.append(index)
            return {"examples": np.array([index])}

    feed = Feed(Counting(), prefetch=4)
    start = feed.get_state()
    assert [next(feed)["examples"].item() for _ in range(3)] == [0, 1, 2]
    state = feed.get_state()
    deadline = time.monotonic() + 10
    while len(made) < 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(made) == list(range(7))
    assert feed.get_state() == state
    assert next(feed)["examples"].item() == 3
    for back, index in ((state, 3), (start, 0)):
        feed.set_state(back)
        assert next(feed)["examples"].item() == index
    feed.close()


@every_batching
def test_two_processes_together_are_one(batching):
    plan = some_plan(batching, multiple=4)
    whole, *shares = Feed(plan), Feed(plan, 0, 2), Feed(plan, 1, 2)
    for _ in range(plan.batches_per_epoch + 1):
        parts = [next(share) for share in shares]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert same(next(whole), joined)
    for feed in (whole, *shares):
        feed.close()


def test_a_state_holds_for_another_number_of_processes():
    plan = some_plan("packed", multiple=4)
    one = Feed(plan)
    for _ in range(3):
        next(one)
    two = Feed(plan, 1, 2)
    two.set_state(one.get_state())
    assert same(next(two), rows_of_process(plan.batch(3), 1, 2))
    one.close()
    two.close()


def test_rows_that_cannot_be_shared_are_refused():
    feed = Feed(some_plan("packed", multiple=4), 0, 3)
    with pytest.raises(ValueError, match="4 rows cannot be shared by 3 processes"):
        next(feed)
    feed.close()


@pytest.mark.parametrize(("arguments", "message"), [((2, 2), "process_index=2"), ((0, 1, -1), "prefetch=-1")])
def test_feeds_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Feed(some_plan("packed"), *arguments)


def test_closing_ends_the_threads_and_the_iteration():
    threads = lambda: {thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")}
    before = threads()
    feed = Feed(some_plan("packed"))
    next(feed)
    assert threads() - before
    feed.close()
    feed.close()
    deadline = time.monotonic() + 10
    while threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads() - before
    with pytest.raises(ValueError, match="closed"):
        next(feed)


def test_a_process_ends_at_once_when_its_feed_is_closed():
    """It does not make the batches that nobody will take: 64 would be 3 seconds' work."""
    program = (
        "import time, numpy as np, sys; from train.data.feed import Feed\n"
        "class Slow:\n"
        "    batches_per_epoch, waste = 1, 0.0\n"
        "    def batch(self, index):\n"
        "        time.sleep(0.2 * (index > 0)); return {'examples': np.array([index])}\n"
        "feed = Feed(Slow(), prefetch=64); next(feed); feed.close()\n"
        "print(time.time(), flush=True); sys.exit(3)"
    )
    here = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True, timeout=60)
    ended = time.time()
    assert (done.returncode, done.stderr) == (3, "")
    assert ended - float(done.stdout) < 2
