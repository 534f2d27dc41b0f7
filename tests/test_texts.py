"""Texts: what a config's files and names open, that it is the same every time, and which mistakes are named how."""

from __future__ import annotations

import collections
import gzip
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds

from train.data.builders import ui_phrases
from train.data.builders.key_phrases import SEPARATOR, key_phrases
from train.data.texts import open_texts

ROOT = Path(__file__).parent.parent
LANGUAGES = ("en", "de", "zh-Hans")


class OldWorld(tfds.core.GeneratorBasedBuilder):
    """Somebody else's data set: other names of splits and features, one feature that is no text."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"en": tfds.features.Text(), "la": tfds.features.Text(), "year": tfds.features.Scalar(np.int32)}
        return tfds.core.DatasetInfo(
            builder=self, description="", features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: object) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {"train": self._generate_examples(10), "dev": self._generate_examples(3)}

    def _generate_examples(self, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for i in range(count):
            yield i, {"en": f"Text {i}", "la": f"Textus {i}", "year": i}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything of this file is prepared, for the same data set is made only once."""
    folder = tmp_path_factory.mktemp("prepared")
    OldWorld(data_dir=folder).download_and_prepare(file_format="array_record")
    return folder


@pytest.fixture
def open_data(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """open_texts with settings that are usual, in a folder of files that are named without their folder."""
    monkeypatch.chdir(tmp_path)
    usual = {
        "language_pair": "en-de",
        "files": {},
        "fields": (),
        "data_dir": str(prepared),
        "lowercase": False,
        "distilled": "",
    }
    return lambda name, **settings: open_texts(usual | {"name": name} | settings)


def write(files: Mapping[str, str | bytes]) -> None:
    """Files in the working folder; those called .gz are packed."""
    for name, content in files.items():
        data = content.encode("utf-8") if isinstance(content, str) else content
        Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


# --- The user's own files


def test_pairs_are_read_from_every_kind_of_file_in_order(open_data: Any) -> None:
    """Two files, a TSV and JSON lines, plain or packed, with either line end and a byte order mark, say the same."""
    write(
        {
            "a.en": "\ufeffone two\r\nthree\r\n",
            "a.de.gz": "eins zwei\n drei ",
            "b.tsv": "one two\teins zwei\nthree\tdrei\n",
            "c.jsonl.gz": '{"source": "one two", "target": "eins zwei", "id": 7}\n\n{"source":"three","target":"drei"}',
        }
    )
    texts = open_data("parallel_text", files={"train": "a.en,a.de.gz", "validation": "b.tsv", "test": "c.jsonl.gz"})
    expected = [{"source": "one two", "target": "eins zwei"}, {"source": "three", "target": "drei"}]
    assert texts.fields == ("source", "target")
    assert [list(texts.splits[name]) for name in ("train", "validation", "test")] == [expected] * 3


def test_a_split_is_random_access(open_data: Any) -> None:
    """Rows keep the order of the lines, through several blocks; places count from either end."""
    write({"a.tsv": "".join(f"text {i}\tTEXT {i}\n" for i in range(1100))})
    split = open_data("parallel_text", files={"train": "a.tsv"}).splits["train"]
    assert len(split) == 1100 and [row["source"] for row in split] == [f"text {i}" for i in range(1100)]
    assert split[1050] == {"source": "text 1050", "target": "TEXT 1050"} and split[-1] == split[1099]
    with pytest.raises(IndexError):
        split[1100]


def test_a_config_spells_files_as_lists_as_well(open_data: Any, prepared: Path) -> None:
    """A ConfigDict does as well as a dict, a list of names as well as commas, and an empty name is no split."""
    write({"a, b.en": "one\n", "a.de": "eins\n"})
    settings = {"name": "parallel_text", "files": {"train": ("a, b.en", "a.de"), "test": ""}, "data_dir": str(prepared)}
    more = {"fields": ("source", "target"), "language_pair": "en-de", "lowercase": False, "distilled": ""}
    texts = open_texts(ml_collections.ConfigDict(settings | more))
    assert {name: list(split) for name, split in texts.splits.items()} == {
        "train": [{"source": "one", "target": "eins"}]
    }


def test_fields_choose_and_turn_round(open_data: Any) -> None:
    """`fields` says which feature is the source and which the target, or that one of them alone is the text."""
    write({"a.tsv": "one\teins\n"})
    turned = open_data("parallel_text", files={"train": "a.tsv"}, fields=("target", "source"))
    assert turned.splits["train"][0] == {"source": "eins", "target": "one"}
    alone = open_data("parallel_text", files={"train": "a.tsv"}, fields=("target",))
    assert alone.fields == ("text",) and alone.splits["train"][0] == {"text": "eins"}
    assert alone.digest != turned.digest


def test_lowercase(open_data: Any) -> None:
    """Texts are lower-cased as Unicode says, and their digest is another one."""
    write({"a.tsv": "ONE Two\tÄrger\n"})
    files = {"train": "a.tsv"}
    lower = open_data("parallel_text", files=files, lowercase=True)
    assert list(lower.splits["train"]) == [lower.splits["train"][0]] == [{"source": "one two", "target": "ärger"}]
    assert lower.digest != open_data("parallel_text", files=files).digest


def test_changed_files_are_prepared_anew(open_data: Any) -> None:
    """The same name with another content makes another data set; the old content the old one, wherever it is."""
    write({"a.tsv": "one\teins\n"})
    first = open_data("parallel_text", files={"train": "a.tsv"})
    write({"a.tsv": "two\tzwei\n", "moved.tsv": "one\teins\n"})
    second = open_data("parallel_text", files={"train": "a.tsv"})
    again = open_data("parallel_text", files={"train": "moved.tsv"})
    assert [texts.splits["train"][0]["source"] for texts in (first, second, again)] == ["one", "two", "one"]
    assert first.digest == again.digest != second.digest


def test_a_damaged_data_set_is_prepared_anew(open_data: Any, caplog: Any) -> None:
    """A shard that was cut off, as by a full disk, is noticed, named and mended."""
    write({"a.tsv": "one\teins\n"})
    there = open_data("parallel_text", files={"train": "a.tsv"}, data_dir="data")
    (shard,) = Path("data").rglob("*.array_record*")
    shard.write_bytes(shard.read_bytes()[:40])
    again = open_data("parallel_text", files={"train": "a.tsv"}, data_dir="data")
    assert again.splits["train"][0] == {"source": "one", "target": "eins"} and again.digest == there.digest
    assert "is damaged" in caplog.text


def test_two_processes_prepare_one_data_set(open_data: Any) -> None:
    """Both get it whole, whoever comes first, and nothing but it is left."""
    write({"a.tsv": "".join(f"{i}\tnumber {i}\n" for i in range(500))})
    program = (
        "from train.data.texts import open_texts\n"
        "texts = open_texts(dict(name='parallel_text', language_pair='', files={'train': 'a.tsv'}, fields=(),"
        " data_dir='data', lowercase=False, distilled=''))\n"
        "print(texts.digest, sum(1 for _ in texts.splits['train']))\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-c", program]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    said = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert said == {f"{open_data('parallel_text', files={'train': 'a.tsv'}).digest} 500"}
    assert [path.name for path in Path("data/parallel_text").glob("*/*")] == ["1.0.0"]


def test_documents_are_whole_files_or_lines(open_data: Any) -> None:
    """A text file is one document to the last line end, a .jsonl one a line; all in the order they are named."""
    write({"b.txt": "first\r\n\n", "a.jsonl": '{"text": "second\\n"}\n{"text": "third"}\n', "c.txt.gz": "Vierter: ü\n"})
    texts = open_data("plain_text", files={"train": "b.txt,a.jsonl,c.txt.gz"})
    assert texts.fields == ("text",)
    assert [row["text"] for row in texts.splits["train"]] == ["first\r\n\n", "second\n", "third", "Vierter: ü\n"]


def test_parts_of_a_file(open_data: Any) -> None:
    """Parts are counted in characters, rounded down, and two of them that meet are the whole."""
    whole = "".join(chr(0x4E00 + i) for i in range(1003))
    write({"a.txt": whole})
    texts = open_data(
        "plain_text", files={"train": "a.txt[:90%]", "validation": "a.txt[90%:99.5%]", "test": "a.txt[99.5%:]"}
    )
    parts = [texts.splits[name][0]["text"] for name in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [902, 95, 6] and "".join(parts) == whole


def test_rows_without_text_are_skipped_and_counted(open_data: Any, caplog: Any) -> None:
    """Two empty sides are no fault, and how many there were is said when the data set is prepared."""
    write({"a.en": "one\n\n \nfour\n", "a.de": "eins\n\n\nvier\n", "a.jsonl": '{"text": ""}\n\n{"text": "x"}\n'})
    pairs = open_data("parallel_text", files={"train": "a.en,a.de"})
    documents = open_data("plain_text", files={"train": "a.jsonl"})
    assert [row["source"] for row in pairs.splits["train"]] == ["one", "four"]
    assert [row["text"] for row in documents.splits["train"]] == ["x"]
    assert caplog.text.count("skipped 2 rows without any text in") == 2


FAULTY_FILES: dict[str, tuple[str, dict[str, str | bytes], str, str]] = {
    "missing": ("parallel_text", {"a.en": "x"}, "a.en,b.de", "data.files.train='a.en,b.de': there is no file"),
    "one of two": ("parallel_text", {"a.en": "x"}, "a.en", "give two files of aligned lines, or one .tsv"),
    "counts": (
        "parallel_text",
        {"a.en": "one\n\ntwo\nthree\n", "a.de": "eins\nzwei"},
        "a.en,a.de",
        "data.files.train: a.en has 4 lines but a.de has 2 lines; line n of one must be",
    ),
    "one empty side": (
        "parallel_text",
        {"a.en": "one\n\nthree\nfour\n\nsix\nx\n", "a.de": "eins\nzwei\n \nvier\nfünf\n\ny"},
        "a.en,a.de",
        "line 2 of a.en and a.de: the source is empty and the other side is not; line 3 .* the target is empty .*"
        "line 5 .*; 4 such lines in all; mend or delete them",
    ),
    "not UTF-8": (
        "parallel_text",
        {"a.en": b"one\ntwo\n", "a.de": b"eins\nz\xfcei\n"},
        "a.en,a.de",
        r"line 2 of a.en and a.de: byte 2 \(0xfc\) is not UTF-8 in a.de; mend",
    ),
    "columns": (
        "parallel_text",
        {"a.tsv": "one\teins\ntwo\nthree\tdrei\t3\n"},
        "a.tsv",
        "line 2 of a.tsv: 1 columns, where source, tab, target are 2; line 3 of a.tsv: 3 columns",
    ),
    "not JSON": (
        "parallel_text",
        {"a.jsonl": '{"source": "x", "target": "y"}\n{"source"}\n[1]\n{"source": "x"}\n'},
        "a.jsonl",
        'line 2 of a.jsonl: not JSON .*; line 3 of a.jsonl: a JSON list.*; line 4 of a.jsonl: no text under "target"',
    ),
    "half a surrogate": ("plain_text", {"a.jsonl": '{"text": "\\ud800"}'}, "a.jsonl", "escape without its partner"),
    "nothing": ("parallel_text", {"a.tsv": "\n\t\n"}, "a.tsv", "a.tsv: there is no pair in there"),
    "no text": ("plain_text", {"a.txt": ""}, "a.txt", "a.txt: there is no text in there"),
    "document": ("plain_text", {"a.txt": b"one\ntwo\nx\xff\n"}, "a.txt", r"line 3 of a.txt is not UTF-8 .*; save the"),
    "documents": ("plain_text", {"a.jsonl": '{"text": 3}'}, "a.jsonl", 'line 1 of a.jsonl: no text under "text"'),
    "half a .gz": ("plain_text", {"a.txt.gz": b"x"}, "half.gz", "'half.gz' cannot be read .*make the file anew"),
    "no .gz": ("plain_text", {"a.txt": b"x"}, "plain.gz", "'plain.gz' cannot be read .*make the file anew"),
    "part": ("plain_text", {"a.txt": b"x"}, "a.txt[90:]", r"a part is spelled as in input.txt\[:90%\]"),
    "part above all": ("plain_text", {"a.txt": b"x"}, "a.txt[90%:110%]", "a part is spelled as in"),
    "part of lines": ("plain_text", {"a.jsonl": b"x"}, "a.jsonl[90%:]", "only text files have parts"),
}


@pytest.mark.parametrize("case", FAULTY_FILES)
def test_faulty_files_are_named(open_data: Any, prepared: Path, case: str) -> None:
    """Which file, which line, what is wrong and what to do; nothing is left of what was half prepared."""
    name, files, spelled, message = FAULTY_FILES[case]
    write(files)
    Path("half.gz").write_bytes(gzip.compress(b"some text")[:-9])
    Path("plain.gz").write_bytes(b"some text")
    before = set(prepared.glob("*/*/*"))
    with pytest.raises(ValueError, match=message):
        open_data(name, files={"train": spelled})
    assert set(prepared.glob("*/*/*")) == before


@pytest.mark.parametrize(
    "files, message",
    [
        ({"training": "a.tsv"}, "data.files has a split 'training'; there are train, validation, test"),
        ({"train": ""}, "data.files names no file; parallel_text needs them"),
    ],
)
def test_unusable_splits_are_named(open_data: Any, files: dict[str, str], message: str) -> None:
    """A split that nothing would read, or none at all, is no data set."""
    with pytest.raises(ValueError, match=message):
        open_data("parallel_text", files=files)


# --- Distilled pairs


def test_distilled_pairs_replace_the_training_split(open_data: Any) -> None:
    """Validation and test stay what they are, and so do their digests."""
    write({"a.tsv": "One\teins\n", "b.tsv": "two\tzwei\n"})
    Path("teacher").mkdir()
    write({"teacher/distilled.jsonl": '{"source": "One", "target": "ein"}\n'})
    settings = {"files": {"train": "a.tsv", "validation": "b.tsv"}, "lowercase": True}
    plain = open_data("parallel_text", **settings)
    Path("packed").mkdir()
    Path("packed/distilled.jsonl.gz").write_bytes(gzip.compress(Path("teacher/distilled.jsonl").read_bytes()))
    packed = open_data("parallel_text", **settings, distilled="packed")
    distilled = open_data("parallel_text", **settings, distilled="teacher")
    assert list(packed.splits["train"]) == list(distilled.splits["train"])
    assert list(distilled.splits["train"]) == [{"source": "one", "target": "ein"}]
    assert distilled.splits["validation"].digest == plain.splits["validation"].digest
    assert distilled.digest != plain.digest


def test_unusable_distilled_pairs_are_named(open_data: Any) -> None:
    """A folder that is not one of train.distill, and documents that no pairs can replace."""
    write({"a.tsv": "one\teins\n", "a.txt": "x"})
    with pytest.raises(ValueError, match=r"data.distilled='teacher': there is no distilled.jsonl; name a folder"):
        open_data("parallel_text", files={"train": "a.tsv"}, distilled="teacher")
    with pytest.raises(ValueError, match=r"data.distilled='teacher' holds pairs"):
        open_data("plain_text", files={"train": "a.txt"}, distilled="teacher")


# --- Other people's data sets


def test_a_prepared_data_set_is_opened_by_name(open_data: Any, prepared: Path) -> None:
    """`fields` names its features, `files` its splits or slices of them; without `files` only equal names serve."""
    texts = open_data("old_world", fields=("en", "la"))
    assert list(texts.splits) == ["train"] and texts.splits["train"][3] == {"source": "Text 3", "target": "Textus 3"}
    slices = {"train": "train[:80%]", "validation": "train[80%:]", "test": "dev"}
    texts = open_data("old_world:1.0.0", fields=("la",), files=slices)
    assert {name: len(split) for name, split in texts.splits.items()} == {"train": 8, "validation": 2, "test": 3}
    assert texts.splits["validation"][0] == {"text": "Textus 8"}


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"name": "new_world"},
            "is neither parallel_text, plain_text, key_phrases, ui_phrases nor prepared in '.*' .*old_world:1.0.0",
        ),
        ({"name": "old_world:2.0.0"}, "data.name='old_world:2.0.0' is neither"),
        ({"name": "old_world", "fields": ()}, r"data.fields=\(\): name one feature of old_world, .* are en, la"),
        ({"name": "old_world", "fields": ("en", "year")}, "its texts are en, la"),
        (
            {"name": "old_world", "fields": ("en",), "files": {"train": "old"}},
            r"data.files.train='old' of .*; name a part of train, dev",
        ),
        (
            {"name": "old_world", "fields": ("en",), "files": {"dev": "dev"}},
            "say which splits of old_world .train, dev.",
        ),
        (
            {"name": "old_world", "fields": ("en",), "files": {"train": "train[:0]"}},
            r"data.files.train='train\[:0\]' of .* it is empty",
        ),
        ({"name": "ui_phrases", "language_pair": "en-fr"}, "data.language_pair='en-fr': ui_phrases has en-de, en-zh"),
        ({"name": "ui_phrases", "language_pair": ""}, "data.language_pair='': ui_phrases has en-de, en-zh"),
        ({"name": "key_phrases", "language_pair": "en-de"}, "data.language_pair='en-de': key_phrases has en"),
    ],
)
def test_unusable_names_are_refused(open_data: Any, settings: dict[str, Any], message: str) -> None:
    """The message says what there is, and where it was looked for."""
    with pytest.raises(ValueError, match=message):
        open_data(**settings)


