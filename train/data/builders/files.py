"""Text files as the builders read them: UTF-8, plain or .gz, with errors that name the file and the line."""

from __future__ import annotations

import abc
import codecs
import dataclasses
import gzip
import json
import logging
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import tensorflow_datasets as tfds
from tqdm import tqdm

logger = logging.getLogger("decoding_jax")

_NAMED = 3  # that many faults are named, the others only counted
_SILENT_S = 5.0  # reading that takes longer shows a progress bar


@dataclasses.dataclass(eq=False)
class FilesConfig(tfds.core.BuilderConfig):
    """Which files a data set is made of.

    Attributes:
      name: a digest of the files' content, so that changed files make another data set.
      splits: the files of each split, spelled as the builder's module says.
    """

    splits: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


class FilesBuilder(tfds.core.GeneratorBasedBuilder):
    """A data set of a FilesConfig; a subclass says what the rows of a split's files are."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "First version."}
    # TFDS would look for checksums of downloads, by way of a package that it does not install.
    url_infos = None

    FIELDS: tuple[str, ...]
    builder_config: FilesConfig

    @abc.abstractmethod
    def rows(self, files: Sequence[str]) -> Iterator[Sequence[str]]:
        """The texts of each row of a split, in the order of FIELDS; ValueError where files are faulty."""

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=str(sys.modules[type(self).__module__].__doc__),
            features=tfds.features.FeaturesDict({field: tfds.features.Text() for field in self.FIELDS}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: object) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        return {split: self._generate_examples(split) for split in self.builder_config.splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        files = self.builder_config.splits[split]
        try:
            for number, row in enumerate(self.rows(files)):
                yield number, dict(zip(self.FIELDS, row, strict=True))
        except ValueError as error:
            raise ValueError(f"data.files.{split}: {error}") from None


class Faults:
    """Collects what is wrong with the lines of one split, so that one error can name several."""

    def __init__(self) -> None:
        self.named: list[str] = []
        self.count = 0

    def add(self, fault: str) -> None:
        """Notes one line's fault."""
        self.count += 1
        if self.count <= _NAMED:
            self.named.append(fault)

    def raise_any(self, remedy: str) -> None:
        """ValueError with the first faults, their number and the remedy, if there was any."""
        if self.count:
            more = f"; {self.count} such lines in all" if self.count > len(self.named) else ""
            raise ValueError(f"{'; '.join(self.named)}{more}; {remedy}")


def suffix(path: str) -> str:
    """What kind of file a name says it is: ".tsv" of "x.TSV.gz"."""
    return Path(path.lower().removesuffix(".gz")).suffix


def read_bytes(path: str) -> bytes:
    """The unpacked content of a file; ValueError if it cannot be read."""
    return b"".join(_blocks(path))


def read_lines(path: str) -> Iterator[bytes]:
    """The lines of a file without their line ends, which are "\\n" or "\\r\\n".

    Raises:
      ValueError: the file cannot be read, or its .gz is damaged.
    """
    rest = b""
    for block in tqdm(_blocks(path), desc=f"reading {Path(path).name}", unit=" MiB", delay=_SILENT_S, leave=False):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    if rest:
        yield rest


def _blocks(path: str) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb") as file:
            yield file.read(1 << 20).removeprefix(codecs.BOM_UTF8)
            while block := file.read(1 << 20):
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path!r} cannot be read ({error}); make the file anew") from None


def decode(text: bytes) -> str:
    """UTF-8 as a string; ValueError says which byte is not."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} (0x{text[error.start]:02x}) is not UTF-8") from None


def parse_object(line: bytes) -> dict[str, object]:
    """A line as a JSON object; ValueError says what else it is."""
    text = decode(line)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, where an object is needed")
    return record


def text_field(record: dict[str, object], name: str) -> str:
    """A field of an object; ValueError if it is missing, no text, or has no UTF-8."""
    text = record.get(name)
    if not isinstance(text, str):
        raise ValueError(f'no text under "{name}"')
    try:
        text.encode("utf-8")  # JSON can spell half a surrogate pair ("\ud800")
    except UnicodeEncodeError:
        raise ValueError(f'"{name}" holds a \\ud800-\\udfff escape without its partner') from None
    return text


def report_skipped(name: str, skipped: int, files: Sequence[str]) -> None:
    """One line of warning about rows without any text."""
    if skipped:
        logger.warning("%s: skipped %d rows without any text in %s", name, skipped, ", ".join(files))
