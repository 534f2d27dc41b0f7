"""Examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import decoding_jax

MODULES = [module.name for module in pkgutil.walk_packages(decoding_jax.__path__, "decoding_jax.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    """Every >>> example gives what stands under it."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0
