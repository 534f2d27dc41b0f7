"""Decoders by name, for configs and command lines: those that need no second model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from decoding_jax.decoders.autoregressive import Autoregressive
from decoding_jax.decoders.beam import Beam
from decoding_jax.decoders.jacobi import Jacobi
from decoding_jax.decoders.lookahead import Lookahead
from decoding_jax.decoders.prompt_lookup import PromptLookup
from decoding_jax.loop import Decoder

DECODERS: Mapping[str, type[Decoder]] = {
    "autoregressive": Autoregressive,
    "beam": Beam,
    "jacobi": Jacobi,
    "lookahead": Lookahead,
    "prompt_lookup": PromptLookup,
}

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


def make_decoder(name: str, settings: Mapping[str, Any]) -> Decoder:
    """The decoder called `name`, a key of `DECODERS`, with its settings.

    >>> make_decoder("prompt_lookup", {"num_draft": 4})
    PromptLookup(num_draft=4, max_ngram=3, min_ngram=1, weak_draft=2, num_matches=1)

    Raises:
      ValueError: no such decoder or setting, or a value that the decoder refuses.
    """
    if name not in DECODERS:
        raise ValueError(f"decoder={name!r}: must be one of {', '.join(DECODERS)}")
    return from_settings(DECODERS[name], name, settings)
