"""What users call: decode, stream, score."""

from __future__ import annotations

import codecs
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from decoding_jax.decoders.autoregressive import Autoregressive
from decoding_jax.decoders.canvas import Canvas
from decoding_jax.loop import ALL_STEPS, Decoder, compile_clock, run, start
from decoding_jax.masks import causal_mask
from decoding_jax.ngram import NGram
from decoding_jax.prepare import (
    Call,
    Prompts,
    check_draft_length,
    check_second_model,
    drafter_hint,
    encode_prompt,
    encode_prompts,
    prepare,
    takes_drafter,
)
from decoding_jax.rows import Context
from decoding_jax.sampling import Sampling
from decoding_jax.stops import NOT_ENDED, Automaton, Stop
from decoding_jax.tracing import bytes_of, trace_canvases, trace_steps
from decoding_jax.types import FINISH_REASONS, Array, DecodeOutput, Inputs, Model, Trace, TraceStep


def decode(
    model: Model,
    prompts: Prompts,
    decoder: Decoder = Autoregressive(),
    *,
    drafter: Model | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    stop: Stop = Stop(),
    seed: int = 0,
    row_ids: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    scorer: Model | NGram | None = None,
    mesh: Mesh | None = None,
    trace: bool = False,
    steps_per_call: int = ALL_STEPS,
) -> DecodeOutput:
    """Generates a continuation of each prompt.

    Args:
      model: from `load`, or any `Model`.
      prompts: a text, chat messages (dicts with role and content), token ids, or a list of one of these. For an
        encoder-decoder these are the sources.
      decoder: the method.
      drafter: a second model that drafts, for decoders that take one; its tokens must be the model's.
      max_new_tokens: the budget of each row, in tokens.
      sampling: how tokens are chosen; greedy by default.
      stop: what ends a row besides the model's end-of-sequence ids.
      seed: of all randomness, 0 to 2**32 - 1.
      row_ids: what each row's randomness is keyed by, default 0..B-1; a row with the same id, seed and
        prompt gives the same tokens in any batch.
      lengths: how many tokens each row's output is to have, where that is known; for decoders that fill a canvas.
      scorer: a second model, or an n-gram model, that ranks the candidates of a decoder that has several by the mean of
        its own log-probabilities. Its calls are not counted.
      mesh: splits the rows over its "data" axis. Load the model with a `placement` on the same mesh, or its
        params are copied there in every call.
      trace: records every step; slower, the tokens are the same.
      steps_per_call: steps between two returns to Python, where signals are heard.

    Returns:
      A DecodeOutput of numpy arrays.

    Raises:
      ValueError: an argument does not fit; raised before anything is compiled.
    """
    if not 1 <= steps_per_call <= ALL_STEPS:
        raise ValueError(f"steps_per_call={steps_per_call}: must be from 1 to {ALL_STEPS}")
    began = time.perf_counter()
    with compile_clock() as clock:
        call = prepare(
            model, prompts, max_new_tokens, sampling, stop, seed, row_ids, mesh, drafter=drafter, lengths=lengths
        )
        fills = isinstance(decoder, Canvas)
        check_decoder(decoder, call, "trace=True" if trace and not fills else "")
        if scorer is not None:
            _check_scorer(scorer, model, call, decoder)
        state = start(decoder, call.ctx)
        steps: list[TraceStep] = []
        first: float | None = None
        while not bool(state.done.all()):
            # The first step alone gives the time to the first token; it is the same program.
            budget = 1 if trace or first is None else steps_per_call
            before = jax.device_get((state.steps, state.status, state.tokens)) if trace and fills else None
            state = run(decoder, call.ctx, state, jnp.int32(budget))
            if trace:
                steps += (
                    trace_steps(model, call, state) if before is None else trace_canvases(model, call, before, state)
                )
            if first is None:
                jax.block_until_ready(state.done)
                first = time.perf_counter() - began - clock.seconds
        output = _first_rows(decoder.finalize(call.ctx, state), call.batch)
        if scorer is not None:
            output = _rescored(output, scorer, encode_prompts(model, prompts), mesh)
    total = time.perf_counter() - began - clock.seconds
    stats = dataclasses.replace(
        output.stats,
        compile_seconds=clock.seconds,
        first_token_seconds=total if first is None else first,
        total_seconds=total,
    )
    output = dataclasses.replace(output, stats=stats, trace=Trace(steps) if trace else None)
    return _with_text(model, call, output)


