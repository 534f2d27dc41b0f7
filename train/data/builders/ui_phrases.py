"""ui_phrases: 18,000 short interface texts in English and German ("en-de") or Chinese ("en-zh"), shipped with us.

From Home Assistant (Apache-2.0; see LICENSE and NOTICE beside the data), by scripts/extract_ui_phrases.py. Two to
twelve English words. About 16,400 pairs for training, 1,000 each for validation and test, which hold no
near-duplicate of a text in another split; both languages have the same splits.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import tensorflow_datasets as tfds

FILE = Path(__file__).parent.parent / "ui_phrases" / "ui_phrases.tsv.xz"
SPLITS = ("train", "validation", "test")
_COLUMNS = {"en-de": 2, "en-zh": 3}  # of the line: split, English, German, Chinese


class UiPhrases(tfds.core.GeneratorBasedBuilder):
    """The data set; TFDS shuffles it by a digest of the source, so that any first part is a fair sample."""

    # A folder of a prepared data set is known by this number: another extract needs another one.
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "From Home Assistant 2026.2.3."}
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(name="en-de", description="English to German."),
        tfds.core.BuilderConfig(name="en-zh", description="English to Chinese, simplified."),
    ]
    # TFDS would look for checksums of downloads, by way of a package that it does not install.
    url_infos = None

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.FeaturesDict({"source": tfds.features.Text(), "target": tfds.features.Text()}),
            homepage="https://www.home-assistant.io",
            license="Apache-2.0",
        )

    def _split_generators(self, dl_manager: object) -> dict[str, Iterator[tuple[str, dict[str, str]]]]:
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, str]]]:
        column = _COLUMNS[self.builder_config.name]
        for row in _rows(split):
            if row[column]:
                yield row[1], {"source": row[1], "target": row[column]}


def english_texts(split: str) -> list[str]:
    """The English texts of a split."""
    return [row[1] for row in _rows(split)]


def _rows(split: str) -> Iterator[list[str]]:
    """The lines of a split: its name, English, German, Chinese; "" where a language has none."""
    with lzma.open(FILE, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            row = line.rstrip("\n").split("\t")
            if row[0] == split:
                yield row
