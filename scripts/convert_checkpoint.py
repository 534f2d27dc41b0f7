"""Converts a model between Hugging Face folders (or GGUF files) and our own Orbax format.

    python scripts/convert_checkpoint.py --input=hf_folder --output=ours                  # to ours
    python scripts/convert_checkpoint.py --input=ours --output=hf_folder --to=huggingface
    python scripts/convert_checkpoint.py --input=smollm2-135m-instruct --output=workdirs/smollm2 --dtype=bfloat16

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
    "dtype", None, ["float32", "bfloat16", "float16"], "Of the params; default: float32, or our folder's own."
)


def main() -> None:
    """Loads and saves."""
    if Path(OUTPUT.value).exists():  # said before anything is read
        raise ValueError(f"output={OUTPUT.value!r} exists already; choose another folder or remove it first")
    model = dj.load(INPUT.value, dtype=DTYPE.value)
    (dj.save if TO.value == "orbax" else dj.save_huggingface)(model, OUTPUT.value)
    print(f"{OUTPUT.value}: {model}")


if __name__ == "__main__":
    run(main)
