"""Logs survive kills and restarts bit for bit, progress tells true rates, losses have the units of the field."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from matplotlib.image import imread
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import decoding_jax as dj
from train import evaluation, metrics
from train.metrics import Logs, Progress, plot_losses, read_scalars


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------- logs
def test_logged_floats_read_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=50).astype(np.float32), np.float32([1e-45, 3.4e38, -0.0, 0.1])])
    logs = Logs(tmp_path, 0)
    for step, value in enumerate(values):
        logs.scalars(step, {"loss": jnp.asarray(value), "double": math.pi * step})
    read = read_scalars(tmp_path)  # before close: a line is in the file when the call returns
    logs.close()
    assert np.array([r["loss"] for r in read]).astype(np.float32).tobytes() == values.tobytes()
    assert [r["double"] for r in read] == [math.pi * step for step in range(len(values))]


def test_nan_and_infinity_stay_valid_json(tmp_path):
    logs = Logs(tmp_path, 0)
    logs.scalars(1, {"a": math.nan, "b": math.inf, "c": np.float32(-math.inf), "d": 1e300})
    logs.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (tmp_path / metrics.METRICS).read_text()
    assert json.loads(text, parse_constant=refuse) == {"step": 1, "a": "nan", "b": "inf", "c": "-inf", "d": 1e300}
    [read] = read_scalars(tmp_path)
    assert math.isnan(read["a"]) and read["b"] == math.inf and read["c"] == -math.inf


def test_a_resumed_run_drops_later_steps_and_half_a_line(tmp_path):
    logs = Logs(tmp_path, 0)
    for step in range(1, 6):
        logs.scalars(step, {"loss": 1.0 / step})
        logs.samples(step, [{"source": f"s{step}", "hypothesis": "ü\u2028\r\n"}, {"source": "t", "hypothesis": ""}])
    logs.close()
    for name in (metrics.METRICS, metrics.SAMPLES):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 3, "lo')
    logs = Logs(tmp_path, 3)
    logs.scalars(4, {"loss": 9.0})
    logs.samples(4, [{"source": "again", "hypothesis": "x"}])
    logs.close()
    assert lines_of(tmp_path / metrics.METRICS) == [
        *({"step": step, "loss": 1.0 / step} for step in (1, 2, 3)),
        {"step": 4, "loss": 9.0},
    ]
    samples = [json.loads(line) for line in (tmp_path / metrics.SAMPLES).read_bytes().split(b"\n")[:-1]]
    assert [s["step"] for s in samples] == [1, 1, 2, 2, 3, 3, 4]
    assert samples[0] == {"step": 1, "source": "s1", "hypothesis": "ü\u2028\r\n"}


def test_a_line_that_lacks_only_its_line_break_is_kept_and_completed(tmp_path):
    (tmp_path / metrics.METRICS).write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}')
    logs = Logs(tmp_path, 2)
    logs.scalars(3, {"loss": 0.5})
    logs.close()
    assert [line["loss"] for line in lines_of(tmp_path / metrics.METRICS)] == [2.0, 1.0, 0.5]


def test_tensorboard_reads_scalars_and_samples_of_a_resumed_run_once(tmp_path):
    logs = Logs(tmp_path, 0)
    for step in range(6):
        logs.scalars(step, {"loss": step, "learning_rate": 0.1})
    logs.samples(5, [{"source": "lost"}])
    logs.close()
    logs = Logs(tmp_path, 3)
    logs.scalars(5, {"loss": 50.0})
    logs.samples(5, [{"source": "a|b", "hypothesis": "c\nd"}])
    logs.close()
    events = EventAccumulator(os.fspath(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0), (1, 1), (2, 2), (3, 3), (5, 50)]
    assert [e.value for e in events.Scalars("learning_rate")] == [np.float32(0.1)] * 4
    # What TensorBoard itself reads with; the other one never drops tensors.
    events = plugin_event_accumulator.EventAccumulator(os.fspath(tmp_path)).Reload()
    assert [e.step for e in events.Tensors("loss")] == [0, 1, 2, 3, 5]
    [sample] = events.Tensors("samples")
    table = make_ndarray(sample.tensor_proto).item().decode()
    assert table == "| source | hypothesis |\n| --- | --- |\n| a\\|b | c<br>d |"


def test_only_process_0_writes(tmp_path, monkeypatch):
    (tmp_path / metrics.METRICS).write_text('{"step": 9, "loss": 1.0}\n')
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    logs = Logs(tmp_path, 0)
    logs.scalars(1, {"loss": 1.0})
    logs.samples(1, [{"source": "x"}])
    logs.close()
    assert plot_losses(tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == [metrics.METRICS]
    assert [r["step"] for r in read_scalars(tmp_path)] == [9]


def test_a_value_called_step_is_refused(tmp_path):
    logs = Logs(tmp_path, 0)
    with pytest.raises(ValueError, match="'step' is taken"):
        logs.scalars(1, {"step": 3.0})
    logs.close()


def test_logging_hardly_holds_up_the_training(tmp_path):
    """The best of 200 calls, so that a busy machine does not matter: below 0.2 ms."""
    logs = Logs(tmp_path, 0)
    values = {"loss": np.float32(2.0), "learning_rate": 1e-3, "gradient_norm": 0.5, "tokens_per_second": 1e4}
    took = []
    for step in range(200):
        began = time.perf_counter()
        logs.scalars(step, values)
        took.append(time.perf_counter() - began)
    logs.close()
    assert min(took) < 2e-4


# ---------------------------------------------------------------------- progress
@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    """Time that stands still but for `clock(seconds)`."""
    now = [100.0]
    monkeypatch.setattr(metrics, "_now", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def test_progress_leaves_out_compiling_and_shows_a_line_every_ten_seconds(clock, capsys):
    progress = Progress(2000, 0)
    clock(300.0)  # compiling
    for step in range(1, 26):
        clock(1.0)
        progress.update(step, 1000, jnp.float32(3.0 - step / 100))
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 1 of 2000, loss 2.990",
        "step 11 of 2000, loss 2.890, 1,000 tokens/s, 33 min left",
        "step 21 of 2000, loss 2.790, 1,000 tokens/s, 33 min left",
        "step 25 of 2000, loss 2.750, 1,000 tokens/s, 33 min left",
    ]


def test_progress_of_a_resumed_run_counts_its_own_steps_and_ends_without_time_left(clock, capsys):
    progress = Progress(110, 100)
    for step in range(101, 111):
        clock(10.0)
        progress.update(step, 50, 1.0)
    clock(60.0)  # the last validation
    progress.close()
    shown = capsys.readouterr().err.splitlines()
    assert shown[1] == "step 102 of 110, loss 1.000, 5 tokens/s, 80 s left"
    assert shown[-1] == "step 110 of 110, loss 1.000, 5 tokens/s" and len(shown) == 10


def test_on_a_terminal_progress_is_a_bar(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(400, 100)
    for step in range(101, 151):
        clock(0.25)
        progress.update(step, 100, 2.0)
    progress.close()
    last = terminal.getvalue().rstrip().split("\r")[-1]
    assert last.startswith(" 38%|") and "step 150 of 400, loss 2.000, 400 tokens/s, 62 s left" in last


# ---------------------------------------------------------------------- the picture
def test_the_picture_of_losses_has_a_second_panel_for_the_learning_rate(tmp_path):
    workdir = tmp_path / "cost $5 试验"
    logs = Logs(workdir, 0)
    for step in range(1, 30):
        logs.scalars(step, {"loss": math.nan if step == 7 else 3 / step, "learning_rate": step / 1000})
    logs.scalars(29, {"validation_loss": 1.5})
    logs.close()
    path = plot_losses(workdir)
    assert path == workdir / "loss.png"
    picture = imread(path)
    assert picture.shape[0] > 600 and picture.shape[1] > 1000 and picture.std() > 0.05
    assert sorted(p.name for p in workdir.iterdir() if p.name[0] == ".") == []


def test_an_empty_log_gives_no_picture_and_one_line_gives_one(tmp_path):
    assert plot_losses(tmp_path) is None
    (tmp_path / metrics.METRICS).write_text("")
    assert plot_losses(tmp_path) is None
    (tmp_path / metrics.METRICS).write_text('{"step": 1, "nats_per_token": "nan"}\n')
    assert plot_losses(tmp_path) is None
    (tmp_path / metrics.METRICS).write_text('{"step": 1, "nats_per_token": 2.5}\n')
    assert plot_losses(tmp_path) is not None


def test_the_smoothed_loss_keeps_a_straight_descent_and_evens_out_noise():
    """A mean that only looked back would lie above the descent, one that began at zero below it."""
    falling = np.linspace(5.0, 1.0, 500)
    np.testing.assert_allclose(metrics._smoothed(falling)[:-10], falling[:-10], rtol=1e-12)
    noise = np.random.default_rng(0).normal(size=500)
    assert metrics._smoothed(noise)[20:].std() < 0.4


def test_samples_are_the_first_and_unequal_counts_are_refused():
    first = {"source": "a", "hypothesis": "x", "reference": "y"}
    assert evaluation.samples_of(["a", "b"], ["x", "x"], ["y", "y"], 1) == [first]
    assert len(evaluation.samples_of(["a", "b"], ["x", "x"], ["y", "y"], 9)) == 2
    with pytest.raises(ValueError, match="2 sources, 1 hypotheses"):
        evaluation.samples_of(["a", "b"], ["x"], ["y", "y"], 1)


def test_losses_in_bits_and_perplexity():
    """A uniform choice among 8 costs 3 bits; an overflow is inf and no error."""
    assert evaluation.bits_per_character(10 * math.log(8), 10) == pytest.approx(3)
    assert evaluation.perplexity(math.log(8)) == pytest.approx(8)
    assert evaluation.perplexity(1e4) == math.inf and math.isnan(evaluation.perplexity(math.nan))
    with pytest.raises(ValueError, match="characters=0"):
        evaluation.bits_per_character(1.0, 0)


# ---------------------------------------------------------------------- decoding a test set
LETTERS = [b"", b" ", *(bytes([c]) for c in b"abcdefgh")]


def alphabet_model(**fields) -> dj.Model:
    """Says the alphabet: after each letter the next, after h a space, then the end."""
    table = np.zeros((len(LETTERS), len(LETTERS)), np.float32)
    for i in range(2, len(LETTERS)):
        table[i, (i + 1) % len(LETTERS) or 1] = 5.0
    table[1, 0] = 5.0
    toy = zoo.table_model(table, eos_ids=(0,), tokenizer=zoo.ByteTokenizer(LETTERS))
    return dataclasses.replace(toy.model, **fields)


def report_of(sources, references, **settings) -> evaluation.DecodingReport:
    settings = {"max_new_tokens": 9, "batch_size": 2, "language": "en"} | settings
    return evaluation.evaluate_decoding(alphabet_model(), sources, references, dj.Autoregressive(), **settings)


def test_hypotheses_come_in_the_order_of_the_sources_and_filling_rows_are_not_counted():
    sources = ["g", "abab" * 20 + "e", "hf", "d", "ccb"]
    report = report_of(sources, ["h", "fgh", "gh", "efgh", "no"])
    assert report.hypotheses == ["h", "fgh", "gh", "efgh", "cdefgh"]
    assert report.scores.values["exact_match"] == 0.8
    # Each hypothesis, a space and the end.
    assert report.tokens == report.model_calls == sum(len(h) + 2 for h in report.hypotheses)
    assert report.tokens_per_call == 1.0 and report.seconds > 0


def test_few_programs_are_compiled_and_none_for_the_last_batch(monkeypatch):
    """Rows of up to 96 tokens, then of up to 64, then one row that is filled up to a batch."""
    batches, decode = [], evaluation.decode

    def spy(model, prompts, *args, **kwargs):
        output = decode(model, prompts, *args, **kwargs)
        batches.append((len(prompts), output.stats.compile_seconds > 0))
        return output

    monkeypatch.setattr(evaluation, "decode", spy)
    report_of(["a" * (1 + i % 5 + 80 * (i % 2)) for i in range(7)], ["x"] * 7, batch_size=3, max_new_tokens=5)
    assert batches == [(3, True), (3, True), (3, False)]


@pytest.mark.parametrize(
    ("sources", "references", "settings", "message"),
    [
        (["a"], ["b", "c"], {}, "1 sources, 2 references"),
        ([], [], {}, "0 sources"),
        (["a"], ["b"], {"batch_size": 0}, "batch_size=0"),
        (["a"], ["b"], {"language": "en-de"}, "language='en-de'"),
    ],
)
def test_evaluation_refuses_what_does_not_fit(sources, references, settings, message):
    with pytest.raises(ValueError, match=message):
        report_of(sources, references, **settings)


def test_evaluation_needs_a_tokenizer_and_room_in_the_context():
    settings = {"max_new_tokens": 5, "batch_size": 1, "language": "en"}
    for fields, message in (({"tokenizer": None}, "no tokenizer"), ({"max_length": 8}, "context of 8")):
        with pytest.raises(ValueError, match=message):
            evaluation.evaluate_decoding(
                alphabet_model(**fields), ["a", "abcd"], ["x", "y"], dj.Autoregressive(), **settings
            )