def test_the_newest_version_is_opened(open_data: Any, prepared: Path) -> None:
    """Versions are compared as numbers: 10 is newer than 9."""
    shutil.copytree(prepared / "old_world" / "1.0.0", "data/old_world/10.0.0")
    Path("data/old_world/9.0.0").mkdir()
    write({"data/old_world/9.0.0/dataset_info.json": "not to be opened"})
    assert len(open_data("old_world", fields=("en",), data_dir="data").splits["train"]) == 10


def test_a_data_set_for_tensorflow_is_refused(open_data: Any, prepared: Path) -> None:
    """TFDS prepares for TensorFlow unless it is told otherwise; such files have no random access."""
    shutil.copytree(prepared / "old_world" / "1.0.0", "data/old_world/1.0.0")
    info = Path("data/old_world/1.0.0/dataset_info.json")
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(ValueError, match=r"not supported.* prepared with file_format='array_record'$"):
        open_data("old_world", fields=("en",), data_dir="data")


def test_nothing_is_said_and_no_tensorflow(open_data: Any, capfd: Any) -> None:
    """TFDS would announce every step."""
    write({"a.tsv": "quiet\tstill\n"})
    open_data("parallel_text", files={"train": "a.tsv"})
    assert capfd.readouterr() == ("", "")
    assert "tensorflow" not in sys.modules


