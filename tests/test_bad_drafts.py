"""Drafts that cannot work are refused with the reason, before anything is compiled; those that are only cut work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zoo

import decoding_jax as dj
from decoding_jax.models.functional import init_transformer
from decoding_jax.registry import make_decoder, read_tree

MODEL = dataclasses.replace(zoo.trigram_cached(5, seed=1).model, max_length=12)
DRAFT = dataclasses.replace(zoo.trigram_cached(5, seed=5, scale=0.7).model, max_length=12)
TRANSLATOR = zoo.history_translator(5, seed=4, start_id=3).model
TRANSFORMER = zoo.small_transformer()  # of two layers
SPECULATIVE = dj.Speculative(num_draft=3)
A_TREE = dj.Tree.of_branches((2, 1, 1))


def decode(decoder: Any, drafter: dj.Model | None = None, model: dj.Model = MODEL, length: int = 2) -> dj.DecodeOutput:
    """Two new tokens behind prompts of `length` tokens."""
    return dj.decode(model, [[1] * length], decoder, drafter=drafter, max_new_tokens=2)


def configured(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: make_decoder(name, settings, has_drafter=True)


def with_tokens(*pieces: bytes) -> dj.Model:
    return zoo.table_model(np.eye(len(pieces)), tokenizer=zoo.ByteTokenizer(pieces)).model


def with_special(*names: str) -> dj.Model:
    """Tokens that have no bytes, only names."""
    model = with_tokens(*[b""] * len(names))
    model.tokenizer.special_ids = {name: number for number, name in enumerate(names)}
    return model


def translate(source: int, drafter_length: int) -> dj.DecodeOutput:
    """An output of two tokens for a source of that many, with a drafter that has that much context."""
    drafter = dataclasses.replace(TRANSLATOR, max_length=drafter_length)
    return dj.decode(TRANSLATOR, [[1] * source], SPECULATIVE, drafter=drafter, max_new_tokens=2)


BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    # The drafter
    "none": (
        "drafter: Speculative needs a second model, and there is none; give a smaller",
        lambda: decode(SPECULATIVE),
    ),
    "no coarser copy": ("drafter: SelfSpeculative needs a second model", lambda: decode(dj.SelfSpeculative())),
    "one too many": ("drafter: Autoregressive takes none; leave it out", lambda: decode(dj.Autoregressive(), DRAFT)),
    "one beside a part": (
        "drafter: SelfSpeculative takes none",
        lambda: decode(dj.SelfSpeculative(exit_layer=1), TRANSFORMER, TRANSFORMER),
    ),
    "none where none can be": (
        "decoder='speculative' drafts with a second model, and none is given",
        lambda: make_decoder("speculative", {}),
    ),
    "other ids": (
        "drafter: its vocabulary has 4 ids and the target's 5",
        lambda: decode(SPECULATIVE, zoo.bigram(4).model),
    ),
    "other tokens": (
        "drafter: its vocabulary is not the target's (token 1 is b'b' and b'x')",
        lambda: decode(SPECULATIVE, with_tokens(b"a", b"x"), with_tokens(b"a", b"b")),
    ),
    "more tokens": (
        "drafter: its vocabulary is not the target's (they have 2 and 3 tokens)",
        lambda: decode(SPECULATIVE, with_tokens(b"a", b"b", b"c"), with_tokens(b"a", b"b")),
    ),
    "other special tokens": (
        "drafter: its vocabulary is not the target's ('<end>' is token 1, and the target's 0)",
        lambda: decode(SPECULATIVE, with_special("<pad>", "<end>"), with_special("<end>", "<pad>")),
    ),
    "another form": ("must both be decoder-only, or both encoder-decoders", lambda: decode(SPECULATIVE, TRANSLATOR)),
    "another start": (
        "encoder-decoders with one start_id",
        lambda: decode(SPECULATIVE, zoo.history_translator(5, start_id=2).model, TRANSLATOR),
    ),
    "a copy of another model": (
        "drafter: its cache is not the target's",
        lambda: decode(
            dj.SelfSpeculative(), init_transformer(dataclasses.replace(zoo.SMALL, num_layers=3)), TRANSFORMER
        ),
    ),
    # Lengths
    "num_draft of 0": ("num_draft=0: must be at least 1", lambda: dj.Speculative(num_draft=0)),
    "num_draft of 0 in a config": ("num_draft=0: must be at least 1", configured("self_speculative", num_draft=0)),
    "copies of 0": ("num_draft=0: must be at least 1", lambda: dj.PromptLookup(num_draft=0)),
    "num_draft past the context": (
        "num_draft=5: a draft has 5 tokens, and behind every prompt the context has only 4 left; draft fewer",
        lambda: decode(dj.Speculative(num_draft=5), DRAFT, length=8),
    ),
    "num_draft past the drafter's context": (
        "num_draft=5: a draft has 5 tokens, and behind every prompt the context has only 4 left",
        lambda: decode(dj.Speculative(num_draft=5), dataclasses.replace(DRAFT, max_length=6)),
    ),
    "tree past the context": ("tree=Tree(", lambda: decode(dj.Speculative(tree=A_TREE), DRAFT, length=10)),
    "part's draft past the context": (
        "num_draft=9: a draft has 9 tokens, and behind every prompt the context has only 8 left",
        lambda: decode(
            dj.SelfSpeculative(exit_layer=1, num_draft=9), None, dataclasses.replace(TRANSFORMER, max_length=10)
        ),
    ),
    "copies past the context": ("num_draft=11: a draft", lambda: decode(dj.PromptLookup(num_draft=11))),
    "block past the context": ("block_length=11: a draft", lambda: decode(dj.Jacobi(block_length=11))),
    "n-gram past the context": ("ngram=12: a draft has 11 tokens", lambda: decode(dj.Lookahead(ngram=12))),
    "prompt past the drafter's context": (
        "drafter: its context is 3, and the longest prompt and budget need 4",
        lambda: decode(SPECULATIVE, dataclasses.replace(DRAFT, max_length=3)),
    ),
    "source past the drafter's context": (
        "drafter: its context is 8, and the longest prompt and budget need 9",
        lambda: translate(source=9, drafter_length=8),
    ),
    # Trees
    "no path": ("tree: there is no path", lambda: dj.Tree(())),
    "no parent": ("tree: the path (1, 0) has no parent; add (1,)", lambda: dj.Tree(((0,), (1, 0)))),
    "twice": ("tree: the path (0,) is there twice", lambda: dj.Tree(((0,), (0,)))),
    "no sibling": ("tree: the path (1,) has no sibling of rank 0", lambda: dj.Tree(((1,),))),
    "negative rank": ("tree: (-1,) is no path", lambda: dj.Tree(((-1,),))),
    "no child": ("branches=(2, 0)", lambda: dj.Tree.of_branches((2, 0))),
    "no parent in a config": ("the path (0, 0) has no parent", configured("speculative", tree=((0, 0),))),
    "twice in a config": ("the path (0,) is there twice", configured("speculative", tree=((0,), (0,)))),
    "no child in a config": ("tree=(2, 0): give the children of a node", configured("speculative", tree=(2, 0))),
    "empty in a config": ("tree=(): give the children of a node", configured("speculative", tree=())),
    "mixed in a config": ("tree=(2, (0,)): give", configured("speculative", tree=(2, (0,)))),
    "text in a config": ("tree=('x',): give the children", configured("speculative", tree=("x",))),
    # Parts of the target
    "exit before the first layer": (
        "exit_layer=0: must be at least 1; one",
        lambda: dj.SelfSpeculative(exit_layer=0),
    ),
    "exit beyond the last layer": (
        "exit_layer=3: view(exit=3): the model has layers 0..1",
        lambda: decode(dj.SelfSpeculative(exit_layer=3), None, TRANSFORMER),
    ),
    "exit behind the last layer": (
        "exit_layer=2: the model has no more layers, so all of it would draft",
        lambda: decode(dj.SelfSpeculative(exit_layer=2), None, TRANSFORMER),
    ),
    "skipped beyond the last layer": (
        "skip_layers=(2,): view(skip=(2,)): the model has layers 0..1",
        lambda: decode(dj.SelfSpeculative(skip_layers=(2,)), None, TRANSFORMER),
    ),
    "skipped is no number": ("skip_layers=('x',): give numbers", configured("self_speculative", skip_layers=("x",))),
    "all skipped": (
        "nothing is left of the layers 0..1",
        lambda: decode(dj.SelfSpeculative(skip_layers=(0, 1)), None, TRANSFORMER),
    ),
    "skipped twice": ("skip_layers=(1, 1): give different", lambda: dj.SelfSpeculative(skip_layers=(1, 1))),
    "skipped is one number": ("skip_layers=1: give", lambda: dj.SelfSpeculative(skip_layers=1)),  # type: ignore[arg-type]
    "exit and skipped": ("two ways to draft", lambda: dj.SelfSpeculative(exit_layer=1, skip_layers=(0,))),
    "no layers": ("no layers to choose from", lambda: decode(dj.SelfSpeculative(exit_layer=1))),
    # The rest
    "acceptance": ("acceptance='sure': must be one of coupled", configured("speculative", acceptance="sure")),
    "window": ("window=0: must be at least 1", lambda: dj.Lookahead(window=0)),
    "n-gram": ("ngram=0: must be at least 2", lambda: dj.Lookahead(ngram=0)),
    "pool smaller than the candidates": ("pool_size=3: must be at least 7", lambda: dj.Lookahead(pool_size=3)),
    "no block": ("block_length=0: must be at least 1", lambda: dj.Jacobi(block_length=0)),
    "no match": ("num_matches=0: must be at least 1", lambda: dj.PromptLookup(num_matches=0)),
    "no width": ("tree: width=0: must be at least 1", lambda: dj.DynamicTree(width=0)),
    "too small to draft on": (
        "from 6, the nodes that are drafted on, to 21, all nodes",
        lambda: dj.DynamicTree(size=5, depth=3, width=3),
    ),
    "rejected by probability": (
        "use acceptance='coupled'",
        lambda: dj.Speculative(tree=dj.DynamicTree(), acceptance="rejection"),
    ),
    # Kinds and ranges
    "half a draft": ("num_draft=2.5: must be a whole number", lambda: dj.Speculative(num_draft=2.5)),  # type: ignore[arg-type]
    "a text": ("num_draft='4': must be a whole number", configured("prompt_lookup", num_draft="4")),
    "half a block": ("block_length=2.0: must be a whole", configured("jacobi", block_length=2.0)),
    "half a window": ("window=2.0: must be a whole number", configured("lookahead", window=2.0)),
    "neither yes nor no": ("adaptive='yes': must be True or False", configured("speculative", adaptive="yes")),
    "branches for a tree": ("tree=(2, 1): give a Tree, such as", lambda: dj.Speculative(tree=(2, 1))),  # type: ignore[arg-type]
    "branches for paths": ("tree: (2, 1) is no list of paths", lambda: dj.Tree((2, 1))),  # type: ignore[arg-type]
    "half a rank": ("tree: (0.5,) is no path", lambda: dj.Tree(((0.5,),))),  # type: ignore[arg-type]
    "half a child": ("branches=(1.5,): give", lambda: dj.Tree.of_branches((1.5,))),  # type: ignore[arg-type]
    "confidence": (
        "min_confidence=2.0: must be a finite number from 0 to 1",
        lambda: decode(dj.Speculative(num_draft=1, min_confidence=2.0), DRAFT),
    ),
    "cost": (
        "draft_cost=-1.0: must be a finite number from 0",
        lambda: decode(dj.Speculative(num_draft=1, adaptive=True, draft_cost=-1.0), DRAFT),
    ),
    "threshold": (
        "epsilon=-1.0: must be a finite number from 0",
        lambda: decode(dj.Speculative(num_draft=1, acceptance=dj.Typical(epsilon=-1.0)), DRAFT),
    ),
    "name for a drafter": ("drafter='int8': give a Model", lambda: decode(SPECULATIVE, "int8")),  # type: ignore[arg-type]
    "n-gram of one": ("ngram=1: must be at least 2", lambda: dj.Lookahead(ngram=1)),
    "candidates": ("candidates=0: must be at least 1", lambda: dj.Lookahead(candidates=0)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_draft_is_refused(case: str) -> None:
    """Errors: one line says what does not fit, and nothing has been compiled for it."""
    message, call = BAD[case]
    with dj.compile_clock() as clock, pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert clock.programs == 0


def test_drafts_that_only_fit_at_first_are_cut() -> None:
    """A draft as long as the context behind the shortest prompt is fine; where less is left the tokens are the same."""
    prompts = [[1, 2, 3, 1], [1] * 9]  # 8 and 3 places are left
    plain = dj.decode(MODEL, prompts, max_new_tokens=3)
    out = dj.decode(MODEL, prompts, dj.Speculative(num_draft=8), drafter=DRAFT, max_new_tokens=3)
    assert zoo.outputs(out) == zoo.outputs(plain) and out.stats.drafted.max() > 0


def test_trees_of_configs() -> None:
    """Branching factors and paths, as tuples or lists, are the trees that they say; nothing is a chain."""
    assert read_tree((2, 1, 1)) == A_TREE
    assert read_tree([[0], [1], [0, 0]]) == dj.Tree(((0,), (1,), (0, 0)))
    assert read_tree(A_TREE) is A_TREE and read_tree(None) is None
