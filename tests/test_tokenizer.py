"""The tokenizer: ids, bytes, special tokens, chat templates and files."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from decoding_jax.checkpoints.tokenizer import Tokenizer

TEXTS = [
    "",
    "hello world",
    "  two  spaces ",
    "你好。世界",
    "def f(x):\n    return x ** 2  # ok\t\n",
    "😀👩‍👩‍👧 naïve e\u0301",
    "\x00\x7f\xa0\xad",
]


def byte_level() -> tokenizers.Tokenizer:
    """All 256 bytes, two merges, two special tokens and one added token of plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "he", "hel"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("h", "e"), ("he", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["Ġplain é"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 258)])
    return backend


def sentencepiece(unigram: bool) -> tokenizers.Tokenizer:
    """Pieces with the marker and bytes for the rest, as in the files of Llama 2 (BPE) and T5 (Unigram)."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "▁he", "he", "▁h"]
    if unigram:
        scored = [(piece, -1.0 - n) for n, piece in enumerate(pieces)]
        backend = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        merges = [("▁", "h"), ("h", "e"), ("▁", "he")]
        backend = tokenizers.Tokenizer(
            models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


@pytest.mark.parametrize("kind", ["byte-level", "bpe", "unigram"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(kind: str, text: str) -> None:
    """decode(encode(text)) is the text, and the bytes of its ids are the text's.

    That holds for Chinese, code, emoji, controls and spaces at the ends; SentencePiece's bytes begin with
    the space that it puts before every text, or (Metaspace) before every text without one.
    """
    tokenizer = Tokenizer(byte_level() if kind == "byte-level" else sentencepiece(kind == "unigram"))
    ids = tokenizer.encode(text)
    joined = b"".join(tokenizer.token_bytes[i] for i in ids)
    if kind == "unigram" and text.startswith(" "):
        assert joined == text.encode()
        assert tokenizer.decode(ids) == text[1:]
    else:
        assert joined == (b" " if text and kind != "byte-level" else b"") + text.encode()
        assert tokenizer.decode(ids) == text


def test_each_kind_of_token_spells_its_bytes() -> None:
    """Special tokens are nothing, added tokens are literal, byte pieces are one byte, holes are nothing."""
    tokenizer = Tokenizer(byte_level())
    table, ids = tokenizer.token_bytes, tokenizer.backend.get_vocab()
    assert len(table) == tokenizer.vocab_size == 261
    assert table[tokenizer.special_ids["<s>"]] == b""
    assert table[ids["Ġplain é"]] == "Ġplain é".encode()
    assert table[ids["Ġ"]] == b" "
    assert sorted(table[:256]) == [bytes([byte]) for byte in range(256)]

    tokenizer = Tokenizer(sentencepiece(False))
    table, ids = tokenizer.token_bytes, tokenizer.backend.get_vocab()
    assert table[ids["<0xE4>"]] == b"\xe4"
    assert table[ids["▁he"]] == b" he"
    assert table[tokenizer.special_ids["<unk>"]] == b""

    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "c": 2}, unk_token="a"))
    assert Tokenizer(words).token_bytes == [b"a", b"", b"c"]


def test_tokenizers_of_other_kinds_decode_as_the_library_does() -> None:
    """WordPiece spacing is the decoder's business, not that of the bytes."""
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "well": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("playing well") == [1, 2, 3]
    assert tokenizer.decode([1, 2, 3, 4]) == "playing well"


def test_cut_characters_and_odd_ids() -> None:
    """Half a character is U+FFFD, special and padded ids are nothing, a negative id is an error."""
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("你", add_special_tokens=False)
    assert tokenizer.decode(ids[:2]) == "\ufffd"
    assert tokenizer.decode([258, *ids, 259, 100_000]) == "你"
    with pytest.raises(ValueError, match="ids holds -1"):
        tokenizer.decode([5, -1])


def test_special_tokens_in_text_and_around_it() -> None:
    """Written out they become their ids; the tokenizer's own come only when asked for."""
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.encode("hel</s>") == [258, 257, 259]
    assert tokenizer.encode("hel</s>", add_special_tokens=False) == [257, 259]
    assert tokenizer.special_ids == {"<s>": 258, "</s>": 259}


def test_stored_truncation_and_padding_do_not_touch_ids() -> None:
    """A file saved with a length of 2 still encodes the whole text."""
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("abc", add_special_tokens=False)) == 3


def folder_with(path: Path, **files: Any) -> Path:
    """A folder with the byte-level tokenizer.json and the given JSON files beside it."""
    byte_level().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        (None, (259,)),
        ({}, (259,)),
        ({"eos_token_id": 7}, (7, 259)),
        ({"eos_token_id": [259, 7, 7]}, (259, 7)),
        ({"eos_token_id": None}, (259,)),
    ],
)
def test_end_ids_come_from_both_files(tmp_path: Path, generation: Any, ends: tuple[int, ...]) -> None:
    """generation_config.json first, then the eos_token, each once and in a stable order."""
    files: dict[str, Any] = {"tokenizer_config": {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}}
    if generation is not None:
        files["generation_config"] = generation
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, **files))
    assert tokenizer.eos_ids == ends
    assert tokenizer.bos_id == 258


