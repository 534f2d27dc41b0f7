"""Examples in docstrings are true, and configs for one's own files find these."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

import decoding_jax
from train.data.texts import open_texts

ROOT = Path(__file__).resolve().parent.parent
MODULES = [module.name for module in pkgutil.walk_packages(decoding_jax.__path__, "decoding_jax.")]
MODULES.append("train.trained_config")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    """Every >>> example gives what stands under it."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def config_of(name: str, *arguments: str) -> ConfigDict:
    """What configs/<name>.py gives."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config: ConfigDict = module.get_config(*arguments)
    return config


def test_own_pairs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, a TSV or a folder; the other splits by their names, the language by the target's ending."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for split in ("train", "validation"):
        for ending, text in (("en", "a\n"), ("de", "b\n"), ("tsv", "a\tb\n")):
            Path(f"data/{split}.{ending}").write_text(text)
    Path("data/test.en").write_text("a\n")  # a test split needs both files
    for argument, language in (("data/train.en,data/train.de", "de"), ("data/train.tsv", ""), ("data", "")):
        config = config_of("own_pairs", argument)
        config.data.data_dir = str(tmp_path)
        assert config.evaluation.language == language
        splits = open_texts(config.data).splits
        assert list(splits) == ["train", "validation"]
        assert all(split[0] == {"source": "a", "target": "b"} for split in splits.values())
    assert config_of("own_pairs", "my.en,my.de").data.files.validation == ""
    with pytest.raises(ValueError, match="behind a colon"):
        config_of("own_pairs")


def test_own_texts_are_found(tmp_path: Path) -> None:
    """Files or a folder; each gives nine tenths to training and the rest to validation."""
    for name, text in (("a.txt", "a" * 10), ("b.txt", "b" * 10)):
        (tmp_path / name).write_text(text)
    for argument in (f"{tmp_path}", f"{tmp_path}/a.txt,{tmp_path}/b.txt"):
        config = config_of("own_text", argument)
        config.data.data_dir = str(tmp_path / "prepared")
        texts = {name: [row["text"] for row in split] for name, split in open_texts(config.data).splits.items()}
        assert texts == {"train": ["a" * 9, "b" * 9], "validation": ["a", "b"]}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty' has no \.txt"):
        config_of("own_text", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="behind a colon"):
        config_of("own_text")
