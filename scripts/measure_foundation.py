"""Measures what the foundation promises of SmolLM2 on this machine; results go to benchmarks/foundation.json.

    python scripts/measure_foundation.py --what=steps
    python scripts/measure_foundation.py --what=compile
    python scripts/measure_foundation.py --what=program
    python scripts/measure_foundation.py --what=lookup --questions=questions.jsonl   # Spec-Bench's questions

Time it with nothing else running. `lookup` takes about 8 minutes on 2 cores, the others one or two.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from absl import flags
from records import report
from timing import Stepper, buffer_size, decode_rounds, loops, seconds

import decoding_jax as dj
from decoding_jax.checkpoints.cache_files import cache_dir
from decoding_jax.loop import ALL_STEPS, run, start
from decoding_jax.prepare import prepare, takes_drafter
from decoding_jax.registry import DECODERS, make_decoder
from train.command import run as run_command

WHAT = flags.DEFINE_enum("what", None, ["steps", "compile", "program", "lookup"], "What to measure.", required=True)
QUESTIONS = flags.DEFINE_string("questions", None, "Spec-Bench's questions as JSON lines (category, turns).")
COUNT = flags.DEFINE_integer("count", 20, "How many summarization prompts.", lower_bound=1)
RECORDS = flags.DEFINE_string("records", "benchmarks/foundation.json", "Where the results go.")
COLD_DECODER = flags.DEFINE_string("cold_decoder", None, "Used by --what=compile for its child processes.")

MODEL = "smollm2-135m-instruct"
NEW_TOKENS = 128
NUM_DRAFT = 8


def save(name: str, value: float, unit: str, target: float | None = None, better: Any = "lower") -> None:
    """Prints and records one result."""
    command = f"python scripts/measure_foundation.py --what={WHAT.value}"
    if WHAT.value == "lookup":  # the questions are Spec-Bench's, wherever they lie
        command += f" --questions=question.jsonl --count={COUNT.value}"
    report(RECORDS.value, name, value, unit, target, better, command)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of half a gigabyte on all cores, the best of several."""
    source = np.ones(2**27, np.float32)
    target = np.empty_like(source)
    ends = np.linspace(0, source.size, (os.cpu_count() or 1) + 1, dtype=int)
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]

    def copy(part: slice) -> None:
        np.copyto(target[part], source[part])

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        return max(2 * source.nbytes / seconds(lambda: list(pool.map(copy, parts))) for _ in range(8))


def measure_steps() -> None:
    """Step time over the time that reading the params takes, and the decoder's own share."""
    model = dj.load(MODEL)
    ids = model.tokenizer.encode("The capital of France is")
    stepper = Stepper(model, buffer_size(model, ids, NEW_TOKENS))
    decode_rounds(model, ids, dj.Autoregressive(), NEW_TOKENS)
    plain, ours, copies = [], [], []
    for _ in range(7):
        copies.append(copy_bandwidth())
        plain.append(stepper.step_seconds(1))
        out, took = decode_rounds(model, ids, dj.Autoregressive(), NEW_TOKENS)
        ours.append(took / int(out.stats.model_calls[0]))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    bound = size / max(copies)
    save("step_over_copy_bandwidth_bound", statistics.median(ours) / bound, "ratio", None)
    save("autoregressive_overhead", statistics.median(o / p for o, p in zip(ours, plain, strict=True)), "ratio", None)
    save("step_milliseconds", statistics.median(ours) * 1e3, "ms")
    save("copy_bandwidth", max(copies) / 1e9, "GB/s", None, "higher")


def measure_lookup() -> None:
    """Tokens per call and efficiency of PromptLookup on Spec-Bench's summarization prompts."""
    if QUESTIONS.value is None:
        raise ValueError("--what=lookup needs --questions=FILE")
    lines = [json.loads(line) for line in Path(QUESTIONS.value).read_text(encoding="utf-8").splitlines()]
    texts = [line["turns"][0] for line in lines if line["category"] == "summarization"][: COUNT.value]
    model = dj.load(MODEL)
    lookup = dj.PromptLookup(num_draft=NUM_DRAFT)
    tokens = calls = looping = different = 0
    speedups, efficiencies = [], []
    for text in texts:
        prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        ids = model.tokenizer.encode(prompt, add_special_tokens=False)
        stepper = Stepper(model, buffer_size(model, ids, NEW_TOKENS))
        for decoder in (dj.Autoregressive(), lookup):  # compiles what this length needs
            decode_rounds(model, ids, decoder, NEW_TOKENS)
        base, plain_seconds = decode_rounds(model, ids, dj.Autoregressive(), NEW_TOKENS)
        out, round_seconds = decode_rounds(model, ids, lookup, NEW_TOKENS)
        plain, copied = (x.tokens[0, : x.lengths[0]].tolist() for x in (base, out))
        round_calls = int(out.stats.model_calls[0])
        one, wide = stepper.step_seconds(1), stepper.step_seconds(NUM_DRAFT + 1)
        per_call = len(copied) / round_calls
        speedup = (plain_seconds / len(plain)) / (round_seconds / len(copied))
        speedups.append(speedup)
        efficiencies.append(speedup / (per_call * one / wide))
        tokens, calls = tokens + len(copied), calls + round_calls
        looping, different = looping + loops(copied), different + (copied != plain)
        print(
            f"{len(ids)} prompt tokens: {per_call:.2f} tokens per call, speed-up {speedup:.2f}, "
            f"step {one * 1e3:.0f} ms at 1, {wide * 1e3:.0f} at {NUM_DRAFT + 1}, efficiency {efficiencies[-1]:.2f}",
            flush=True,
        )
    save("prompt_lookup_tokens_per_call", tokens / calls, "tokens per model call", None, "higher")
    save("prompt_lookup_efficiency", statistics.median(efficiencies), "ratio", 0.85, "higher")
    save("prompt_lookup_speedup", statistics.median(speedups), "ratio to Autoregressive", None, "higher")
    save("prompt_lookup_looping_outputs", looping / len(texts), "share of outputs", None)
    save("prompt_lookup_different_outputs", different, f"prompts of {len(texts)}", None)


