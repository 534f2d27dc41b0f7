"""Distillation: which pairs come out, in which order, that no stop changes a byte; and scores of a trained model."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import decoding_jax as dj
from decoding_jax.batch_job import Tally
from decoding_jax.models.functional import abstract_transformer, transformer_model
from decoding_jax.models.transformer import TransformerConfig
from train.config import default_config
from train.data.texts import DISTILLED, open_texts
from train.data.tokenizers import make_tokenizer
from train.distillation import Distillation, default_folder, perform, prepare
from train.trained_config import argv_with_config, differing_texts, get_config

ROOT = Path(__file__).resolve().parent.parent
LENGTH, BUDGET = 10, 8
# The last but one has a special token written out in it, the last is longer than LENGTH with its <eos>.
SOURCES = [*("Ba" + "cdefgh"[i % 6] * (i % 4) + "ab"[i % 2] for i in range(22)), "a<eos>b", "a" * LENGTH]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with data, a cache and a teacher, a random encoder-decoder of single characters."""
    folder = tmp_path_factory.mktemp("home")
    lines = [json.dumps({"source": source, "target": f"{i}"}) + "\n" for i, source in enumerate(SOURCES)]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "test.jsonl").write_text("".join(lines[:5]))
    (folder / "text.txt").write_text("a text\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODING_JAX_CACHE", str(folder / "cache"))
        save_teacher(folder / "teacher", folder, 12)
        yield folder


def save_teacher(path: Path, home: Path, seed: int, encoder_layers: int = 1) -> None:
    """A model whose greedy outputs differ: some end, some do not, some are empty."""
    tokenizer = make_tokenizer({"kind": "characters"}, open_texts(settings(home).data))
    start_id = tokenizer.bos_id if encoder_layers else None
    shape = TransformerConfig(
        tokenizer.vocab_size, 1, 16, 24, 2, 2, 8, max_length=32, encoder_layers=encoder_layers, start_id=start_id
    )
    draw = np.random.default_rng(seed).normal
    random = lambda x: draw(0.0, 2.0 / x.shape[0] ** 0.5, x.shape) if x.ndim > 1 else np.ones(x.shape)
    params = jax.tree.map(lambda x: jnp.asarray(random(x), x.dtype), abstract_transformer(shape)[1])
    dj.save(transformer_model(shape, params, eos_ids=tokenizer.eos_ids, tokenizer=tokenizer), path)


def settings(home: Path, decoder: str = "autoregressive", **sampling: float) -> ConfigDict:
    """A config over the pairs of `home`, lower-cased."""
    config = default_config()
    config.data.name = "parallel_text"
    config.data.files = ConfigDict({"train": str(home / "train.jsonl"), "test": str(home / "test.jsonl")})
    config.data.lowercase = True
    config.data.length = LENGTH
    config.distillation.decoder = decoder
    config.distillation.beam.num_beams = 2
    config.distillation.beam.length_penalty = 0.0
    config.distillation.sampling.update(sampling)
    config.distillation.max_new_tokens = BUDGET
    config.distillation.batch_size = 8
    config.distillation.batches_per_part = 1
    config.evaluation.language = "de"
    config.evaluation.max_new_tokens = BUDGET
    config.evaluation.beam.num_beams = 2
    config.evaluation.batch_size = 1  # as in the test of the other command, so that nothing is compiled again
    config.compilation_cache = str(home / "compiled")
    return config


@pytest.fixture
def ready() -> Iterator[Callable[..., Distillation]]:
    """`prepare`, whose folders are free again after the test or when `release` is called."""
    opened: list[int] = []

    def open_one(*arguments: Any, **more: Any) -> Distillation:
        while opened:
            os.close(opened.pop())
        work = prepare(*arguments, **more)
        opened.append(work.lock)
        return work

    yield open_one
    for lock in opened:
        os.close(lock)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pairs_in(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / DISTILLED).read_text().splitlines()]


# ---------------------------------------------------------------------- what comes out


