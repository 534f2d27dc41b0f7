"""Settings that cannot be used are refused before anything is read, with their whole name and the remedy."""

from __future__ import annotations

import dataclasses
import math
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags
from tiny_runs import home, make_small_mesh, pairs_config, text_config

from decoding_jax.checkpoints.orbax import write_model_files
from decoding_jax.registry import OBJECTS
from train import settings
from train.command import parse_flags
from train.compile_only import report_memory
from train.config import OWN_DECODERS, default_config
from train.data.batches import make_plan
from train.data.builders import prepare_files
from train.settings import RANGES, Range, check_settings, evaluation_decoder
from train.setup import Data, check_decoding, check_kept_shape, check_rows, kept_model, model_config, open_data
from train.workdir import check_workdir

__all__ = ["home"]  # a fixture

ROOT = Path(__file__).resolve().parent.parent


def changed(**changes: Any) -> ConfigDict:
    """The defaults with changes, whose dots are written as two underscores."""
    config = default_config()
    with config.ignore_type():
        config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config


# --- Without data


def test_the_defaults_are_accepted_and_every_number_has_a_range() -> None:
    """A number that is added to the settings gets a range, or a reason here."""
    config = default_config()
    check_settings(config)
    free = {"data.tokenizer.vocab_size", "mesh.data", "mesh.fsdp", "mesh.tensor"}  # checked where they are used
    parts = tuple(f"evaluation.{name}." for name in OWN_DECODERS)

    def numbers(part: ConfigDict, path: str = "") -> Iterator[str]:
        for name, value in part.items():
            if isinstance(value, ConfigDict):
                yield from numbers(value, f"{path}{name}.")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield f"{path}{name}"

    assert {n for n in numbers(config) if not n.startswith(("distillation.", *parts))} == set(RANGES) | free


@pytest.mark.parametrize("name", RANGES)
def test_numbers_out_of_range_are_refused_with_name_value_and_range(name: str) -> None:
    """On both sides of each end, and what is no number."""
    numbers = RANGES[name]
    below = numbers.low if numbers.open_low else numbers.low - 1
    above = numbers.high if numbers.open_high else numbers.high + 1
    for value in (below, above, math.nan):
        config = default_config()
        kind = type(settings._value_of(config, name))
        if kind is int and not math.isfinite(value):
            continue
        config.update_from_flattened_dict({name: kind(value)})
        with pytest.raises(ValueError) as refused:
            check_settings(config)
        assert str(refused.value) == f"{name}={kind(value)}: must be {numbers}"


