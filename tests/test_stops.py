"""What ends a row: ids, stop strings across token borders, and the text, ids and log-probabilities cut alike."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

import decoding_jax as dj
from decoding_jax.stops import Automaton, advance_strings, stop_arrays


def first_match(text: bytes, patterns: list[bytes]) -> tuple[int, int] | None:
    """Start and end of the match that is completed first, the longest of those; by looking everywhere."""
    for end in range(len(text) + 1):
        starts = [end - len(p) for p in patterns if text[:end].endswith(p)]
        if starts:
            return min(starts), end
    return None


def held_back(text: bytes, patterns: list[bytes]) -> int:
    """How many last bytes may still become a match."""
    return max(n for n in range(len(text) + 1) if not n or any(p.startswith(text[-n:]) for p in patterns))


@pytest.mark.parametrize("seed", range(40))
def test_the_automaton_finds_what_a_search_finds(seed: int) -> None:
    """Overlapping, nested and repeating patterns over two letters: the first completed match, else what is held."""
    rng = np.random.default_rng(seed)
    letters = lambda n: bytes(rng.choice([97, 98], size=n).tolist())
    patterns = [letters(rng.integers(1, 6)) for _ in range(rng.integers(1, 5))]
    automaton = Automaton(patterns)
    for _ in range(20):
        text = letters(rng.integers(0, 14))
        at = int(rng.integers(0, len(text) + 1))  # in two pieces, as tokens come
        state, end = automaton.feed(0, text[:at])
        if end is None:
            state, end = automaton.feed(state, text[at:])
            end = None if end is None else at + end
        match = first_match(text, patterns)
        assert end == (None if match is None else match[1])
        assert automaton.cut(text) == (text if match is None else text[: match[0]])
        assert match or automaton.depth[state] == held_back(text, patterns)


def test_a_pattern_inside_another_ends_the_search_first() -> None:
    """`bcd` is complete before `abcde`, so it counts; of two that end together the longer one does."""
    assert Automaton([b"abcde", b"bcd"]).cut(b"xabcde") == b"xa"
    assert Automaton([b"cd", b"abcd"]).cut(b"xabcd") == b"x"


# Tokens of several bytes, halves of characters, an unused end of the table, and two special tokens.
PIECES = [b"a", b"b", b"ab", b"ba", b"bab", b"\xc3", b"\xa9", "é".encode(), b"\xe2\x82", b"\xac", b"", b""]
EOS, SPECIAL = 10, 11
TOKENIZER = zoo.ByteTokenizer(PIECES)
TOY = zoo.history_cached(len(PIECES), seed=4, scale=0.5, tokenizer=TOKENIZER)
PROMPTS = [[0, 1], [1], [3, 4, 5], [7]]
DECODERS = {
    "plain": dj.Autoregressive(),
    "lookup": dj.PromptLookup(num_draft=4),
    "tree": zoo.TreeLookup(compare=False),
}
BUDGET = 20


def test_the_device_agrees_with_the_host() -> None:
    """The loop's automaton, fed token by token, is hit by the same token as a search over the bytes."""
    patterns = [b"abb", b"bab", "é€".encode()]
    tables = jax.device_put(stop_arrays(dj.Stop(), Automaton(patterns), (), len(PIECES), PIECES)).strings
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 10, size=(64, 12))
    rows[:3, 3:6] = [[7, 8, 9], [5, 6, 8], [6, 7, 8]]
    state, hit = jnp.zeros(64, jnp.int32), np.zeros((64, 12), bool)
    for at in range(12):
        state, now = advance_strings(tables, state, jnp.asarray(rows[:, at], jnp.int32))
        hit[:, at] = now
    for row, tokens in enumerate(rows):
        text = [b"".join(PIECES[t] for t in tokens[: n + 1]) for n in range(12)]
        found = [first_match(t, patterns) is not None for t in text]
        assert hit[row].any() == any(found)
        assert not any(found) or int(hit[row].argmax()) == found.index(True)


def cut(tokens: list[int], strings: list[str], ids: tuple[int, ...]) -> tuple[list[int], str, str]:
    """Tokens, text and reason of a row that would go on as `tokens` for ever."""
    patterns = [s.encode() for s in strings]
    for n in range(1, len(tokens) + 1):
        data = b"".join(PIECES[t] for t in tokens[:n])
        match = first_match(data, patterns)
        if match:
            data = data[: match[0]]
        reason = "eos" if tokens[n - 1] == EOS else "stop" if match or tokens[n - 1] in ids else "length"
        if reason != "length" or n == len(tokens):
            return tokens[:n], data.decode("utf-8", errors="replace"), reason
    return [], "", "length"