def test_named_tokens_are_special(tmp_path: Path) -> None:
    """A token that only special_tokens_map.json calls special decodes to nothing; no id is invented."""
    names = {"eos_token": "hel", "bos_token": "<not there>"}
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, special_tokens_map=names))
    assert tokenizer.eos_ids == (257,)
    assert tokenizer.decode(tokenizer.encode("hello")) == "lo"
    assert tokenizer.bos_id is None
    assert "<not there>" not in tokenizer.special_ids


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "  {%- if m.role == 'stop' %}{% break %}{% endif %}\n"
    "{% generation %}{{ m.role }}: {{ m.content | tojson }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
USER = {"role": "user", "content": "<é> & 'x'"}


def test_templates_run_as_transformers_runs_them() -> None:
    """Blocks are trimmed, loops may break, JSON is not escaped for HTML, generation tags are read past."""
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<s>"}, (), TEMPLATE)
    stop = {"role": "stop", "content": ""}
    assert tokenizer.apply_chat_template([USER, stop, USER]) == "<s>user: \"<é> & 'x'\"assistant:"
    assert tokenizer.apply_chat_template([USER], add_generation_prompt=False) == "<s>user: \"<é> & 'x'\""
    dated = Tokenizer(byte_level(), chat_template="{{ strftime_now('%Y') }}{{ tools is none }}{{ eos_token }}")
    assert dated.apply_chat_template([USER]) == f"{datetime.datetime.now().year}True"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[9].content + 1 }}", "rejects"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        (None, "has no chat template; pass the prompt as text"),
    ],
)
def test_template_failures_are_value_errors(template: str | None, message: str) -> None:
    """A template's own complaint, a broken one and one that leaves the sandbox all say what happened."""
    with pytest.raises(ValueError, match=message):
        Tokenizer(byte_level(), chat_template=template).apply_chat_template([USER])


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ("hi", "messages is 'hi'"),
        ([], r"messages is \[\]"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([USER, {"role": "user"}], r"messages\[1\] is \{'role': 'user'\}"),
        ([{"role": "user", "content": ["x"]}], r"'content': \['x'\]"),
    ],
)
def test_malformed_messages_are_shown(messages: Any, shown: str) -> None:
    """The error holds the bad value and the form that is wanted."""
    with pytest.raises(ValueError, match=shown):
        Tokenizer(byte_level(), chat_template=TEMPLATE).apply_chat_template(messages)


def test_the_default_template_is_chosen(tmp_path: Path) -> None:
    """Of several named templates the default one is used; a template file outranks them all."""
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = folder_with(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_template == "yes"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template == "file"


def test_saved_tokenizers_come_back(tmp_path: Path) -> None:
    """save and from_folder keep everything, whatever another tokenizer has left in the folder."""
    (tmp_path / "chat_template.jinja").write_text("old")
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "old", "model_max_length": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.5}')
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": "</s>"}, (7,), TEMPLATE)
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.named_tokens == tokenizer.named_tokens
    assert again.eos_ids == tokenizer.eos_ids == (7, 259)
    assert again.chat_template == TEMPLATE
    assert again.token_bytes == tokenizer.token_bytes
    assert again.special_ids == tokenizer.special_ids
    assert again.vocabulary_digest() == tokenizer.vocabulary_digest()
    assert again.encode("hello 你") == tokenizer.encode("hello 你")
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.5
    Tokenizer(byte_level()).save(tmp_path)
    bare = Tokenizer.from_folder(tmp_path)
    assert (bare.chat_template, bare.eos_ids, dict(bare.named_tokens)) == (None, (), {})


def test_digest_is_that_of_the_vocabulary() -> None:
    """Equal for equal maps from ids to tokens, whatever else differs; different when two tokens swap ids."""
    plain = Tokenizer(byte_level())
    assert plain.vocabulary_digest() == Tokenizer(byte_level(), {"bos_token": "<s>"}, (1,), "t").vocabulary_digest()
    ours = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    theirs = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 1, "b": 0}, unk_token="a")))
    assert ours.vocabulary_digest() != theirs.vocabulary_digest()


def test_bad_files_are_named(tmp_path: Path) -> None:
    """Absent and broken files give the path and what to do."""
    with pytest.raises(ValueError, match=r"no tokenizer file.*tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json.*fetch it again"):
        Tokenizer.from_folder(tmp_path)
    folder_with(tmp_path, generation_config={"eos_token_id": "</s>"})
    with pytest.raises(ValueError, match=r"eos_token_id in .*generation_config\.json.*\['</s>'\]"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json.*not JSON"):
        Tokenizer.from_folder(tmp_path)
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").vocab_size == 261
