"""The translator in the package: what it weighs, what it loads as, and what it writes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import decoding_jax as dj
import decoding_jax.checkpoints as checkpoints
from decoding_jax.models.quantized import is_quantized

SENTENCES = ["Turn off the light in the kitchen.", "Off", "Select the device that you want to add."]


def test_they_weigh_little() -> None:
    """Eight megabytes at most, in all."""
    folders = [checkpoints.find_model(name) for name in checkpoints.OWN_MODELS]
    assert sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()) < 8e6


@pytest.mark.parametrize("name", checkpoints.OWN_MODELS)
def test_they_are_stored_in_int8_and_load_in_floats(name: str) -> None:
    """By their names as floats, which most machines multiply faster; as folders as they lie."""
    model, stored = dj.load(name), dj.load(checkpoints.find_model(name))
    assert is_quantized(stored.params) and not is_quantized(model.params)
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.float32)}
    assert model.tokenizer is not None and model.tokenizer.vocab_size == model.vocab_size


def test_a_name_is_no_folder_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is the package's model wherever one stands."""
    (tmp_path / checkpoints.OWN_MODELS[0]).mkdir()
    monkeypatch.chdir(tmp_path)
    assert checkpoints.find_model(checkpoints.OWN_MODELS[0]).is_relative_to(Path(dj.__file__).parent)


def test_a_translation() -> None:
    """Sentences of the kind that it was trained on come out as German, greedily and by a search that stops early."""
    model = dj.load("ui-phrases-en-de")
    for decoder in (dj.Autoregressive(), dj.Beam(num_beams=5, early_stopping=True)):
        texts = dj.decode(model, SENTENCES, decoder, max_new_tokens=24).text
        assert texts is not None and texts[1] == "Ausschalten" and texts[2].startswith("Wähle das Gerät aus")