def check_decoder(decoder: Decoder, call: Call, needs_prefix: str = "") -> None:
    """Lets a decoder refuse a call before anything is compiled; so does what needs a committed prefix.

    Raises:
      ValueError: what does not fit, and the remedy.
    """
    if isinstance(decoder, type) or not hasattr(decoder, "step"):
        raise ValueError(f"decoder={decoder!r}: give a decoder such as Autoregressive() or PromptLookup(num_draft=4)")
    name = type(decoder).__name__
    if call.ctx.model.canvas is not None and not hasattr(decoder, "runs"):
        objective = call.ctx.model.canvas.objective
        raise ValueError(
            f"decoder: {name} writes token by token, and this model was trained with {objective} to write several at "
            f"once; use its own decoder (in configs {objective})"
        )
    if call.ctx.lengths is not None and not isinstance(decoder, Canvas):
        raise ValueError(f"lengths: {name} writes until the text ends, whatever its length; leave it out")
    if needs_prefix and not getattr(decoder, "grows_prefix", False):
        raise ValueError(f"{needs_prefix}: {name} may revise its output until the end; use decode without it")
    if takes_drafter(decoder) != (call.ctx.drafter is not None):
        if call.ctx.drafter is None:
            raise ValueError(f"drafter: {name} needs a second model, and there is none; give {drafter_hint(decoder)}")
        raise ValueError(f"drafter: {name} takes none; leave it out, or choose Speculative (in configs speculative)")
    parallel = call.ctx.drafter is not None and call.ctx.drafter.canvas is not None
    if parallel and not getattr(decoder, "drafts_in_parallel", False):
        raise ValueError(
            f"drafter: {name} drafts token by token, and this drafter writes several at once; use DraftThenVerify (in "
            "configs draft_then_verify)"
        )
    check_draft_length(decoder, call.left, "every prompt")
    if check := getattr(decoder, "check", None):
        check(call.ctx)


def _text_of(model: Model, call: Call, tokens: np.ndarray) -> str:
    data = bytes_of(model, tokens)
    if call.automaton is not None:
        data = call.automaton.cut(data)
    return data.decode("utf-8", errors="replace")


def _first_rows(output: DecodeOutput, batch: int) -> DecodeOutput:
    """Without the padding rows: the first `batch` rows of everything that has a row axis."""

    def rows(record: Any) -> Any:
        fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        cut = {name: value[:batch] for name, value in fields.items() if isinstance(value, np.ndarray | list)}
        return dataclasses.replace(record, **cut)

    candidates = None if output.candidates is None else rows(output.candidates)
    return dataclasses.replace(rows(output), stats=rows(output.stats), candidates=candidates)


def _with_text(model: Model, call: Call, output: DecodeOutput) -> DecodeOutput:
    """Adds the text where there is a tokenizer."""
    candidates = output.candidates
    if model.tokenizer is None:
        return output
    texts = lambda tokens, lengths: [_text_of(model, call, t[:n]) for t, n in zip(tokens, lengths, strict=True)]
    if candidates is not None:
        both = zip(candidates.tokens, candidates.lengths, strict=True)
        candidates = dataclasses.replace(candidates, text=[texts(t, n) for t, n in both])
    return dataclasses.replace(output, text=texts(output.tokens, output.lengths), candidates=candidates)


def _check_scorer(scorer: Any, model: Model, call: Call, decoder: Decoder) -> None:
    """ValueError where a second model cannot rank what a decoder finds."""
    if not isinstance(scorer, Model | NGram):
        raise ValueError(f"scorer={scorer!r}: give a Model, such as dj.load gives, or an NGram")
    if max(getattr(decoder, name, 1) for name in ("num_candidates", "beam", "n_best")) < 2:
        raise ValueError(
            f"scorer: {decoder!r} has one candidate and leaves nothing to choose; give it a length_beam, beam or "
            "n_best above 1, or no scorer"
        )
    if isinstance(scorer, NGram):
        if scorer.vocab_size != model.vocab_size:
            raise ValueError(f"scorer: its vocabulary has {scorer.vocab_size} ids and the model's {model.vocab_size}")
        return
    if scorer.canvas is not None:
        raise ValueError(
            f"scorer: it was trained with {scorer.canvas.objective}; give a model that writes token by token"
        )
    sources = call.ctx.source_lengths
    longest = max(int(call.ctx.limits.max()), 0 if sources is None else int(sources.max()))
    check_second_model(model, scorer, longest, "scorer")


