"""decoding_jax: every way of generating a sequence in JAX, behind one contract."""

from decoding_jax.api import Score, StreamChunk, decode, score, stream
from decoding_jax.checkpoints import load, save, save_huggingface
from decoding_jax.decoders.autoregressive import Autoregressive
from decoding_jax.decoders.beam import Beam
from decoding_jax.decoders.jacobi import Jacobi
from decoding_jax.decoders.lookahead import Lookahead
from decoding_jax.decoders.prompt_lookup import PromptLookup
from decoding_jax.decoders.self_speculative import SelfSpeculative
from decoding_jax.decoders.speculative import Speculative
from decoding_jax.loop import Decoder, compile_clock, enable_compilation_cache
from decoding_jax.models.quantized import quantized
from decoding_jax.models.sharding import tensor_parallel
from decoding_jax.models.uncached import uncached_model
from decoding_jax.sampling import Sampling
from decoding_jax.stops import Stop
from decoding_jax.trees import DynamicTree, Tree
from decoding_jax.types import Cache, Candidates, DecodeOutput, Features, Inputs, Model, Stats, Trace
from decoding_jax.verify import Typical

__all__ = [
    "Autoregressive",
    "Beam",
    "Cache",
    "Candidates",
    "DecodeOutput",
    "Decoder",
    "DynamicTree",
    "Features",
    "Inputs",
    "Jacobi",
    "Lookahead",
    "Model",
    "PromptLookup",
    "Sampling",
    "Score",
    "SelfSpeculative",
    "Speculative",
    "Stats",
    "Stop",
    "StreamChunk",
    "Trace",
    "Tree",
    "Typical",
    "compile_clock",
    "decode",
    "enable_compilation_cache",
    "load",
    "quantized",
    "save",
    "save_huggingface",
    "score",
    "stream",
    "tensor_parallel",
    "uncached_model",
]