STOPS: dict[str, tuple[list[str], tuple[int, ...]]] = {
    "across tokens": (["abba", "bbb"], ()),
    "overlapping": (["aba", "bab", "ab"], ()),
    "characters": (["é", "€a"], ()),
    "several": (["aa", "bb", "éé"], (8,)),
    "rare": (["abababababab"], ()),
}


@functools.cache
def endless(seed: int) -> dj.DecodeOutput:
    return dj.decode(TOY.model, PROMPTS, max_new_tokens=BUDGET, sampling=dj.Sampling(temperature=1.0), seed=seed)


@pytest.mark.parametrize("name", list(STOPS))
@pytest.mark.parametrize("decoder", list(DECODERS.values()), ids=list(DECODERS))
def test_text_ids_and_log_probs_are_cut_alike(decoder: Any, name: str) -> None:
    """The row ends with the token that completes a stop, also inside an accepted block; the text before it."""
    strings, ids = STOPS[name]
    for seed in range(6):
        out = dj.decode(
            TOY.with_eos(EOS),
            PROMPTS,
            decoder,
            max_new_tokens=BUDGET,
            sampling=dj.Sampling(temperature=1.0),
            stop=dj.Stop(ids, strings),
            seed=seed,
        )
        for row, tokens in enumerate(zoo.outputs(endless(seed))):
            kept, text, reason = cut(tokens, strings, ids)
            assert zoo.outputs(out)[row] == kept
            assert out.text is not None and out.text[row] == text
            assert out.finish_reason[row] == reason
            np.testing.assert_allclose(
                out.log_probs[row, : len(kept)], endless(seed).log_probs[row, : len(kept)], atol=1e-5
            )
            assert not out.log_probs[row, len(kept) :].any()
            assert out.stats.tokens[row] == out.lengths[row] == len(kept)


@pytest.mark.parametrize("decoder", list(DECODERS.values()), ids=list(DECODERS))
def test_streamed_text_is_never_taken_back(decoder: Any) -> None:
    """Law 6: the chunks' texts add up to the text, each is final, and a half character is never shown."""
    strings, ids = STOPS["characters"]
    strings = [*strings, "abab"]
    arguments: Any = {"max_new_tokens": BUDGET, "sampling": dj.Sampling(temperature=1.0)}
    for seed in range(6):
        arguments |= {"stop": dj.Stop(ids, strings), "seed": seed}
        whole = dj.decode(TOY.with_eos(EOS), PROMPTS, decoder, **arguments)
        texts, tokens = [""] * 4, [[] for _ in PROMPTS]  # type: list[str], list[list[int]]
        for chunk in dj.stream(TOY.with_eos(EOS), PROMPTS, decoder, **arguments):
            texts[chunk.row] += chunk.text
            tokens[chunk.row] += chunk.tokens
            assert whole.text is not None and whole.text[chunk.row].startswith(texts[chunk.row])
        assert texts == whole.text and tokens == zoo.outputs(whole)


def scripted(tokens: list[int]) -> dj.Model:
    """A model that says `tokens` one after the other, from the first one on; each may occur once."""
    table = np.zeros((len(PIECES), len(PIECES)), np.float32)
    for now, then in itertools.pairwise(tokens):
        table[now, then] = 9.0
    return zoo.table_model(table, eos_ids=(EOS,), tokenizer=TOKENIZER).model


@pytest.mark.parametrize(
    ("script", "strings", "texts"),
    [
        ([0, 5, 6, 1, EOS], [], ["", "é", "b", ""]),
        ([0, 8, 9, EOS], [], ["", "€", ""]),
        ([0, 8, 1, EOS], [], ["", "\ufffdb", ""]),
        ([0, 1, 5, EOS], [], ["b", "", "\ufffd"]),
        ([1, 0, 3, 2, EOS], ["aba", "abb"], ["", ""]),
        ([1, 0, 7, 2, EOS], ["abb", "aé!"], ["", "", "aé", "ab"]),
        ([0, 1, 2, EOS], ["abab", "bb"], ["", "b", "ab"]),
    ],
    ids=[
        "half a character",
        "two thirds",
        "a broken one",
        "an open one",
        "a match",
        "none",
        "a partial match at the end",
    ],
)
def test_what_a_stream_holds_back(script: list[int], strings: list[str], texts: list[str]) -> None:
    """Law 6: possible matches and half characters wait for the next token, and the last chunk gives up waiting."""
    chunks = list(dj.stream(scripted(script), [script[:1]], max_new_tokens=8, stop=dj.Stop(strings=strings or ["zzz"])))
    assert [chunk.text for chunk in chunks] == texts


