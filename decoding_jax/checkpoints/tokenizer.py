"""Text to ids and back, over the `tokenizers` library, with the bytes of every token."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer.json with what its neighbours in a Hugging Face folder say about chat and ends.

    Attributes:
      backend: the `tokenizers.Tokenizer` that does the work; it is not changed after construction.
      named_tokens: the special tokens that have a part to play, such as {"bos_token": "<s>"}.
      eos_ids: ids that end a text, the main one first. The eos_token among `named_tokens` is always one.
      chat_template: Jinja source, None for a tokenizer without one.
    """

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    named_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Files keep the truncation and padding of whoever trained with them; ids must be the text's alone.
        self.backend.no_truncation()
        self.backend.no_padding()
        special = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        for text in self.named_tokens.values():
            # Tokens the vocabulary lacks are left out: adding them would make ids the model has not.
            if text not in special and self.backend.token_to_id(text) is not None:
                self.backend.add_special_tokens([text])
        end = self.backend.token_to_id(self.named_tokens.get("eos_token", ""))
        ends = self.eos_ids if end is None else (*self.eos_ids, end)
        object.__setattr__(self, "eos_ids", tuple(dict.fromkeys(ends)))

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        """Reads a Hugging Face folder: tokenizer.json and whichever of its neighbours exist.

        The end ids are those of generation_config.json, then the eos_token of tokenizer_config.json.

        Raises:
          ValueError: there is no tokenizer.json, or a file cannot be read.
        """
        folder = Path(path)
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        backend = _read_backend(folder / "tokenizer.json")
        named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}

        ends = generation.get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if not all(type(end) is int and end >= 0 for end in ends):
            raise ValueError(
                f"eos_token_id in {str(folder / 'generation_config.json')!r} is {ends!r}; "
                "it must be an id or a list of ids"
            )

        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            config["chat_template"] = template_file.read_text(encoding="utf-8")
        template = _default_template(config.get("chat_template"))
        return cls(backend, named, tuple(ends), template)

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        """Reads a bare tokenizer.json: no end ids, no chat template.

        Raises:
          ValueError: the file is absent or is not a tokenizer.json.
        """
        return cls(_read_backend(Path(path)))

    def save(self, folder: Path | str) -> None:
        """Writes the files from which `from_folder` makes this tokenizer again.

        Other entries of a tokenizer_config.json or generation_config.json that is there already are kept.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"), pretty=False)
        config = _read_json(folder / "tokenizer_config.json")
        config = {key: value for key, value in config.items() if key not in (*_NAMED_TOKENS, "chat_template")}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config.update(self.named_tokens)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        _write_json(folder / "tokenizer_config.json", config)
        # Two files outrank the configuration, so older ones must not say something else.
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        generation = _read_json(folder / "generation_config.json")
        _write_json(folder / "generation_config.json", generation | {"eos_token_id": list(self.eos_ids)})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Special tokens written out in the text become their ids. What the vocabulary cannot spell is lost
        without a word: SmolLM2, for one, lacks six control characters and the bytes of planes 4 to 11.

        Args:
          text: any string.
          add_special_tokens: whether the tokenizer puts its own tokens around the text, such as a first
            <s>. False for the output of `apply_chat_template`, which has them already.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: special tokens left out, bytes that are no UTF-8 as U+FFFD.

        Ids past the vocabulary, which a padded embedding can produce, have no text.

        Raises:
          ValueError: an id is negative.
        """
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"ids holds {min(ids)}, which is no id; cut the padding off before decoding")
        if self._decoding.kind == "other":
            return self.backend.decode([i for i in ids if i < self.vocab_size], skip_special_tokens=True)
        table = self.token_bytes
        text = b"".join(table[i] for i in ids if i < len(table)).decode("utf-8", errors="replace")
        # SentencePiece puts a space before the text when it encodes.
        for _ in range(self._decoding.leading_spaces):
            text = text.removeprefix(" ")
        return text

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes each id stands for, `vocab_size` of them; b"" for special tokens and unused ids.

        Joined, they are the UTF-8 of the text, except that SentencePiece's leading space is still there.
        Tokenizers that are neither byte-level nor SentencePiece (WordPiece, word level) lose their spacing.
        """
        decoding = self._decoding
        table = [b""] * self.vocab_size
        added = self.backend.get_added_tokens_decoder()
        for token, i in self.backend.get_vocab(with_added_tokens=True).items():
            if i not in added:
                table[i] = decoding.bytes_of(token)
            elif not added[i].special:
                # Added tokens are matched in the raw text. Only those matched after normalization are
                # spelled as SentencePiece spells its pieces.
                piece = decoding.kind == "sentencepiece" and added[i].normalized
                table[i] = decoding.bytes_of(token) if piece else token.encode("utf-8")
        return table

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, to be encoded with `add_special_tokens=False`.

        Templates are programs from a downloaded file: they run in Jinja's sandbox.

        Args:
          messages: [{"role": "user", "content": "..."}, ...]; further keys go to the template as they are.
          add_generation_prompt: whether the text ends where the assistant's answer begins.

        Raises:
          ValueError: the tokenizer has no template, a message is malformed, or the template fails.
        """
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template; pass the prompt as text, or use the folder of an "
                "instruction-tuned model (its tokenizer_config.json or chat_template.jinja holds one)"
            )
        _check_messages(messages)
        tokens = {"bos_token": "", "eos_token": ""} | dict(self.named_tokens)
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **tokens,
            )
        except Exception as error:
            # Templates run arbitrary expressions, which may fail in any way.
            raise ValueError(
                f"the chat template rejects messages={messages!r}: {error}; see the model's card for the "
                "roles and the order it takes"
            ) from error

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Every special token and its id, in the order of the ids."""
        added = self.backend.get_added_tokens_decoder()
        return {added[i].content: i for i in sorted(added) if added[i].special}

    @property
    def bos_id(self) -> int | None:
        """The id that starts a text, None where the tokenizer names none."""
        text = self.named_tokens.get("bos_token")
        return None if text is None else self.backend.token_to_id(text)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. A model may have more rows than this, for padding."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def vocabulary_digest(self) -> str:
        """SHA-256 of the map from ids to tokens: equal exactly where two models mean the same by an id."""
        pairs = sorted((i, token) for token, i in self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    @functools.cached_property
    def _decoding(self) -> _Decoding:
        return _Decoding.of(json.loads(self.backend.to_str())["decoder"])

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment.from_string(self.chat_template or "")


@dataclasses.dataclass(frozen=True)
class _Decoding:
    """How tokens spell bytes, as the decoder of a tokenizer.json tells it."""

    kind: str  # byte_level, sentencepiece or other
    byte_fallback: bool = False
    leading_spaces: int = 0

    @classmethod
    def of(cls, decoder: dict[str, Any] | None) -> _Decoding:
        steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        by_type = {step["type"]: step for step in steps}
        if "ByteLevel" in by_type:
            return cls("byte_level")
        metaspace = by_type.get("Metaspace")
        replaces = any(
            step["type"] == "Replace" and step["pattern"] == {"String": "▁"} and step["content"] == " "
            for step in steps
        )
        # Another marker than SentencePiece's own is left to the library.
        if replaces or (metaspace is not None and metaspace["replacement"] == "▁"):
            leading = by_type.get("Strip", {}).get("start", 0)
            if metaspace is not None and metaspace.get("prepend_scheme", "always") != "never":
                leading += 1
            return cls("sentencepiece", "ByteFallback" in by_type, leading)
        return cls("other")

    def bytes_of(self, token: str) -> bytes:
        if self.kind == "byte_level" and _byte_of_char().keys() >= set(map(ord, token)):
            return token.translate(_byte_of_char()).encode("latin-1")
        if self.kind == "sentencepiece":
            if self.byte_fallback and (byte := _BYTE_PIECE.fullmatch(token)):
                return bytes.fromhex(byte[1])
            return token.replace("▁", " ").encode("utf-8")
        return token.encode("utf-8")


@functools.cache
def _byte_of_char() -> dict[int, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 begin at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; here it only has to be read past."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it without ClassVar)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which would put &#39; and \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check_messages(messages: Any) -> None:
    form = '[{"role": "user", "content": "..."}, ...]'
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {messages!r}; it must be a list such as {form}")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"messages[{place}] is {message!r}; messages must be a list such as {form}")


def _token_text(entry: Any) -> str | None:
    # Either the text itself or a serialized AddedToken.
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _default_template(entry: Any) -> str | None:
    # Either one template or a list of named ones.
    if isinstance(entry, list):
        entry = {item["name"]: item["template"] for item in entry}.get("default")
    return entry if isinstance(entry, str) else None


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ValueError(
            f"there is no tokenizer file {str(path)!r}; save one there with the tokenizers library, or in "
            "transformers with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises bare Exceptions.
        raise ValueError(
            f"{str(path)!r} is not a tokenizer.json that this version of tokenizers reads ({error}); "
            "fetch it again, or upgrade tokenizers"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}); fetch it again or remove it") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds no JSON object; fetch it again or remove it")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
