"""Tokenizers made from the training texts, or read from a folder.

Special tokens come first in a vocabulary that is made here: <eos> 0, <bos> 1, <mask> 2, and for characters <unk> 3.
The same texts make the same vocabulary, on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from decoding_jax.checkpoints import Tokenizer

if TYPE_CHECKING:
    from train.data.texts import Texts

EOS, BOS, MASK, UNK = "<eos>", "<bos>", "<mask>", "<unk>"
_NAMED = {"eos_token": EOS, "bos_token": BOS, "mask_token": MASK}
_BYTES_AND_SPECIALS = 256 + len(_NAMED)


def make_tokenizer(settings: Mapping[str, Any], texts: Texts) -> Tokenizer:
    """The tokenizer that the `data.tokenizer` part of a config asks for.

    Args:
      settings: `kind`, and what the kind needs:
        "characters": one token for each distinct character of the training split; others become <unk>.
        "bytes": one token for each byte of the UTF-8 text, 259 with the special tokens.
        "bpe": byte-level byte-pair encoding of the training split, one vocabulary for all fields, of `vocab_size`
          tokens with the special tokens and the 256 bytes; fewer where no pair is left that occurs twice.
        "file": the folder `path` with tokenizer.json and tokenizer_config.json, or its tokenizer.json.
      texts: the data set; only its training split is read.

    Raises:
      ValueError: the kind is unknown, its setting cannot be used, or there is no training split.
    """
    kind = settings["kind"]
    makers: dict[str, Callable[[], Tokenizer]] = {
        "characters": lambda: _characters(_training_texts(texts)),
        "bytes": lambda: _bpe(_BYTES_AND_SPECIALS, iter(())),
        "bpe": lambda: _bpe(settings["vocab_size"], _training_texts(texts)),
        "file": lambda: _file(settings["path"]),
    }
    if kind not in makers:
        raise ValueError(f"data.tokenizer.kind={kind!r}: there is no such tokenizer; choose one of {', '.join(makers)}")
    return makers[kind]()


def start_id_of(tokenizer: Tokenizer) -> int:
    """What an encoder-decoder's output begins behind: <bos>, or the end of a text where there is none."""
    return tokenizer.eos_ids[0] if tokenizer.bos_id is None else tokenizer.bos_id


def mask_id_of(tokenizer: Tokenizer) -> int:
    """<mask>, which stands at hidden places; ValueError where there is none."""
    found: int | None = tokenizer.backend.token_to_id(tokenizer.named_tokens.get("mask_token", MASK))
    if found is None:
        raise ValueError(
            "the tokenizer has no <mask>, which models that fill a canvas need; train with a tokenizer made here "
            "(data.tokenizer.kind='bpe'), or add a mask_token to its tokenizer_config.json"
        )
    return found


def unknown_id_of(tokenizer: Tokenizer) -> int | None:
    """<unk>, which stands for what the vocabulary lacks; None where it lacks nothing."""
    return tokenizer.backend.token_to_id(tokenizer.named_tokens.get("unk_token", ""))


def unknown_characters(tokenizer: Tokenizer, text: str) -> str:
    """The characters of a text that the vocabulary has no token for, each once, in order."""
    unknown = unknown_id_of(tokenizer)
    if unknown is None:
        return ""
    return "".join(c for c in sorted(set(text)) if unknown in tokenizer.encode(c, add_special_tokens=False))


def digest_of_tokenizer(tokenizer: Tokenizer) -> str:
    """SHA-256 of how texts become ids, and of what ends and begins them."""
    facts = [tokenizer.backend.to_str(), tokenizer.eos_ids, tokenizer.bos_id]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _training_texts(texts: Texts) -> Iterator[str]:
    if "train" not in texts.splits:
        raise ValueError(
            f"texts has no split 'train' (only {', '.join(texts.splits) or 'none at all'}), which a tokenizer is made "
            "from; add one, or set data.tokenizer.kind='file'"
        )
    split = texts.splits["train"]
    for i in range(len(split)):
        example = split[i]
        for field in texts.fields:
            yield example[field]


def _characters(texts: Iterator[str]) -> Tokenizer:
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    named = _NAMED | {"unk_token": UNK}
    # Byte-pair encoding without any pair leaves single characters.
    vocabulary = {token: i for i, token in enumerate([*named.values(), *sorted(alphabet)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(named.values()))
    return Tokenizer(backend, named)


def _bpe(vocab_size: int, texts: Iterator[str]) -> Tokenizer:
    if not isinstance(vocab_size, int) or vocab_size < _BYTES_AND_SPECIALS:
        raise ValueError(
            f"data.tokenizer.vocab_size={vocab_size!r}: must be a whole number of at least {_BYTES_AND_SPECIALS}, the "
            "256 bytes and the special tokens"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    # GPT-2's words, which no token crosses: a space belongs to the word behind it.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(_NAMED.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, _NAMED)


def _file(path: str) -> Tokenizer:
    given = Path(path).expanduser()
    folder = given.parent if given.name == "tokenizer.json" else given
    if not path or not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"data.tokenizer.path={path!r}: there is no tokenizer.json; give the folder of a model in Hugging Face form"
        )
    tokenizer = Tokenizer.from_folder(folder)
    if not tokenizer.eos_ids:
        raise ValueError(
            f"data.tokenizer.path={path!r}: the tokenizer names no token that ends a text; write its eos_token into "
            "tokenizer_config.json beside it"
        )
    return tokenizer
