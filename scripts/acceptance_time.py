"""How long the acceptance of a draft takes by itself, and the model call that it follows."""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
from timing import Stepper, seconds

import decoding_jax as dj
from decoding_jax.models.functional import abstract_transformer, transformer_model
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.prepare import prepare
from decoding_jax.rows import Context, start_rows
from decoding_jax.types import Array
from decoding_jax.verify import Coupled, Nodes, verify

BATCH, DRAFT, PROMPT = 8, 8, 64
VOCAB_SIZE = 128_256
LLAMA_1B = TransformerConfig(
    vocab_size=VOCAB_SIZE,
    num_layers=16,
    width=2048,
    mlp_width=8192,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    tie_embeddings=True,
)
EVERYTHING = dj.Sampling(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
)


def verifying_seconds() -> float:
    """A float32 call of a model shaped like Llama 3.2 1B on B rows of K + 1 positions, logits included."""
    _, shapes = abstract_transformer(LLAMA_1B)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), shapes)
    stepper = Stepper(transformer_model(LLAMA_1B, params), 256, BATCH)
    return statistics.median(stepper.step_seconds(DRAFT + 1, steps=2) for _ in range(3))


@jax.jit
def _emitted(ctx: Context, draft: Array, logits: Array) -> Array:
    """What the walk emits behind the prompts: i32[B, K + 1], zeros behind its end."""
    rows = start_rows(ctx)
    nodes = Nodes(
        tokens=jnp.concatenate([rows.last, draft], axis=1),
        parents=jnp.broadcast_to(jnp.arange(DRAFT + 1) - 1, (BATCH, DRAFT + 1)),
        verifiable=jnp.ones((BATCH, DRAFT + 1), bool),
    )
    verdict = verify(ctx, rows, nodes, logits, DRAFT, Coupled())
    return jax.lax.dynamic_slice_in_dim(verdict.rows.tokens, PROMPT, DRAFT + 1, axis=1)


def acceptance_seconds(processors: bool) -> float:
    """Processors, filters, draws and the walk over a chain that is accepted whole, which costs the most.

    Args:
      processors: at a temperature, with every filter and penalty on; else greedy.
    """
    model = dj.Model(
        apply=lambda params, inputs, cache: dj.Features(params, (), cache), params=(), vocab_size=VOCAB_SIZE
    )
    sampling = EVERYTHING if processors else dj.Sampling()
    prompts = [[(7 * row + i) % 100 for i in range(PROMPT)] for row in range(BATCH)]
    ctx = prepare(model, prompts, 32, sampling, dj.Stop(), 0, None, None).ctx
    logits = 3.0 * jax.random.normal(jax.random.key(0), (BATCH, DRAFT + 1, VOCAB_SIZE))
    draft = jnp.zeros((BATCH, DRAFT), jnp.int32)
    for _ in range(DRAFT):  # each time one token more is what the target draws
        draft = _emitted(ctx, draft, logits)[:, :DRAFT]
    return statistics.median(seconds(lambda: _emitted(ctx, draft, logits)) for _ in range(5))
