"""Texts as token ids: made once, kept in a cache folder, read through memory maps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import tokenizers
import tqdm

from decoding_jax.checkpoints import Tokenizer
from decoding_jax.checkpoints.cache_files import cached_folder
from train.data.tokenizers import digest_of_tokenizer, start_id_of, unknown_id_of

if TYPE_CHECKING:
    from train.data.texts import Split, Texts

FIELDS = {"windows": ("text",), "packed": ("text",), "bucketed": ("source", "target")}

_FORMAT = 2  # of the cached files and of what they hold
_CHARACTERS_AT_ONCE = 1 << 18
_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
_COUNTS = "counts.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, one behind the other: row i is tokens[offsets[i] : offsets[i + 1]].

    Attributes:
      tokens: i32[total].
      offsets: i64[n + 1], from 0 to total.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """i64[n]."""
        return np.diff(self.offsets)


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """The token ids of a split.

    Attributes:
      split: its name, for messages.
      fields: "text", or "source" and "target"; rows of the same number belong together.
      places: i64[n], which example of the split each row is.
      characters: of the kept "text" or "target" side that are predicted, for bits per character.
      dropped: examples that were left out because they are longer than `length`.
      cut: examples that were shortened to `length`.
      empty: examples that were left out because a side of them has no token.
      unknown: tokens that stand for something the vocabulary lacks.
      eos_id: the token that ends a row.
      start_id: the token that a decoder's output begins behind: <bos>, or <eos> of a tokenizer without one.
    """

    split: str
    fields: Mapping[str, Ragged]
    places: np.ndarray
    characters: int
    dropped: int
    cut: int
    empty: int
    unknown: int
    eos_id: int
    start_id: int

    def __len__(self) -> int:
        return len(self.places)


def tokenise(texts: Texts, split: str, tokenizer: Tokenizer, settings: Mapping[str, Any], cache: Path) -> Examples:
    """The token ids of a split, from the cache where they have been made before.

    Each text becomes its ids and <eos>, never with <bos>; special tokens that are written out in a text are
    text, or with `markup` the tokens themselves. For "windows" the split is one stream: its documents one behind the
    other, each with an <eos> where there are several, of any length.

    Args:
      texts: the data set.
      split: the name of the split.
      tokenizer: from `make_tokenizer`.
      settings: the `data` part of a config; `batching`, `length`, `overlong` and `markup` are read. An example of
        which a side is longer than `length` tokens, <eos> included, is left out ("drop") or shortened to `length` with
        its <eos> kept ("cut").
      cache: the folder in which a folder of this split's arrays is made.

    Raises:
      ValueError: a setting cannot be used, the texts do not suit the batching, no example is left, or the cache
        cannot be written.
    """
    _check(texts, split, settings)
    if not tokenizer.eos_ids:
        raise ValueError(
            "the tokenizer names no end-of-sequence token; give its eos_token in tokenizer_config.json beside it"
        )
    stream = settings["batching"] == "windows"
    form = {
        "format": _FORMAT,
        "texts": [texts.digest, split, *texts.fields],
        "tokenizer": digest_of_tokenizer(tokenizer),
        "stream": stream,
        "markup": settings["markup"],
        "limit": None if stream else [settings["length"], settings["overlong"]],
    }
    digest = hashlib.sha256(json.dumps(form).encode()).hexdigest()
    folder = cached_folder(
        cache / f"{split}-{digest[:24]}", functools.partial(_write, texts, split, tokenizer, settings)
    )
    array = lambda name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
    return Examples(
        split=split,
        fields={field: Ragged(array(field), array(f"{field}_offsets")) for field in texts.fields},
        places=array("places"),
        eos_id=tokenizer.eos_ids[0],
        start_id=start_id_of(tokenizer),
        **json.loads((folder / _COUNTS).read_text(encoding="utf-8")),
    )


def _check(texts: Texts, split: str, settings: Mapping[str, Any]) -> None:
    batching, length, overlong = settings["batching"], settings["length"], settings["overlong"]
    if split not in texts.splits:
        raise ValueError(f"split={split!r}: the data set has only {', '.join(texts.splits) or 'no splits'}")
    if batching not in FIELDS:
        raise ValueError(f"data.batching={batching!r}: there is no such batching; choose one of {', '.join(FIELDS)}")
    if tuple(texts.fields) != FIELDS[batching]:
        fitting = " or ".join(name for name, fields in FIELDS.items() if fields == tuple(texts.fields))
        raise ValueError(
            f"data.batching={batching!r} needs the fields {FIELDS[batching]}, and the texts have "
            f"{tuple(texts.fields)}; choose {fitting or 'another data set'}"
        )
    if not isinstance(length, int) or length < 2:
        raise ValueError(f"data.length={length!r}: must be a whole number of at least 2, a token and <eos>")
    if overlong not in ("drop", "cut"):
        raise ValueError(f"data.overlong={overlong!r}: must be 'drop' or 'cut'")


def _write(texts: Texts, split: str, tokenizer: Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Writes <field>.npy, <field>_offsets.npy, places.npy and the counts."""
    counts = dict.fromkeys(("characters", "dropped", "cut", "empty", "unknown"), 0)
    packed = settings["batching"] == "packed"
    lengths: dict[str, list[int]] = {field: [] for field in texts.fields}
    places: list[int] = []
    unknown_id = unknown_id_of(tokenizer)
    one_stream = settings["batching"] == "windows"
    end = [] if one_stream and len(texts.splits[split]) == 1 else tokenizer.eos_ids[:1]
    limit = None if one_stream else settings["length"] - 1
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / f"{field}.npy").open("wb+")) for field in texts.fields]
        for file in files:
            _write_header(file, 0)
        for place, text, sides in _encoded(texts, split, tokenizer, settings["markup"]):
            kept = _fit(sides, limit, settings["overlong"], counts)
            if kept is None:
                continue
            places.append(place)
            for field, file, ids in zip(texts.fields, files, kept, strict=True):
                lengths[field].append(len(ids) + len(end))
                file.write(np.append(ids, np.array(end, np.int32)).tobytes())
                if unknown_id is not None:
                    counts["unknown"] += int(np.count_nonzero(ids == unknown_id))
            # A shortened text counts as much as its tokens spell.
            whole = len(kept[-1]) == len(sides[-1])
            counts["characters"] += len(text) if whole else len(tokenizer.decode(kept[-1]))
            if packed:  # nothing predicts the first token of a document
                counts["characters"] -= len(tokenizer.decode(kept[-1][:1]))
        for field, file in zip(texts.fields, files, strict=True):
            _write_header(file, sum(lengths[field]))
    if not places:
        raise ValueError(
            f"split {split!r} has no example left of {len(texts.splits[split])} ({counts['dropped']} are longer than "
            f"data.length={settings['length']}, {counts['empty']} are empty); raise data.length or give other texts"
        )
    np.save(folder / "places.npy", np.array(places, np.int64))
    for field in texts.fields:
        np.save(folder / f"{field}_offsets.npy", np.cumsum([0, *lengths[field]], dtype=np.int64))
    (folder / _COUNTS).write_text(json.dumps(counts) + "\n", encoding="utf-8")


