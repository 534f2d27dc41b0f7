"""Tokenizers made from training texts, and the token ids of data sets."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from decoding_jax.checkpoints import Tokenizer
from train.data import examples as examples_module
from train.data.examples import tokenise
from train.data.tokenizers import make_tokenizer

HARD = "Größe  zählt:\n\n  你好。世界 😀 naïve\t<eos> it's 1234\r\n"
KINDS = ("characters", "bytes", "bpe")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Stands for a data set: lists of dicts as splits."""

    splits: Mapping[str, Sequence[Mapping[str, str]]]
    fields: tuple[str, ...] = ("text",)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([dict(self.splits), self.fields]).encode()).hexdigest()


def documents(*texts: str, **others: Sequence[str]) -> Texts:
    splits = {"train": texts, **others}
    return Texts({name: [{"text": text} for text in split] for name, split in splits.items()})


def pairs(*texts: tuple[str, str]) -> Texts:
    return Texts({"train": [{"source": a, "target": b} for a, b in texts]}, ("source", "target"))


def made(kind: str, texts: Texts, vocab_size: int = 280, path: Path | str = "") -> Tokenizer:
    return make_tokenizer({"kind": kind, "vocab_size": vocab_size, "path": str(path)}, texts)


def settings(batching: str, length: int = 64, overlong: str = "drop") -> dict[str, Any]:
    return {"batching": batching, "length": length, "overlong": overlong, "markup": False}


# --- Tokenizers


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_reads_and_writes_the_same(kind, tmp_path):
    ours = made(kind, documents(HARD, "more"))
    ours.save(tmp_path)
    theirs = Tokenizer.from_folder(tmp_path)
    for text in (HARD, HARD[::-1], " ", "", "  a  "):
        ids = ours.encode(text)
        assert theirs.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert theirs.vocabulary_digest() == ours.vocabulary_digest()
    assert (theirs.eos_ids, theirs.bos_id, theirs.named_tokens) == (ours.eos_ids, ours.bos_id, ours.named_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_text_back(kind):
    tokenizer = made(kind, documents(HARD))
    text = HARD.replace("<eos>", "")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert b"".join(tokenizer.token_bytes[i] for i in tokenizer.encode(text)) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_first_and_are_not_put_around_a_text(kind):
    tokenizer = made(kind, documents(HARD))
    unknown = {"<unk>": 3} if kind == "characters" else {}
    assert tokenizer.special_ids == {"<eos>": 0, "<bos>": 1, "<mask>": 2} | unknown
    assert (tokenizer.eos_ids, tokenizer.bos_id) == ((0,), 1)
    assert min(tokenizer.encode("it's")) > 3


def test_bpe_has_the_asked_size_and_spells_what_it_never_saw():
    tokenizer = made("bpe", pairs(("the cat and the dog", "die Katze und der Hund " * 3)), vocab_size=265)
    assert tokenizer.vocab_size == 265
    assert tokenizer.decode(tokenizer.encode("日本 ß")) == "日本 ß"
    assert len(tokenizer.encode(" Katze")) < len(" Katze")  # the target side counts as well


def test_bpe_stops_where_no_pair_occurs_twice():
    assert made("bpe", documents("abcd"), vocab_size=300).vocab_size == 259


def test_bytes_need_no_texts_of_their_own():
    assert made("bytes", documents("a")).vocab_size == 259
    assert len(made("bytes", documents("a")).encode("ü😀")) == 6


def test_characters_are_sorted_and_others_are_unknown():
    tokenizer = made("characters", documents("ba", "cab", validation=["z"]))
    assert tokenizer.encode("abc") == [4, 5, 6]
    assert tokenizer.encode("azzb") == [4, 3, 3, 5]
    assert tokenizer.decode([4, 3, 5]) == "ab"


def test_the_same_texts_make_the_same_vocabulary_in_another_process():
    """Among many pairs of equal counts, neither hash seeds nor threads choose."""
    program = (
        "from types import SimpleNamespace as N; from train.data.tokenizers import make_tokenizer as m;"
        "words = [a + b + c for a in 'abcdefgh' for b in 'ijklmn' for c in 'opqrst'];"
        "t = N(splits={'train': [{'text': ' '.join(words)}] * 2}, fields=('text',));"
        "print(m({'kind': 'bpe', 'vocab_size': 320}, t).backend.to_str())"
    )
    here = Path(__file__).parents[1]
    run = lambda seed: subprocess.run(
        [sys.executable, "-c", program],
        cwd=here,
        env=os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    words = [a + b + c for a in "abcdefgh" for b in "ijklmn" for c in "opqrst"]
    assert run("7").strip() == made("bpe", documents(*[" ".join(words)] * 2), vocab_size=320).backend.to_str()


def test_a_tokenizer_from_a_folder_or_its_file(tmp_path):
    ours = made("bpe", documents(HARD * 3))
    ours.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert made("file", documents("x"), path=path).encode(HARD) == ours.encode(HARD)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "words"}, r"kind='words'.*characters, bytes, bpe, file"),
        ({"kind": "bpe", "vocab_size": 258}, "vocab_size=258.*at least 259"),
        ({"kind": "file", "path": ""}, "path=''.*no tokenizer.json"),
        ({"kind": "file", "path": "nowhere"}, "path='nowhere'.*no tokenizer.json"),
    ],
)
def test_settings_of_tokenizers_that_cannot_be_used(changed, message):
    with pytest.raises(ValueError, match=message):
        make_tokenizer({"kind": "bytes", "vocab_size": 300, "path": ""} | changed, documents("a"))


