r"""Measures what decoders that write several words at once do; results go to benchmarks/nonautoregressive.json.

    python scripts/measure_nonautoregressive.py --what=rates        # known exactly: how often two modes are mixed
    python scripts/measure_nonautoregressive.py --what=two_modes    # learnt: a teacher, students, distillation
    python scripts/measure_nonautoregressive.py --what=quality      # BLEU, chrF, repeats, calls of trained translators
    python scripts/measure_nonautoregressive.py --what=speed        # their batch jobs, 1, 8 and 64 rows at once
    python scripts/measure_nonautoregressive.py --what=rounds       # BLEU after 1 to 10 rounds
    python scripts/measure_nonautoregressive.py --what=lengths      # the length head, and lengths that are off
    python scripts/measure_nonautoregressive.py --what=bound        # where the time goes, beside what calls allow
    python scripts/measure_nonautoregressive.py --what=base_size    # the same at Transformer-base size, random weights
    python scripts/measure_nonautoregressive.py --what=bulk         # 10,000 titles
    python scripts/measure_nonautoregressive.py --what=key_phrases  # another task than translation

The translators are workdirs: --teacher, and its students, called like it with ",ctc,distilled" behind (see
docs/parallel.md). Names of records are "task/method/figure", where --task is the task. Measure times with nothing else
running.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from records import report
from translation_methods import Method, Runs, TimedJob, median_seconds, rows_of

import decoding_jax as dj
from decoding_jax.analysis import gauges
from decoding_jax.analysis.scores import text_scores
from decoding_jax.analysis.toys import posterior_model
from decoding_jax.batch_job import Job
from decoding_jax.batch_rows import Row
from decoding_jax.checkpoints.cache_files import cache_dir
from decoding_jax.models.functional import init_transformer
from decoding_jax.models.transformer import TransformerConfig
from decoding_jax.prepare import prepare
from decoding_jax.types import CanvasSpec
from train.command import run, say
from train.config import default_config
from train.data.builders.key_phrases import SEPARATOR
from train.evaluation import evaluate_decoding
from train.loop import Trainer
from train.trained_config import get_config
from train.translation import open_pairs

WHAT = flags.DEFINE_enum(
    "what",
    None,
    ["rates", "two_modes", "quality", "speed", "rounds", "lengths", "bound", "base_size", "bulk", "key_phrases"],
    "What to measure.",
    required=True,
)
STEPS = flags.DEFINE_integer("steps", 2000, "two_modes: training steps of each model.", lower_bound=1)
TEACHER = flags.DEFINE_string("teacher", "workdirs/ui_phrases-en-de", "The teacher's workdir.")
ENDING = flags.DEFINE_string("ending", "", "What the students' workdirs end with besides, such as ,seed_1.")
TASK = flags.DEFINE_string("task", "en-de", "What the records' names begin with.")
METHODS = flags.DEFINE_list("methods", [], "quality, speed: only these methods.")
SPLIT = flags.DEFINE_string("split", "test", "Of the pairs that are decoded.")
RECORDS = flags.DEFINE_string("records", "benchmarks/nonautoregressive.json", "Where the results go.")

NEW_TOKENS = 48
BATCH_SIZES = (1, 8, 64)
SENTENCES = {1: 48, 8: 256, 64: 1024}  # that a timed job has


def save(name: str, value: float, unit: str, target: float | None = None, better: Any = "higher") -> None:
    """Prints and records one result."""
    command = f"python scripts/measure_nonautoregressive.py --what={WHAT.value}"
    for flag in (TEACHER, ENDING, TASK, SPLIT, STEPS):
        if flag.present:
            command += f" --{flag.name}={flag.value}"
    report(RECORDS.value, name, value, unit, target, better, command)


# --- Known exactly


def measure_rates() -> None:
    """How many rows are whole that are written in T rounds with exact posteriors, and what dependence does to them.

    Rows of 16 tokens with two modes: 2^-(16 / T - 1) of them. 64 random rows of 16 tokens: there is no formula. Pairs
    that are equal more and more often: the total correlation grows, and one round makes as many equal ones as chance.
    """
    size = 16
    modes = [[3, 4] * (size // 2), [4, 3] * (size // 2)]
    oracle = np.random.default_rng(0).integers(3, 11, (64, size)).tolist()
    for rounds in (1, 2, 4, 8, 16):
        name = f"{rounds:02d}_rounds"
        wanted = 2.0 ** -(size / rounds - 1)
        save(f"two_modes_exact/{name}/whole_rows", _share_of(modes, modes, rounds), "share of 4,000 rows")
        save(f"two_modes_exact/{name}/by_the_formula", wanted, "share")
        save(f"random_rows_exact/{name}/whole_rows", _share_of(oracle, oracle, rounds), "share of 4,000 rows")
    equal = [[v, v] for v in range(3, 7)]
    for more in (0, 1, 2, 4, 8):  # how much more often than another pair an equal one is in the law
        law = [[a, b] for a in range(3, 7) for b in range(3, 7) for _ in range(1 + more * (a == b))]
        name = f"{4 * (1 + more) / len(law):.2f}_equal"
        chances: dict[gauges.Words, float] = {
            pair: law.count(list(pair)) / len(law) for pair in itertools.product(range(3, 7), repeat=2)
        }
        save(f"dependence/{name}/total_correlation", gauges.total_correlation(chances), "nats")
        for rounds in (1, 2):
            save(f"dependence/{name}/equal_after_{rounds}", _share_of(equal, law, rounds), "share of 4,000 pairs")


def _share_of(good: list[list[int]], law: list[list[int]], rounds: int) -> float:
    """How many of 4,000 rows, drawn in so many rounds by the posterior of a law of equally probable rows, are good."""
    rows, size = 4000, len(law[0])
    out = dj.decode(
        posterior_model(law, vocab_size=12, mask_id=2),
        [[3]] * rows,
        dj.MaskPredict(iterations=rounds),
        max_new_tokens=size,
        lengths=[size] * rows,
        sampling=dj.Sampling(temperature=1.0),
    )
    return sum(row in good for row in out.tokens.tolist()) / rows


# --- Learnt


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sources of 8 to 12 letters, and as targets the source, or by a coin its reverse."""

    sources: list[str]
    targets: list[str]

    def write(self, file: Path) -> None:
        lines = (f"{source}\t{target}\n" for source, target in zip(self.sources, self.targets, strict=True))
        file.write_text("".join(lines), encoding="utf-8")


