"""Compiling a step of training without data, params or the devices' memory: does it fit, and where does memory go?"""

from __future__ import annotations

import jax
from ml_collections import ConfigDict

from train.setup import check_rows, make_layout, make_objective, model_config, objective_of
from train.state import make_mesh, make_step


def report_memory(config: ConfigDict) -> str:
    """Lowers and compiles the step of a config for its mesh, on abstract values; a table of bytes per device.

    Raises:
      ValueError: a setting does not fit.
    """
    mesh = make_mesh(config.mesh)
    layout = make_layout(config, model_config(config, None), mesh)
    rows = config.data.rows_per_batch
    check_rows(rows, layout.row_shards * config.optimizer.accumulate)
    batch = {
        name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=layout.rows)
        for name, shape in objective_of(config).abstract_batch(rows, config.data.length).items()
    }
    objective = make_objective(config, layout, None)
    compiled = make_step(layout, config).lower(layout.abstract_state, batch, objective).compile()
    memory = compiled.memory_analysis()
    print(memory)
    count = sum(shape.size for shape in layout.abstract_params.values())
    state = sum(map(_bytes, jax.tree.leaves(layout.abstract_state)))
    lines = [
        f"{count:,} parameters on {mesh.size} devices, mesh {dict(mesh.shape)}",
        f"state (params, optimizer, averages)    {state / 2**30:8.2f} GiB per device",
    ]
    if memory is not None:
        lines += [
            f"arguments of the step                  {memory.argument_size_in_bytes / 2**30:8.2f} GiB per device",
            f"results, in the arguments' place       {memory.alias_size_in_bytes / 2**30:8.2f} GiB per device",
            f"temporary arrays                       {memory.temp_size_in_bytes / 2**30:8.2f} GiB per device",
        ]
    return "\n".join(lines)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    size = leaf.dtype.itemsize
    for extent in leaf.sharding.shard_shape(leaf.shape):
        size *= extent
    return size
