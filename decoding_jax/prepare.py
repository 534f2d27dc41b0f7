"""From what users pass to what the compiled loop takes: prompts to ids, checks, buckets, placement.

Everything is checked here, before anything is compiled; the errors name the argument, the value and
the remedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decoding_jax.checks import is_whole
from decoding_jax.rows import ROW_FIELDS, Context
from decoding_jax.sampling import Sampling, sampling_arrays
from decoding_jax.stops import Automaton, Stop, stop_arrays, stop_automaton
from decoding_jax.types import Model

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int] | np.ndarray
Prompts = Prompt | Sequence[Prompt]


def bucket(size: int, least: int = 64) -> int:
    """The smallest of 64, 96, 128, 192, 256, ..., two per octave, that holds `size`; from `least` to 64 it doubles.

    >>> [bucket(n) for n in (1, 64, 65, 100, 129)], [bucket(n, least=16) for n in (1, 17, 40, 65)]
    ([64, 64, 96, 128, 192], [16, 32, 64, 96])
    """
    found = least
    while found < size:
        power = 1 << (found.bit_length() - 1)
        found = power * 3 // 2 if found == power >= 64 else power * 2
    return found


def least_bucket(model: Model) -> int:
    """The smallest `bucket` of prompts. An encoder computes every place of it, so sources have smaller ones."""
    return 64 if model.encode is None else 16


def _as_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(f"prompts={prompts!r}: give a text, chat messages, token ids, or a list of one of these")
    if isinstance(prompts[0], Mapping) or is_whole(prompts[0]):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def encode_prompt(model: Model, prompt: Prompt, name: str) -> list[int]:
    """A text, chat messages or ids as checked token ids; errors call the prompt `name`."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"{name}={prompt!r}: give a text, chat messages or token ids")
    chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if isinstance(prompt, str) or chat:
        if model.tokenizer is None:
            raise ValueError(f"{name} is text, but the model has no tokenizer; give token ids or Model(tokenizer=...)")
        text = model.tokenizer.apply_chat_template(list(prompt)) if chat else str(prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # what bytes that are no UTF-8 become on a command line
            raise ValueError(f"{name}: {text[error.start :][:1]!r} in it is no character; give UTF-8 text") from None
        # As in training, a source has an end and no other special token.
        ids = model.tokenizer.encode(text, add_special_tokens=not chat and model.encode is None)
        if model.encode is not None and ids:
            ids = [*ids, *model.eos_ids[:1]]
    else:
        ids = list(prompt)
    hidden = None if model.canvas is None or model.encode is None else model.canvas.mask_id
    if hidden in ids and {*ids} <= {*model.eos_ids, hidden}:
        raise ValueError(f"{name}={ids}: only hidden places ({hidden}), so there is nothing to write from")
    if not ids:
        raise ValueError(f"{name} is empty: a model continues something; give at least one token (its BOS id, say)")
    for i in ids:
        if not is_whole(i) or not 0 <= i < model.vocab_size:
            raise ValueError(f"{name}: {i!r} is not a token id of this model; ids run from 0 to {model.vocab_size - 1}")
    return [int(i) for i in ids]


def encode_prompts(model: Model, prompts: Prompts) -> list[list[int]]:
    """All prompts as token ids."""
    return [encode_prompt(model, p, f"prompts[{i}]") for i, p in enumerate(_as_list(prompts))]


def check_length(
    model: Model, ids: Sequence[int] | np.ndarray, max_new_tokens: int, name: str, whose: str = "model"
) -> None:
    """ValueError where a prompt, called `name`, and its budget do not fit into the context of the `whose` model."""
    if model.max_length is None or len(ids) + max_new_tokens <= model.max_length:
        return
    if not max_new_tokens:
        raise ValueError(
            f"{name} has {len(ids)} tokens, more than the {whose}'s context of {model.max_length}; shorten it"
        )
    raise ValueError(
        f"{name} has {len(ids)} tokens and max_new_tokens={max_new_tokens}: together more than the {whose}'s "
        f"context of {model.max_length}; shorten the prompt or the budget"
    )


def context_left(model: Model, drafter: Model | None, length: int) -> int | None:
    """How many tokens the contexts of the model and its drafter have left behind `length` others; None: no bound."""
    bounds = [m.max_length for m in (model, drafter) if m is not None and m.max_length is not None]
    return min(bounds) - length if bounds else None


# What sets the length of a decoder's drafts, and that length.
_DRAFT_LENGTHS: Mapping[str, Callable[[Any], int]] = {
    "tree": lambda tree: tree.depth,
    "num_draft": lambda count: count,
    "block_length": lambda count: count,
    "ngram": lambda size: size - 1,
}


def check_draft_length(decoder: Any, left: int | None, name: str) -> None:
    """ValueError where no draft ever fits into the context that is left behind a prompt, called `name`.

    Drafts that fit at first and not near the end are no error: they are cut.

    Args:
      decoder: any.
      left: from `context_left`, for the shortest prompt.
      name: of that prompt.
    """
    given = [key for key in _DRAFT_LENGTHS if getattr(decoder, key, None) is not None]
    if left is None or not given:
        return
    setting, value = given[0], getattr(decoder, given[0])
    if (length := _DRAFT_LENGTHS[setting](value)) > left:
        raise ValueError(
            f"{setting}={value}: a draft has {length} tokens, and behind {name} the context has only {left} left; "
            "draft fewer, or shorten the prompt"
        )


def takes_drafter(decoder: Any) -> bool:
    """Whether a decoder has to be given a second model that drafts."""
    return bool(getattr(decoder, "takes_drafter", False))


def drafter_hint(decoder: Any) -> str:
    """What to give a decoder that lacks its second model, for errors."""
    return getattr(decoder, "drafter_hint", "a drafter")


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call: the compiled loop's context, and what the host needs to read its result.

    Attributes:
      ctx: on the device (or devices).
      batch: rows that were asked for; further rows of `ctx` are padding and done from the start.
      automaton: finds the stop strings in text.
      left: from `context_left`, behind the shortest prompt.
    """

    ctx: Context
    batch: int
    automaton: Automaton | None
    left: int | None


def _with_special_strings(model: Model, stop: Stop) -> Stop:
    """A stop string that is a special token has no bytes in the text; it stops by its id instead."""
    special = getattr(model.tokenizer, "special_ids", {})
    strings = [stop.strings] if isinstance(stop.strings, str) else list(stop.strings)
    ids = [special[s] for s in strings if isinstance(s, str) and s in special]
    return Stop((*stop.token_ids, *ids), [s for s in strings if not (isinstance(s, str) and s in special)])


def prepare(
    model: Model,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Stop,
    seed: int,
    row_ids: Sequence[int] | None,
    mesh: Mesh | None,
    sources: Sequence[Sequence[int]] | None = None,
    drafter: Model | None = None,
    lengths: Sequence[int] | None = None,
) -> Call:
    """Checks a call and lays it out in buckets; see `decode` for the arguments.

    For an encoder-decoder `prompts` are the sources, unless `sources` gives these and `prompts` what its decoder
    begins with.
    """
    ids = encode_prompts(model, prompts)
    if model.start_id is not None and sources is None:
        sources, ids = ids, [[model.start_id]] * len(ids)
    for i, source in enumerate(sources or ()):
        check_length(model, source, 0, f"prompts[{i}]")
    if not is_whole(max_new_tokens) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be a whole number of at least 0")
    for i, prompt in enumerate(ids):
        check_length(model, prompt, max_new_tokens, f"prompts[{i}]")
    if not isinstance(drafter, Model | None):
        raise ValueError(f"drafter={drafter!r}: give a Model, such as dj.load gives")
    if drafter is not None:
        longest_source = max(map(len, sources or [[]]))
        longest = max(longest_source, max(map(len, ids)) + max_new_tokens)
        check_second_model(model, drafter, longest, "drafter")
    if not is_whole(seed) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: must be a whole number from 0 to 2**32 - 1")
    batch = len(ids)
    rows = list(range(batch)) if row_ids is None else list(row_ids)
    if len(rows) != batch or not all(is_whole(r) and 0 <= r < 2**31 for r in rows):
        raise ValueError(f"row_ids={rows!r}: give one whole number from 0 to 2**31 - 1 for each of the {batch} prompts")
    shards = _data_shards(mesh)
    padded = -(-batch // shards) * shards

    prompt_lengths = np.ones((padded,), np.int32)
    prompt_lengths[:batch] = [len(p) for p in ids]
    longest = int(prompt_lengths.max())
    tokens = np.zeros((padded, bucket(longest + max_new_tokens)), np.int32)
    for row, prompt in zip(tokens, ids, strict=False):
        row[: len(prompt)] = prompt
    source_tokens, source_lengths = _lay_out_sources(sources, padded, least_bucket(model))
    stop = _with_special_strings(model, stop)
    automaton = stop_automaton(stop)
    token_bytes = model.tokenizer.token_bytes if automaton is not None and model.tokenizer is not None else None
    stops = stop_arrays(stop, automaton, model.eos_ids, model.vocab_size, token_bytes)
    sampling_rows, rules = sampling_arrays(sampling, batch, model.vocab_size, np.asarray(stops.ends))
    host: Any = {
        "params": (),
        "prompts": tokens,
        "prompt_lengths": prompt_lengths,
        "limits": prompt_lengths + np.where(np.arange(padded) < batch, max_new_tokens, 0).astype(np.int32),
        "row_ids": np.array([*rows, *[0] * (padded - batch)], np.int32),
        "seed": np.uint32(seed),
        "sampling": jax.tree.map(lambda x: np.pad(x, (0, padded - batch), mode="edge"), sampling_rows),
        "rules": rules,
        "stops": stops,
        "sources": source_tokens,
        "source_lengths": source_lengths,
        "lengths": _lay_out_lengths(lengths, batch, padded, max_new_tokens),
    }
    ctx = Context(**host, model=model.spec, drafter=None if drafter is None else drafter.spec)
    left = context_left(model, drafter, min(map(len, ids)))
    return Call(_place(ctx, model, drafter, mesh), batch, automaton, left)


def check_second_model(model: Model, second: Model, longest: int, name: str) -> None:
    """ValueError where the tokens of a second model, called `name`, mean something else, or `longest` do not fit it."""
    if (model.encode is None) != (second.encode is None) or model.start_id != second.start_id:
        raise ValueError(
            f"{name}: it and the target must both be decoder-only, or both encoder-decoders with one start_id"
        )
    _check_vocabulary(model, second, name)
    if second.max_length is not None and longest > second.max_length:
        raise ValueError(
            f"{name}: its context is {second.max_length}, and the longest prompt and budget need {longest}; shorten "
            "them, or give another model"
        )


def _check_vocabulary(model: Model, other: Model, name: str) -> None:
    """ValueError where the tokens of another model, called `name`, mean something else than the model's."""
    remedy = "give a model that was trained with the same tokenizer"
    if model.tokenizer is not None and other.tokenizer is not None:
        ours, theirs = model.tokenizer.token_bytes, other.tokenizer.token_bytes
        differ = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
        if differ or len(ours) != len(theirs):
            first = f"they have {len(ours)} and {len(theirs)} tokens"
            if differ:
                first = f"token {differ[0]} is {ours[differ[0]]!r} and {theirs[differ[0]]!r}"
            raise ValueError(f"{name}: its vocabulary is not the target's ({first}); {remedy}")
        # Their bytes are alike, since they have none.
        mine, its = (getattr(each.tokenizer, "special_ids", {}) for each in (model, other))
        for text in sorted(mine.keys() | its.keys()):
            if mine.get(text) != its.get(text):
                raise ValueError(
                    f"{name}: its vocabulary is not the target's ({text!r} is token {its.get(text)}, and the target's "
                    f"{mine.get(text)}); {remedy}"
                )
    elif model.vocab_size != other.vocab_size:
        raise ValueError(
            f"{name}: its vocabulary has {other.vocab_size} ids and the target's {model.vocab_size}; give a model of "
            "the same vocabulary"
        )


def _lay_out_lengths(lengths: Sequence[int] | None, batch: int, padded: int, most: int) -> np.ndarray | None:
    """Given output lengths as i32[B], 0 in padding rows; ValueError where one is not from 1 to `most`."""
    if lengths is None:
        return None
    given = np.asarray(lengths).tolist()
    if not isinstance(given, list) or len(given) != batch or not all(is_whole(n) and 1 <= n <= most for n in given):
        raise ValueError(
            f"lengths={lengths!r}: give one whole number from 1 to max_new_tokens={most} for each of the {batch} rows"
        )
    return np.array([*given, *[0] * (padded - batch)], np.int32)


def _lay_out_sources(
    sources: Sequence[Sequence[int]] | None, padded: int, least: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Sources as i32[B, M], M from `least` on, and their lengths i32[B]; rows of one token behind the real ones."""
    if sources is None:
        return None, None
    lengths = np.ones((padded,), np.int32)
    lengths[: len(sources)] = [len(source) for source in sources]
    tokens = np.zeros((padded, bucket(int(lengths.max()), least)), np.int32)
    for row, source in zip(tokens, sources, strict=False):
        row[: len(source)] = source
    return tokens, lengths


def _data_shards(mesh: Mesh | None) -> int:
    if mesh is None:
        return 1
    if "data" not in mesh.shape:
        raise ValueError(f"mesh has the axes {tuple(mesh.shape)}; rows are split over an axis named 'data'")
    return mesh.shape["data"]


def _place(ctx: Context, model: Model, drafter: Model | None, mesh: Mesh | None) -> Context:
    """Puts per-row arrays in parts along the mesh's data axis, everything else whole on every device.

    Params that already live on the mesh stay as they are; `load(placement=...)` puts them there once.
    """
    weights = {"params": model.params, "drafter_params": () if drafter is None else drafter.params}
    if mesh is None:
        return dataclasses.replace(jax.device_put(ctx), **weights)
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def put(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        here = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        return leaf if here else jax.device_put(leaf, whole)

    rows = {name: jax.device_put(getattr(ctx, name), split) for name in ROW_FIELDS}
    shared = {name: jax.device_put(getattr(ctx, name), whole) for name in ("seed", "rules", "stops")}
    return dataclasses.replace(ctx, **rows, **shared, **jax.tree.map(put, weights), rows_sharding=split)
