"""The texts of a data set, by split: pairs of source and target, or documents, read at random places.

A config's `data` part says which:

    name             "ui_phrases", "key_phrases", "parallel_text", "plain_text" (see `train.data.builders`), or one
                     that TFDS has prepared: "name", "name/config" or "name/config:1.0.0"
    language_pair    of ui_phrases: "en-de" or "en-zh"
    files            of parallel_text and plain_text: the files of each split, spelled as these modules say.
                     Of any other data set: which of its splits serve, as in {"train": "train[:95%]",
                     "validation": "train[95%:]"}; if it is empty, those called train, validation and test
    fields           which features serve: ("source", "target") of pairs, in this order, or one of documents.
                     Turned round they turn the translation round; empty means all features of our own data sets
    data_dir         where prepared data sets are; "" is a folder of the user's cache
    lowercase        whether texts are lower-cased
    distilled        "" or a folder of `train.distill`, whose pairs replace the training split
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tensorflow_datasets as tfds

from decoding_jax.checkpoints.cache_files import cache_dir, sha256_of_file
from train.data.builders import OF_FILES, OWN, SHIPPED, SPLITS, prepare_files, prepare_shipped, quiet

_ROWS_AT_ONCE = 1024

DISTILLED = "distilled.jsonl"  # one {"source", "target"} a line; .gz too


class DataSource(Protocol):
    """What TFDS reads texts with, as UTF-8 bytes by feature."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, bytes]: ...
    def __getitems__(self, indices: Sequence[int]) -> Sequence[Mapping[str, bytes]]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The texts of one split, in a fixed order.

    Attributes:
      rows: the data set's rows.
      features: by our field the feature's name in `rows`.
      lowercase: whether texts are lower-cased.
      digest: changes whenever the texts do.
    """

    rows: DataSource
    features: Mapping[str, str]
    lowercase: bool
    digest: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, str]:
        """The texts at a place by field; negative places count from the end."""
        return self._texts(self.rows[range(len(self))[index]])

    def __iter__(self) -> Iterator[dict[str, str]]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            # Twice as fast as one by one.
            block = self.rows.__getitems__(list(range(start, min(start + _ROWS_AT_ONCE, len(self)))))
            yield from map(self._texts, block)

    def _texts(self, row: Mapping[str, bytes]) -> dict[str, str]:
        texts = {field: row[feature].decode("utf-8") for field, feature in self.features.items()}
        return {field: text.lower() for field, text in texts.items()} if self.lowercase else texts


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """A data set.

    Attributes:
      splits: those of "train", "validation" and "test" that there are.
      fields: ("source", "target") or ("text",).
      digest: changes whenever the texts do, so that caches can be keyed by it.
    """

    splits: Mapping[str, Split]
    fields: tuple[str, ...]
    digest: str


def open_texts(settings: Mapping[str, Any]) -> Texts:
    """Opens a data set; prepares it first if it is one of ours that is not prepared yet.

    Args:
      settings: the `data` part of a config; see the module.

    Raises:
      ValueError: a setting cannot be used, or a file or data set is missing or faulty; with the remedy.
    """
    root = Path(settings["data_dir"]).expanduser() if settings["data_dir"] else cache_dir() / "tfds"
    name, lowercase = settings["name"], bool(settings["lowercase"])
    files: Mapping[str, Any] = settings["files"]
    if name in OF_FILES:
        builder, files = prepare_files(root, name, files), {}
    elif name in SHIPPED:
        builder = prepare_shipped(root, name, settings["language_pair"])
    else:
        builder = _find_prepared(root, name)
    parts = _parts(builder, files)
    features = _features(builder, settings["fields"])
    splits = {split: _open_split(builder, split, part, features, lowercase) for split, part in parts.items()}
    if settings["distilled"]:
        splits["train"] = _distilled(root, settings["distilled"], features, lowercase)
    fields = tuple(features)
    return Texts(splits, fields, _digest([fields, *sorted((key, split.digest) for key, split in splits.items())]))


def _find_prepared(root: Path, name: str) -> tfds.core.DatasetBuilder:
    """The newest version of a prepared data set, or the one that is named."""
    there = [(*each.rpartition(":")[::2], each) for each in _prepared_names(root)]
    path, _, wanted = name.partition(":")
    versions = {version: each for base, version, each in there if base == path and wanted in ("", version)}
    if not versions:
        others = [each for base, _, each in there if base.split("/")[0] not in OWN]
        raise ValueError(
            f"data.name={name!r} is neither {', '.join(OWN)} nor prepared in {str(root)!r} (prepared are: "
            f"{', '.join(others) or 'none'}); prepare it with TFDS and file_format='array_record', or set data.data_dir"
        )
    newest = versions[max(versions, key=lambda version: [int(part) for part in version.split(".")])]
    with quiet():
        return tfds.builder_from_directory(root / newest.replace(":", "/"))


def _prepared_names(root: Path) -> list[str]:
    """All that is prepared in a folder, as "name:version" or "name/config:version"."""
    folders = [file.parent for depth in ("*/*", "*/*/*") for file in root.glob(f"{depth}/dataset_info.json")]
    folders = [folder for folder in folders if re.fullmatch(r"\d+\.\d+\.\d+", folder.name)]
    return sorted(f"{folder.parent.relative_to(root).as_posix()}:{folder.name}" for folder in folders)


def _parts(builder: tfds.core.DatasetBuilder, files: Mapping[str, Any]) -> dict[str, str]:
    """By our split the split, or slice of one, of the data set."""
    there = list(builder.info.splits)
    parts = {split: part for split, part in files.items() if part} or {name: name for name in SPLITS if name in there}
    if not parts or not set(parts) <= set(SPLITS):
        raise ValueError(
            f"data.files={dict(files)}: say which splits of {builder.name} ({', '.join(there)}) serve as "
            f"{', '.join(SPLITS)}"
        )
    return parts


def _features(builder: tfds.core.DatasetBuilder, fields: Sequence[str]) -> dict[str, str]:
    """By our field the name of the feature that serves."""
    features = builder.info.features
    # TFDS gives them in another order each time they are read.
    there = sorted(name for name in features if isinstance(features[name], tfds.features.Text))
    chosen = list(fields) or (there if builder.name in OWN else [])
    if len(chosen) not in (1, 2) or len(set(chosen)) != len(chosen) or not set(chosen) <= set(there):
        raise ValueError(
            f"data.fields={tuple(fields)}: name one feature of {builder.name}, or two for source and target; "
            f"its texts are {', '.join(there) or 'none'}"
        )
    return dict(zip(("text",) if len(chosen) == 1 else ("source", "target"), chosen, strict=True))


def _open_split(
    builder: tfds.core.DatasetBuilder, name: str, part: str, features: Mapping[str, str], lowercase: bool
) -> Split:
    try:
        split = builder.info.splits[part]
        if not split.num_examples:
            raise ValueError("it is empty")
        with quiet():
            rows = builder.as_data_source(part)
    except (KeyError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"data.files.{name}={part!r} of {builder.name} in {builder.data_dir} cannot be used: {_reason(error)}; "
            f"name a part of {', '.join(builder.info.splits)}, prepared with file_format='array_record'"
        ) from None
    content: list[Any] = [builder.info.full_name]  # of our own ones that says all: preparing twice makes other bytes
    if builder.name not in OWN:
        content = [(sha256_of_file(Path(shard.filename)), shard.skip, shard.take) for shard in split.file_instructions]
    return Split(rows, features, lowercase, _digest([content, part, dict(features), lowercase]))


def _reason(error: Exception) -> str:
    return str(error.args[0] if error.args else error).splitlines()[0].rstrip(".")


def _distilled(root: Path, folder: str, features: Mapping[str, str], lowercase: bool) -> Split:
    plain = Path(folder).expanduser() / DISTILLED
    file = plain if plain.is_file() else plain.with_name(f"{DISTILLED}.gz")
    if tuple(features) != ("source", "target"):
        raise ValueError(f"data.distilled={folder!r} holds pairs, and data.fields names one feature; name two")
    if not file.is_file():
        raise ValueError(f"data.distilled={folder!r}: there is no {DISTILLED}; name a folder that train.distill filled")
    builder = prepare_files(root, "parallel_text", {"train": [str(file)]})
    return _open_split(builder, "train", "train", {field: field for field in features}, lowercase)


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
