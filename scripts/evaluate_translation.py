r"""Scores a trained translation model: decodes a test set with several decoders and prints a table.

    python scripts/evaluate_translation.py --model=workdirs/ui_phrases-en-de
    python scripts/evaluate_translation.py --model=workdirs/ui_phrases-en-de --split=validation --examples=100 \
        --decoders=autoregressive,beam --config.evaluation.beam.num_beams=8

The model is the run's best checkpoint. Data and settings are those of its run; others come with --config=configs/x.py
(what differs in the data is said) or --config.name=value. The decoders' settings are those of config.evaluation.

BLEU and chrF are sacrebleu's, with their signatures; --tokenised adds the BLEU of Multi30k papers: lower-cased and
tokenised by Moses' rules. tokens/call is below 1 for beam search, which goes on searching after the output that wins
in the end was finished.

Results become records with the name that they are given, such as "multi30k en-de beam 5 BLEU":

    ... --tokenised --record=benchmarks/trainer.json --name="multi30k en-de" --target=35
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags
from records import read_records, record

import decoding_jax as dj
from decoding_jax.analysis.scores import tokenised_bleu
from decoding_jax.loop import Decoder
from decoding_jax.registry import make_decoder
from train.command import run, say
from train.config import OWN_DECODERS
from train.evaluation import DecodingReport, evaluate_decoding
from train.setup import compiled_folder
from train.trained_config import argv_with_config, differing_texts
from train.translation import load_translator, open_pairs

_CONFIG = config_flags.DEFINE_config_file("config", None, "Data and settings; default: those of the model's run.")
_MODEL = flags.DEFINE_string("model", None, "The workdir of a trained encoder-decoder.", required=True)
_SPLIT = flags.DEFINE_string("split", "test", "What is decoded: test, validation or train.")
_DECODERS = flags.DEFINE_list(
    "decoders",
    None,
    f"Of {', '.join(OWN_DECODERS)}; by commas. Default: autoregressive,beam, or what the model was trained for.",
)
_EXAMPLES = flags.DEFINE_integer("examples", None, "Only the first so many of the split.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 3, "How many examples are shown with their outputs.", lower_bound=0)
_TOKENISED = flags.DEFINE_bool("tokenised", False, "Score lower-cased, Moses-tokenised texts too.")
_RECORD = flags.DEFINE_string("record", None, "A file of records for the results, such as benchmarks/trainer.json.")
_NAME = flags.DEFINE_string("name", None, 'What the records\' names begin with, such as "multi30k en-de".')
_TARGET = flags.DEFINE_float("target", None, "What the tokenised BLEU of the last decoder was to reach.")
_COMMAND = shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])


@dataclasses.dataclass(frozen=True)
class Result:
    """What one decoder reached.

    Attributes:
      label: the decoder, as tables and records call it.
      report: its outputs, their scores and their cost.
      tokenised: the BLEU of lower-cased, tokenised texts; None where it was not asked for.
    """

    label: str
    report: DecodingReport
    tokenised: float | None


def label_of(name: str, decoder: Decoder) -> str:
    """ "greedy" for autoregressive, "beam 5" for beam with 5 beams, else the decoder's name."""
    if isinstance(decoder, dj.Beam):
        return f"beam {decoder.num_beams}"
    return "greedy" if name == "autoregressive" else name.replace("_", " ")


def check_flags() -> None:
    """ValueError where flags contradict each other or the results could not be recorded, before anything is loaded."""
    if _DECODERS.value == []:
        raise ValueError("--decoders is empty; name at least one")
    if unknown := [name for name in _DECODERS.value or () if name not in OWN_DECODERS]:
        raise ValueError(f"--decoders={','.join(unknown)}: choose of {', '.join(OWN_DECODERS)}")
    if bool(_RECORD.value) != bool(_NAME.value):
        raise ValueError("--record and --name belong together; give both")
    if _RECORD.value and _EXAMPLES.value:
        raise ValueError(f"--examples={_EXAMPLES.value}: a record is of the whole split; leave one of them out")
    if _RECORD.value:
        read_records(_RECORD.value)
    if _TARGET.value is not None and not (_TOKENISED.value and _RECORD.value):
        raise ValueError(
            f"--target={_TARGET.value:g} is for the record of the tokenised BLEU; give --tokenised, --record"
        )


