"""parallel_text: pairs of source and target out of the user's own files, in their order.

    {"train": "train.en.gz,train.de.gz", "validation": "val.tsv", "test": "test.jsonl"}

Each split is one of

    two files            one text a line, the source's file first; also a list, for names that hold commas
    .tsv                 source, tab, target on each line
    .jsonl               an object with "source" and "target" on each line; other fields are ignored

of UTF-8, plain or .gz. White space around a text is dropped. A pair with two empty sides is skipped and counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from train.data.builders.files import (
    Faults,
    FilesBuilder,
    decode,
    parse_object,
    read_lines,
    report_skipped,
    suffix,
    text_field,
)

_REMEDY = "mend or delete them (in parallel files the line of both)"


def check_files(files: Sequence[str]) -> None:
    """ValueError if a split is not spelled as the module says."""
    if len(files) != 2 and not (len(files) == 1 and suffix(files[0]) in (".tsv", ".jsonl")):
        raise ValueError("give two files of aligned lines, or one .tsv, or one .jsonl (each of them plain or .gz)")


class ParallelText(FilesBuilder):
    """The data set; see the module."""

    FIELDS = ("source", "target")

    def rows(self, files: Sequence[str]) -> Iterator[Sequence[str]]:
        return read_pairs(files)


def read_pairs(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The pairs of one split, in order.

    Raises:
      ValueError: after the last pair, with the first lines that have a fault; or the files' lengths differ, or there
        is no pair at all.
    """
    parse = _parsers(files)
    faults, good, skipped = Faults(), 0, 0
    for number, lines in enumerate(_rows(files), start=1):
        try:
            source, target = (text.strip() for text in parse(lines))
            if not source and not target:
                skipped += 1
                continue
            if not source or not target:
                side = "source" if not source else "target"
                raise ValueError(f"the {side} is empty and the other side is not")
        except ValueError as error:
            faults.add(f"line {number} of {' and '.join(files)}: {error}")
            continue
        good += 1
        yield source, target
    faults.raise_any(_REMEDY)
    if not good:
        raise ValueError(f"{' and '.join(files)}: there is no pair in there; give a file that has some")
    report_skipped("parallel_text", skipped, files)


def _rows(files: Sequence[str]) -> Iterator[tuple[bytes, ...]]:
    """The lines of all files that have the same number; ValueError at the end if some file has more."""
    counts = [0] * len(files)
    for lines in itertools.zip_longest(*(read_lines(file) for file in files)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if len(set(counts)) == 1:
            yield lines
    if len(set(counts)) > 1:
        described = " but ".join(f"{file} has {count} lines" for file, count in zip(files, counts, strict=True))
        raise ValueError(f"{described}; line n of one must be the translation of line n of the other")


def _parsers(files: Sequence[str]) -> Callable[[Sequence[bytes]], Sequence[str]]:
    if len(files) == 2:
        return lambda lines: [_decode_line(line, file) for line, file in zip(lines, files, strict=True)]
    return _parse_tsv if suffix(files[0]) == ".tsv" else _parse_json


def _decode_line(line: bytes, file: str) -> str:
    try:
        return decode(line)
    except ValueError as error:
        raise ValueError(f"{error} in {file}") from None


def _parse_tsv(lines: Sequence[bytes]) -> Sequence[str]:
    columns = decode(lines[0]).split("\t")
    if columns == [""]:
        return "", ""
    if len(columns) != 2:
        raise ValueError(f"{len(columns)} columns, where source, tab, target are 2")
    return columns


def _parse_json(lines: Sequence[bytes]) -> Sequence[str]:
    if not lines[0].strip():
        return "", ""
    record = parse_object(lines[0])
    return text_field(record, "source"), text_field(record, "target")