@pytest.mark.parametrize(
    "decoder, temperature, outcomes",
    [
        ("autoregressive", 0.0, {"eos", "length"}),
        ("beam", 0.0, {"eos", "length", "empty"}),
        ("autoregressive", 1.0, {"eos", "length", "empty"}),
    ],
    ids=["greedy", "beam", "sampled"],
)
def test_pairs_are_the_teachers_outputs_in_the_order_of_the_split(
    decoder: str, temperature: float, outcomes: set[str], home: Path, tmp_path: Path, ready: Any
) -> None:
    """Each line has what `decode` makes of its source; what did not end or is empty is left out."""
    work = ready(settings(home, decoder, temperature=temperature), str(home / "teacher"), tmp_path)
    tally, counts = perform(work)
    sources = [source.lower() for source in SOURCES[:-2]]
    expected: list[dict[str, str]] = []
    reasons: set[str] = set()
    for at in range(0, len(sources), 8):
        some = sources[at : at + 8]
        filled = [*some, *[some[0]] * (8 - len(some))]  # the job's own shapes: nothing is compiled for this
        out = dj.decode(
            work.model,
            filled,
            work.job.decoder,
            max_new_tokens=BUDGET,
            sampling=work.job.sampling,
            row_ids=range(at, at + 8),
            mesh=work.job.mesh,
        )
        assert out.text is not None
        for source, text, reason in zip(some, out.text, out.finish_reason, strict=False):
            reasons.add(reason if text else "empty")
            if reason == "eos" and text:
                expected.append({"source": source, "target": text})
    assert [pair for pair in pairs_in(tmp_path) if pair["source"] != "a<eos>b"] == expected
    assert reasons == outcomes
    assert work.job.sampling.temperature == temperature
    assert tally.rows == len(SOURCES) - 1 and counts.pop("sources longer than 10 tokens") == 1
    assert sum(counts.values()) == tally.rows and counts[f"outputs without <eos> in {BUDGET} tokens"] > 0


def test_sources_are_tokenised_as_in_training(home: Path, tmp_path: Path, ready: Any) -> None:
    """They are lower-cased, end with <eos>, and a special token that is written in one is five letters."""
    work = ready(settings(home), str(home / "teacher"), tmp_path)
    tokenizer = work.model.tokenizer
    assert len(work.rows) == len(SOURCES) - 1
    assert work.rows[1].prompt.tolist() == [*tokenizer.encode("badb"), 0]
    assert [row.id for row in work.rows][-1] == 22
    prompt = work.rows[22].prompt.tolist()
    assert len(prompt) == 8 and prompt.count(0) == 1 and prompt[-1] == 0


def test_distilled_pairs_are_a_training_split(home: Path, tmp_path: Path, ready: Any) -> None:
    """data.distilled reads the file that was written; the other splits stay."""
    config = settings(home)
    perform(ready(config, str(home / "teacher"), tmp_path))
    config.data.distilled = str(tmp_path)
    texts = open_texts(config.data)
    assert list(texts.splits["train"]) == pairs_in(tmp_path)
    assert len(texts.splits["test"]) == 5


def test_without_a_good_output_there_is_no_file(home: Path, tmp_path: Path, ready: Any) -> None:
    """A teacher that never ends within the budget gives no pairs, and the counts say why."""
    config = settings(home)
    config.distillation.max_new_tokens = 1
    counts = perform(ready(config, str(home / "teacher"), tmp_path))[1]
    assert counts["pairs"] == 0 and counts["outputs without <eos> in 1 tokens"] == len(SOURCES) - 1
    assert not (tmp_path / DISTILLED).exists()


# ---------------------------------------------------------------------- stops


class Interrupted(BaseException):
    """Stands for a signal."""


def test_a_stopped_job_ends_with_the_same_bytes(home: Path, tmp_path: Path, ready: Any) -> None:
    """Until all parts are there the folder has no pairs; going on writes every file as an unstopped run does."""
    config, teacher = settings(home), str(home / "teacher")
    perform(ready(config, teacher, tmp_path / "whole"))
    expected = contents(tmp_path / "whole")
    assert sum(name.startswith("part-") for name in expected) == 3

    def stop(tally: Tally) -> None:
        if tally.rows == 16:
            raise Interrupted

    with pytest.raises(Interrupted):
        perform(ready(config, teacher, tmp_path / "stopped"), stop)
    assert set(contents(tmp_path / "stopped")) == {"plan.json", "part-00000-of-00003.jsonl"}
    tally, _ = perform(ready(config, teacher, tmp_path / "stopped"))
    assert (tally.kept_parts, tally.rows) == (1, 15)
    assert contents(tmp_path / "stopped") == expected
    tally, _ = perform(ready(config, teacher, tmp_path / "stopped"))  # nothing is left to do
    assert tally.rows == 0 and contents(tmp_path / "stopped") == expected


