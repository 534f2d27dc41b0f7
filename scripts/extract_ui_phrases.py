"""Makes the data set ui_phrases: short interface texts in English, German and Chinese, out of a Home Assistant wheel.

    pip download --no-deps --only-binary=:all: --python-version 3.14 homeassistant==2026.2.3
    python scripts/extract_ui_phrases.py --wheel=homeassistant-2026.2.3-py3-none-any.whl

The wheel holds the same string tables in every language. The extract is a table of UTF-8 lines, packed with xz:
split, English, German, Chinese, separated by tabs, the last two empty where there is no usable text. An English
text is there once, so a split is the same for both languages. The same wheel makes the same bytes.

Interface texts repeat one another with small changes, so the splits are made of groups: texts that are equal but
for case, digits and punctuation, or that share at least 60% of their words or of their letter triples, or that
have the same translation, are in one group, and so is everything that such links connect.
"""

from __future__ import annotations

import collections
import hashlib
import json
import lzma
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from train.command import run, say

WHEEL = flags.DEFINE_string("wheel", None, "The wheel of homeassistant 2026.2.3.", required=True)
OUTPUT = flags.DEFINE_string("output", "train/data/ui_phrases/ui_phrases.tsv.xz", "Where the extract goes.")
HELD_OUT = flags.DEFINE_integer("held_out", 1000, "English texts in each of validation and test.", lower_bound=1)

ENGLISH, GERMAN, CHINESE = "en", "de", "zh-Hans"
MIN_WORDS, MAX_WORDS = 2, 12
# Validation and test are made of small groups: a large one is a pattern that is filled in again and again, and
# would be most of what is measured.
LARGEST_HELD_OUT_GROUP = 10

# Placeholders, references, markup, addresses and line breaks: not text to translate.
_NOT_TEXT = re.compile(r"[{}\[\]|<>*`\n\r\t]|://|www\.")
_HAN = re.compile("[\u4e00-\u9fff]")

Key = tuple[str, ...]


def read_table(wheel: zipfile.ZipFile, language: str) -> dict[Key, str]:
    """The texts of one language, by integration and path within its table."""
    name = re.compile(rf"homeassistant/components/([^/]+)/translations/{language}\.json")
    table: dict[Key, str] = {}
    for file in sorted(wheel.namelist()):
        if found := name.fullmatch(file):
            table.update(_flatten(json.loads(wheel.read(file)), (found[1],)))
    if not table:
        raise ValueError(f"wheel={wheel.filename!r} holds no texts in {language!r}; give a wheel of homeassistant")
    return table


