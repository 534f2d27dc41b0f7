"""Settings of every test: eight CPU devices, quick compiling, and no silent promotion of ranks or types."""

from __future__ import annotations

import os

# Most of the suite's time is LLVM's; without its optimizations it takes half of it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax

if jax.config.jax_platforms is None:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Both promotions have hidden real mistakes: a [B, 1] times a [B] is a [B, B], a bool plus a float a float.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