def test_a_cut_part_is_decoded_again(home: Path, tmp_path: Path, ready: Any) -> None:
    """A line less in a part costs no pair, and while the part is missing there are no pairs to train on."""
    config, teacher = settings(home), str(home / "teacher")
    perform(ready(config, teacher, tmp_path))
    expected = contents(tmp_path)
    part = tmp_path / "part-00001-of-00003.jsonl"
    part.write_bytes(part.read_bytes()[:-30])

    def stop(tally: Tally) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        perform(ready(config, teacher, tmp_path), stop)
    assert set(contents(tmp_path)) == set(expected) - {DISTILLED, part.name}
    perform(ready(config, teacher, tmp_path))
    assert contents(tmp_path) == expected


def test_another_job_in_the_folder_is_refused_or_replaced(home: Path, tmp_path: Path, ready: Any) -> None:
    """A teacher that was trained further, other settings and other texts are noticed; old pairs never outlive parts."""
    config, teacher, out = settings(home), str(tmp_path / "teacher"), tmp_path / "out"
    (tmp_path / "teacher").symlink_to(home / "teacher")
    perform(ready(config, teacher, out))
    before = contents(out)
    with pytest.raises(ValueError, match=r"different: sampling\).*--overwrite"):
        ready(settings(home, temperature=0.5), teacher, out)
    config.data.fields = ("target", "source")
    with pytest.raises(ValueError, match="different: texts_sha256, token_ids_sha256"):
        ready(config, teacher, out)
    config = settings(home)
    (tmp_path / "teacher").unlink()
    save_teacher(tmp_path / "teacher", home, 13)
    with pytest.raises(ValueError, match="different: teacher_sha256"):
        ready(config, teacher, out)
    assert contents(out) == before

    def stop(tally: Tally) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        perform(ready(config, teacher, out, overwrite=True), stop)
    assert set(contents(out)) == {"plan.json"}


# ---------------------------------------------------------------------- what is refused


