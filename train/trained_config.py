"""The config that a model was trained with, for commands that go on from its workdir.

As a config file it takes the workdir as its argument: --config=train/trained_config.py:workdirs/x. Commands that begin
with `argv_with_config` need no --config, and take --config.name=value all the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from train.command import BAD_USAGE, say
from train.config import default_config
from train.jobs import every_setting
from train.workdir import CONFIG, flattened

# What says which texts there are. The model has its own tokenizer, and its targets do not come from a teacher here.
_TEXTS = ("name", "language_pair", "files", "fields", "lowercase", "length")


def get_config(workdir: str) -> ConfigDict:
    """The settings of the run in a workdir; what it did not know yet has its default, data.distilled is empty.

    Raises:
      ValueError: there are none, or they are damaged.
    """
    file = Path(workdir).expanduser() / CONFIG
    try:
        stored = _with_tuples(json.loads(file.read_text(encoding="utf-8")))
        config = default_config()
        with config.ignore_type():
            config.update(stored)
        config.data.distilled = ""
    except OSError:
        raise ValueError(f"there is no {file}; give the workdir of a training run, or --config") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}); restore it, or give --config") from None
    return config


def argv_with_config(argv: Sequence[str], flag: str) -> list[str]:
    """A command line whose --config, where it is not given, is that of the workdir that a flag names.

    Ends the process where that workdir has none.

    >>> argv_with_config(["x.py", "--model", "a", "--config=b.py"], "model")
    ['x.py', '--model', 'a', '--config=b.py']
    """
    workdir = _value(argv, flag)
    if workdir is None or _value(argv, "config") is not None:
        return list(argv)
    if workdir and not (Path(workdir).expanduser() / CONFIG).exists():
        say(f"--{flag}={workdir!r}: there is no {CONFIG} in it; give the workdir of a training run, or --config")
        sys.exit(BAD_USAGE)
    return [argv[0], f"--config={__file__}:{workdir}", *argv[1:]]


def differing_texts(config: ConfigDict, workdir: str) -> list[str]:
    """The settings of `data` that decide about the texts and are not those of the run, each with both values.

    Args:
      config: what a command was given.
      workdir: of the run; of any other folder nothing is known to differ.

    Raises:
      ValueError: the config has no data.
    """
    with every_setting():
        given = _texts(config.data)
    if not (Path(workdir).expanduser() / CONFIG).exists():
        return []
    trained = _texts(get_config(workdir).data)
    names = sorted(trained.keys() | given.keys())
    # An empty setting is the same as none.
    names = [name for name in names if (trained.get(name) or None) != (given.get(name) or None)]
    return [f"data.{name} was {trained.get(name)!r}, is {given.get(name)!r}" for name in names]


def _value(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag on a command line, --flag=value or --flag value; None where it is not given."""
    for arg, following in zip(argv, [*argv[1:], ""], strict=True):
        name, has_value, value = arg.partition("=")
        if name in (f"-{flag}", f"--{flag}"):
            return value if has_value else following
    return None


def _with_tuples(value: Any) -> Any:
    """Lists of JSON as the tuples that they were: flags cannot override lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(each) for key, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _texts(data: ConfigDict) -> dict[str, Any]:
    """The settings that say which texts there are, by name within `data`."""
    settings = flattened(_with_tuples(data.to_dict()))
    return {name: value for name, value in settings.items() if name.partition(".")[0] in _TEXTS}
