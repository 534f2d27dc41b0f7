r"""Translates the training split with a trained teacher: its outputs become the targets of a student.

Greedy, with beam search (5 beams), or sampled:

    python -m train.distill --teacher=workdirs/ui_phrases-en-de
    python -m train.distill --teacher=workdirs/ui_phrases-en-de \
        --config.distillation.decoder=beam --config.distillation.beam.num_beams=5
    python -m train.distill --teacher=workdirs/ui_phrases-en-de \
        --config.distillation.sampling.temperature=0.7 --output=workdirs/ui_phrases-en-de/distilled-sampled

Data and settings are those of the teacher's run; others come with --config=configs/x.py (what differs in the data is
said) or --config.name=value.

The student learns from these pairs in place of the training split. Its vocabulary may be its own; here it is the
teacher's:

    python -m train --config=configs/ui_phrases.py:en-de --workdir=workdirs/student \
        --config.data.distilled=workdirs/ui_phrases-en-de/distilled-beam \
        --config.data.tokenizer.kind=file --config.data.tokenizer.path=workdirs/ui_phrases-en-de

With the same vocabulary it can learn the teacher's probabilities of each word of these targets as well; the loss is
then (1 - weight) cross-entropy + weight KL divergence from the teacher:

    ... --config.teacher.path=workdirs/ui_phrases-en-de --config.teacher.weight=0.5

The folder (--output) gets

    distilled.jsonl                 {"source", "target"} of each good output, in the order of the split; comes last
    part-00000-of-00007.jsonl, ...  {"id", "text", "tokens", "finish_reason", "stats"}; id is the place in the split
    summary.json                    how many pairs, what was left out and why, speed, versions, hardware
    plan.json                       which job this is: settings, texts and the digest of the teacher's weights

Left out are sources longer than data.length, and outputs that are empty, broken or without <eos> within
distillation.max_new_tokens. After any interruption the same command goes on where the last complete part ended; the
bytes are those of a run that was never stopped. A part that was cut or changed meanwhile is named and decoded again. A
teacher that was trained further makes another job.

Exit code: 0 done, or stopped by SIGTERM; 1 the job failed, or no output was good; 2 bad usage; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

import decoding_jax as dj
from decoding_jax import batch_folder
from train.command import BAD_USAGE, FAILED, one_line, run, say
from train.data.texts import DISTILLED
from train.distillation import default_folder, perform, prepare
from train.jobs import RowProgress, run_stoppable, write_summary
from train.setup import compiled_folder
from train.signals import StopSignals
from train.trained_config import argv_with_config, differing_texts

_CONFIG = config_flags.DEFINE_config_file("config", None, "Data and settings; default: those of the teacher's run.")
_TEACHER = flags.DEFINE_string("teacher", None, "The workdir of a trained encoder-decoder.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write to; default: distilled-<decoder> in --teacher.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Discard what another job left in the folder.")


def distil(config: ConfigDict, folder: Path, signals: StopSignals) -> int:
    """The whole job; returns the exit code."""
    begun = time.monotonic()
    try:
        if cache := compiled_folder(config):
            dj.enable_compilation_cache(os.path.expanduser(cache))
        if different := differing_texts(config, _TEACHER.value):
            say(f"not the data that the teacher was trained on: {', '.join(different)}")
        work = prepare(config, _TEACHER.value, folder, _OVERWRITE.value)
    except (ValueError, OSError) as error:
        say(one_line(error))
        return BAD_USAGE
    say(f"{len(work.rows):,} sources in {len(work.parts)} parts{_listed(work.left_out)}")
    progress = RowProgress(len(work.rows), signals)
    try:
        tally, counts = perform(work, progress)
    finally:
        progress.close()
    if tally.rows or not (folder / batch_folder.SUMMARY).exists():
        more = {"distilled": counts, "teacher": _TEACHER.value, "config": config.to_dict()}
        write_summary(folder, work.job, tally, more, begun)
    pairs = counts.pop("pairs")
    if not pairs:
        say(f"no output is good enough{_listed(counts)}; raise distillation.max_new_tokens or train the teacher longer")
        return FAILED
    say(f"{pairs:,} pairs in {folder / DISTILLED}{_listed(counts)}")
    say(f"train a student on them with --config.data.distilled={folder}")
    return 0


def _listed(counts: dict[str, int]) -> str:
    """Counts by the reason, as the end of a line; "" if all are 0."""
    found = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
    return f"; left out: {found}" if found else ""


def main() -> int:
    config = _CONFIG.value
    folder = Path(_OUTPUT.value).expanduser() if _OUTPUT.value else default_folder(config, _TEACHER.value)
    return run_stoppable(lambda signals: distil(config, folder, signals), folder)


if __name__ == "__main__":
    sys.argv = argv_with_config(sys.argv, "teacher")
    run(main)
