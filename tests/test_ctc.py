"""CTC against enumeration of every path: the loss, what a path says, the prefix beam, the best alignment."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoding_jax import ctc
from decoding_jax.ngram import NGram
from train.objectives.ctc_loss import ctc_loss, needed_frames

Text = tuple[int, ...]
BLANK = 2  # neither the first id nor the last
A, B = 0, 1


def says(path: Text) -> Text:
    """Repeats out first, then blanks."""
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != BLANK)


def every_path(log_probs: np.ndarray) -> dict[Text, float]:
    """The log-probability of every path through log_probs [T, V]."""
    size, vocab_size = log_probs.shape
    paths = itertools.product(range(vocab_size), repeat=size)
    return {path: float(sum(log_probs[t, s] for t, s in enumerate(path))) for path in paths}


def every_text(log_probs: np.ndarray) -> dict[Text, float]:
    """The log-probability of every text, summed over its paths."""
    mass: dict[Text, float] = {}
    for path, log_p in every_path(log_probs).items():
        mass[says(path)] = mass.get(says(path), 0.0) + math.exp(log_p)
    return {text: math.log(p) for text, p in mass.items()}


def random_log_probs(rows: int, frames: int, vocab_size: int, seed: int = 1, scale: float = 1.5) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(scale=scale, size=(rows, frames, vocab_size))
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


def padded(texts: list[Text], size: int, filler: int) -> np.ndarray:
    return np.array([[*text, *[filler] * (size - len(text))] for text in texts], np.int32).reshape(len(texts), size)


def lines(tokens: jax.Array, lengths: jax.Array) -> list[Text]:
    """The rows of tokens [N, T], of which nothing may stand past the lengths."""
    rows = list(zip(np.asarray(tokens), np.asarray(lengths), strict=True))
    assert all(not row[n:].any() for row, n in rows)
    return [tuple(row[:n].tolist()) for row, n in rows]


# Empty, one, repeats, all frames needed (5 of 5: A blank A B A), one frame too many needed, padding frames.
TARGETS: list[Text] = [(), (A,), (A, A), (A, A, B, A), (A, A, B, B), (3, B), (), (B, B, B), (A,)]
FRAMES = np.array([5, 5, 4, 5, 5, 3, 0, 4, 0], np.int32)
LENGTHS = np.array([len(text) for text in TARGETS], np.int32)
LOG_PROBS = random_log_probs(len(TARGETS), 5, 4)
FEASIBLE = [True, True, True, True, False, True, True, False, False]

loss_of = jax.jit(lambda log_probs, frames, targets, lengths: ctc_loss(log_probs, frames, targets, lengths, BLANK))
align = jax.jit(lambda *given: ctc.best_path_alignment(*given, BLANK))


@pytest.mark.parametrize("filler", [A, BLANK, 99])
def test_loss_is_that_of_every_path_summed(filler: int) -> None:
    """Ragged frames and targets, repeats, no target, no frames; rows that cannot say their target are told apart."""
    losses, feasible = loss_of(LOG_PROBS, FRAMES, padded(TARGETS, 4, filler), LENGTHS)
    assert feasible.tolist() == FEASIBLE
    for row, text in enumerate(TARGETS):
        every = every_text(LOG_PROBS[row, : FRAMES[row]])
        assert (text in every) == FEASIBLE[row]
        np.testing.assert_allclose(losses[row], -every[text] if FEASIBLE[row] else 0.0, atol=2e-6)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_needed_frames(as_array) -> None:
    """A frame a token and one between equal neighbours, padding not counted, in NumPy and in JAX."""
    needed = needed_frames(as_array(padded(TARGETS, 6, A)), as_array(LENGTHS))
    assert isinstance(needed, type(as_array(LENGTHS))) and needed.dtype == np.int32
    assert needed.tolist() == [0, 1, 3, 5, 6, 2, 0, 5, 1]
    assert needed_frames(as_array(padded([(), ()], 0, A)), as_array(np.zeros(2, np.int32))).tolist() == [0, 0]


def test_gradients_in_float64() -> None:
    """Against central differences in every log-probability; rows that are not feasible and padding frames have none."""
    with jax.enable_x64(True):
        x = jnp.asarray(LOG_PROBS, jnp.float64)
        given = (FRAMES, padded(TARGETS, 4, 99), LENGTHS)
        total = jax.jit(lambda x: loss_of(x, *given)[0].sum())
        got = np.asarray(jax.jit(jax.grad(total))(x))
        assert got.dtype == np.float64
        steps = 1e-5 * jnp.eye(x.size).reshape(x.size, *x.shape)
        each = jax.jit(jax.vmap(total))
        want = (each(x[None] + steps) - each(x[None] - steps)) / 2e-5
        np.testing.assert_allclose(got, np.asarray(want).reshape(x.shape), atol=1e-8)
    for row, frames in enumerate(FRAMES):
        assert not got[row, frames:].any() and (FEASIBLE[row] or not got[row].any())


def test_loss_has_no_nan_and_never_falls_below_0() -> None:
    """Sure frames, impossible symbols, an impossible target and hopeless rows; value and gradient, of long rows too."""
    rows = 4
    sure = np.full((rows, 300, 4), -np.inf, np.float32)
    sure[:, :, BLANK] = 0.0
    sure[0, 7] = [0.0, -np.inf, -np.inf, -np.inf]  # says A for sure
    near = jax.nn.log_softmax(jnp.asarray(random_log_probs(1, 300, 4) * 1e-3).at[:, :, A].add(18.0))
    log_probs = jnp.concatenate([sure, jnp.broadcast_to(near, (1, 300, 4)), random_log_probs(1, 300, 4)])
    targets = padded([(A,), (), (B,), (A,) * 200, (A,), (A, A, A)], 200, BLANK)
    lengths = np.array([1, 0, 1, 200, 1, 3], np.int32)
    frames = np.full(rows + 2, 300, np.int32)
    losses, feasible = loss_of(log_probs, frames, targets, lengths)
    gradient = jax.jit(jax.grad(lambda x: loss_of(x, frames, targets, lengths)[0].sum()))(log_probs)
    assert np.isfinite(losses).all() and np.isfinite(gradient).all() and (np.asarray(losses) >= 0).all()
    assert feasible.tolist() == [True, True, True, False, True, True]
    assert losses[0] == losses[1] == losses[3] == 0.0 and losses[2] > 1e19 and losses[4] < 1e-4
    assert not gradient[3].any() and gradient[0, 7].tolist() == [-1.0, 0.0, 0.0, 0.0]


def test_padding_and_batch_mates_change_nothing() -> None:
    """Law 5: every function gives a row alone, in a batch and behind garbage padding the same."""
    wide = np.concatenate([LOG_PROBS, np.full((len(TARGETS), 2, 4), -0.1, np.float32)], axis=1)
    targets = padded(TARGETS, 4, B)
    losses, aligned = (
        np.asarray(loss_of(LOG_PROBS, FRAMES, targets, LENGTHS)[0]),
        align(LOG_PROBS, FRAMES, targets, LENGTHS),
    )
    found = beam_of(LOG_PROBS, FRAMES, 4, 2)
    for row in range(len(TARGETS)):
        alone = (wide[[row]], FRAMES[[row]], padded([TARGETS[row]], 5, 99), LENGTHS[[row]])
        np.testing.assert_allclose(loss_of(*alone)[0], losses[[row]], rtol=1e-6)
        assert align(*alone)[0, :5].tolist() == aligned[row].tolist() and align(*alone)[0, 5:].tolist() == [BLANK] * 2
        tokens, lengths, scores = beam_of(wide[[row]], FRAMES[[row]], 4, 2)
        assert lines(tokens[0], lengths[0]) == lines(found[0][row], found[1][row])
        np.testing.assert_allclose(scores[0], found[2][row], rtol=1e-6)


def test_collapse_of_every_path() -> None:
    """Tokens, how many, and where each first stood, for every path of 4 symbols and every length."""
    paths = list(itertools.product(range(4), repeat=4))
    for length in range(5):
        lengths = jnp.full(len(paths), length, jnp.int32)
        tokens, kept, at = jax.jit(ctc.collapse)(jnp.asarray(paths, jnp.int32), lengths, BLANK)
        assert lines(tokens, kept) == [says(path[:length]) for path in paths]
        for path, places, n in zip(paths, np.asarray(at), np.asarray(kept), strict=True):
            starts = [t for t in range(length) if path[t] != BLANK and (t == 0 or path[t - 1] != path[t])]
            assert places[:n].tolist() == starts and (places[n:] == 4).all()


def test_best_alignment_of_every_target() -> None:
    """The most probable path that says the target, blanks past the frames and where no path does."""
    paths = np.asarray(align(LOG_PROBS, FRAMES, padded(TARGETS, 4, 99), LENGTHS))
    for row, (text, frames) in enumerate(zip(TARGETS, FRAMES, strict=True)):
        every = every_path(LOG_PROBS[row, :frames])
        saying = [path for path in every if says(path) == text]
        best = max(saying, key=lambda path: every[path]) if saying else (BLANK,) * int(frames)
        assert paths[row].tolist() == [*best, *[BLANK] * (5 - int(frames))]


def test_best_alignment_through_impossible_symbols() -> None:
    """Where the target has probability 0 the path still says it."""
    log_probs = np.full((1, 3, 4), -np.inf, np.float32)
    log_probs[:, :, BLANK] = 0.0
    path = align(log_probs, np.array([3]), np.array([[A, A]]), np.array([2]))
    assert path.tolist() == [[A, BLANK, A]]


beam_of = jax.jit(
    lambda log_probs, lengths, *static: ctc.prefix_beam(log_probs, lengths, BLANK, *static),
    static_argnums=(2, 3, 4, 5),
)


def any_of_equals(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    order = np.random.default_rng(0).permutation(values.shape[1]).astype(np.int32)
    best, index = jax.lax.top_k(values[:, order], count)
    return best, jnp.asarray(order)[index]


@pytest.mark.parametrize(("frames", "vocab_size", "top_k"), [(6, 3, jax.lax.top_k), (4, 4, any_of_equals)])
def test_a_wide_beam_ranks_every_text(frames: int, vocab_size: int, top_k) -> None:
    """Law 9: with room for all prefixes the texts, their order and their probabilities are those of enumeration."""
    log_probs = random_log_probs(3, frames, vocab_size, seed=frames)
    lengths = np.array([frames, frames - 1, 0], np.int32)
    tokens, found, scores = map(np.asarray, beam_of(log_probs, lengths, 128, 9, None, top_k))
    for row, length in enumerate(lengths):
        every = every_text(log_probs[row, :length])
        want = sorted(every, key=lambda text: -every[text])
        assert lines(tokens[row], found[row])[: len(want)] == want
        np.testing.assert_allclose(scores[row, : len(want)], [every[text] for text in want], atol=1e-5)
        assert np.isneginf(scores[row, len(want) :]).all() and not found[row, len(want) :].any()


def plain_beam(log_probs: np.ndarray, width: int, top: int) -> dict[Text, float]:
    """The same search with dictionaries: prefix -> mass of paths that end in a blank, and in its last token."""
    beams = {(): (1.0, 0.0)}
    for frame in np.exp(log_probs.astype(np.float64)):
        tokens = sorted((t for t in range(frame.size) if t != BLANK), key=lambda t: -frame[t])
        after: dict[Text, tuple[float, float]] = {}

        def add(text: Text, in_blank: float, in_token: float, after=after) -> None:
            old = after.get(text, (0.0, 0.0))
            after[text] = (old[0] + in_blank, old[1] + in_token)

        for text, (in_blank, in_token) in beams.items():
            add(text, (in_blank + in_token) * frame[BLANK], in_token * frame[text[-1]] if text else 0.0)
            for token in tokens:
                longer = (*text, token)
                if token in tokens[:top] or longer in beams:
                    source = in_blank if text[-1:] == (token,) else in_blank + in_token
                    add(longer, 0.0, source * frame[token])
        alive = {text: mass for text, mass in after.items() if sum(mass) > 0}
        beams = dict(sorted(alive.items(), key=lambda item: -sum(item[1]))[:width])
    return {text: math.log(sum(mass)) for text, mass in beams.items()}


@pytest.mark.parametrize(("width", "top", "frames", "vocab_size"), [(1, 2, 7, 4), (3, 1, 7, 4), (8, 2, 14, 3)])
def test_a_narrow_beam_is_the_plain_one(width: int, top: int, frames: int, vocab_size: int) -> None:
    """Prefixes that fall out of the beam and come back while longer ones stayed are still merged rightly."""
    log_probs = random_log_probs(100, frames, vocab_size, scale=3.0)
    tokens, found, scores = map(np.asarray, beam_of(log_probs, np.full(100, frames, np.int32), width, top))
    for row in range(100):
        want = plain_beam(log_probs[row], width, top)
        assert lines(tokens[row], found[row])[: len(want)] == list(want)
        np.testing.assert_allclose(scores[row, : len(want)], list(want.values()), atol=1e-4)
        assert np.isneginf(scores[row, len(want) :]).all()


def sharp(path: Text) -> np.ndarray:
    """Log-probabilities [1, T, 4] of frames that say this path almost surely."""
    return np.asarray(jax.nn.log_softmax(10.0 * jax.nn.one_hot(jnp.asarray([path]), 4)))


@pytest.mark.parametrize("path", [(A, BLANK, A, A), (BLANK,) * 4, (A, A, B, A), (BLANK, B, BLANK, B)])
def test_greedy_and_narrow_beams_say_what_the_path_says(path: Text) -> None:
    """`A blank A A` is AA: nothing is merged in the output. All blanks say nothing; no beam ever holds a blank."""
    log_probs, lengths = sharp(path), np.array([4], np.int32)
    tokens, kept, _ = ctc.collapse(jnp.argmax(log_probs, axis=2), jnp.asarray(lengths), BLANK)
    assert lines(tokens, kept) == [says(path)]
    for width in (1, 4):
        tokens, found, _ = beam_of(log_probs, lengths, width, 1)
        texts = lines(tokens[0], found[0])
        assert texts[0] == says(path) and all(BLANK not in text for text in texts)


def test_the_blank_takes_no_place_among_the_top() -> None:
    """With top=1 the best token is tried also where the blank is more probable than every token."""
    log_probs = np.log(np.tile(np.array([0.3, 0.1, 0.6, 1e-9], np.float32), (1, 4, 1)))
    tokens, lengths, _ = beam_of(log_probs, np.array([1], np.int32), 4, 1)
    assert lines(tokens[0], lengths[0]) == [(), (A,), (), ()]


ALPHA, BETA = 0.7, 0.4
LM = NGram.train([[A, B, A, 3], [A, A, 3], [B, 3, 3]], order=2, vocab_size=4)


def fuse(tokens: jax.Array, lengths: jax.Array, candidates: jax.Array) -> jax.Array:
    return ALPHA * LM.log_prob(tokens, lengths, candidates) + BETA


def test_fusion_ranks_by_the_sum_and_merges_by_the_paths() -> None:
    """The score of every text is its log-probability and alpha log p_lm + beta for each of its tokens."""
    log_probs = random_log_probs(2, 4, 4, seed=8)
    tokens, found, scores = beam_of(log_probs, np.full(2, 4, np.int32), 128, 3, fuse)
    known = [text for size in range(4) for text in itertools.product((A, B, 3), repeat=size)]
    lengths = np.array([len(text) for text in known], np.int32)
    law = jax.jit(LM.log_prob)(padded(known, 3, 0), lengths, np.tile(np.arange(4, dtype=np.int32), (len(known), 1)))
    added: dict[Text, float] = {(): 0.0}
    for text, log_p in zip(known, np.asarray(law), strict=True):
        added |= {(*text, token): added[text] + ALPHA * float(log_p[token]) + BETA for token in (A, B, 3)}
    for row in range(2):
        every = {text: log_p + added[text] for text, log_p in every_text(log_probs[row]).items()}
        want = sorted(every, key=lambda text: -every[text])
        assert lines(tokens[row], found[row])[: len(want)] == want
        np.testing.assert_allclose(scores[row, : len(want)], [every[text] for text in want], atol=1e-5)


def test_fusion_steers_a_narrow_beam() -> None:
    """What fusion forbids is not found, and it may say anything of a blank, which is never appended."""

    def only_b(tokens: jax.Array, lengths: jax.Array, candidates: jax.Array) -> jax.Array:
        del tokens, lengths
        return jnp.where(candidates == BLANK, jnp.nan, jnp.where(candidates == B, 0.0, -jnp.inf))

    tokens, found, scores = beam_of(sharp((A, BLANK, A)), np.array([3], np.int32), 2, 3, only_b)
    assert not np.isnan(scores).any() and all(set(text) <= {B} for text in lines(tokens[0], found[0]))
