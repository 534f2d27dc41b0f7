"""Talks with a causal model in the terminal; replies are streamed.

    python scripts/chat.py
    python scripts/chat.py --model=path/to/folder --decoder=prompt_lookup --temperature=0.7
    python scripts/chat.py --model=path/to/folder --decoder=speculative --drafter=path/to/small

Ctrl-C stops a reply, Ctrl-D (or an empty line twice) ends the program; /new starts another conversation.
"""

from __future__ import annotations

import dataclasses
import sys
import time

from absl import flags

import decoding_jax as dj
from decoding_jax.api import check_decoder
from decoding_jax.checkpoints.cache_files import cache_dir
from decoding_jax.prepare import prepare
from decoding_jax.registry import DECODERS, make_decoder
from train.command import run, say
from train.jobs import load_drafter

# Beam search has nothing to stream: it may change its mind until the end.
STREAMING = [name for name in DECODERS if name != "beam"]

MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "What dj.load takes: a name, a folder or a .gguf file.")
DECODER = flags.DEFINE_enum("decoder", "autoregressive", STREAMING, "How replies are generated.")
DRAFTER = flags.DEFINE_string(
    "drafter", "", "What speculative and self_speculative draft with: what dj.load takes, or int8 for a coarser copy."
)
SYSTEM = flags.DEFINE_string("system", "", "A system message that every conversation starts with.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
TOP_P = flags.DEFINE_float(
    "top_p", 1.0, "Keep the most probable tokens of this mass.", lower_bound=0.0, upper_bound=1.0
)
REPETITION_PENALTY = flags.DEFINE_float("repetition_penalty", 1.1, "1 is off.")
SEED = flags.DEFINE_integer("seed", 0, "Of all randomness.", lower_bound=0)
NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "The longest reply, in tokens.", lower_bound=1)


@dataclasses.dataclass(frozen=True)
class Talker:
    """What answers: a model, how it decodes, and the model that drafts for it, if one does."""

    model: dj.Model
    decoder: dj.Decoder
    drafter: dj.Model | None
    sampling: dj.Sampling


def reply(talker: Talker, messages: list[dict[str, str]], turn: int) -> str:
    """Streams one reply to the screen and returns it; Ctrl-C ends it early."""
    said, tokens, began = "", 0, time.perf_counter()
    try:
        for chunk in dj.stream(
            talker.model,
            messages,
            talker.decoder,
            drafter=talker.drafter,
            max_new_tokens=NEW_TOKENS.value,
            sampling=talker.sampling,
            seed=SEED.value,
            row_ids=[turn],
        ):
            tokens += len(chunk.tokens)
            said += chunk.text
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print(f"\n  ({tokens} tokens, {tokens / (time.perf_counter() - began):.1f} tokens/s)")
    return said


def conversation(talker: Talker) -> None:
    """Reads lines and answers them until the input ends."""
    start = [{"role": "system", "content": SYSTEM.value}] if SYSTEM.value else []
    messages, turn, blank = list(start), 0, False
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends the program)")
            continue
        except EOFError:
            return
        if not line:
            if blank:
                return
            blank = True
            continue
        blank = False
        if line == "/new":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": reply(talker, messages, turn)})
        except ValueError as error:  # a conversation that outgrew the context, say
            messages.pop()
            say(f"{error}; /new starts another conversation")
        turn += 1


def main() -> None:
    """Loads the models and talks."""
    decoder = make_decoder(DECODER.value, {}, has_drafter=bool(DRAFTER.value))
    dj.enable_compilation_cache(cache_dir() / "compiled")
    model = dj.load(MODEL.value)
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise ValueError(f"model={MODEL.value!r} has no chat template; chat needs an instruction-tuned model")
    sampling = dj.Sampling(
        temperature=TEMPERATURE.value, top_p=TOP_P.value, repetition_penalty=REPETITION_PENALTY.value
    )
    drafter = load_drafter(DRAFTER.value, model)
    # Settings that cannot be meant are refused here, not in every reply.
    call = prepare(model, [0], NEW_TOKENS.value, sampling, dj.Stop(), SEED.value, None, None, drafter=drafter)
    check_decoder(decoder, call, "chat")
    conversation(Talker(model, decoder, drafter, sampling))


if __name__ == "__main__":
    run(main)