def test_what_cannot_be_used_is_named_with_its_remedy(home: Path, tmp_path: Path) -> None:
    """Wrong teachers, data and settings are found before anything is written."""
    teacher, plain = str(home / "teacher"), settings(home)
    save_teacher(tmp_path / "decoder_only", home, 0, encoder_layers=0)
    dj.save(dataclasses.replace(dj.load(teacher), tokenizer=None), tmp_path / "mute")
    documents, student, validation, searching = (settings(home) for _ in range(4))
    documents.data.name, documents.data.files = "plain_text", ConfigDict({"train": str(home / "text.txt")})
    student.data.distilled = str(home)
    validation.distillation.split = "validation"
    searching.distillation.update({"decoder": "beam", "sampling": {"temperature": 1.0}})
    refused = [
        (plain, "nowhere", "teacher='nowhere': no such folder"),
        (plain, str(tmp_path / "decoder_only"), "decoder_only' is a decoder-only model.*objective='seq2seq'"),
        (plain, str(tmp_path / "mute"), r"mute' has no tokenizer.*put the tokenizer\.json"),
        (documents, teacher, "data.name='plain_text' has no pairs.*objective='seq2seq'"),
        (student, teacher, "data.distilled=.* leave it empty here"),
        (validation, teacher, "split='validation': data.name='parallel_text' has only train, test"),
        (searching, teacher, "distillation.sampling.temperature.*: Beam searches"),
        (ConfigDict({"model": "x"}), teacher, "the config file lacks a setting: .*distillation"),
    ]
    for config, path, message in refused:
        with pytest.raises(ValueError, match=message):
            prepare(config, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- the commands

CONFIG = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_distill import settings
get_config = lambda: settings(Path({home!r}))
"""


def start(home: Path, command: Sequence[str], *arguments: Any) -> subprocess.Popen[str]:
    """A command with the config of these tests, on one device."""
    (home / "config.py").write_text(CONFIG.format(tests=str(ROOT / "tests"), home=str(home)))
    line = [sys.executable, *command, f"--config={home / 'config.py'}", *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def test_command_stops_at_sigterm(home: Path, tmp_path: Path, ready: Any) -> None:
    """It ends with 0 and complete parts only; the same job goes on from them, on any mesh."""
    config, teacher, out = settings(home, "beam"), home / "teacher", tmp_path / "out"
    config.distillation.batch_size = 1
    flags = ("--config.distillation.decoder=beam", "--config.distillation.batch_size=1")
    process = start(home, ["-m", "train.distill"], *flags, f"--teacher={teacher}", f"--output={out}")
    while not list(out.glob("part-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=300)[1]
    assert process.returncode == 0 and "distill: stopped; run the same command again" in text, text
    parts = [json.loads(file.read_text())["id"] for file in sorted(out.glob("part-*"))]
    assert parts == list(range(len(parts))) and len(parts) < len(SOURCES) - 1
    assert len(contents(out)) == len(parts) + 1 and not (out / DISTILLED).exists()
    ready(config, str(teacher), out)  # eight devices here: it is the same job


def test_the_default_folder_and_the_docstring(home: Path) -> None:
    """Pairs go beside the teacher, by the decoder; --help shows commands that can be copied."""
    assert default_folder(settings(home, "beam"), "runs/a") == Path("runs/a/distilled-beam")
    shown = ast.get_docstring(ast.parse((ROOT / "train" / "distill.py").read_text())) or ""
    assert " \\\n        --config.distillation.decoder=beam" in shown


# ---------------------------------------------------------------------- the config of the teacher's run


def test_the_config_is_that_of_the_run(home: Path, tmp_path: Path) -> None:
    """Without --config a command has the run's settings, and what the run did not know yet has its default."""
    config = settings(home)
    config.data.fields, config.data.distilled, config.data.length = ("target", "source"), "elsewhere", 17
    stored = json.loads(config.to_json())
    del stored["distillation"]
    (tmp_path / "train_config.json").write_text(json.dumps(stored))
    argv = argv_with_config(["x.py", "--teacher", str(tmp_path), "--config.data.length=9"], "teacher")
    path, _, workdir = argv[1].removeprefix("--config=").partition(":")
    assert Path(path).samefile(ROOT / "train" / "trained_config.py") and argv[2:] == ["--teacher", workdir, argv[-1]]
    found = get_config(workdir)
    assert found.data.fields == ("target", "source") and found.data.length == 17 and found.data.distilled == ""
    assert found.distillation == default_config().distillation
    given = argv_with_config(["x.py", "--teacher=a", "--config=b.py"], "teacher")
    assert given == ["x.py", "--teacher=a", "--config=b.py"]
    with pytest.raises(ValueError, match=r"no .*train_config\.json; give the workdir of a training run, or --config"):
        get_config(str(home / "teacher"))
    (tmp_path / "train_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"train_config\.json is damaged"):
        get_config(workdir)


def test_other_texts_than_the_runs_are_named(home: Path, tmp_path: Path) -> None:
    """A --config whose texts are others says so; batches, tokenizer and decoding are nobody's concern."""
    config = settings(home)
    (tmp_path / "train_config.json").write_text(config.to_json())
    config.data.tokens_per_batch, config.data.tokenizer.kind, config.evaluation.language = 1, "bytes", "zh"
    assert differing_texts(config, str(tmp_path)) == []
    config.data.lowercase, config.data.files.test = False, "other.tsv"
    test = str(home / "test.jsonl")
    assert differing_texts(config, str(tmp_path)) == [
        f"data.files.test was {test!r}, is 'other.tsv'",
        "data.lowercase was True, is False",
    ]
    assert differing_texts(config, str(home / "teacher")) == []  # of a model that `dj.save` wrote nothing is known
    with pytest.raises(ValueError, match=r"the config file lacks a setting: .*data"):
        differing_texts(ConfigDict({"model": "x"}), str(tmp_path))


def test_scores_of_a_model(home: Path, tmp_path: Path) -> None:
    """The table has a line for each decoder, the records the names and the command, one of them the target."""
    flags = (f"--model={home / 'teacher'}", "--decoders=beam", "--tokenised", "--samples=1", "--name=toy", "--target=3")
    process = start(home, ["scripts/evaluate_translation.py"], *flags, f"--record={tmp_path / 'r.json'}")
    table, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    lines = [line.split() for line in table.splitlines()]
    assert lines[0][:3] == ["decoder", "BLEU", "chrF"] and lines[1][:2] == ["beam", "2"]
    assert "nrefs:1|case:mixed" in table and "reference         0\n" in table
    records = {record["name"]: record for record in json.loads((tmp_path / "r.json").read_text())}
    scores = ("BLEU", "chrF", "exact match", "tokenised BLEU")
    assert set(records) == {f"toy beam 2 {score}" for score in scores}
    assert f"{records['toy beam 2 chrF']['value']:.2f}" == lines[1][3]
    assert records["toy beam 2 tokenised BLEU"]["target"] == 3.0 and records["toy beam 2 BLEU"]["target"] is None
    assert records["toy beam 2 BLEU"]["command"].startswith("python scripts/evaluate_translation.py --config=")