# --- ui_phrases


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    """The rows of the shipped table: split, English, German, Chinese."""
    return [line.split("\t") for line in lzma.decompress(ui_phrases.FILE.read_bytes()).decode("utf-8").splitlines()]


def plain(text: str) -> str:
    """Without case, punctuation and which digit it is."""
    return " ".join(re.sub(r"[\W_]+", " ", re.sub(r"\d", "0", text.lower())).split())


def triples(text: str) -> set[str]:
    """Of letters, with a space at either end."""
    return {f" {text} "[i : i + 3] for i in range(len(text))}


@pytest.mark.parametrize("pair", ["en-de", "en-zh"])
def test_ui_phrases_is_what_is_shipped(open_data: Any, table: list[list[str]], pair: str) -> None:
    """Every row of the table that has a translation is in its split, and nothing else is."""
    texts = open_data("ui_phrases", language_pair=pair)
    column = 2 if pair == "en-de" else 3
    for name, split in texts.splits.items():
        expected = {row[1]: row[column] for row in table if row[0] == name and row[column]}
        assert {row["source"]: row["target"] for row in split} == expected and len(split) == len(expected)
    sizes = {name: len(split) for name, split in texts.splits.items()}
    assert sizes["validation"] == sizes["test"] == 1000 and 16_000 < sizes["train"] < 17_000


