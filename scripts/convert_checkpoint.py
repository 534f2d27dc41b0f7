"""Converts a model between Hugging Face folders (or GGUF files) and our own Orbax format.

    python scripts/convert_checkpoint.py --input=hf_folder --output=ours                  # to ours
    python scripts/convert_checkpoint.py --input=ours --output=hf_folder --to=huggingface
    python scripts/convert_checkpoint.py --input=smollm2-135m-instruct --output=workdirs/smollm2 --dtype=bfloat16
    python scripts/convert_checkpoint.py --input=workdirs/ui_phrases-en-de --output=small --dtype=int8  # the matrices

The output folder appears whole or not at all, and is never overwritten. A folder in either format is
what `dj.load` takes.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

import decoding_jax as dj
from train.command import run

INPUT = flags.DEFINE_string("input", None, "What dj.load takes: a name, a folder or a .gguf file.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "The folder to make.", required=True)
TO = flags.DEFINE_enum("to", "orbax", ["orbax", "huggingface"], "The format to write.")
DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16", "float16", "int8"],
    "Of the params; default: float32, or our folder's own. int8 is for the matrices alone, and in our format.",
)


def main() -> None:
    """Loads and saves."""
    if Path(OUTPUT.value).exists():  # said before anything is read
        raise ValueError(f"output={OUTPUT.value!r} exists already; choose another folder or remove it first")
    int8 = DTYPE.value == "int8"
    model = dj.load(INPUT.value, dtype=None if int8 else DTYPE.value)
    model = dj.quantized(model) if int8 else model
    (dj.save if TO.value == "orbax" else dj.save_huggingface)(model, OUTPUT.value)
    print(f"{OUTPUT.value}: {model}")


if __name__ == "__main__":
    run(main)