def test_an_end_of_sequence_outranks_a_stop_and_a_full_budget() -> None:
    """The reason is "eos" for an EOS id that is a stop id too or the last of the budget; a stop id says "stop"."""
    model = scripted([0, 1, EOS])
    assert dj.decode(model, [[0]], max_new_tokens=2, stop=dj.Stop([EOS])).finish_reason == ["eos"]
    assert dj.decode(model, [[0]], max_new_tokens=2, stop=dj.Stop([1])).finish_reason == ["stop"]
    assert dj.decode(model, [[0]], max_new_tokens=1).finish_reason == ["length"]


def test_special_tokens_named_as_stop_strings_stop_by_id() -> None:
    """A special token has no bytes in the text: its name as a stop string stands for its id."""
    out = dj.decode(scripted([0, SPECIAL, 1, EOS]), [[0]], max_new_tokens=4, stop=dj.Stop(strings=["<11>"]))
    assert zoo.outputs(out) == [[SPECIAL]] and out.finish_reason == ["stop"] and out.text == [""]


def test_stops_may_be_forbidden_for_a_while() -> None:
    """min_new_tokens holds back EOS ids and stop ids alike, at every node of a draft."""
    for decoder in DECODERS.values():
        out = dj.decode(
            TOY.with_eos(EOS),
            PROMPTS,
            decoder,
            max_new_tokens=BUDGET,
            sampling=dj.Sampling(temperature=1.0, min_new_tokens=9),
            stop=dj.Stop([0, 1, 2], ["zz"]),
        )
        assert (out.lengths >= 10).all() and set(out.finish_reason) <= {"eos", "stop"}


def test_the_prompt_is_not_searched() -> None:
    """A stop string that begins in the prompt, or lies in it, is no match: only new text counts."""
    out = dj.decode(scripted([0, 1, 2, EOS]), [[0]], max_new_tokens=4, stop=dj.Stop(strings=["aba"]))
    assert out.text == ["bab"] and out.finish_reason == ["eos"]


@pytest.mark.parametrize("entries", [4, 20], ids=["fewer ids than the model", "more ids than the model"])
def test_tokenizers_may_have_another_size(entries: int) -> None:
    """A padded embedding emits ids that no token has: they add no text; a larger table is cut, not an error."""
    tokenizer = zoo.ByteTokenizer((PIECES * 2)[:entries])
    model = dataclasses.replace(scripted([0, 5, 1, 6, EOS]), tokenizer=tokenizer)
    out = dj.decode(model, [[0]], max_new_tokens=8, stop=dj.Stop(strings=["zz"]))
    assert zoo.outputs(out) == [[5, 1, 6, EOS]]
    assert out.text == ["b" if entries == 4 else "\ufffdb\ufffd"]


def test_other_stop_strings_compile_nothing() -> None:
    """Law 10: the automaton's tables are padded, so strings of like size share a program."""
    call = functools.partial(dj.decode, scripted([0, 1, EOS]), [[0]], max_new_tokens=8)
    call(stop=dj.Stop(strings=["zz"]))
    with dj.compile_clock() as clock:
        assert call(stop=dj.Stop(strings=["b", "aaaa", "é"])).finish_reason == ["stop"]
    assert clock.programs == 0


@pytest.mark.parametrize(
    ("stop", "name"),
    [
        (dj.Stop(strings=[""]), "stop.strings"),
        (dj.Stop(strings=[3]), "stop.strings"),  # type: ignore[list-item]
        (dj.Stop([12]), "stop.token_ids"),
        (dj.Stop([-1]), "stop.token_ids"),
        (dj.Stop([1.0]), "stop.token_ids"),  # type: ignore[list-item]
    ],
)
def test_impossible_stops_are_refused(stop: dj.Stop, name: str) -> None:
    """An empty string, a thing that is no text and an unknown id are ValueErrors that name the field."""
    with pytest.raises(ValueError, match=name):
        dj.decode(scripted([0, 1]), [[0]], max_new_tokens=2, stop=stop)


def test_stop_strings_need_a_tokenizer() -> None:
    """Without a tokenizer there is no text to search; the error names the remedy."""
    with pytest.raises(ValueError, match=r"stop\.token_ids"):
        dj.decode(zoo.bigram(4).model, [[0]], max_new_tokens=2, stop=dj.Stop(strings=["a"]))


def test_text_with_half_a_surrogate_pair_is_refused() -> None:
    """Bytes that are no UTF-8 reach a program so; the tokenizer's own error would name neither value nor remedy."""
    model = dataclasses.replace(zoo.bigram(12).model, tokenizer=zoo.ByteTokenizer(PIECES))
    with pytest.raises(ValueError, match="no character; give UTF-8"):
        dj.decode(model, "a\ud800", max_new_tokens=1)