def _fit(sides: list[np.ndarray], limit: int | None, overlong: str, counts: dict[str, int]) -> list[np.ndarray] | None:
    """The ids to keep of an example, without <eos>; None to leave it out. `counts` says what was done."""
    if not all(map(len, sides)):
        counts["empty"] += 1
        return None
    if limit is None or all(len(ids) <= limit for ids in sides):
        return sides
    if overlong == "drop":
        counts["dropped"] += 1
        return None
    counts["cut"] += 1
    return [ids[:limit] for ids in sides]


def _encoded(
    texts: Texts, split: str, tokenizer: Tokenizer, markup: bool
) -> Iterator[tuple[int, str, list[np.ndarray]]]:
    """For each example its place, the text of its last field, and the ids i32[...] of every field."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = not markup  # an "<eos>" that is written in a text is text
    source = texts.splits[split]
    place = 0
    # Short work shows no bar.
    with tqdm.tqdm(total=len(source), desc=f"tokenising {split}", unit=" texts", delay=2, disable=None) as bar:
        for examples in _chunks(source, texts.fields):
            columns = [_encode(backend, [example[field] for example in examples]) for field in texts.fields]
            for example, sides in zip(examples, zip(*columns, strict=True), strict=True):
                yield place, example[texts.fields[-1]], list(sides)
                place += 1
            bar.update(len(examples))


def _chunks(source: Split, fields: Sequence[str]) -> Iterator[list[dict[str, str]]]:
    """The examples in lists of about `_CHARACTERS_AT_ONCE`."""
    chunk, characters = [], 0
    for i in range(len(source)):
        example = source[i]
        chunk.append(example)
        characters += sum(len(example[field]) for field in fields)
        if characters >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    yield chunk


def _encode(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text, i32[...]."""
    encode = lambda batch: [
        np.array(found.ids, np.int32) for found in backend.encode_batch_fast(batch, add_special_tokens=False)
    ]
    short = iter(encode([text for text in texts if len(text) <= _CHARACTERS_AT_ONCE]))
    return [
        next(short)
        if len(text) <= _CHARACTERS_AT_ONCE
        else np.concatenate([encode([piece])[0] for piece in _pieces(backend, text)])
        for text in texts
    ]


def _pieces(backend: tokenizers.Tokenizer, text: str) -> Iterator[str]:
    """A long text in pieces that have the same ids: encoding takes some 150 bytes of memory a character.

    Pieces end with a line end between two characters that are no spaces, which is between two tokens unless the
    tokenizer treats the beginning of a text in its own way. Then the text stays whole.
    """
    ids = lambda piece: backend.encode(piece, add_special_tokens=False).ids
    start = 0
    if ids("a\nb") == ids("a\n") + ids("b"):
        while end := _LINE_END.search(text, start + _CHARACTERS_AT_ONCE):
            yield text[start : end.end()]
            start = end.end()
    yield text[start:]


def _write_header(file: IO[bytes], total: int) -> None:
    """The head of a .npy file of i32[total]. NumPy leaves room in it for the count to grow in place."""
    file.seek(0)
    header = {"descr": np.dtype(np.int32).str, "fortran_order": False, "shape": (total,)}
    np.lib.format.write_array_header_1_0(file, header)
