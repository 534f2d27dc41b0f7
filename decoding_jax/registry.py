"""Decoders by name, with settings as configs and command lines can write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

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
from decoding_jax.loop import Decoder
from decoding_jax.prepare import drafter_hint, takes_drafter
from decoding_jax.trees import DynamicTree, Tree

DECODERS: Mapping[str, type[Decoder]] = {
    "autoregressive": Autoregressive,
    "beam": Beam,
    "ctc": CTC,
    "draft_then_verify": DraftThenVerify,
    "group_autoregressive": GroupAutoregressive,
    "iterative_refinement": IterativeRefinement,
    "jacobi": Jacobi,
    "lookahead": Lookahead,
    "mask_predict": MaskPredict,
    "nonautoregressive": NonAutoregressive,
    "outline_then_fill": OutlineThenFill,
    "prompt_lookup": PromptLookup,
    "segment_parallel": SegmentParallel,
    "self_speculative": SelfSpeculative,
    "speculative": Speculative,
}

# Settings that are objects of Python, which configs cannot write, and what goes with them.
OBJECTS = ("language_model", "language_model_weight")

T = TypeVar("T")


def from_settings(cls: type[T], name: str, settings: Mapping[str, Any]) -> T:
    """A dataclass from its settings; fields that are not given keep their defaults.

    Raises:
      ValueError: a setting that `cls` does not have, or a value that it refuses.
    """
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = [key for key in settings if key not in known]
    if unknown:
        raise ValueError(f"{name}: no settings called {unknown}; known: {', '.join(known) or 'none'}")
    return cls(**settings)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def read_tree(value: Any) -> Tree | DynamicTree | None:
    """A draft tree from branching factors, such as (2, 1, 1), or from a list of paths; None is a chain.

    ("dynamic", 24, 5, 4) is a `DynamicTree` of that size, depth and width. Trees stay what they are.

    >>> read_tree((2, 1)) == read_tree(((0,), (1,), (0, 0), (1, 0)))
    True
    >>> read_tree(("dynamic", 24, 5, 4))
    DynamicTree(size=24, depth=5, width=4)

    Raises:
      ValueError: it is none of these, or a path is there twice or lacks its parent or a sibling before it.
    """
    if value is None or isinstance(value, Tree | DynamicTree):
        return value
    whole = lambda numbers: all(type(n) is int for n in numbers)
    if _is_list(value) and len(value) == 4 and value[0] == "dynamic" and whole(value[1:]):
        return DynamicTree(*value[1:])
    if _is_list(value) and value and whole(value) and min(value) > 0:
        return Tree.of_branches(value)
    if _is_list(value) and value and all(_is_list(path) and whole(path) for path in value):
        return Tree(tuple(map(tuple, value)))
    raise ValueError(
        f"tree={value!r}: give the children of a node at each depth, such as (2, 1, 1), or paths, such as "
        '((0,), (1,), (0, 0)), or ("dynamic", size, depth, width)'
    )


def read_layers(value: Any) -> tuple[int, ...]:
    """Numbers of layers; ValueError where it is no list of whole numbers."""
    if not _is_list(value) or not all(type(n) is int for n in value):
        raise ValueError(f"skip_layers={value!r}: give numbers of layers, such as (1, 3)")
    return tuple(value)


def read_draft(value: Any) -> Any:
    """How a parallel drafter decodes: a decoder's name with its defaults, or a decoder.

    >>> read_draft("mask_predict").iterations
    10
    """
    if isinstance(value, str) and value in DECODERS:
        return DECODERS[value]()
    return value


# Settings that configs write otherwise than decoders take them.
_READERS: Mapping[str, Callable[[Any], Any]] = {"tree": read_tree, "skip_layers": read_layers, "draft": read_draft}


def make_decoder(name: str, settings: Mapping[str, Any], *, has_drafter: bool = False) -> Decoder:
    """The decoder called `name`, a key of `DECODERS`, with its settings.

    Args:
      name: of the decoder.
      settings: its fields; those that are not given keep their defaults. See `read_tree` for `tree`.
      has_drafter: whether its caller has a second model for it.

    >>> make_decoder("prompt_lookup", {"num_draft": 4})
    PromptLookup(num_draft=4, max_ngram=3, min_ngram=1, weak_draft=2, num_matches=1)
    >>> make_decoder("speculative", {"tree": (1, 1)}, has_drafter=True).tree.paths
    ((0,), (0, 0))

    Raises:
      ValueError: no such decoder or setting, a value that the decoder refuses, or a decoder that needs a drafter
        where there is none.
    """
    if name not in DECODERS:
        raise ValueError(f"decoder={name!r}: must be one of {', '.join(DECODERS)}")
    read = {key: _READERS[key](value) if key in _READERS else value for key, value in settings.items()}
    decoder = from_settings(DECODERS[name], name, read)
    if takes_drafter(decoder) and not has_drafter:
        raise ValueError(
            f"decoder={name!r} drafts with a second model, and none is given; give {drafter_hint(decoder)}, or "
            "choose another decoder"
        )
    return decoder