def test_a_changed_table_is_a_new_version() -> None:
    """Prepared copies are known by the version: whoever changes the table changes both lines here and VERSION."""
    known = {"1.0.0": "81471ea4ceeb87eb8a4948aa094040277a66dc89e7ad1d99db2755a416d5f609"}
    assert hashlib.sha256(ui_phrases.FILE.read_bytes()).hexdigest() == known[str(ui_phrases.UiPhrases.VERSION)]


def test_the_table_holds_texts_to_translate(table: list[list[str]]) -> None:
    """2 to 12 English words, no markup or placeholder, Chinese where it says so, nothing twice, sorted."""
    sources = [row[1] for row in table]
    assert sources == sorted(set(sources))
    for _, source, german, chinese in table:
        assert 2 <= len(source.split()) <= 12 and german != source and (german or chinese)
        assert not re.search(r"[{}<>*`|\[\]]|://", source + german + chinese)
        assert not chinese or re.search("[\u4e00-\u9fff]", chinese)


def test_no_text_of_ui_phrases_is_in_two_splits(table: list[list[str]]) -> None:
    """Nor is its translation: equal but for case, digits and punctuation counts as equal."""
    for column in (1, 2, 3):
        splits: dict[str, set[str]] = collections.defaultdict(set)
        for row in table:
            if text := plain(row[column]):
                splits[text].add(row[0])
        assert all(len(there) == 1 for there in splits.values())