def _rescored(output: DecodeOutput, scorer: Model | NGram, prompts: list[list[int]], mesh: Mesh | None) -> DecodeOutput:
    """The candidates in the order of a second model's mean log-probability, and its best as the output."""
    found = output.candidates
    assert found is not None  # `_check_scorer` has seen that there are several
    batch, count = found.lengths.shape
    if isinstance(scorer, NGram):
        totals = scorer.totals(found.tokens.reshape(batch * count, -1), found.lengths.reshape(-1))
    else:
        outputs = [found.tokens[row, n, : found.lengths[row, n]].tolist() for row in range(batch) for n in range(count)]
        totals = score(scorer, [prompts[row] for row in range(batch) for _ in range(count)], outputs, mesh=mesh).totals
    means = totals.reshape(batch, count) / np.maximum(found.lengths, 1)
    scores = np.where(found.lengths > 0, means, -np.inf).astype(np.float32)
    found = found.ranked_by(scores)
    return dataclasses.replace(
        output,
        tokens=found.tokens[:, 0],
        lengths=found.lengths[:, 0],
        log_probs=found.log_probs[:, 0],
        finish_reason=[row[0] for row in found.finish_reason],
        stats=dataclasses.replace(output.stats, tokens=found.lengths[:, 0]),
        candidates=found,
    )


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """New tokens of one row, as soon as they are certain.

    Attributes:
      row: index of the prompt.
      tokens: the new ids.
      text: the new text. What may still become a stop string, and half a character, is held back; the
        texts of all chunks together are the row's `DecodeOutput.text`.
      finish_reason: "eos", "stop" or "length" in a row's last chunk, else None.
    """

    row: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None


class _RowText:
    """The text of one row's bytes as they come: what may become a stop string or a character is held back."""

    def __init__(self, automaton: Automaton | None):
        self.automaton, self.state, self.held = automaton, 0, b""
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, final: bool) -> str:
        """The text that no later byte can take back; all of it when the row is final."""
        if self.automaton is None:
            return self.characters.decode(data, final)
        self.state, end = self.automaton.feed(self.state, data)
        whole = self.held + data
        if end is not None:
            keep = len(self.held) + end - int(self.automaton.match[self.state])
        else:
            keep = len(whole) - (0 if final else int(self.automaton.depth[self.state]))
        self.held = whole[keep:]
        return self.characters.decode(whole[:keep], final)


def stream(
    model: Model,
    prompts: Prompts,
    decoder: Decoder = Autoregressive(),
    *,
    drafter: Model | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    stop: Stop = Stop(),
    seed: int = 0,
    row_ids: Sequence[int] | None = None,
    mesh: Mesh | None = None,
) -> Iterator[StreamChunk]:
    """Generates like `decode` and yields what is new after every step; the tokens are the same.

    Raises:
      ValueError: as `decode`; also for a decoder that may revise its output until the end.
    """
    call = prepare(model, prompts, max_new_tokens, sampling, stop, seed, row_ids, mesh, drafter=drafter)
    check_decoder(decoder, call, "stream")
    return _stream(model, call, decoder)


def _stream(model: Model, call: Call, decoder: Decoder) -> Iterator[StreamChunk]:
    state = start(decoder, call.ctx)
    seen = np.asarray(call.ctx.prompt_lengths).copy()
    texts = [_RowText(call.automaton) for _ in range(call.batch)]
    closed = [False] * call.batch
    while not all(closed):
        rows = state.rows
        tokens, length, reason = jax.device_get((rows.tokens, rows.length, rows.reason))
        for row in range(call.batch):
            new = tuple(tokens[row, seen[row] : length[row]].tolist())
            final = bool(reason[row] != NOT_ENDED)
            if closed[row] or not (new or final):
                continue
            seen[row], closed[row], text = length[row], final, ""
            if model.tokenizer is not None:
                text = texts[row].feed(bytes_of(model, new), final)
            yield StreamChunk(row, new, text, FINISH_REASONS[reason[row]] if final else None)
        if not all(closed):
            state = run(decoder, call.ctx, state, jnp.int32(1))


@dataclasses.dataclass(frozen=True)
class Score:
    """Teacher-forced log-probabilities of given continuations.

    Attributes:
      log_probs: f32[B, N], of each continuation token given everything before it; 0 past each length.
      lengths: i32[B], tokens of each continuation.
    """

    log_probs: np.ndarray
    lengths: np.ndarray

    @property
    def totals(self) -> np.ndarray:
        """f64[B], the log-probability of each whole continuation: the exact chain rule."""
        return self.log_probs.astype(np.float64).sum(axis=1)

    def __repr__(self) -> str:
        shown = ", ".join(f"{t:.3f} ({n} tokens)" for t, n in zip(self.totals, self.lengths, strict=True))
        return f"Score({shown})"