def test_a_tokenizer_needs_a_training_split():
    with pytest.raises(ValueError, match=r"no split 'train'.*only test"):
        made("characters", Texts({"test": [{"text": "a"}]}))


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    Tokenizer(tokenizers.Tokenizer(models.BPE())).save(tmp_path)
    with pytest.raises(ValueError, match="names no token that ends a text"):
        made("file", documents("a"), path=tmp_path)


# --- Token ids


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_ids_of_the_texts_and_an_end(kind, tmp_path):
    texts = pairs(("a  b", "ä\n"), ("b", "😀 a"))
    tokenizer = made(kind, texts)
    found = tokenise(texts, "train", tokenizer, settings("bucketed"), tmp_path)
    for field in texts.fields:
        for i, example in enumerate(texts.splits["train"]):
            assert found.fields[field][i].tolist() == [*tokenizer.encode(example[field]), 0]
        assert found.fields[field].tokens.dtype == np.int32
    assert found.characters == len("ä\n") + len("😀 a")
    assert (found.dropped, found.cut, found.empty, found.unknown) == (0, 0, 0, 0)
    assert (found.eos_id, found.start_id, found.places.tolist()) == (0, 1, [0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_written_in_the_data_are_text(kind, tmp_path):
    texts = documents("end <eos><bos> <mask>")
    tokenizer = made(kind, texts)
    row = tokenise(texts, "train", tokenizer, settings("packed"), tmp_path).fields["text"][0]
    assert min(row[:-1]) > 3 and row[-1] == 0
    assert tokenizer.decode(row) == "end <eos><bos> <mask>"


def test_markup_in_the_data_is_read_as_special_tokens(tmp_path):
    texts = documents("a<mask>b")
    tokenizer = made("characters", texts)
    of = lambda markup: tokenise(texts, "train", tokenizer, settings("packed") | {"markup": markup}, tmp_path)
    assert of(True).fields["text"][0].tolist() == [*tokenizer.encode("a"), 2, *tokenizer.encode("b"), 0]
    assert 2 not in of(False).fields["text"][0]  # and the two are not one cache entry


def test_tokens_that_a_tokenizer_puts_around_a_text_are_left_out(tmp_path):
    tokenizer = made("bytes", documents("a"))
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 0)]
    )
    adding = Tokenizer(backend, tokenizer.named_tokens)
    assert adding.encode("a")[0] == 1
    row = tokenise(documents("a"), "train", adding, settings("packed"), tmp_path).fields["text"][0]
    assert row.tolist() == [*tokenizer.encode("a"), 0]


