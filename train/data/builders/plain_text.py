"""plain_text: documents out of the user's own files, in their order.

    {"train": "input.txt[:90%]", "validation": "input.txt[90%:]"}
    {"train": "part1.jsonl.gz,part2.jsonl.gz", "validation": "one.txt,two.txt"}

Each split is one file or several, in a string with commas or in a list, of UTF-8, plain or .gz:

    .jsonl               an object with "text" on each line, each a document; other fields are ignored
    any other            the whole file is one document, unchanged to the last line end
    any other[a%:b%]     a part of it by characters, from the a-th to the b-th percent; a file is read whole for that

An empty document is skipped and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from train.data.builders.files import (
    Faults,
    FilesBuilder,
    parse_object,
    read_bytes,
    read_lines,
    report_skipped,
    suffix,
    text_field,
)

_NUMBER = r"(\d+(?:\.\d+)?)%"
_PART = re.compile(rf"(.+)\[(?:{_NUMBER})?:(?:{_NUMBER})?\]")


def parse_part(file: str) -> tuple[str, Fraction, Fraction]:
    """A file's name and the part of it that is meant: "a.txt[:90%]" is ("a.txt", 0, 9/10), "a.txt" ("a.txt", 0, 1).

    Raises:
      ValueError: what is in brackets is no part, or is a part of a .jsonl.
    """
    if not file.endswith("]"):
        return file, Fraction(0), Fraction(1)
    found = _PART.fullmatch(file)
    start, stop = (Fraction(found[2] or 0) / 100, Fraction(found[3] or 100) / 100) if found else (1, 0)
    if not found or not start <= stop <= 1:
        raise ValueError("a part is spelled as in input.txt[:90%], input.txt[90%:] or input.txt[10%:20%]")
    if suffix(found[1]) == ".jsonl":
        raise ValueError("only text files have parts; give each split a .jsonl of its own")
    return found[1], Fraction(start), Fraction(stop)


class PlainText(FilesBuilder):
    """The data set; see the module."""

    FIELDS = ("text",)

    def rows(self, files: Sequence[str]) -> Iterator[Sequence[str]]:
        return ((text,) for text in read_documents(files))


def read_documents(files: Sequence[str]) -> Iterator[str]:
    """The documents of one split, in order.

    Raises:
      ValueError: a file cannot be read or is not UTF-8; after the last document, with the first lines that have a
        fault; or there is no text at all.
    """
    faults, good, skipped = Faults(), 0, 0
    for file in files:
        for text in _json_documents(file, faults) if suffix(file) == ".jsonl" else [_whole_document(file)]:
            if text:
                good += 1
                yield text
            else:
                skipped += 1
    faults.raise_any("mend or delete them")
    if not good:
        raise ValueError(f"{' and '.join(files)}: there is no text in there; give a file that has some")
    report_skipped("plain_text", skipped, files)


def _whole_document(file: str) -> str:
    path, start, stop = parse_part(file)
    content = read_bytes(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} of {path} is not UTF-8 ({error.reason}); save the file as UTF-8") from None
    return text[int(start * len(text)) : int(stop * len(text))]


def _json_documents(file: str, faults: Faults) -> Iterator[str]:
    for number, line in enumerate(read_lines(file), start=1):
        try:
            yield text_field(parse_object(line), "text") if line.strip() else ""
        except ValueError as error:
            faults.add(f"line {number} of {file}: {error}")
