r"""Measures what decoders that write several words at once do; results go to benchmarks/nonautoregressive.json.

    python scripts/measure_nonautoregressive.py --what=rates        # known exactly: how often two modes are mixed
    python scripts/measure_nonautoregressive.py --what=two_modes    # learnt: a teacher, students, distillation

rates takes a minute, two_modes a quarter of an hour on two cores.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from records import report

import decoding_jax as dj
from decoding_jax.analysis.toys import posterior_model
from train.command import run, say
from train.config import default_config
from train.loop import Trainer

WHAT = flags.DEFINE_enum("what", None, ["rates", "two_modes"], "What to measure.", required=True)
STEPS = flags.DEFINE_integer("steps", 2000, "two_modes: training steps of each model.", lower_bound=1)
RECORDS = flags.DEFINE_string("records", "benchmarks/nonautoregressive.json", "Where the results go.")


def save(name: str, value: float, unit: str, target: float | None = None, better: Any = "higher") -> None:
    """Prints and records one result."""
    command = f"python scripts/measure_nonautoregressive.py --what={WHAT.value}"
    report(RECORDS.value, name, value, unit, target, better, command)


# --- Known exactly


def measure_rates() -> None:
    """Rows of 16 tokens with two modes, written in T equal rounds: 2^-(16 / T - 1) of them are whole."""
    size, rows = 16, 4000
    modes = [[3, 4] * (size // 2), [4, 3] * (size // 2)]
    model = posterior_model(modes, vocab_size=6, mask_id=2)
    for rounds in (1, 2, 4, 8, 16):
        out = dj.decode(
            model,
            [[3]] * rows,
            dj.MaskPredict(iterations=rounds),
            max_new_tokens=size,
            lengths=[size] * rows,
            sampling=dj.Sampling(temperature=1.0),
        )
        wanted = 2.0 ** -(size / rounds - 1)
        save(f"two modes, exact/{rounds} rounds/whole rows", _share(out.tokens.tolist(), modes), "share of 4,000 rows")
        save(f"two modes, exact/{rounds} rounds/whole rows by the formula", wanted, "share")


def _share(rows: list[Any], good: list[Any]) -> float:
    return sum(row in good for row in rows) / len(rows)


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
        _report("teacher, autoregressive", teacher, dj.Autoregressive(), test)
        decode = lambda sources: dj.decode(teacher, sources, max_new_tokens=16).text or []
        taught = [text for at in range(0, len(pairs.sources), 500) for text in decode(pairs.sources[at : at + 500])]
        Pairs(pairs.sources, taught).write(distilled)
        for data, file in (("raw", raw), ("distilled", distilled)):
            student = _train("nonautoregressive", file, validation, folder / f"nonautoregressive-{data}")
            _report(f"nonautoregressive, {data}", student, dj.NonAutoregressive(), test)
            student = _train("mask_predict", file, validation, folder / f"mask_predict-{data}")
            for rounds in (1, 4, 10):
                _report(f"mask_predict, {data}, {rounds} rounds", student, dj.MaskPredict(rounds), test)
            student = _train("ctc", file, validation, folder / f"ctc-{data}")
            _report(f"ctc, {data}", student, dj.CTC(), test)


def _train(objective: str, train: Path, validation: Path, workdir: Path) -> dj.Model:
    Trainer(settings(objective, train, validation), workdir).run()
    return dj.load(workdir)


def _report(name: str, model: dj.Model, decoder: dj.Decoder, test: Pairs) -> None:
    for how, sampling in (("greedy", dj.Sampling()), ("sampled", dj.Sampling(temperature=1.0))):
        out = dj.decode(model, test.sources, decoder, max_new_tokens=16, sampling=sampling)
        valid = [text in (source, source[::-1]) for text, source in zip(out.text or [], test.sources, strict=True)]
        save(f"two modes, learnt/{name}/valid, {how}", sum(valid) / len(valid), "share of 500 rows")
    say(f"{name}: {out.stats}")


def main() -> int:
    {"rates": measure_rates, "two_modes": measure_two_modes}[WHAT.value]()
    return 0


if __name__ == "__main__":
    run(main)
