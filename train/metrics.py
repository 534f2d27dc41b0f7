"""What a run leaves to look at: logs of numbers and samples, progress on the terminal, a picture of the losses.

A workdir holds

    metrics.jsonl           one object a line, {"step": 400, "loss": 2.113, ...}
    samples.jsonl           one object a line, {"step": 400, "source": ..., "hypothesis": ..., ...}
    events.out.tfevents.*   the same for TensorBoard, in float32
    loss.png                from `plot_losses`

JSON has no nan and no infinity, so these three are the strings "nan", "inf" and "-inf": `float` reads every value.
In multi-process runs process 0 writes and shows, the others do nothing.
"""

from __future__ import annotations

import collections
import io
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from decoding_jax.checkpoints.cache_files import write_atomically
from train.command import show

METRICS, SAMPLES, PICTURE = "metrics.jsonl", "samples.jsonl", "loss.png"
# The names that `plot_losses` looks for.
# The loss without smoothing and teacher, which is what the validation loss is.
LOSS, VALIDATION_LOSS, LEARNING_RATE = "nats_per_token", "validation_loss", "learning_rate"

_TENSORBOARD_SECONDS = 10  # between two writes of the event file
_TENSORBOARD_QUEUE = 1000  # events that wait for its thread; a full queue would hold up the training


# --- Lines


def _line(step: int, fields: Mapping[str, Any]) -> str:
    """A line of a log. Python writes the shortest digits that read back as the same float64."""
    plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    return json.dumps({"step": step, **plain}, ensure_ascii=False) + "\n"


