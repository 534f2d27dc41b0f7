"""Settings of every test: eight CPU devices, quick compiling, and no silent promotion of ranks or types."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Most of the suite's time is LLVM's; without its optimizations it takes half of it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax

if jax.config.jax_platforms is None:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Both promotions have hidden real mistakes: a [B, 1] times a [B] is a [B, B], a bool plus a float a float.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Forgets compiled programs now and then: each takes many memory maps, of which a process on Linux has 65,530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()
