"""The data sets of this package, prepared by TFDS as array_record files that need no TensorFlow.

    ui_phrases           short interface texts, shipped with the package
    key_phrases          texts out of these, and their phrases that say most
    parallel_text        pairs out of the user's own files
    plain_text           documents out of the user's own files

A prepared data set is in `root/name/config/version`, as everywhere in TFDS. The config of the user's own files is a
digest of their content: files that change, or another choice of files, make another data set.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging

from decoding_jax.checkpoints.cache_files import cached_folder, sha256_of_file
from train.data.builders.files import FilesConfig, suffix
from train.data.builders.key_phrases import KeyPhrases
from train.data.builders.parallel_text import ParallelText, check_files
from train.data.builders.plain_text import PlainText, parse_part
from train.data.builders.ui_phrases import SPLITS, UiPhrases

SHIPPED: dict[str, Any] = {"key_phrases": KeyPhrases, "ui_phrases": UiPhrases}
OF_FILES: dict[str, Any] = {"parallel_text": ParallelText, "plain_text": PlainText}
OWN = OF_FILES | SHIPPED


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what TFDS says about every step; the builders show themselves how far a long reading is."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def prepare_shipped(root: Path, name: str, language_pair: str) -> tfds.core.DatasetBuilder:
    """One of SHIPPED, prepared if it is not yet.

    Args:
      root: where prepared data sets are.
      name: of the data set.
      language_pair: "en-de" or "en-zh" of ui_phrases, "" or "en" of key_phrases.

    Raises:
      ValueError: there is no such pair, or `root` cannot be written.
    """
    configs = SHIPPED[name].builder_configs
    chosen = language_pair or (next(iter(configs)) if len(configs) == 1 else "")
    if chosen not in configs:
        raise ValueError(f"data.language_pair={language_pair!r}: {name} has {', '.join(configs)}")
    return _prepare(root, name, configs[chosen])


def prepare_files(root: Path, name: str, files: Mapping[str, Any]) -> tfds.core.DatasetBuilder:
    """parallel_text or plain_text of the user's files, prepared if it is not yet.

    Args:
      root: where prepared data sets are.
      name: "parallel_text" or "plain_text"; their modules say how files are spelled.
      files: by split; an empty entry means that there is no such split.

    Raises:
      ValueError: a split or a file that cannot be used, and the remedy; or `root` cannot be written.
    """
    splits = {split: names for split, value in files.items() if (names := _file_names(value))}
    if unknown := sorted(set(splits) - set(SPLITS)):
        raise ValueError(f"data.files has a split {unknown[0]!r}; there are {', '.join(SPLITS)}")
    if not splits:
        raise ValueError(f"data.files names no file; {name} needs them for at least one of {', '.join(SPLITS)}")
    digests = {}
    for split, names in splits.items():
        try:
            if name == "parallel_text":
                check_files(names)
            digests[split] = [_describe(file, has_parts=name == "plain_text") for file in names]
        except ValueError as error:
            raise ValueError(f"data.files.{split}={','.join(names)!r}: {error}") from None
    digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    return _prepare(root, name, FilesConfig(name=digest[:16], splits=splits))


def _file_names(value: str | Sequence[str] | None) -> list[str]:
    names = value.split(",") if isinstance(value, str) else list(value or [])
    return [str(Path(name.strip()).expanduser()) for name in names if name.strip()]


def _describe(file: str, has_parts: bool) -> list[str]:
    """All of a file that decides what is prepared: content, kind, part."""
    path, *part = parse_part(file) if has_parts else (file,)
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r} (names are relative to {str(Path.cwd())!r}); correct the name")
    return [sha256_of_file(Path(path)), suffix(path), *map(str, part)]


def _prepare(root: Path, name: str, config: tfds.core.BuilderConfig) -> tfds.core.DatasetBuilder:
    def build(scratch: Path) -> None:
        builder = OWN[name](data_dir=scratch / "work", config=config)
        try:
            builder.download_and_prepare(file_format="array_record")
        except RuntimeError as error:  # of array_record where the disk is full
            raise OSError(str(error).splitlines()[0]) from error
        for file in Path(builder.data_dir).iterdir():
            file.rename(scratch / file.name)
        shutil.rmtree(scratch / "work")

    # TFDS by itself fails when two processes prepare one data set at once, and trusts whatever it finds.
    with quiet():
        folder = cached_folder(root / name / config.name / str(OWN[name].VERSION), build)
        return tfds.builder_from_directory(folder)
