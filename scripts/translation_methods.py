"""What measure_nonautoregressive.py compares: trained translators, how each decodes, and jobs that are timed."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from timing import decode_phases

import decoding_jax as dj
from decoding_jax.batch_job import Job, run_job
from decoding_jax.batch_rows import Batch, Row, plan_parts
from decoding_jax.prepare import encode_prompts, least_bucket
from train.command import say
from train.workdir import RESULTS


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of the tables.

    Attributes:
      run: what the student's workdir has behind its teacher's, such as ",ctc,distilled"; "" is the teacher.
      decoder: with its settings.
      drafter: of a second model, likewise; None: there is none.
      scorer: of a model that chooses among candidates, likewise.
    """

    run: str
    decoder: dj.Decoder
    drafter: str | None = None
    scorer: str | None = None


def _rounds(name: str, run: str, make: type, rounds: Sequence[int]) -> dict[str, Method]:
    """One method for each number of rounds."""
    return {f"{name}_{count}_round{'s' * (count > 1)}": Method(run, make(count)) for count in rounds}


METHODS: Mapping[str, Method] = {
    "teacher": Method("", dj.Autoregressive()),
    "teacher_beam_5": Method("", dj.Beam(num_beams=5)),
    "nonautoregressive_raw": Method(",nonautoregressive", dj.NonAutoregressive()),
    "nonautoregressive": Method(",nonautoregressive,distilled", dj.NonAutoregressive()),
    "nonautoregressive_length_beam_5": Method(",nonautoregressive,distilled", dj.NonAutoregressive(length_beam=5)),
    "nonautoregressive_length_beam_5_chosen_by_teacher": Method(
        ",nonautoregressive,distilled", dj.NonAutoregressive(length_beam=5), scorer=""
    ),
    "ctc_raw": Method(",ctc", dj.CTC()),
    "ctc": Method(",ctc,distilled", dj.CTC()),
    "ctc_beam_8": Method(",ctc,distilled", dj.CTC(beam=8)),
    **_rounds("mask_predict_raw", ",mask_predict", dj.MaskPredict, [1, 4]),
    **_rounds("mask_predict", ",mask_predict,distilled", dj.MaskPredict, [1, 2, 4, 10]),
    "mask_predict_4_rounds_length_beam_5": Method(
        ",mask_predict,distilled", dj.MaskPredict(iterations=4, length_beam=5)
    ),
    **_rounds("iterative_refinement", ",iterative_refinement,distilled", dj.IterativeRefinement, [1, 2, 4, 10]),
    "group_autoregressive": Method(",group_autoregressive,distilled", dj.GroupAutoregressive()),
    "segment_parallel": Method(",segment_parallel,distilled", dj.SegmentParallel()),
    "outline_then_fill": Method(",outline_then_fill,distilled", dj.OutlineThenFill()),
    "draft_then_verify": Method("", dj.DraftThenVerify(draft=dj.CTC()), ",ctc,distilled"),
}


class Runs:
    """The workdirs of a teacher and of its students, each loaded once.

    Args:
      teacher: its workdir.
      ending: of the students' workdirs, such as ",seed_1".
    """

    def __init__(self, teacher: str, ending: str = "") -> None:
        self.teacher, self.ending = teacher, ending
        self._loaded: dict[str, dj.Model] = {}

    def workdir(self, run: str) -> Path:
        """Of a run."""
        return Path(self.teacher + run + (self.ending if run else ""))

    def load(self, run: str | None) -> dj.Model | None:
        """The model of a run, None of None."""
        return None if run is None else self.model(run)

    def model(self, run: str) -> dj.Model:
        """The model of a run; ValueError where it has another vocabulary than the teacher."""
        if run not in self._loaded:
            self._loaded[run] = model = dj.load(self.workdir(run))
            digests = [each.tokenizer.vocabulary_digest() for each in (model, self.model(""))]
            if digests[0] != digests[1]:
                raise ValueError(f"{self.workdir(run)} has another vocabulary than its teacher; train it again")
        return self._loaded[run]

    def trained(self, wanted: Sequence[str] = ()) -> dict[str, Method]:
        """The methods whose models are there, of those that are wanted; what is missing is said.

        Raises:
          ValueError: there is no such method, or no teacher.
        """
        if unknown := [name for name in wanted if name not in METHODS]:
            raise ValueError(f"methods={','.join(unknown)}: choose of {', '.join(METHODS)}")
        done = lambda run: (self.workdir(run) / RESULTS).exists()
        if not done(""):
            raise ValueError(
                f"teacher={self.teacher!r}: no workdir of a finished run; train it first (docs/parallel.md)"
            )
        chosen = {name: METHODS[name] for name in wanted or METHODS}
        missing = [name for name, m in chosen.items() if not (done(m.run) and done(m.drafter or ""))]
        if missing:
            say(f"not trained to the end and left out: {', '.join(missing)}")
        return {name: method for name, method in chosen.items() if name not in missing}


@dataclasses.dataclass(frozen=True)
class TimedJob:
    """A batch job that is run again and again.

    Attributes:
      model, job: what decodes, and how.
      rows: what is decoded.
    """

    model: dj.Model
    job: Job
    rows: Sequence[Row]

    @property
    def parts(self) -> list[list[Batch]]:
        """Its batches, in parts."""
        lengths = [len(row.prompt) for row in self.rows]
        told = [row.length is not None for row in self.rows]
        least = least_bucket(self.model)
        return plan_parts(lengths, self.job.batch_size, self.job.batches_per_part, told, least)

    def seconds(self) -> float:
        """Wall-clock time of the whole job, with all that it writes."""
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            run_job(self.model, self.job, self.rows, self.parts, Path(folder))
            return time.perf_counter() - began

    def phases(self) -> tuple[float, float]:
        """Seconds of the same batches before their first round (encoder), and of their rounds (calls of the model)."""
        encoder = calls = 0.0
        for batch in (batch for part in self.parts for batch in part):
            rows = [self.rows[i] for i in batch.filled(self.job.batch_size)]
            told = [row.length for row in rows if row.length is not None]
            sources, new = [row.prompt for row in rows], self.job.max_new_tokens
            _, before, took = decode_phases(self.model, sources, self.job.decoder, new, told or None)
            encoder, calls = encoder + before, calls + took
        return encoder, calls


def median_seconds(jobs: Mapping[str, TimedJob], repeats: int) -> dict[str, float]:
    """Median seconds of jobs that are run by turns, after a first run of each that compiles."""
    for each in jobs.values():
        each.seconds()
    took: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, each in jobs.items():
            took[name].append(each.seconds())
    return {name: statistics.median(found) for name, found in took.items()}


def rows_of(model: dj.Model, sources: Sequence[str]) -> list[Row]:
    """Sources as the rows of a job."""
    return [Row(n, n, np.asarray(ids, np.int32)) for n, ids in enumerate(encode_prompts(model, list(sources)))]