def test_ranges_say_what_they_hold() -> None:
    """The words are the remedy."""
    assert str(Range(1)) == "at least 1" and str(Range(0, open_low=True)) == "above 0"
    assert str(Range(0, 1)) == "from 0 to 1" and str(Range(0, 1, open_high=True)) == "from 0 to below 1"
    assert 0 in Range(0) and 1 not in Range(0, 1, open_high=True) and math.inf not in Range(0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"optimizer__schedule": "linear"}, "optimizer.schedule='linear': choose one of cosine, rsqrt, constant"),
        ({"data__batching": "random"}, "data.batching='random': choose one of windows, packed, bucketed"),
        (
            {"total_steps": 100},
            "optimizer.warmup_steps=100: must be from 0 to below total_steps=100; lower it or raise total_steps",
        ),
        ({"data__length": 600}, "data.length=600 is more than the model's max_length=512; lower it or raise model.max"),
        ({"model__num_kv_heads": 3}, "model.num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"evaluation__decoder": "speculative"}, "evaluation.decoder='speculative': choose one of autoregr"),
        (
            {"evaluation__decoder": "prompt_lookup", "evaluation__prompt_lookup__num_draft": 0},
            "evaluation.prompt_lookup.num_draft=0: must be at least 1",
        ),
        (
            {"evaluation__decoder": "jacobi", "evaluation__jacobi__block_length": 0},
            "evaluation.jacobi.block_length=0: must be at least 1",
        ),
        ({"optimizer__lerning_rate": 1.0}, "optimizer.lerning_rate: there is no such setting; did you mean"),
        ({"model__heads": 1}, "model.heads: there is no such setting"),
        ({"total_steps": "10"}, "total_steps='10': must be of the kind int, as in total_steps=1000"),
        ({"frozen": (1,)}, r"frozen=(1,): must be of the kind tuple of texts"),
        ({"data": {}}, "the config file lacks the setting data."),
        ({"optimizer": 3}, "optimizer is a int; it must be a ConfigDict"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named_in_full(changes: dict[str, Any], message: str) -> None:
    """Words that are no choice, settings against each other, names that there are not."""
    config = default_config()
    with config.ignore_type(), config.unlocked():
        for name, value in changes.items():
            *path, last = name.split("__")
            part = config
            for each in path:
                part = part[each]
            part[last] = ConfigDict(value) if isinstance(value, dict) else value
    with pytest.raises(ValueError) as refused:
        check_settings(config)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_a_config_must_be_one() -> None:
    """What get_config may return by mistake."""
    for given in ({"total_steps": 3}, None):
        with pytest.raises(ValueError, match=r"get_config of the config file is a .*; it must be a ConfigDict"):
            check_settings(given)


@pytest.mark.parametrize("name", OWN_DECODERS)
def test_each_decoder_has_its_settings_in_both_parts(name: str) -> None:
    """With all fields, so that --config.evaluation.lookahead.window=3 is known; a config may also leave a part out."""
    config = default_config()
    config.evaluation.decoder = name
    decoder = evaluation_decoder(config)
    fields = {field.name for field in dataclasses.fields(decoder)}  # type: ignore[arg-type]
    assert set(config.evaluation[name]) == set(config.distillation[name]) == fields - set(OBJECTS)
    del config.evaluation[name]
    check_settings(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data.length": 0}, "data.length=0: must be at least 2"),
        ({"data.rows_per_batch": 0}, "data.rows_per_batch=0: must be at least 1"),
        ({}, "model.vocab_size=0 stands for that of the tokenizer.*; give --config.model.vocab_size=8000"),
    ],
)
def test_compiling_alone_checks_the_settings(changes: dict[str, Any], message: str) -> None:
    """And says which size the vocabulary has to be given."""
    config = default_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        report_memory(config)


# --- Flags


@pytest.mark.parametrize(
    "line, message",
    [
        ("--config=configs/nowhere.py", "--config=configs/nowhere.py: there is no such file"),
        (
            "--config=configs/ui_phrases.py --config.data.nmae=x",
            "config.data.nmae: there is no such setting; did you mean config.data.name?",
        ),
        ("--config configs/ui_phrases.py --config.total_steps.x=3", "config.total_steps is one value"),
        ("configs/ui_phrases.py:en-zh", "--config is missing; give --config=configs/ui_phrases.py:en-zh"),
        ("", "--config is missing; give --config=<a file>"),
    ],
)
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_a_slip_in_the_flags_is_one_line_with_the_remedy(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which file, which setting with its whole path, what was meant."""
    argv = ["train/__main__.py", *line.split()]
    own = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", own, sys_argv=argv)
    flags.mark_flag_as_required("config", own)
    monkeypatch.setattr(flags, "FLAGS", own)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        parse_flags(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and said.count("\n") == 1


def test_a_config_that_follows_from_another_flag_is_not_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Distilling without a teacher asks for the teacher, not for the config that comes with it."""
    argv, own = ["train/distill.py"], flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", own, sys_argv=argv)
    flags.DEFINE_string("teacher", None, "", required=True, flag_values=own)
    monkeypatch.setattr(flags, "FLAGS", own)
    with pytest.raises(SystemExit):
        parse_flags(argv)
    said = capsys.readouterr().err
    assert "--teacher must have a value" in said and "--config" not in said


# --- With data


def opened(config: ConfigDict) -> Data:
    return open_data(config, None)


@pytest.fixture(scope="module")
def text(home: Path) -> tuple[ConfigDict, Data]:
    config = text_config(home)
    return config, opened(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"decoder": "beam", "temperature": 0.8},
            "evaluation.temperature=0.8: Beam searches and does not draw; use temperature 0",
        ),
        (
            {"decoder": "beam", "temperature": 0.0, "beam.num_beams": 0},
            "evaluation.beam.num_beams=0: must be at least 1",
        ),
        (
            {"decoder": "beam", "temperature": 0.0, "beam.n_best": 9},
            "evaluation.beam.num_beams=5, n_best=9: need 1 <= n_best <= num_beams",
        ),
        ({"max_new_tokens": 64}, "evaluation.max_new_tokens=64: leaves no room for a prompt"),
    ],
)  # fmt: skip
def test_decoding_that_would_fail_is_refused_at_the_start(
    text: tuple[ConfigDict, Data], changes: dict[str, Any], message: str
) -> None:
    """The message names the setting of the training run, not that of `decode`."""
    config, data = ConfigDict(text[0].to_dict()), text[1]
    config.evaluation.update_from_flattened_dict(changes)
    with pytest.raises(ValueError) as refused:
        check_decoding(config, data, model_config(config, data.tokenizer))
    assert str(refused.value).startswith(message)
    config.evaluation.prompts = ()  # then nothing is decoded
    check_decoding(config, data, model_config(config, data.tokenizer))