_SCORE_CHUNK = 64


@jax.jit
def score_tokens(ctx: Context, lengths: Array) -> Array:
    """Log-probabilities f32[B, N] of ctx.prompts' tokens from ctx.prompt_lengths up to lengths i32[B]."""
    batch, size = ctx.prompts.shape
    cache = ctx.init_cache(size)

    def chunk(index: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        cache, scores = carry
        positions = jnp.broadcast_to(index * _SCORE_CHUNK + jnp.arange(_SCORE_CHUNK), (batch, _SCORE_CHUNK))
        token_at = lambda at: jnp.take_along_axis(ctx.prompts, jnp.minimum(at, size - 1), axis=1)
        inputs = Inputs(
            tokens=token_at(positions),
            positions=positions,
            mask=causal_mask(positions, size),
            slots=jnp.where(positions < lengths[:, None], positions, size),
        )
        out = ctx.apply(inputs, cache)
        wanted = (positions + 1 >= ctx.prompt_lengths[:, None]) & (positions + 1 < lengths[:, None])

        def read(hidden: Array) -> Array:
            logits = ctx.readout(hidden)
            chosen = jnp.take_along_axis(logits, token_at(positions + 1)[:, :, None], axis=2)[:, :, 0]
            return chosen - jax.nn.logsumexp(logits, axis=2)

        # Logits cost as much as several layers, so chunks that lie in the prompts make none.
        nothing = lambda hidden: jnp.zeros(positions.shape, jnp.float32)
        new = jax.lax.cond(wanted.any(), read, nothing, out.hidden)
        at = jnp.where(wanted, positions + 1, size)
        return out.cache, jax.vmap(lambda row, i, v: row.at[i].set(v, mode="drop"))(scores, at, new)

    start = (cache, jnp.zeros((batch, size), jnp.float32))
    return jax.lax.fori_loop(0, -(-(lengths.max() - 1) // _SCORE_CHUNK), chunk, start)[1]


def _encode_continuations(model: Model, continuations: Prompts, count: int) -> list[list[int]]:
    """Continuations as ids; unlike a prompt one may be empty, and text gets no special tokens."""
    given: list[Any] = list(continuations)
    if isinstance(continuations, str) or (given and isinstance(given[0], int | np.integer)):
        given = [continuations]
    if len(given) != count:
        raise ValueError(f"continuations: {len(given)} for {count} prompts; give one for each")
    ids = []
    for i, item in enumerate(given):
        if isinstance(item, str) and model.tokenizer is not None:
            item = model.tokenizer.encode(item, add_special_tokens=False)
        ids.append(encode_prompt(model, item, f"continuations[{i}]") if len(item) else [])
    return ids


def score(model: Model, prompts: Prompts, continuations: Prompts, *, mesh: Mesh | None = None) -> Score:
    """The model's log-probability of each given continuation of each prompt, token by token.

    Args:
      model: a causal model, or an encoder-decoder.
      prompts: as in `decode`; an encoder-decoder's are its sources.
      continuations: one per prompt: texts (encoded on their own, without special tokens) or token ids.
      mesh: splits the rows over its "data" axis.

    Raises:
      ValueError: an argument does not fit.
    """
    if model.canvas is not None:
        raise ValueError(
            f"model: it was trained with {model.canvas.objective}, so its tokens have no log-probability given those "
            "before; score with a model that writes token by token"
        )
    first = encode_prompts(model, prompts)
    second = _encode_continuations(model, continuations, len(first))
    sources = None
    if model.start_id is not None:
        sources, first = first, [[model.start_id]] * len(first)
    whole = [a + b for a, b in zip(first, second, strict=True)]
    call = prepare(model, whole, 0, Sampling(), Stop(), 0, None, mesh, sources=sources)
    starts = np.ones((call.ctx.prompts.shape[0],), np.int32)
    starts[: len(first)] = [len(p) for p in first]
    lengths = call.ctx.prompt_lengths
    ctx = dataclasses.replace(call.ctx, prompt_lengths=jax.device_put(starts, lengths.sharding))
    scores = np.asarray(score_tokens(ctx, lengths))
    counts = np.array([len(s) for s in second], np.int32)
    at = np.arange(max(int(counts.max()), 1))
    index = np.minimum(starts[: len(first), None] + at, scores.shape[1] - 1)
    picked = np.take_along_axis(scores[: len(first)], index, axis=1)
    return Score(np.where(at < counts[:, None], picked, np.float32(0.0)), counts)
