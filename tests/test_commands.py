"""The commands: help texts, exit codes, one clear line instead of a traceback, Ctrl-C in a chat."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

import decoding_jax as dj
from decoding_jax.checkpoints.tokenizer import Tokenizer
from decoding_jax.models.functional import init_transformer
from decoding_jax.models.transformer import TransformerConfig

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [
    "chat", "convert_checkpoint", "decode", "kill_test", "measure_draft_verify", "measure_foundation", "quickstart",
    "prune_layers", "readme_table", "self_prompt",
]  # fmt: skip


def command(name: str, *arguments: str) -> list[str]:
    """The command line of a script."""
    return [sys.executable, f"scripts/{name}.py", *arguments]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script that has ended."""
    return subprocess.run(command(name, *arguments), capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random chat model of 32 words that never ends a reply by itself."""
    folder = tmp_path_factory.mktemp("models")
    words = {f"w{i}": i for i in range(32)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}> {{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = TransformerConfig(32, 1, 16, 16, 2, 2, 8, max_length=100_000)
    dj.save(init_transformer(config, tokenizer=Tokenizer.from_folder(folder)), folder / "tiny")
    return folder / "tiny"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_reads_well(name: str) -> None:
    """--help shows what the command is for and how it is called, and succeeds."""
    done = run(name, "--help")
    assert done.returncode == 0 and f"python scripts/{name}.py" in done.stdout


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("chat", ["--no_such_flag"], "no_such_flag"),
        ("chat", ["--model=nowhere"], "model='nowhere': no such folder or file"),
        ("chat", ["--decoder=beam"], "decoder"),
        ("chat", ["--top_p=0"], "sampling.top_p=0"),
        ("quickstart", ["--max_new_tokens=0"], "max_new_tokens"),
        ("quickstart", ["--model=nowhere"], "model='nowhere': no such folder or file"),
        ("convert_checkpoint", ["--output=x"], "input"),
        ("convert_checkpoint", ["--input=nowhere", "--output=scripts"], "exists already"),
        ("readme_table", ["surplus"], "'surplus' is no flag"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(name: str, arguments: list[str], message: str) -> None:
    """A wrong flag or value is named on one line of standard error; there is no traceback."""
    done = run(name, *arguments)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{name}: ") and message in last
    assert "Traceback" not in done.stderr


def test_ctrl_c_stops_a_reply_and_not_the_chat(tiny: Path) -> None:
    """An interrupt ends the reply that is being written; the next line is answered, and the end is clean."""
    chat = subprocess.Popen(
        command("chat", f"--model={tiny}", "--max_new_tokens=20000"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert chat.stdin is not None and chat.stdout is not None
    with chat.stdin, chat.stdout:
        for _ in range(2):
            chat.stdin.write("w1 w2\n")
            chat.stdin.flush()
            assert chat.stdout.read(12)  # the reply has begun
            chat.send_signal(signal.SIGINT)
            line = chat.stdout.readline()
            while "[stopped]" not in line:
                assert line, "the chat ended"
                line = chat.stdout.readline()
            assert "tokens/s" in chat.stdout.readline()
        chat.stdin.close()
        assert chat.wait(timeout=60) == 0


def test_a_model_writes_its_own_training_data(tiny: Path, tmp_path: Path) -> None:
    """Both jobs run, every 50th text is for validation, and a second start decodes nothing."""
    arguments = [f"--model={tiny}", f"--output={tmp_path / 'out'}", "--count=8", "--translations=2", "--length=4"]
    first, second = (run("self_prompt", *arguments, "--batch_size=4") for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    lines = {
        split: (tmp_path / "out" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        for split in ("train", "validation")
    }
    assert len(lines["validation"]) == 1 and len(lines["train"]) >= 2
    assert "3 texts in" in first.stderr and "3 texts in" in second.stderr  # a beginning of code and two translations


def test_a_pruned_model_is_the_large_one_without_the_other_layers(tmp_path: Path) -> None:
    """Its logits are those of the view that skips them, bit for bit; layers that do not exist are refused."""
    large = init_transformer(TransformerConfig(32, 3, 16, 16, 2, 2, 8))
    dj.save(large, tmp_path / "large")
    from_large = [f"--input={tmp_path / 'large'}", f"--output={tmp_path / 'small'}"]
    done = run("prune_layers", *from_large, "--layers=0,2")
    assert done.returncode == 0, done.stderr
    tokens = dict(prompts=[[1, 2, 3]], max_new_tokens=4)
    small, view = (dj.decode(model, **tokens) for model in (dj.load(tmp_path / "small"), large.view(skip=(1,))))
    assert (small.tokens == view.tokens).all() and (small.log_probs == view.log_probs).all()
    refused = run("prune_layers", *from_large, "--layers=2,3")
    assert refused.returncode == 2 and "give ascending numbers from 0 to 2" in refused.stderr