def test_pairs_are_decoded_greedily_whatever_the_temperature(home: Path) -> None:
    """Beam search suits them, with the default temperature of a language model's samples."""
    config = pairs_config(home, {"evaluation.decoder": "beam"})
    data = opened(config)
    check_decoding(config, data, model_config(config, data.tokenizer))


def test_sources_that_are_decoded_while_training_are_checked(home: Path) -> None:
    """Without a validation split these are the first of the training split; later ones are not decoded."""
    long = "a" * 90
    (home / "long.tsv").write_text("".join(f"{s}\tx\n" for s in ("one", "two", long)), encoding="utf-8")
    changes = {"data.files.train": f"{home}/long.tsv", "data.files.validation": "", "data.files.test": ""}
    config = pairs_config(home, changes | {"evaluation.decode_every": 5})
    data = opened(config)
    shape = model_config(config, data.tokenizer)
    with pytest.raises(ValueError, match="source 2 of the train split has 91 tokens, more than the model's context"):
        check_decoding(config, data, shape)
    config.evaluation.examples = 2
    check_decoding(config, data, shape)
    config.evaluation.examples, config.evaluation.decode_every = 3, 0
    check_decoding(config, data, shape)


def test_validation_must_predict_something(home: Path) -> None:
    """Packed documents of one token have no character that is predicted."""
    (home / "long.jsonl").write_text('{"text": "ab ba"}\n', encoding="utf-8")
    (home / "short.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")
    changes = {"data.files.train": f"{home}/long.jsonl", "data.files.validation": f"{home}/short.jsonl"}
    with pytest.raises(ValueError, match=r"data.files.validation='.*': every document is one token"):
        opened(text_config(home, changes | {"data.batching": "packed"}))


@pytest.mark.parametrize("kind", ["characters", "bpe", "bytes"])
def test_a_training_split_is_needed(home: Path, kind: str) -> None:
    """Whatever the tokenizer is made from."""
    with pytest.raises(ValueError, match=r"data.files.train='': there is no training split, only validation; name"):
        opened(text_config(home, {"data.files.train": "", "data.tokenizer.kind": kind}))


def test_a_split_that_there_is_not_is_named_by_its_setting(home: Path) -> None:
    """Of a file that is not there, with the remedy; test_texts has that of a prepared data set."""
    with pytest.raises(ValueError, match=r"data.files.train='abc': there is no file 'abc' .*; correct the name"):
        opened(text_config(home, {"data.files.train": "abc"}))