def make_pairs(count: int, seed: int) -> Pairs:
    """Random pairs; the same for the same seed."""
    draw = random.Random(seed)
    sources = ["".join(draw.choices("abcdefghijkl", k=draw.randint(8, 12))) for _ in range(count)]
    return Pairs(sources, [source if draw.random() < 0.5 else source[::-1] for source in sources])


def settings(objective: str, train: Path, validation: Path) -> ConfigDict:
    """2 + 2 layers of width 64 on pairs of characters."""
    config = default_config()
    config.objective = objective
    config.total_steps = STEPS.value
    config.data.name = "parallel_text"
    config.data.files = ConfigDict({"train": str(train), "validation": str(validation), "test": ""})
    config.data.data_dir = str(train.parent / "data")
    config.data.tokenizer.kind = "characters"
    config.data.batching = "bucketed"
    config.data.length = 16
    config.data.tokens_per_batch = 1024
    config.model.num_layers = config.model.encoder_layers = 2
    config.model.width, config.model.mlp_width, config.model.head_size = 64, 128, 16
    config.model.max_length = 64
    config.optimizer.learning_rate = 3e-3
    config.evaluation.every = config.checkpoint.every = max(STEPS.value // 4, 1)
    config.checkpoint.keep_best = 0  # by the loss of pairs with two modes none is best that knows one
    config.evaluation.language = "en"
    config.evaluation.decoder = "autoregressive" if objective == "seq2seq" else objective
    config.evaluation.max_new_tokens = 16
    return config


def measure_two_modes() -> None:
    """Valid outputs, in either mode, of a teacher, of students on the same pairs, and of one on the teacher's."""
    test = make_pairs(500, seed=3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        raw, validation, distilled = folder / "train.tsv", folder / "validation.tsv", folder / "distilled.tsv"
        pairs = make_pairs(20000, seed=1)
        pairs.write(raw)
        make_pairs(200, seed=2).write(validation)
        teacher = _train("seq2seq", raw, validation, folder / "teacher")
        _report("teacher", teacher, dj.Autoregressive(), test)
        decode = lambda sources: dj.decode(teacher, sources, max_new_tokens=16).text or []
        taught = [text for at in range(0, len(pairs.sources), 500) for text in decode(pairs.sources[at : at + 500])]
        Pairs(pairs.sources, taught).write(distilled)
        for data, file in (("raw", raw), ("distilled", distilled)):
            student = _train("nonautoregressive", file, validation, folder / f"nonautoregressive-{data}")
            _report(f"nonautoregressive_{data}", student, dj.NonAutoregressive(), test)
            student = _train("mask_predict", file, validation, folder / f"mask_predict-{data}")
            for rounds in (1, 4, 10):
                _report(f"mask_predict_{data}_{rounds:02d}_rounds", student, dj.MaskPredict(rounds), test)
            student = _train("ctc", file, validation, folder / f"ctc-{data}")
            _report(f"ctc_{data}", student, dj.CTC(), test)


def _train(objective: str, train: Path, validation: Path, workdir: Path) -> dj.Model:
    Trainer(settings(objective, train, validation), workdir).run()
    return dj.load(workdir)


def _report(name: str, model: dj.Model, decoder: dj.Decoder, test: Pairs) -> None:
    for how, sampling in (("greedy", dj.Sampling()), ("sampled", dj.Sampling(temperature=1.0))):
        out = dj.decode(model, test.sources, decoder, max_new_tokens=16, sampling=sampling)
        valid = [text in (source, source[::-1]) for text, source in zip(out.text or [], test.sources, strict=True)]
        save(f"two_modes_learnt/{name}/valid_{how}", sum(valid) / len(valid), "share of 500 rows")
    say(f"{name}: {out.stats}")


# --- Trained translators


def read_pairs(split: str) -> tuple[list[str], list[str], str]:
    """The sources and targets of a split of the teacher's data, and the targets' language."""
    config = get_config(TEACHER.value)
    pairs = list(open_pairs(config.data, split))
    return [pair["source"] for pair in pairs], [pair["target"] for pair in pairs], config.evaluation.language


def measure_quality() -> None:
    """What every trained method makes of the whole split, in batches of 64."""
    runs = Runs(TEACHER.value, ENDING.value)
    sources, references, language = read_pairs(SPLIT.value)
    split = list if language.startswith(("zh", "ja")) else str.split  # there characters are what words are here
    corpus = [split(text) for text in read_pairs("train")[1]]
    for name, method in runs.trained(METHODS.value).items():
        found = evaluate_decoding(
            runs.model(method.run),
            sources,
            references,
            method.decoder,
            max_new_tokens=NEW_TOKENS,
            batch_size=64,
            language=language,
            drafter=runs.load(method.drafter),
            scorer=runs.load(method.scorer),
        )
        jax.clear_caches()  # a process has room for so many programs only
        words, wanted = [[split(text) for text in texts] for texts in (found.hypotheses, references)]
        figures: dict[str, tuple[float, str, Any]] = {
            "BLEU": (found.scores.values["bleu"], "of 100", "higher"),
            "chrF": (found.scores.values["chrf"], "of 100", "higher"),
            "calls": (found.model_calls / len(sources), "model calls for a sentence", "lower"),
            "draft_calls": (found.draft_calls / len(sources), "calls of a second model for a sentence", "lower"),
            "repeated_words": (100 * gauges.repetition_rate(words), "% of words", "lower"),
            "known_bigrams": (100 * gauges.ngram_consistency(words, corpus), "% of bigrams, in training", "higher"),
            "order_errors": (100 * gauges.word_order_error(words, wanted), "% of pairs of shared words", "lower"),
            "length_error": (gauges.length_error(words, wanted), "words", "lower"),
        }
        for figure, (value, unit, better) in figures.items():
            save(f"{TASK.value}/{name}/{figure}", value, unit, None, better)


def measure_speed() -> None:
    """The batch job of every method and the teacher's by turns: sentences a second at 1, 8 and 64 rows at once."""
    runs = Runs(TEACHER.value, ENDING.value)
    sources = read_pairs(SPLIT.value)[0]
    chosen = {"teacher": Method("", dj.Autoregressive())} | runs.trained(METHODS.value)
    chosen = {name: method for name, method in chosen.items() if method.scorer is None}  # a job has none
    for batch in BATCH_SIZES:
        rows = rows_of(runs.model(""), sources[: SENTENCES[batch]])
        jobs = {
            name: TimedJob(
                runs.model(method.run),
                Job(method.decoder, NEW_TOKENS, batch_size=batch, drafter=runs.load(method.drafter)),
                rows,
            )
            for name, method in chosen.items()
        }
        took = median_seconds(jobs, repeats=3)
        for name, seconds in took.items():
            if batch == 1:
                save(f"{TASK.value}/{name}/ms_alone", 1e3 * seconds / len(rows), "ms for a sentence", None, "lower")
            else:
                save(f"{TASK.value}/{name}/sentences_per_s_by_{batch}", len(rows) / seconds, "sentences per s")
            save(f"{TASK.value}/{name}/speedup_by_{batch}", took["teacher"] / seconds, "ratio to the teacher")
        jax.clear_caches()


def measure_rounds() -> None:
    """BLEU and calls of what refines, for 1 to 10 rounds."""
    runs = Runs(TEACHER.value, ENDING.value)
    sources, references, language = read_pairs(SPLIT.value)
    makers = {"mask_predict": dj.MaskPredict, "iterative_refinement": dj.IterativeRefinement}
    for name, make in makers.items():
        model = runs.model(f",{name},distilled")
        for count in range(1, 11):
            found = evaluate_decoding(
                model, sources, references, make(count), max_new_tokens=NEW_TOKENS, batch_size=64, language=language
            )
            title = f"{TASK.value}_rounds/{name}"
            save(f"{title}/BLEU_{count:02d}", found.scores.values["bleu"], "BLEU")
            save(
                f"{title}/calls_{count:02d}",
                found.model_calls / len(sources),
                "model calls for a sentence",
                None,
                "lower",
            )


def measure_lengths() -> None:
    """How often the length head is right, and BLEU where every length is the reference's and a few tokens."""
    runs = Runs(TEACHER.value, ENDING.value)
    sources, references, language = read_pairs(SPLIT.value)
    model, decoder = runs.model(",nonautoregressive,distilled"), dj.NonAutoregressive()
    true = np.asarray([len(model.tokenizer.encode(text, add_special_tokens=False)) + 1 for text in references])
    call = prepare(model, list(sources), NEW_TOKENS, dj.Sampling(), dj.Stop(), 0, None, None)
    chosen = jax.jit(lambda ctx: decoder.choose_lengths(ctx, ctx.encode()))(call.ctx)
    off = np.abs(np.asarray(chosen)[: len(sources), 0] - true)
    for most in (0, 1, 2):
        name = "right" if most == 0 else f"within_{most}"
        save(f"{TASK.value}_lengths/nonautoregressive/{name}", float((off <= most).mean()), "share of lengths")
    for wrong in (-2, -1, 0, 1, 2):
        lengths, texts = np.clip(true + wrong, 1, NEW_TOKENS).tolist(), []
        for at in range(0, len(sources), 64):
            part = slice(at, at + 64)
            out = dj.decode(model, sources[part], decoder, max_new_tokens=NEW_TOKENS, lengths=lengths[part])
            texts += [text.strip() for text in out.text or []]
        bleu = text_scores(texts, references, language).values["bleu"]
        save(f"{TASK.value}_lengths/nonautoregressive/BLEU_at_{wrong:+d}", bleu, "BLEU")


# --- Where the time goes


def measure_bound() -> None:
    """The trained teacher against one call, and against one call and a round of refinement."""
    runs = Runs(TEACHER.value, ENDING.value)
    sources = read_pairs(SPLIT.value)[0]
    students = {
        "ctc": (runs.model(",ctc,distilled"), dj.CTC()),
        "mask_predict_2_rounds": (runs.model(",mask_predict,distilled"), dj.MaskPredict(2)),
    }
    for batch in BATCH_SIZES:
        rows = rows_of(runs.model(""), sources[: SENTENCES[batch]])
        _compare(f"{TASK.value}_bound_by_{batch}", runs.model(""), students, rows, batch, NEW_TOKENS)
        jax.clear_caches()


def measure_base_size() -> None:
    """12 tokens from 12 at Transformer-base size (Vaswani et al. 2017) with random weights, which never end early."""
    words, new_tokens = 32_000, 12
    canvas = {
        "one_call": CanvasSpec("nonautoregressive", 1, source_copy="uniform"),
        "two_calls": CanvasSpec("mask_predict", 1),
    }
    decoders: dict[str, dj.Decoder] = {"one_call": dj.NonAutoregressive(), "two_calls": dj.MaskPredict(2)}
    teacher = init_transformer(_base_config(words, None))
    students = {name: (init_transformer(_base_config(words, spec)), decoders[name]) for name, spec in canvas.items()}
    draw = np.random.default_rng(0)
    for batch in BATCH_SIZES:
        count = {1: 8, 8: 32, 64: 128}[batch]
        rows = [Row(n, n, draw.integers(3, words, 12, np.int32), new_tokens) for n in range(count)]
        target = 3.0 if batch == 1 else None
        _compare(f"base_size_by_{batch}", teacher, students, rows, batch, new_tokens, target)
        jax.clear_caches()


def _base_config(vocab_size: int, canvas: CanvasSpec | None) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=vocab_size,
        num_layers=6,
        encoder_layers=6,
        width=512,
        mlp_width=2048,
        num_heads=8,
        num_kv_heads=8,
        head_size=64,
        max_length=64,
        start_id=0,
        canvas=canvas,
    )


def _compare(
    task: str,
    teacher: dj.Model,
    students: Mapping[str, tuple[dj.Model, Any]],
    rows: Sequence[Row],
    batch: int,
    new_tokens: int,
    target: float | None = None,
) -> None:
    """Batch jobs by turns, and what the calls alone would allow: N tau / (tau + c).

    N calls of tau are the teacher's rounds, tau + c those of a student, which are wider; the rest of a job is the
    encoder, and what the host does.
    """
    contenders = {"teacher": (teacher, dj.Autoregressive())} | dict(students)
    jobs = {}
    for name, (model, decoder) in contenders.items():
        told = [row if model.needs_lengths else dataclasses.replace(row, length=None) for row in rows]
        jobs[name] = TimedJob(model, Job(decoder, new_tokens, batch_size=batch), told)
    took = median_seconds(jobs, repeats=5)
    phases = [{name: job.phases() for name, job in jobs.items()} for _ in range(4)][1:]  # the first ones compile
    median = lambda name, which: statistics.median(each[name][which] for each in phases)
    before, rounds = ({name: median(name, which) for name in jobs} for which in (0, 1))
    for name, seconds in took.items():
        save(f"{task}/{name}/ms", 1e3 * seconds / len(rows), "ms for a sentence", None, "lower")
        save(f"{task}/{name}/ms_of_calls", 1e3 * rounds[name] / len(rows), "ms for a sentence", None, "lower")
        save(f"{task}/{name}/ms_of_encoder", 1e3 * before[name] / len(rows), "ms for a sentence", None, "lower")
        if name != "teacher":
            first = target if name == "one_call" else None
            save(f"{task}/{name}/speedup", took["teacher"] / seconds, "ratio to the teacher", first)
            save(f"{task}/{name}/ideal", rounds["teacher"] / rounds[name], "ratio to the teacher")


# --- Other jobs


def measure_bulk() -> None:
    """10,000 titles through the batch job by 64: the teacher and CTC."""
    runs = Runs(TEACHER.value, ENDING.value)
    rows = rows_of(runs.model(""), read_pairs("train")[0][:10_000])
    for name, method in {"teacher": Method("", dj.Autoregressive()), "ctc": Method(",ctc,distilled", dj.CTC())}.items():
        job = TimedJob(runs.model(method.run), Job(method.decoder, NEW_TOKENS, batch_size=64), rows)
        job.seconds()  # compiles
        save(f"bulk/{name}/seconds", job.seconds(), "s for 10,000 titles", None, "lower")


def measure_key_phrases() -> None:
    """F1 of the sets of phrases, and calls, of a model that writes all at once and of one that writes in order."""
    workdirs = {"ctc": "workdirs/key_phrases", "autoregressive": "workdirs/key_phrases-seq2seq"}
    decoders: dict[str, Any] = {"ctc": dj.CTC(), "autoregressive": dj.Autoregressive()}
    for name, workdir in workdirs.items():
        if not Path(workdir).is_dir():
            say(f"not trained and left out: {workdir}")
            continue
        config = get_config(workdir)
        pairs = list(open_pairs(config.data, SPLIT.value))
        sources, targets = ([pair[field] for pair in pairs] for field in ("source", "target"))
        model = dj.load(workdir)
        found = evaluate_decoding(
            model, sources, targets, decoders[name], max_new_tokens=NEW_TOKENS, batch_size=64, language="en"
        )
        job = TimedJob(model, Job(decoders[name], NEW_TOKENS, batch_size=64), rows_of(model, sources))
        took = median_seconds({name: job}, repeats=3)[name]
        sets = [[text.split(SEPARATOR) for text in texts] for texts in (found.hypotheses, targets)]
        save(f"key_phrases/{name}/F1", 100 * gauges.set_f1(*sets), "of 100")
        save(f"key_phrases/{name}/calls", found.model_calls / len(sources), "model calls for a text", None, "lower")
        save(f"key_phrases/{name}/texts_per_s_by_64", len(sources) / took, "texts per s")


def main() -> int:
    """Measures what was asked for."""
    dj.enable_compilation_cache(cache_dir() / "compiled")
    measure = {
        "rates": measure_rates,
        "two_modes": measure_two_modes,
        "quality": measure_quality,
        "speed": measure_speed,
        "rounds": measure_rounds,
        "lengths": measure_lengths,
        "bound": measure_bound,
        "base_size": measure_base_size,
        "bulk": measure_bulk,
        "key_phrases": measure_key_phrases,
    }
    measure[WHAT.value]()
    return 0


if __name__ == "__main__":
    run(main)