@pytest.mark.parametrize(
    ("overlong", "kept", "characters"), [("drop", ["abc", "ab"], 3), ("cut", ["abc", "abc", "ab"], 5)]
)
def test_overlong_documents(overlong, kept, characters, tmp_path):
    """abc and its <eos> just fit into 4. The first token of a document is not predicted, so it does not count."""
    texts = documents("abc", "abcd", "ab", "")
    tokenizer = made("characters", texts)
    found = tokenise(texts, "train", tokenizer, settings("packed", 4, overlong), tmp_path)
    rows = found.fields["text"]
    assert [tokenizer.decode(rows[i]) for i in range(len(rows))] == kept
    assert all(rows[i][-1] == 0 for i in range(len(rows)))
    assert found.characters == characters
    assert (found.dropped, found.cut, found.empty) == ((1, 0, 1) if overlong == "drop" else (0, 1, 1))


@pytest.mark.parametrize("long_side", [0, 1])
def test_a_pair_is_dropped_or_cut_when_either_side_is_too_long(long_side, tmp_path):
    pair = ("ab", "abcdef") if long_side else ("abcdef", "ab")
    texts = pairs(("a", "b"), pair, ("", "b"), ("a", ""))
    tokenizer = made("characters", texts)
    dropped = tokenise(texts, "train", tokenizer, settings("bucketed", 5, "drop"), tmp_path)
    assert (dropped.dropped, dropped.empty, dropped.places.tolist()) == (1, 2, [0])
    cut = tokenise(texts, "train", tokenizer, settings("bucketed", 5, "cut"), tmp_path)
    sides = [tokenizer.decode(cut.fields[field][1]) for field in texts.fields]
    assert (cut.cut, cut.empty, sides) == (1, 2, [side[:4] for side in pair])
    assert cut.characters == 1 + len(pair[1][:4])


def test_a_stream_has_ends_only_between_several_documents(tmp_path):
    one, two = documents("abc" * 9), documents("abc", "", "d")
    tokenizer = made("characters", two)
    assert (
        tokenise(one, "train", tokenizer, settings("windows", 4), tmp_path).fields["text"][0].tolist() == [4, 5, 6] * 9
    )
    several = tokenise(two, "train", tokenizer, settings("windows", 4), tmp_path)
    assert several.fields["text"].tokens.tolist() == [4, 5, 6, 0, 7, 0]
    assert (several.empty, several.places.tolist()) == (1, [0, 2])


def test_unknown_characters_are_counted(tmp_path):
    texts = documents("ab", validation=["axb", "yz"])
    found = tokenise(texts, "validation", made("characters", texts), settings("packed"), tmp_path)
    assert found.unknown == 3


class _Once(list):  # type: ignore[type-arg]
    """Examples that can be read only once."""

    def __getitem__(self, index: Any) -> Any:
        example, self[index] = super().__getitem__(index), None
        assert example is not None, "read again"
        return example


def test_a_second_run_reads_the_cache_and_reports_the_same(tmp_path):
    digest = "d"
    texts = dataclasses.make_dataclass("T", ["splits", "fields", "digest"])(
        {"train": _Once([{"text": "abc"}, {"text": "abcdefgh"}, {"text": ""}])}, ("text",), digest
    )
    tokenizer = made("bytes", documents("a"))
    first, second = (tokenise(texts, "train", tokenizer, settings("packed", 6, "cut"), tmp_path) for _ in range(2))
    assert np.array_equal(first.fields["text"].tokens, second.fields["text"].tokens)
    assert np.array_equal(first.fields["text"].offsets, second.fields["text"].offsets)
    counts = lambda found: [found.characters, found.dropped, found.cut, found.empty, found.unknown]
    assert counts(first) == counts(second) == [6, 0, 1, 1, 0]  # nothing predicts a document's first byte