def test_prompts_of_unknown_characters_are_told_once(
    text: tuple[ConfigDict, Data], capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer of characters knows those of the training split."""
    config, data = ConfigDict(text[0].to_dict()), text[1]
    config.evaluation.prompts = ("The ", "Zoë", "the")
    check_decoding(config, data, model_config(config, data.tokenizer))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'TZë'" in said
    config.evaluation.prompts = ("the ",)
    check_decoding(config, data, model_config(config, data.tokenizer))
    assert capsys.readouterr().err == ""


def test_what_a_split_holds_is_told_in_correct_plurals(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of a thing, or several."""
    opened(text_config(home))
    train, validation = capsys.readouterr().err.splitlines()
    assert "train: 1 example, " in train and " batches per epoch, " in train
    assert "; 1 batch per epoch, " in validation


def test_rows_are_checked_with_the_settings(home: Path) -> None:
    """The Trainer takes no other way."""
    with pytest.raises(ValueError, match="log_every=0: must be at least 1"):
        check_rows(text_config(home, {"log_every": 0}), make_small_mesh())


def test_a_full_disk_while_a_data_set_is_prepared_is_one_line(tmp_path: Path) -> None:
    """Limited to 50 kB a file; array_record tells of it by a RuntimeError."""
    (tmp_path / "big.txt").write_text("".join(random.Random(0).choices("abcdefghijklmnop", k=300_000)))
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot be written .*File too large.*; make room there, or set DECODING"):
            prepare_files(tmp_path / "root", "plain_text", {"train": f"{tmp_path}/big.txt"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


# --- What the folder keeps


def test_a_kept_model_that_is_damaged_or_another_is_named(text: tuple[ConfigDict, Data], tmp_path: Path) -> None:
    """At the start, since `dj.load` needs it at the end; without its config.json it is written anew."""
    config, data = text
    shape = model_config(config, data.tokenizer)
    write_model_files(shape, data.tokenizer, data.tokenizer.eos_ids, tmp_path)
    kept = kept_model(tmp_path)
    assert kept is not None and kept.config == shape
    assert kept.tokenizer.vocabulary_digest() == data.tokenizer.vocabulary_digest()
    check_kept_shape(tmp_path, kept.config, shape)
    with pytest.raises(
        ValueError, match=r"config.json describes another model \(width is 16, not 24\); remove its con"
    ):
        check_kept_shape(tmp_path, kept.config, dataclasses.replace(shape, width=24))
    for content in ("{", "[]", '{"transformer": {"width": "x"}}', '{"transformer": 3}'):
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=r"the files of its model are damaged .*; remove its config.json"):
            kept_model(tmp_path)
    (tmp_path / "config.json").unlink()
    assert kept_model(tmp_path) is None


def test_a_workdir_that_cannot_be_made_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a file, or in a folder that may only be read."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"workdir='.*/file/run': .*/file is no folder that can be written; choose"):
        check_workdir(tmp_path / "file" / "run", default_config())
    check_workdir(tmp_path / "new" / "run", default_config())
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(ValueError, match="is no folder that can be written"):
        check_workdir(tmp_path / "new" / "run", default_config())
    assert not (tmp_path / "new").exists()


# --- Which examples a batch holds


@pytest.mark.parametrize("batching", ["windows", "packed"])
def test_a_plan_names_all_examples_of_a_batch(home: Path, batching: str) -> None:
    """Of unshuffled rows by hand: five documents a..e of 4 tokens with <eos>, in rows of 8, two rows a batch."""
    (home / "five.jsonl").write_text("".join(f'{{"text": "{c * 3}"}}\n' for c in "abcde"), encoding="utf-8")
    changes = {"data.files.train": f"{home}/five.jsonl", "data.files.validation": "", "data.batching": batching}
    config = text_config(home, changes | {"data.length": 8, "data.rows_per_batch": 2})
    examples = opened(config).examples["train"]
    plan = make_plan(examples, config.data, 0, False, 1)
    # The last token of a window is predicted, and belongs to the next document.
    wanted = {"windows": [[0, 1, 2], [2, 3, 4]], "packed": [[0, 1], [2, 3, 4]]}[batching]
    assert plan.batches_per_epoch == 2
    assert [plan.examples_of(index).tolist() for index in (0, 1, 2)] == [*wanted, wanted[0]]
