"""Where a Transformer's params go on a mesh."""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The axis that is split over devices: the output features of what reads the residual stream, the
# input features of what writes to it. Fused kernels are split as they lie; where a part ends inside a
# head, XLA moves activations.
_COLUMNS = ("qkv/kernel", "gate_up/kernel", "head/kernel")
_ROWS = ("out/kernel", "down/kernel")


def tensor_parallel(mesh: Mesh, axis: str = "tensor") -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """A placement for `load`: matrices are split over a mesh axis, the rest is on every device (Megatron-LM, 2019).

    Raises:
      ValueError: the mesh has no such axis.
    """
    if axis not in mesh.shape:
        raise ValueError(f"mesh has the axes {tuple(mesh.shape)}, not {axis!r}")
    parts = mesh.shape[axis]

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        spec: tuple[str | None, ...] = ()
        if path.endswith(_COLUMNS) and shape[1] % parts == 0:
            spec = (None, axis)
        elif (path.endswith(_ROWS) or path == "embed/embedding") and shape[0] % parts == 0:
            spec = (axis, None)
        elif path.endswith("qkv/bias") and shape[0] % parts == 0:
            spec = (axis,)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return place