def test_the_cache_knows_texts_tokenizer_and_settings_apart(tmp_path):
    texts = documents("abcab", "ab")
    characters, byte_level = made("characters", texts), made("bytes", texts)
    made_of = lambda texts, tokenizer, **changed: tokenise(
        texts, "train", tokenizer, settings("packed", 4, "cut") | changed, tmp_path
    ).fields["text"]
    first = made_of(texts, characters)
    assert made_of(documents("b"), characters).tokens.tolist() == [5, 0]
    assert made_of(texts, byte_level)[1].tolist() != first[1].tolist()
    assert len(made_of(texts, characters, overlong="drop")) == 1
    assert made_of(texts, characters, length=3).lengths.tolist() == [3, 3]
    assert made_of(texts, characters, batching="windows").lengths.tolist() == [6, 3]
    assert np.array_equal(made_of(texts, characters).tokens, first.tokens)


def test_a_damaged_cache_is_made_again(tmp_path, caplog):
    texts = documents("abc")
    tokenizer = made("bytes", texts)
    first = tokenise(texts, "train", tokenizer, settings("packed"), tmp_path).fields["text"].tokens.tolist()
    (file,) = tmp_path.glob("train-*/text.npy")
    file.write_bytes(file.read_bytes()[:-4])
    assert tokenise(texts, "train", tokenizer, settings("packed"), tmp_path).fields["text"].tokens.tolist() == first
    assert "damaged" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_in_pieces_has_the_ids_of_the_whole(kind, monkeypatch, tmp_path):
    text = "Ein Wort.\nNoch eines,\n\n und  mehr \nam Ende\nZeile\n\tEinzug\nüber\n你好\n😀\n"
    texts = documents(text)
    tokenizer = made(kind, texts)
    monkeypatch.setattr(examples_module, "_CHARACTERS_AT_ONCE", 5)
    assert len(list(examples_module._pieces(tokenizer.backend, text))) > 4
    found = tokenise(texts, "train", tokenizer, settings("windows", 8), tmp_path)
    assert found.fields["text"].tokens.tolist() == tokenizer.encode(text)


def test_a_long_text_stays_whole_where_its_beginning_is_special(monkeypatch):
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("▁ab\n")}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    monkeypatch.setattr(examples_module, "_CHARACTERS_AT_ONCE", 2)
    (ids,) = examples_module._encode(backend, ["ab\nab\nab"])
    assert ids.tolist() == backend.encode("ab\nab\nab").ids


@pytest.mark.parametrize(
    ("texts", "changed", "message"),
    [
        (documents("a"), {"batching": "buckets"}, "batching='buckets'.*windows, packed, bucketed"),
        (
            documents("a"),
            {"batching": "bucketed"},
            r"needs the fields \('source', 'target'\).*choose windows or packed",
        ),
        (pairs(("a", "b")), {"batching": "packed"}, r"needs the fields \('text',\).*choose bucketed"),
        (documents("a"), {"length": 1}, "length=1: must be a whole number of at least 2"),
        (documents("a"), {"overlong": "keep"}, "overlong='keep'"),
        (documents("", "abcdef"), {"length": 3}, "no example left of 2 .1 are longer than data.length=3, 1 are empty"),
    ],
)
def test_texts_that_cannot_be_tokenised(texts, changed, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tokenise(texts, "train", made("bytes", texts), settings("packed") | changed, tmp_path)


def test_a_split_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"split='test'.*only train"):
        tokenise(documents("a"), "test", made("bytes", documents("a")), settings("packed"), tmp_path)


def test_an_output_begins_behind_the_end_where_there_is_no_beginning(tmp_path):
    plain = made("bytes", documents("a"))
    tokenizer = Tokenizer(plain.backend, {"eos_token": "<eos>"})
    found = tokenise(pairs(("a", "b")), "train", tokenizer, settings("bucketed"), tmp_path)
    assert found.start_id == found.eos_id == 0