def test_no_near_duplicate_is_in_two_splits(table: list[list[str]]) -> None:
    """A sample of the held-out texts shares with no text of another split 60% of the words or of the letter triples."""
    texts = [(row[0], plain(row[1])) for row in table]
    features = [(split, set(text.split()), triples(text)) for split, text in texts]
    for split, words, letters in [each for each in features if each[0] != "train"][::50]:
        for other, other_words, other_letters in features:
            if other != split:
                assert 10 * len(words & other_words) < 6 * len(words | other_words)
                assert 10 * len(letters & other_letters) < 6 * len(letters | other_letters)


# --- key_phrases


def test_key_phrases_are_runs_of_their_text(open_data: Any, table: list[list[str]]) -> None:
    """At most three, none twice, each in its text between function words; texts are three of their own split's."""
    texts = open_data("key_phrases", language_pair="")
    for name, split in texts.splits.items():
        known = {row[1] for row in table if row[0] == name}
        for row in split:
            phrases = row["target"].split(SEPARATOR)
            assert 1 <= len(phrases) == len(set(phrases)) <= 3
            places = [row["source"].find(phrase) for phrase in phrases]
            assert min(places) >= 0 and "the" not in row["target"].lower().split()
        for row in [split[0], split[-1]]:
            assert sum(text in row["source"] for text in known) >= 3
    sizes = {name: len(split) for name, split in texts.splits.items()}
    assert sizes["validation"] == sizes["test"] == 999 and 16_000 < sizes["train"] < 17_000