def measure_compile() -> None:
    """Tracing and compiling of each decoder in fresh processes: an empty persistent cache, then a full one."""
    for name in DECODERS:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--what=compile", f"--cold_decoder={name}={cache}"]
            runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
        cold, warm = (float(r.stdout.split()[-1]) for r in runs)
        save(f"compile_seconds_cold_{name}", cold, "s", 40)
        save(f"compile_seconds_cached_{name}", warm, "s", 5)


def with_drafter(name: str, model: dj.Model) -> tuple[dj.Decoder, dj.Model | None]:
    """A decoder with its default settings, and the model's int8 copy if it needs a drafter."""
    decoder = make_decoder(name, {}, has_drafter=True)
    return decoder, dj.quantized(model) if takes_drafter(decoder) else None


def compile_once(name: str, cache: str) -> None:
    """The child of `measure_compile`: prints the seconds."""
    dj.enable_compilation_cache(cache)
    model = dj.load(MODEL)
    decoder, drafter = with_drafter(name, model)
    out = dj.decode(model, "The capital of France is", decoder, drafter=drafter, max_new_tokens=32)
    print(out.stats.compile_seconds)


def primitives(jaxpr: Any) -> set[str]:
    """Names of all primitives of a jaxpr and of those inside it."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            names |= primitives(inner) if hasattr(inner, "eqns") else set()
    return names


def measure_program() -> None:
    """Every decoder of SmolLM2 is one program without host traffic, and lowers for cpu, cuda and tpu."""
    model = dj.load(MODEL)
    bad = 0
    for name in DECODERS:
        decoder, drafter = with_drafter(name, model)
        sampling = dj.Sampling(temperature=0.7)
        call = prepare(model, "The capital of France is", 32, sampling, dj.Stop(), 0, None, None, drafter=drafter)
        state = jax.eval_shape(start, decoder, call.ctx)
        arguments = (decoder, call.ctx, state, jax.ShapeDtypeStruct((), jnp.int32))
        names = primitives(jax.make_jaxpr(run)(*arguments).jaxpr)
        compiled = run.lower(*arguments).compile().as_text()
        traffic = [word for word in ("infeed", "outfeed", "send(", "recv(", "callback") if word in (compiled or "")]
        exported = export_platforms(decoder, call.ctx, state)
        fine = "while" in names and not any("callback" in n for n in names) and not traffic
        fine &= exported == ("cpu", "cuda", "tpu")
        print(f"{name}: while={'while' in names}, host traffic={traffic}, exported for {exported}", flush=True)
        bad += not fine
    save("decoders_that_are_not_one_program", bad, f"decoders of {len(DECODERS)}", 0)


def export_platforms(decoder: dj.Decoder, ctx: Any, state: Any) -> tuple[str, ...]:
    """The platforms that `jax.export` lowers a decode for; arguments go flat, since exports know no classes."""
    leaves, tree = jax.tree.flatten((decoder, ctx, state))

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        decoder, ctx, state = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(run(decoder, ctx, state, jnp.int32(ALL_STEPS)))

    shapes = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
    exported = jax.export.export(jax.jit(flat), platforms=("cpu", "cuda", "tpu"))(*shapes)
    return tuple(exported.platforms)


def main() -> None:
    """Measures what was asked for."""
    if COLD_DECODER.value:
        return compile_once(*COLD_DECODER.value.split("=", 1))
    if WHAT.value != "compile":
        dj.enable_compilation_cache(cache_dir() / "compiled")
    measure = {
        "steps": measure_steps,
        "compile": measure_compile,
        "program": measure_program,
        "lookup": measure_lookup,
    }
    return measure[WHAT.value]()


if __name__ == "__main__":
    run_command(main)
