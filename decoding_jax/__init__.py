"""decoding_jax: every way of generating a sequence in JAX, behind one contract."""

from decoding_jax.api import Score, StreamChunk, decode, score, stream
from decoding_jax.checkpoints import load, save, save_huggingface
from decoding_jax.decoders.autoregressive import Autoregressive
from decoding_jax.decoders.beam import Beam
from decoding_jax.decoders.ctc import CTC
from decoding_jax.decoders.draft_then_verify import DraftThenVerify
from decoding_jax.decoders.group_autoregressive import GroupAutoregressive
from decoding_jax.decoders.iterative_refinement import IterativeRefinement
from decoding_jax.decoders.jacobi import Jacobi
from decoding_jax.decoders.lookahead import Lookahead
from decoding_jax.decoders.mask_predict import MaskPredict
from decoding_jax.decoders.nonautoregressive import NonAutoregressive
from decoding_jax.decoders.outline_then_fill import OutlineThenFill
from decoding_jax.decoders.prompt_lookup import PromptLookup
from decoding_jax.decoders.segment_parallel import SegmentParallel
from decoding_jax.decoders.self_speculative import SelfSpeculative
from decoding_jax.decoders.speculative import Speculative
from decoding_jax.loop import Decoder, compile_clock, enable_compilation_cache
from decoding_jax.models.quantized import quantized
from decoding_jax.models.sharding import tensor_parallel
from decoding_jax.models.uncached import uncached_model
from decoding_jax.ngram import NGram
from decoding_jax.sampling import Sampling
from decoding_jax.stops import Stop
from decoding_jax.trees import DynamicTree, Tree
from decoding_jax.types import Cache, Candidates, CanvasSpec, DecodeOutput, Features, Inputs, Model, Stats, Trace
from decoding_jax.verify import Typical

__all__ = [
    "CTC",
    "Autoregressive",
    "Beam",
    "Cache",
    "Candidates",
    "CanvasSpec",
    "DecodeOutput",
    "Decoder",
    "DraftThenVerify",
    "DynamicTree",
    "Features",
    "GroupAutoregressive",
    "Inputs",
    "IterativeRefinement",
    "Jacobi",
    "Lookahead",
    "MaskPredict",
    "Model",
    "NGram",
    "NonAutoregressive",
    "OutlineThenFill",
    "PromptLookup",
    "Sampling",
    "Score",
    "SegmentParallel",
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
