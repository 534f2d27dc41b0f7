"""The rows of a batch job: read from files of JSON lines, and the order in which they are decoded."""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decoding_jax.checks import is_whole
from decoding_jax.decoders.autoregressive import Autoregressive
from decoding_jax.loop import Decoder
from decoding_jax.prepare import bucket, check_draft_length, check_length, context_left, encode_prompt
from decoding_jax.types import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A good line.

    Attributes:
      number: of its line, counted from 0 over all files.
      id: as the user gave it.
      prompt: i32[T], token ids.
      length: how many tokens the output is to have, of models that fill a canvas; None where the line does not say.
    """

    number: int
    id: str | int
    prompt: np.ndarray
    length: int | None = None


def read_rows(
    model: Model,
    files: Sequence[tuple[str, Path]],
    max_new_tokens: int,
    decoder: Decoder = Autoregressive(),
    drafter: Model | None = None,
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Reads files of JSON lines, each {"id", and one of "prompt", "messages", "tokens"} (or "source", "tokens").

    With a model that fills a canvas a line may have a "length" too, that of its output in tokens.

    Args:
      model: its tokenizer makes ids of text, once.
      files: the names that errors are reported under, and where the files are.
      max_new_tokens: the budget that must fit into the context behind each prompt.
      decoder: whose drafts must fit there too.
      drafter: a second model that must take the prompts as well.

    Returns:
      The good lines, and for each bad one {"file" (where there are several), "line" (counted from 1), "id"
      (where it is known), "reason"}. Blank lines are neither. Of several lines with one id the first is kept.
    """
    rows: list[Row] = []
    errors: list[dict[str, Any]] = []
    seen: set[str | int] = set()
    for number, (name, line_number, line) in enumerate(_lines(files)):
        if not line.strip():
            continue
        place: dict[str, Any] = {"line": line_number} if len(files) == 1 else {"file": name, "line": line_number}
        try:
            fields = _fields(line)
            place["id"] = identity = _identity(fields)
            if identity in seen:
                raise ValueError(f"id {identity!r} belongs to an earlier line; give every line its own")
            seen.add(identity)
            field, ids = _prompt(model, fields)
            _check_room(model, drafter, decoder, ids, max_new_tokens, field)
            length = _length(model, fields, max_new_tokens)
            rows.append(Row(number, identity, np.array(ids, np.int32), length))
        except ValueError as error:
            errors.append(place | {"reason": str(error)})
    return rows, errors


def _lines(files: Sequence[tuple[str, Path]]) -> Iterator[tuple[str, int, bytes]]:
    """(name, line number from 1, line); bytes, so that one line that is not UTF-8 spoils no other."""
    for name, path in files:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, start=1):
                yield name, line_number, line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line


def _fields(line: bytes) -> dict[str, Any]:
    """A line as an object; ValueError says what else it is."""
    try:
        fields = json.loads(line.decode("utf-8"))
        # JSON can spell half a surrogate pair ("\ud800"), which no tokenizer and no UTF-8 file takes.
        if b"\\u" in line:
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise ValueError(f"byte {error.start + 1} (0x{byte:02x}) is not UTF-8; save the file as UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("a \\ud800-\\udfff escape stands without its partner; such a text has no UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}; give one object on each line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}; give an object with id and prompt, messages or tokens")
    return fields


def _identity(fields: dict[str, Any]) -> str | int:
    if "id" not in fields:
        raise ValueError('no "id"; give every line its own')
    identity = fields["id"]
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise ValueError(f"id {identity!r} is neither a text nor a whole number")
    return identity


_TOKENS = {"tokens": (list, "a list of ids")}
_PROMPTS = {"prompt": (str, "a text"), "messages": (list, "a list of messages")} | _TOKENS
_SOURCES = {"source": (str, "a text")} | _TOKENS  # of encoder-decoders


def _prompt(model: Model, fields: dict[str, Any]) -> tuple[str, list[int]]:
    """Which field of a line holds its prompt, and the prompt's token ids; ValueError says why there are none."""
    kinds = _PROMPTS if model.encode is None else _SOURCES
    given = [name for name in _PROMPTS | _SOURCES if name in fields]
    if len(given) != 1 or given[0] not in kinds:
        raise ValueError(f"has {' and '.join(given) or 'no prompt'}; this model takes one of {', '.join(kinds)}")
    name, value = given[0], fields[given[0]]
    kind, described = kinds[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}; it must be {described}")
    if name == "messages" and not (value and isinstance(value[0], dict)):
        raise ValueError(f"messages={value!r}: must be objects with role and content, at least one")
    if name == "tokens" and value and isinstance(value[0], dict):
        raise ValueError("tokens holds objects; chat goes into messages")
    return name, encode_prompt(model, value, name)


def _length(model: Model, fields: dict[str, Any], most: int) -> int | None:
    """The "length" of a line; None where it has none. ValueError where it cannot be used."""
    taken = model.canvas is not None and model.canvas.takes_lengths
    if "length" not in fields:
        if model.needs_lengths:
            raise ValueError("has no length, and this model cannot choose one; give every line its own")
        return None
    if not taken:
        raise ValueError("has a length, but this model finds it while it writes; leave it out")
    length = fields["length"]
    if not is_whole(length) or not 1 <= length <= most:
        raise ValueError(f"length={length!r}: must be a whole number from 1 to max_new_tokens={most}")
    return int(length)


def _check_room(
    model: Model, drafter: Model | None, decoder: Decoder, ids: list[int], max_new_tokens: int, name: str
) -> None:
    """ValueError where a prompt, called `name`, leaves the models too little of their context."""
    budget = max_new_tokens if model.encode is None else 0
    check_length(model, ids, budget, name)
    if drafter is not None:
        check_length(drafter, ids, budget, name, "drafter")
    if model.encode is None:
        check_draft_length(decoder, context_left(model, drafter, len(ids)), name)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that are decoded together, by their place in the list of rows.

    Attributes:
      rows: whose results are kept.
      filler: the row that fills the batch up. The longest of its group: a batch that holds it compiles
        no new shape.
    """

    rows: tuple[int, ...]
    filler: int

    def filled(self, batch_size: int) -> list[int]:
        return [*self.rows, *[self.filler] * (batch_size - len(self.rows))]


def plan_parts(
    lengths: Sequence[int],
    batch_size: int,
    batches_per_part: int,
    kinds: Sequence[bool] | None = None,
    least: int = 64,
) -> list[list[Batch]]:
    """The batches of each part, from the prompts' lengths; rows of different kinds or buckets share none.

    Args:
      lengths: of the prompts, in tokens.
      batch_size: rows of a batch.
      batches_per_part: of a part, but for the last one.
      kinds: of each row; None: all are of one.
      least: the smallest bucket, from `prepare.least_bucket`.

    >>> [[batch.rows for batch in part] for part in plan_parts([3, 70, 5, 9], 2, 1)]
    [[(0, 2)], [(3,)], [(1,)]]
    """
    groups: dict[tuple[bool, int], list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault((kinds is not None and kinds[row], bucket(length, least)), []).append(row)
    batches = []
    for _, group in sorted(groups.items()):
        longest = max(group, key=lambda row: lengths[row])
        for at in range(0, len(group), batch_size):
            batches.append(Batch(tuple(group[at : at + batch_size]), longest))
    return [batches[at : at + batches_per_part] for at in range(0, len(batches), batches_per_part)]


def part_names(count: int) -> list[str]:
    """The file names of a job's parts."""
    return [f"part-{k:05d}-of-{count:05d}.jsonl" for k in range(count)]
