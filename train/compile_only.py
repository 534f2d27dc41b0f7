"""Compiling a step of training without data, params or the devices' memory: does it fit, and where does memory go?"""

from __future__ import annotations

import math
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from train.data.packing import round_up
from train.setup import check_rows, make_layout, make_objective, model_config, objective_of
from train.state import Layout, make_mesh, make_step

# XLA's CPU compiler drops the barriers that `remat` puts around what is computed again, and then finds that it was
# computed before: nothing would be saved. GPUs and TPUs keep the barriers.
_KEEP_REMAT = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def report_memory(config: ConfigDict) -> str:
    """Lowers and compiles the step of a config for its mesh, on abstract values; a table of GiB per device.

    On CPUs that stand for other devices the temporary arrays are a rough estimate: they depend on the order in which a
    compiler lets things happen, and on what it fuses.

    Raises:
      ValueError: a setting does not fit.
    """
    if config.init_from:
        raise ValueError(
            f"init_from={config.init_from!r}: there is nothing to load here; describe its shape in model.*"
        )
    mesh = make_mesh(config.mesh)
    check_rows(config, mesh)
    layout = make_layout(config, model_config(config, None), mesh)
    rows = _rows(config)
    shapes = objective_of(config).abstract_batch(rows, config.data.length)
    batch = {
        name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=layout.rows) for name, shape in shapes.items()
    }
    objective = make_objective(config, layout, None)
    begun = time.monotonic()
    lowered = make_step(layout, config).lower(layout.abstract_state, batch, objective)
    compiled = lowered.compile(_KEEP_REMAT if jax.default_backend() == "cpu" else None)
    seconds = time.monotonic() - begun
    count = sum(shape.size for shape in layout.abstract_params.values())
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    head = [
        f"{count:,} parameters on {mesh.size} devices ({sizes}), batches of {rows:,} x {config.data.length:,} tokens",
        f"lowered and compiled in {seconds:.1f} s; GiB per device:",
    ]
    table = _memory(layout, compiled.memory_analysis(), _logits_bytes(config, layout, rows))
    return "\n".join(head + [f"  {name:34}{size / 2**30:8.2f}" for name, size in table.items()])


def _rows(config: ConfigDict) -> int:
    """The rows of a batch; of buckets, those of the longest."""
    multiple = config.data.rows_multiple
    if config.data.batching == "bucketed":
        return max(config.data.tokens_per_batch // config.data.length // multiple, 1) * multiple
    return round_up(config.data.rows_per_batch, multiple)


def _memory(layout: Layout, analysis: Any, logits: float) -> dict[str, float]:
    """Bytes per device by what they are for; XLA's part is missing where a compiler does not tell."""
    state = sum(map(_shard_bytes, jax.tree.leaves(layout.abstract_state)))
    table = {"params, optimizer, averages": state}
    if analysis is not None:
        arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
        new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        table |= {
            "batch, teacher": arguments - state,
            "temporary arrays": temporary,
            "together": arguments + temporary + new,
        }
    return table | {"for comparison, logits in float32": logits}


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None  # that of the layout
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _logits_bytes(config: ConfigDict, layout: Layout, rows: int) -> float:
    """Of one array of the logits that are in memory at once, over the devices that can share it."""
    tensor, vocabulary = layout.mesh.shape["tensor"], layout.config.vocab_size
    share = vocabulary // tensor if vocabulary % tensor == 0 else vocabulary
    return rows / layout.row_shards / config.optimizer.accumulate * config.data.length * share * 4