def _flatten(node: Mapping[str, Any], path: Key) -> Iterator[tuple[Key, str]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _flatten(value, (*path, name))
        else:
            yield (*path, name), re.sub(" +", " ", value).strip()


def usable_pairs(english: Mapping[Key, str], other: Mapping[Key, str], language: str) -> dict[str, str]:
    """English texts and their translations; of several for one text the most frequent, then the first by spelling."""
    seen: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for key, source in english.items():
        target = other.get(key, "")
        if not target or source == target or _NOT_TEXT.search(source) or _NOT_TEXT.search(target):
            continue
        if not MIN_WORDS <= len(source.split()) <= MAX_WORDS or (language == CHINESE and not _HAN.search(target)):
            continue
        seen[source][target] += 1
    return {source: min(targets, key=lambda text: (-targets[text], text)) for source, targets in seen.items()}


def normalise(text: str) -> str:
    """Lower case, every digit a 0, punctuation dropped, single spaces."""
    return " ".join(re.sub(r"[\W_]+", " ", re.sub(r"\d", "0", text.lower())).split())


def groups_of(sources: Sequence[str], translations: Sequence[Mapping[str, str]]) -> np.ndarray:
    """The group of each text, i64[n]: the connected components of near-duplicates."""
    normal = [normalise(source) for source in sources]
    links = [*_equal(normal)]
    for pairs in translations:
        links += _equal([normalise(pairs.get(source, "")) for source in sources])
    links += _similar([set(text.split()) for text in normal])
    links += _similar([{f" {text} "[i : i + 3] for i in range(len(text))} for text in normal])
    return _components(len(sources), links)


def _equal(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    first: dict[str, int] = {}
    for i, text in enumerate(texts):
        if text and (j := first.setdefault(text, i)) != i:
            yield j, i


def _similar(features: Sequence[set[str]]) -> Iterator[tuple[int, int]]:
    """The pairs of sets whose intersection is at least 60% of their union."""
    sizes = np.array([len(each) for each in features])
    holders: dict[str, list[int]] = collections.defaultdict(list)
    for i, each in enumerate(features):
        for feature in each:
            holders[feature].append(i)
    arrays = {feature: np.array(held) for feature, held in holders.items()}
    for i, each in enumerate(features):
        if not each:
            continue
        shared = np.bincount(np.concatenate([arrays[feature] for feature in each]), minlength=len(features))
        for j in np.flatnonzero(10 * shared >= 6 * (sizes[i] + sizes - shared)):
            if j < i:
                yield int(j), i


def _components(count: int, links: Iterable[tuple[int, int]]) -> np.ndarray:
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for i, j in links:
        low, high = sorted((root(i), root(j)))
        parent[high] = low
    return np.array([root(i) for i in range(count)])


def choose_splits(
    sources: Sequence[str], groups: np.ndarray, translations: Sequence[Mapping[str, str]], held_out: int
) -> dict[str, str]:
    """The split of each text. Validation and test hold whole small groups, all of whose texts have every translation.

    Which groups is decided by a digest of their texts, so it is as good as random and the same everywhere.
    """
    members: dict[int, list[str]] = collections.defaultdict(list)
    for source, group in zip(sources, groups.tolist(), strict=True):
        members[group].append(source)
    small = [
        group
        for group in members.values()
        if len(group) <= LARGEST_HELD_OUT_GROUP and all(source in pairs for source in group for pairs in translations)
    ]
    small.sort(key=lambda group: hashlib.sha256("\n".join(group).encode()).digest())
    splits = dict.fromkeys(sources, "train")
    for name in ("test", "validation"):
        missing = held_out
        for group in small:
            if splits[group[0]] == "train" and len(group) <= missing:
                splits.update(dict.fromkeys(group, name))
                missing -= len(group)
    return splits


def pack(lines: Iterable[str]) -> bytes:
    """Lines as an .xz file; the container has no time in it, so equal lines make equal bytes."""
    return lzma.compress("".join(f"{line}\n" for line in lines).encode("utf-8"), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    """Reads the wheel, writes the extract, reports the figures."""
    try:
        with zipfile.ZipFile(WHEEL.value) as wheel:
            english, german, chinese = (read_table(wheel, language) for language in (ENGLISH, GERMAN, CHINESE))
    except zipfile.BadZipFile as error:
        raise ValueError(f"wheel={WHEEL.value!r} is not a whole wheel ({error}); download it again") from None
    to_german, to_chinese = usable_pairs(english, german, GERMAN), usable_pairs(english, chinese, CHINESE)
    sources = sorted({*to_german, *to_chinese})
    groups = groups_of(sources, [to_german, to_chinese])
    splits = choose_splits(sources, groups, [to_german, to_chinese], HELD_OUT.value)
    packed = pack("\t".join((splits[s], s, to_german.get(s, ""), to_chinese.get(s, ""))) for s in sources)
    Path(OUTPUT.value).write_bytes(packed)
    sizes = np.unique(groups, return_counts=True)[1]
    say(
        f"{len(sources)} texts ({len(to_german)} en-de, {len(to_chinese)} en-zh) in {len(sizes)} groups, "
        f"{np.count_nonzero(sizes == 1)} of a single text, the largest of {sizes.max()}"
    )
    say(f"{dict(sorted(collections.Counter(splits.values()).items()))}, {len(packed)} bytes in {OUTPUT.value}")


if __name__ == "__main__":
    run(main)