def test_key_phrases_say_most() -> None:
    """Rare words go first, and a run of more than four words is no phrase; the same text has the same ones."""
    assert key_phrases("The battery level is low. Geofence of the front door") == [
        "battery level",
        "Geofence",
        "front door",
    ]
    assert key_phrases("one two three four five six seven eight. Geofence") == ["Geofence"]
    assert key_phrases("of the and") == []


# --- The extraction


def run_extraction(wheel: str, output: str) -> str:
    """What scripts/extract_ui_phrases.py says, keeping two texts each for validation and test."""
    command = [sys.executable, str(ROOT / "scripts" / "extract_ui_phrases.py")]
    arguments = [f"--wheel={wheel}", f"--output={output}", "--held_out=2"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60).stderr


def make_wheel(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """A wheel of one integration with a table for each language."""
    with zipfile.ZipFile("small.whl", "w") as file:
        for language, table in tables.items():
            file.writestr(f"homeassistant/components/lamp/translations/{language}.json", json.dumps(table))


def test_the_extraction_groups_what_is_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near-duplicates and equal translations share a split, the most frequent translation wins, the bytes are fixed."""
    monkeypatch.chdir(tmp_path)
    alike = [
        ("Bring me sensor 1", "Bringe mir Sensor 1", "给我传感器 1"),
        ("Bring me sensor 2!", "Bringe mir Sensor 2!", "给我传感器 2"),
        ("Fetch that probe", "Bringe mir Sensor 1", "拿那个探头"),
    ]
    others = [
        ("Open window", "Fenster auf", "开窗"),
        ("Strange noises", "Komisches Rauschen", "奇怪的声音"),
        ("Purple haze", "Lila Dunst", "紫色的雾"),
        ("Quick brown fox", "Schneller Fuchs", "快狐狸"),
        ("Only   German here", "Nur Deutsch hier", "German"),
        ("Lonely", "Einsam", "孤独"),
        ("Hello {name}", "Hallo {name}", "你好 {name}"),
        ("Same again", "Same again", "Same again"),
    ]
    rows = [*alike, *others, ("Open window", "Öffne Fenster", "打开窗户"), ("Open window", "Fenster auf", "打开窗户")]
    keys = [f"key {i}" for i in range(len(rows))]
    columns = zip(*rows, strict=True)
    tables = {language: dict(zip(keys, texts, strict=True)) for language, texts in zip(LANGUAGES, columns, strict=True)}
    make_wheel({language: {"state": table} for language, table in tables.items()})
    said = run_extraction("small.whl", "a.xz")
    run_extraction("small.whl", "b.xz")
    assert Path("a.xz").read_bytes() == Path("b.xz").read_bytes()
    lines = lzma.decompress(Path("a.xz").read_bytes()).decode("utf-8").splitlines()
    table = {row[1]: (row[0], *row[2:]) for row in (line.split("\t") for line in lines)}
    assert set(table) == {row[0] for row in [*alike, *others[:4]]} | {"Only German here"}
    assert table["Open window"][1:] == ("Fenster auf", "打开窗户")
    assert table["Only German here"] == ("train", "Nur Deutsch hier", "")
    assert len({table[row[0]][0] for row in alike}) == 1
    assert collections.Counter(row[0] for row in table.values()) == {"train": 4, "validation": 2, "test": 2}
    assert "8 texts (8 en-de, 7 en-zh) in 6 groups, 5 of a single text, the largest of 3" in said


def test_the_extraction_refuses_what_is_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and no file."""
    monkeypatch.chdir(tmp_path)
    write({"half.whl": "PK"})
    make_wheel({"en": {"a": "Some text"}})
    assert "wheel='half.whl' is not a whole wheel" in run_extraction("half.whl", "a.xz")
    assert "holds no texts in 'de'; give a wheel of homeassistant" in run_extraction("small.whl", "a.xz")
    assert not Path("a.xz").exists()