def evaluate(config: ConfigDict, pairs: list[dict[str, str]]) -> list[Result]:
    """Decodes the pairs' sources with every decoder that was asked for."""
    settings = config.evaluation
    model = load_translator("model", _MODEL.value)
    names = _DECODERS.value or (["autoregressive", "beam"] if model.canvas is None else [model.canvas.objective])
    decoders = {name: make_decoder(name, settings.get(name, {})) for name in names}
    sources, references = ([pair[field] for pair in pairs] for field in ("source", "target"))
    results = []
    for name, decoder in decoders.items():
        label = label_of(name, decoder)
        say(f"decoding {len(pairs):,} sources: {label}")
        report = evaluate_decoding(
            model,
            sources,
            references,
            decoder,
            max_new_tokens=settings.max_new_tokens,
            batch_size=min(settings.batch_size, len(pairs)),
            language=settings.language,
        )
        tokenised = tokenised_bleu(report.hypotheses, references, settings.language) if _TOKENISED.value else None
        results.append(Result(label, report, tokenised))
    return results


def table(results: list[Result]) -> str:
    """One line for each decoder."""
    titles = ["BLEU", "chrF", "exact match", "tokens/call", "seconds"]
    lines = [[f"{'decoder':16}", *titles, *(["tokenised BLEU"] if _TOKENISED.value else [])]]
    for result in results:
        values = result.report.scores.values
        numbers = [
            f"{values['bleu']:.2f}",
            f"{values['chrf']:.2f}",
            f"{values['exact_match']:.3f}",
            f"{result.report.tokens_per_call:.2f}",
            f"{result.report.seconds:.1f}",
        ]
        lines.append(
            [f"{result.label:16}", *numbers, *([] if result.tokenised is None else [f"{result.tokenised:.2f}"])]
        )
    widths = [len(title) for title in lines[0]]
    return "\n".join("  ".join(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)) for line in lines)


def show(results: list[Result], pairs: list[dict[str, str]]) -> None:
    """Prints the table, the signatures of its scores, and samples."""
    print(table(results))
    for name, signature in results[0].report.scores.signatures.items():
        print(f"{name}: {signature}")
    for number, pair in enumerate(pairs[: _SAMPLES.value]):
        print(f"\n{'source':16}  {pair['source']}\n{'reference':16}  {pair['target']}")
        for result in results:
            print(f"{result.label:16}  {result.report.hypotheses[number]}")


def write_records(file: str, name: str, results: list[Result]) -> None:
    """Writes the scores of every decoder, with the command that was given."""
    for result in results:
        values = result.report.scores.values
        scores = {"BLEU": values["bleu"], "chrF": values["chrf"]}
        if result.tokenised is not None:
            scores["tokenised BLEU"] = result.tokenised
        for score, value in scores.items():
            target = _TARGET.value if score == "tokenised BLEU" and result is results[-1] else None
            record(file, f"{name} {result.label} {score}", value, "of 100", target, "higher", _COMMAND)
        share = values["exact_match"]
        record(file, f"{name} {result.label} exact match", share, "share of outputs", None, "higher", _COMMAND)


def main() -> None:
    """Evaluates, prints, records."""
    check_flags()
    config = _CONFIG.value
    if cache := compiled_folder(config):
        dj.enable_compilation_cache(os.path.expanduser(cache))
    if different := differing_texts(config, _MODEL.value):
        say(f"not the data that the model was trained on: {', '.join(different)}")
    split = open_pairs(config.data, _SPLIT.value)
    pairs = [split[i] for i in range(min(len(split), _EXAMPLES.value or len(split)))]
    results = evaluate(config, pairs)
    show(results, pairs)
    if _RECORD.value and _NAME.value:
        write_records(_RECORD.value, _NAME.value, results)
        say(f"the results are in {_RECORD.value}")


if __name__ == "__main__":
    sys.argv = argv_with_config(sys.argv, "model")
    run(main)
