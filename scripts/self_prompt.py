r"""Lets a chat model write its own training data: questions that it makes up, and its own greedy answers.

    python scripts/self_prompt.py --model=smollm2-135m-instruct --count=1600 --output=outputs/self_prompt

A draft model has to say what its target would say, so it learns from the target's own outputs. Questions are sampled
by giving the model the beginning of a user's turn (Xu et al. 2024, Magpie), half of them with a first word of ours so
that they vary; beginnings of Python files are continued in the same way. Then all are answered greedily, together with
"Translate German to English: ..." for the longer phrases of ui_phrases, and with the prompts of --more. The folder gets

    questions/, answers/    the two batch jobs, in parts that survive any interruption
    train.jsonl, validation.jsonl    {"text"} of each question with its answer, as the model reads it; come last

Train on them with configs/draft_smollm2.py. After any interruption the same command goes on.

Exit code: 0 done, or stopped by SIGTERM; 1 the job failed; 2 bad usage; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import decoding_jax as dj
from decoding_jax import batch_folder, batch_job, batch_rows
from decoding_jax.batch_job import Job
from decoding_jax.batch_rows import Row
from decoding_jax.checkpoints.cache_files import cache_dir, write_atomically
from train.command import BAD_USAGE, one_line, run, say
from train.data.texts import open_texts
from train.jobs import RowProgress, StopSignals, run_stoppable

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "What dj.load takes; it needs a chat template.")
_COUNT = flags.DEFINE_integer("count", 4000, "How many questions and beginnings are sampled.", lower_bound=1)
_MORE = flags.DEFINE_list("more", [], "Files of JSON lines with a prompt or messages each, as for decode.py.")
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write to.", required=True)
_LENGTH = flags.DEFINE_integer("length", 128, "The longest answer, in tokens.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Rows decoded together.", lower_bound=1)
_TRANSLATIONS = flags.DEFINE_integer("translations", 600, "How many phrases are translated.", lower_bound=0)

# Half of the questions begin freely.
OPENERS = (
    "Write", "What", "How many", "Who", "Explain", "If", "Imagine", "A", "Why", "Describe", "Which", "Where is",
)  # fmt: skip
BEGINNINGS = ("def ", "from typing import List\n\n\ndef ", "import math\n\n\ndef ", "class ")
_QUESTION_TOKENS = 64
_SHORTEST_PHRASE = 5  # words
_VALIDATION_EVERY = 50  # texts


def question_rows(model: dj.Model, count: int) -> list[Row]:
    """The beginnings that are continued: 7 of 8 inside a user's turn, the others of Python files."""
    marker = "\0"
    turn = model.tokenizer.apply_chat_template([{"role": "user", "content": marker}]).split(marker)[0]
    if not turn:
        raise ValueError(f"model={_MODEL.value!r}: its chat template puts nothing before a user's text to continue")
    encode = lambda text: np.array(model.tokenizer.encode(text, add_special_tokens=False), np.int32)
    rows = []
    for i in range(count):
        if i % 8 == 7:
            start = BEGINNINGS[i // 8 % len(BEGINNINGS)]
        else:
            start = turn + (OPENERS[(i // 2 - i // 8) % len(OPENERS)] if i % 2 else "")
        rows.append(Row(i, start.removeprefix(turn), encode(start)))
    return rows


def answer_prompts(model: dj.Model, questions: list[Row], outputs: Iterator[dict[str, Any]]) -> Iterator[str]:
    """What is answered: finished questions as chats, and code as it is."""
    chat = lambda text: model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    for output in outputs:
        question = questions[output["id"]]
        text = str(question.id) + output["text"]
        if question.id in BEGINNINGS:
            yield text
        elif output["finish_reason"] == "eos" and text.strip():
            yield chat(text.strip())
    for text in _phrases():
        yield chat(f"Translate German to English: {text}")


def _phrases() -> list[str]:
    settings = {"name": "ui_phrases", "language_pair": "en-de", "files": {}, "fields": (), "data_dir": ""}
    train = open_texts(settings | {"lowercase": False, "distilled": ""}).splits["train"]
    long = [pair["target"] for pair in train if len(pair["target"].split()) >= _SHORTEST_PHRASE]
    return long[:: max(len(long) // max(_TRANSLATIONS.value, 1), 1)][: _TRANSLATIONS.value]


def decode_rows(model: dj.Model, job: Job, rows: list[Row], folder: Path, signals: StopSignals) -> None:
    """One batch job, from where it stopped."""
    batch_folder.open_folder(folder)
    parts = batch_rows.plan_parts([len(row.prompt) for row in rows], job.batch_size, job.batches_per_part)
    batch_folder.start_folder(folder, batch_job.describe_job([], job, _MODEL.value, "float32"), rows, [])
    progress = RowProgress(len(rows), signals)
    try:
        tally = batch_job.run_job(model, job, rows, parts, folder, progress)
    finally:
        progress.close()
    speed = f", {tally.tokens / tally.seconds:.0f} tokens/s" if tally.seconds else ""
    say(f"{len(rows):,} rows in {folder}{speed}")


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """The outputs of a batch job."""
    for path in sorted(folder.glob(batch_folder.PARTS)):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def make(folder: Path, signals: StopSignals) -> int:
    """Both jobs and the texts; returns the exit code."""
    try:
        dj.enable_compilation_cache(cache_dir() / "compiled")
        model = dj.load(_MODEL.value)
        questions = question_rows(model, _COUNT.value)
        more, errors = batch_rows.read_rows(model, [(name, Path(name)) for name in _MORE.value], _LENGTH.value)
        if errors:
            raise ValueError(f"more: {errors[0]}")
        sampled = dj.Sampling(temperature=0.8)
        job = Job(sampling=sampled, max_new_tokens=_QUESTION_TOKENS, batch_size=_BATCH_SIZE.value)
        decode_rows(model, job, [Row(r.number, r.number, r.prompt) for r in questions], folder / "questions", signals)
        texts = list(answer_prompts(model, questions, records(folder / "questions")))
        prompts = [model.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        prompts += [row.prompt.tolist() for row in more]
        rows = [Row(i, i, np.array(prompt, np.int32)) for i, prompt in enumerate(prompts)]
    except (ValueError, OSError) as error:
        say(one_line(error))
        return BAD_USAGE
    job = Job(max_new_tokens=_LENGTH.value, batch_size=_BATCH_SIZE.value)
    decode_rows(model, job, rows, folder / "answers", signals)
    backend = model.tokenizer.backend
    whole = {
        r["id"]: backend.decode(prompts[r["id"]], skip_special_tokens=False) + r["text"]
        for r in records(folder / "answers")
    }
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for i in sorted(whole):
        line = json.dumps({"text": whole[i]}, ensure_ascii=False) + "\n"
        splits["train" if i % _VALIDATION_EVERY else "validation"].append(line)
    for split, lines in splits.items():
        write_atomically(folder / f"{split}.jsonl", "".join(lines).encode())
    say(f"{len(whole):,} texts in {folder}")
    return 0


def main() -> int:
    folder = Path(_OUTPUT.value).expanduser()
    return run_stoppable(lambda signals: make(folder, signals), folder)


if __name__ == "__main__":
    run(main)
