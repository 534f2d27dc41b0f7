"""Training runs small enough for tests: texts, configs that train on them, meshes of some of the eight devices."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from ml_collections import ConfigDict

import decoding_jax as dj
from train.config import default_config
from train.loop import Trainer
from train.state import AXES

# What enable_compilation_cache sets.
_CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
_WORDS = ("see", "tree", "house", "in", "on", "the", "a", "and")


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts of 17 to 23 characters, which all go into one bucket; the same for the same seed."""
    random = np.random.default_rng(seed)
    texts = (" ".join(random.choice(_WORDS, 5)) for _ in itertools.count())
    return list(itertools.islice((text for text in texts if 17 <= len(text) <= 23), count))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for a module's runs, and for what would go into the user's cache: equal runs are compiled once."""
    folder = tmp_path_factory.mktemp("runs")
    before = {name: getattr(jax.config, name) for name in _CACHE_SETTINGS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODING_JAX_CACHE", str(folder / "cache"))
        compilation_cache.reset_cache()
        dj.enable_compilation_cache(folder / "compiled")
        yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def text_config(home: Path, changes: dict[str, Any] | None = None) -> ConfigDict:
    """A language model of characters: one layer, 12 steps of 8 windows of 16 characters, checkpoints every 4."""
    (home / "text.txt").write_text(" ".join(sentences(60)), encoding="utf-8")
    config = _small(home)
    config.data.name = "plain_text"
    config.data.files.train = f"{home}/text.txt[:90%]"
    config.data.files.validation = f"{home}/text.txt[90%:]"
    config.data.batching = "windows"
    config.data.rows_per_batch = 8
    config.evaluation.prompts = ("the ",)
    config.update_from_flattened_dict(changes or {})
    return config


def pairs_config(home: Path, changes: dict[str, Any] | None = None) -> ConfigDict:
    """A translator of characters, from sentences to the same in upper case: one layer on each side."""
    for split, count, seed in (("train", 60, 1), ("validation", 12, 2), ("test", 8, 3)):
        lines = [f"{text}\t{text.upper()}\n" for text in sentences(count, seed)]
        (home / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    config = _small(home)
    config.objective = "seq2seq"
    config.data.name = "parallel_text"
    for split in ("train", "validation", "test"):
        config.data.files[split] = f"{home}/{split}.tsv"
    config.data.batching = "bucketed"
    config.data.length = 24
    config.data.tokens_per_batch = 192
    config.model.encoder_layers = 1
    config.evaluation.language = "en"
    config.update_from_flattened_dict(changes or {})
    return config


def _small(home: Path) -> ConfigDict:
    config = default_config()
    config.total_steps = 12
    config.data.data_dir = str(home / "data")
    config.data.tokenizer.kind = "characters"
    config.data.length = 16
    config.model.num_layers = 1
    config.model.width = 16
    config.model.mlp_width = 32
    config.model.num_heads = 2
    config.model.num_kv_heads = 2
    config.model.head_size = 8
    config.model.max_length = 64
    config.optimizer.warmup_steps = 2
    config.log_every = 1
    config.checkpoint.every = 4
    config.evaluation.every = 4
    config.evaluation.max_new_tokens = 8
    config.evaluation.batch_size = 8
    config.compilation_cache = str(home / "compiled")
    return config


def make_small_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over the first of the eight devices, as on a machine that has only these."""
    sizes = (data, fsdp, tensor)
    devices = jax.devices()[: data * fsdp * tensor]
    return jax.make_mesh(sizes, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=devices)


class Crash(Exception):
    """What `train_until` raises inside the loop."""


def train_until(trainer: Trainer, step: int) -> None:
    """Trains and dies right after a step was computed, before anything else is done about it."""
    compute = trainer.train_step

    def dying(*arguments: Any) -> Any:
        result = compute(*arguments)
        if int(result[0].step) == step:
            raise Crash
        return result

    trainer.train_step = dying
    with pytest.raises(Crash):
        trainer.run()


def logged(workdir: Path, name: str) -> dict[int, float]:
    """A number of metrics.jsonl by step."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line[name] for line in lines if name in line}