def _records(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of a log, as they are and read; what a killed process left of its last line is passed over."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append((line + b"\n", record))
    return found


def _cut(path: Path, last_step: int) -> None:
    """Removes the lines of later steps and half a line at the end."""
    kept = b"".join(line for line, record in _records(path) if record["step"] <= last_step)
    if path.exists() and path.read_bytes() != kept:
        write_atomically(path, kept)


def read_scalars(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The lines of metrics.jsonl in order, every value a float; none where there is no log."""
    return [{name: float(v) for name, v in record.items()} for _, record in _records(Path(workdir) / METRICS)]


# --- Logs


class Logs:
    """Writes numbers and samples to the workdir, line by line.

    A line is in the file when the call returns, so a killed process loses none. TensorBoard's file follows
    within ten seconds.

    Args:
      workdir: made if needed.
      first_step: the step that the run goes on from, 0 for a new one. What an earlier run wrote of later
        steps is removed from the two logs, and hidden in TensorBoard.

    Raises:
      OSError: the folder cannot be written.
    """

    def __init__(self, workdir: str | os.PathLike[str], first_step: int):
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, SAMPLES):
            _cut(folder / name, first_step)
        self._metrics = (folder / METRICS).open("a", encoding="utf-8", buffering=1)
        self._samples = (folder / SAMPLES).open("a", encoding="utf-8", buffering=1)
        self._events = EventFileWriter(os.fspath(folder), _TENSORBOARD_QUEUE, _TENSORBOARD_SECONDS)
        # A reader of event files drops what it saw of this step and later ones.
        self._add_event(first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add_event(self, step: int, **content: Any) -> None:
        self._events.add_event(Event(wall_time=time.time(), step=step, **content))

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line of numbers.

        Args:
          step: the number of updates so far.
          values: by name; numbers or arrays without axes. Arrays on a device are waited for.

        Raises:
          ValueError: a value is called "step".
        """
        if not self._writes:
            return
        if "step" in values:
            raise ValueError(f"values={dict(values)}: the name 'step' is taken by the line's own; choose another")
        floats = {name: float(value) for name, value in values.items()}
        self._metrics.write(_line(step, floats))
        points = [Summary.Value(tag=name, simple_value=value) for name, value in floats.items()]
        self._add_event(step, summary=Summary(value=points))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes one line for each sample, and for TensorBoard a table of them all.

        Args:
          step: the number of updates so far.
          samples: texts (or what else JSON can hold) by name, the same names in all.
        """
        if not self._writes or not samples:
            return
        self._samples.write("".join(_line(step, sample) for sample in samples))
        self._add_event(step, summary=text_pb("samples", _markdown_table(samples)))

    def close(self) -> None:
        """Writes what is still waiting for TensorBoard's file."""
        if self._writes:
            self._metrics.close()
            self._samples.close()
            self._events.close()


def _markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    def cells(values: Sequence[Any]) -> str:
        # A bar or a line break would end the cell.
        texts = (str(value).replace("|", "\\|").replace("\n", "<br>") for value in values)
        return "| " + " | ".join(texts) + " |"

    names = list(rows[0])
    body = [cells([row.get(name, "") for name in names]) for row in rows]
    return "\n".join([cells(names), cells(["---"] * len(names)), *body])


# --- Progress

_now = time.monotonic
_WINDOW = 10.0  # seconds that tokens/s is measured over, and between two lines where there is no terminal
_BAR_INTERVAL = 0.5


class Progress:
    """Shows how far the training is: a bar on a terminal, elsewhere a line about every ten seconds.

    Rates leave out everything before the first update: that is compiling. The time left follows from the mean
    speed since then, pauses for validation included.

    Args:
      total_steps: of the whole run.
      first_step: the step that this process goes on from.
    """

    def __init__(self, total_steps: int, first_step: int):
        self._total = total_steps
        self._shows = jax.process_index() == 0
        self._bar: Any = None
        if self._shows and sys.stderr.isatty():
            layout = "{percentage:3.0f}%|{bar}| step {n_fmt} of {total_fmt}{postfix}"
            self._bar = tqdm.tqdm(total=total_steps, initial=first_step, bar_format=layout, dynamic_ncols=True)
        self._interval = _WINDOW if self._bar is None else _BAR_INTERVAL
        self._step, self._tokens, self._loss = first_step, 0, math.nan
        self._first: tuple[float, int, int] | None = None
        # (seconds, step, tokens so far) whenever something was shown, as far back as the window goes.
        self._shown = collections.deque[tuple[float, int, int]](maxlen=round(_WINDOW / self._interval) + 1)

    def update(self, step: int, tokens: int, loss: Any) -> None:
        """Tells of a finished update.

        Args:
          step: the number of updates so far.
          tokens: that were trained on since the last call.
          loss: in nats per token. An array on a device is only waited for when it is shown.
        """
        self._step, self._tokens, self._loss = step, self._tokens + tokens, loss
        if not self._shows:
            return
        # The first and the last are always shown, so that compiling and what follows the training stay apart.
        if not self._shown or step >= self._total or _now() - self._shown[-1][0] >= self._interval:
            self._show()

    def close(self) -> None:
        """Shows the last update and leaves the bar as it is."""
        if self._shown and self._shown[-1][1] != self._step:
            self._show()
        if self._bar is not None:
            self._bar.close()

    def _show(self) -> None:
        parts = [f"loss {float(self._loss):.3f}"]  # waits for the device, so the clock is read after it
        mark = (_now(), self._step, self._tokens)
        self._first = self._first or mark
        self._shown.append(mark)
        seconds, tokens = mark[0] - self._shown[0][0], mark[2] - self._shown[0][2]
        if seconds > 0:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        steps = mark[1] - self._first[1]
        if steps > 0 and mark[1] < self._total:
            parts.append(f"{_duration((mark[0] - self._first[0]) / steps * (self._total - mark[1]))} left")
        if self._bar is None:
            show(f"step {self._step} of {self._total}, {', '.join(parts)}")
        else:
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
            self._bar.n = self._step
            self._bar.refresh()


def _duration(seconds: float) -> str:
    """
    >>> _duration(61.2), _duration(600), _duration(9000)
    ('61 s', '10 min', '2.5 h')
    """
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"


# --- The picture

_RAW, _SMOOTHED, _VALIDATION, _RATE = "#b5d2ea", "#1f5f99", "#d1560f", "#5c6670"


def plot_losses(workdir: str | os.PathLike[str]) -> Path | None:
    """Draws loss.png from metrics.jsonl: `loss`, `validation_loss` and, below them, `learning_rate`.

    Args:
      workdir: with the logs of a run; its name is the title.

    Returns:
      Where the picture is; None where no loss is logged, and in processes other than the first.
    """
    folder = Path(workdir)
    lines = read_scalars(folder) if jax.process_index() == 0 else []
    steps, losses = _series(lines, LOSS)
    validated, validation = _series(lines, VALIDATION_LOSS)
    rate_steps, rates = _series(lines, LEARNING_RATE)
    if not len(steps) and not len(validated):
        return None
    figure = Figure(figsize=(8.0, 5.6), dpi=150, layout="constrained")
    if len(rates):
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        lower.plot(rate_steps, rates, color=_RATE, linewidth=1.4, marker=_marker(rates))
        _dress(lower, "learning rate")
        lower.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        lower.yaxis.set_major_locator(MaxNLocator(3))
        lower.set_ylim(bottom=0)
    else:
        upper = lower = figure.subplots()
    if len(steps):
        upper.plot(steps, losses, color=_RAW, linewidth=0.8, marker=_marker(losses), label="training")
        smoothed = _smoothed(losses)
        upper.plot(steps, smoothed, color=_SMOOTHED, linewidth=1.8, marker=_marker(losses), label="training, smoothed")
    if len(validated):
        best = int(validation.argmin())
        label = f"validation, best {validation[best]:.3f} at step {int(validated[best]):,}"
        upper.plot(validated, validation, color=_VALIDATION, linewidth=1.0, marker="o", markersize=4, label=label)
    _dress(upper, "loss (nats per token)")
    upper.set_title(folder.resolve().name, parse_math=False, fontweight="bold", loc="left")
    upper.legend(frameon=False)
    lower.set_xlabel("step (updates)")
    lower.set_xlim(0, max(line["step"] for line in lines) * 1.01 or 1)
    lower.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    lower.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    figure.align_ylabels()
    write_atomically(folder / PICTURE, _png(figure))
    return folder / PICTURE


def _series(lines: Sequence[Mapping[str, float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values f64[N] of the lines that have a finite value of this name."""
    pairs = [(line["step"], line[name]) for line in lines if math.isfinite(line.get(name, math.nan))]
    steps, values = np.array(pairs, np.float64).reshape(-1, 2).T
    return steps, values


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over about 4 percent of the points, f64[N], around each: one that only looks back lags above a fall.

    It narrows at the start, where losses fall steeply; at the end it looks back alone, so that no last point leads.
    """
    index = np.arange(len(values))
    before = np.minimum(round(0.02 * len(values)), index)
    after = np.minimum(before, index[::-1])
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + after + 1] - sums[index - before]) / (before + after + 1)


def _marker(values: np.ndarray) -> str:
    """A line of one point would not be seen."""
    return "o" if len(values) == 1 else ""


def _dress(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(color="#e6e9ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    with warnings.catch_warnings():
        # The default font lacks many scripts that a folder may be named in; it draws boxes for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(data, format="png")
    return data.getvalue()
