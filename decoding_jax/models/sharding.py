"""Where a Transformer's params go on a mesh.

Every dimension of a param has a logical axis, or None where it is never split; rules say which mesh axis each
logical axis is split over. Tensor parallelism (Megatron-LM, 2019) splits the outputs of what reads the residual
stream and the inputs of what writes to it; fully sharded data parallelism (ZeRO, 2020) splits the stream's features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decoding_jax.models.transformer import TransformerConfig

Rules = Mapping[str, str | None]

# The end of a param's path, and its logical axes. Fused kernels are laid out so that an even split of "heads"
# cuts between groups of heads wherever the parts divide num_kv_heads.
AXES: dict[str, tuple[str | None, ...]] = {
    "embed/embedding": ("vocab", "embed"),
    "head/kernel": ("embed", "vocab"),
    "attention/qkv/kernel": ("embed", "heads"),
    "attention/qkv/bias": ("heads",),
    "attention/out/kernel": ("heads", "embed"),
    "cross/q/kernel": ("embed", "heads"),
    "cross/kv/kernel": ("embed", "heads"),
    "cross/out/kernel": ("heads", "embed"),
    "gate_up/kernel": ("embed", None, "mlp"),
    "down/kernel": ("mlp", "embed"),
    "scale": (None,),  # of every norm
}
TRAINING_RULES: Rules = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def logical_axes(path: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """The logical axis of each dimension of a param; what is not in the table is never split."""
    for suffix, axes in AXES.items():
        if f"/{path}".endswith(f"/{suffix}") and len(axes) == len(shape):
            return axes
    return (None,) * len(shape)


def place(
    mesh: Mesh, rules: Rules, config: TransformerConfig | None = None
) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """A placement (for `load`, or for each leaf of a training state) that splits params as the rules say.

    A dimension that the mesh axis does not divide stays whole.

    Args:
      mesh: whose axes the rules name.
      rules: from logical axes ("embed", "heads", "mlp", "vocab") to mesh axes; None, or left out: not split.
      config: given, heads are split only where no group of query heads is torn from its key and value. Without it
        they are split wherever the sizes divide, and XLA moves activations where a part ends inside a group.

    Raises:
      ValueError: an axis in the rules does not exist, or would split two dimensions of one param.
    """
    _check_rules(mesh, rules)

    def axis_of(logical: str | None, size: int) -> str | None:
        axis = rules.get(logical) if logical else None
        if axis is None:
            return None
        pieces = config.num_kv_heads if config is not None and logical == "heads" else size
        return axis if size % mesh.shape[axis] == 0 and pieces % mesh.shape[axis] == 0 else None

    def placed(path: str, shape: tuple[int, ...]) -> NamedSharding:
        spec = [axis_of(logical, size) for logical, size in zip(logical_axes(path, shape), shape, strict=True)]
        while spec and spec[-1] is None:  # equal placements have equal specs, which jit's cache compares
            spec.pop()
        return NamedSharding(mesh, PartitionSpec(*spec))

    return placed


def tensor_parallel(mesh: Mesh, axis: str = "tensor") -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """A placement for `load`: matrices are split over a mesh axis, the rest is on every device (Megatron-LM, 2019).

    Raises:
      ValueError: the mesh has no such axis.
    """
    return place(mesh, {"heads": axis, "mlp": axis, "vocab": axis})


def check_mesh(config: TransformerConfig, mesh: Mesh, rules: Rules = TRAINING_RULES) -> None:
    """Refuses a mesh that would leave attention or MLP whole on every device, where the rules want them split.

    Raises:
      ValueError: an axis in the rules does not exist, or does not divide `num_kv_heads` or `mlp_width`.
    """
    _check_rules(mesh, rules)
    for logical, field in (("heads", "num_kv_heads"), ("mlp", "mlp_width")):
        axis, size = rules.get(logical), getattr(config, field)
        if axis is not None and size % mesh.shape[axis]:
            parts = mesh.shape[axis]
            raise ValueError(
                f"mesh axis {axis!r} has size {parts}, which does not divide {field}={size}; make it "
                f"{math.gcd(size, parts)} and another axis larger, or change {field}"
            )


def _check_rules(mesh: Mesh, rules: Rules) -> None:
    known = sorted({logical for axes in AXES.values() for logical in axes if logical})
    for logical, axis in rules.items():
        if logical not in known:
            raise ValueError(f"rules: {logical!r} is no logical axis; there are {', '.join(known)}")
        if axis is not None and axis not in mesh.shape:
            raise ValueError(f"mesh has the axes {tuple(mesh.shape)}, not {axis!r}")
    for param, axes in AXES.items():
        used = [rules[logical] for logical in axes if logical and rules.get(logical)]
        if len(set(used)) < len(used):
            raise ValueError(
                f"rules={dict(rules)} split two dimensions of {param} over one mesh axis; name different ones"
            )
