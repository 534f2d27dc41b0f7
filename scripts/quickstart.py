"""Decodes with real models by several decoders and compares them in tables.

    python scripts/quickstart.py                       # greedy, about two minutes on two cores
    python scripts/quickstart.py --prompt='Your text'  # your own prompt instead
    python scripts/quickstart.py --sentence='Select the device you want to add.'

First a small model that is part of the package translates a sentence from English to German; then
SmolLM2-135M-Instruct answers prompts. The first run converts the latter's weights (once, into the user's cache folder)
and compiles; compiled programs are kept beside them, so the next run starts quickly.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags
from prompts import COPYING_PROMPTS

import decoding_jax as dj
from decoding_jax.checkpoints import find_model
from decoding_jax.checkpoints.cache_files import cache_dir
from train.command import run

MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "What dj.load takes: a name, a folder or a .gguf file.")
PROMPT = flags.DEFINE_multi_string("prompt", list(COPYING_PROMPTS), "What to ask; may be given several times.")
SENTENCE = flags.DEFINE_string(
    "sentence", "The connection failed. Please try again later.", "What to translate to German."
)
NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "The budget of each answer, in tokens.", lower_bound=1)

DECODERS = {
    "Autoregressive": dj.Autoregressive(),
    "PromptLookup": dj.PromptLookup(num_draft=4, min_ngram=2),
}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def translate() -> None:
    """One sentence by an encoder-decoder: token by token, and by search."""
    model = dj.load("ui-phrases-en-de")
    methods: dict[str, dj.Decoder] = {
        "Autoregressive": dj.Autoregressive(),
        "Beam": dj.Beam(num_beams=5, early_stopping=True),
    }
    print(f"\ntranslating with {len(methods)} decoders (each is compiled first)\n\n> {SENTENCE.value}", flush=True)
    rows = [("decoder", "calls", "ms", "translation")]
    for name, decoder in methods.items():
        for _ in range(4):  # the first time it compiles
            out = dj.decode(model, [SENTENCE.value], decoder, max_new_tokens=32)
        calls, took = int(out.stats.model_calls[0]), 1e3 * out.stats.total_seconds
        rows.append((name, str(calls), f"{took:.1f}", (out.text or [""])[0]))
    print(f"{table(rows)}\n")


def answer() -> None:
    """Prompts by a language model, with drafts and without."""
    print(f"loading {MODEL.value} (its weights are converted once)", flush=True)
    model = dj.load(MODEL.value)
    print(model)
    chats = [[{"role": "user", "content": text}] for text in PROMPT.value]
    outputs = {}
    for name, decoder in DECODERS.items():
        print(f"decoding {len(chats)} prompts with {name} (compiling first, up to half a minute)", flush=True)
        compiled = dj.decode(model, chats, decoder, max_new_tokens=NEW_TOKENS.value).stats.compile_seconds
        outputs[name] = compiled, dj.decode(model, chats, decoder, max_new_tokens=NEW_TOKENS.value)

    plain = outputs["Autoregressive"][1]
    for text, answer in zip(PROMPT.value, plain.text or [], strict=True):
        print(f"\n> {text}\n{answer}")
    rows = [("decoder", "tokens/s", "tokens per model call", "compile s", "same text")]
    for name, (compiled, out) in outputs.items():
        stats = out.stats
        speed = stats.tokens.sum() / stats.total_seconds
        same = "reference" if out is plain else "yes" if out.text == plain.text else "no"
        rows.append((name, f"{speed:.1f}", f"{stats.tokens_per_call:.2f}", f"{compiled:.1f}", same))
    print(f"\n{table(rows)}")
    print(
        "\nTokens per model call are what a method saves anywhere. What a call on several positions costs depends"
        "\non the machine: next to nothing more than on one position on an accelerator, two to three times as much"
        "\non a few CPU cores."
    )


def main() -> None:
    """Decodes, compares, prints."""
    dj.enable_compilation_cache(cache_dir() / "compiled")
    find_model(MODEL.value)  # a wrong name is said before anything is decoded
    translate()
    answer()


if __name__ == "__main__":
    run(main)
