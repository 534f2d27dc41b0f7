"""What the commands share: how flags are read, how errors are shown, which exit code they give."""

from __future__ import annotations

import contextlib
import difflib
import logging as standard_logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 128 + signal.SIGINT  # exit codes
_QUOTES = "\"'"  # around what a KeyError misses


def show(line: str) -> None:
    """One line on standard error; nobody reading it any more is no reason to end."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """One line on standard error, with the command's name in front."""
    show(f"{_name()}: {text}")


def _name() -> str:
    path = Path(sys.argv[0])
    return path.parent.name if path.stem == "__main__" else path.stem


def one_line(error: BaseException) -> str:
    """An error's message without line breaks; of a quoted traceback only the first and the last line."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def unknown_setting(path: str, known: Iterable[str]) -> str:
    """What to say of a setting that there is not, given the names beside it."""
    section, _, name = path.rpartition(".")
    full = lambda each: f"{section}.{each}".strip(".")
    near = [full(each) for each in difflib.get_close_matches(name, list(known))]
    remedy = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(map(full, sorted(known)))}"
    return f"{path}: there is no such setting; {remedy}"


def _fault_of_config(argv: Sequence[str]) -> str | None:
    """What is wrong with --config or with the names behind --config., if anything is."""
    if "config" not in flags.FLAGS:
        return None
    given = [re.fullmatch(r"--?config(?:=(.*))?", argument) for argument in argv]
    paths = [found[1] or "".join(argv[i + 1 : i + 2]) for i, found in enumerate(given) if found]
    if not paths:
        if not flags.FLAGS["config"].validators:  # not required: it follows from another flag
            return None
        files = [each for each in argv[1:] if re.match(r"[^-].*\.py(:|$)", each)]
        return f"--config is missing; give --config={files[0] if files else '<a file>'}"
    if not Path(paths[-1].partition(":")[0]).is_file():
        return f"--config={paths[-1]}: there is no such file (paths begin in {str(Path.cwd())!r}); correct the name"
    own = flags.FlagValues()
    line = [argv[0], f"--config={paths[-1]}"]
    holder = config_flags.DEFINE_config_file("config", None, "", own, sys_argv=line)
    try:
        own(line)
        return next(_unknown_settings(argv, holder.value), None)
    except Exception:  # the file itself fails, as reading the flags has told
        return None


def _unknown_settings(argv: Sequence[str], config: Any) -> Iterator[str]:
    for argument in argv[1:]:
        found = re.match(r"--?config((?:\.\w+)+)", argument)
        part, path = config, "config"
        for name in found[1].split(".")[1:] if found else ():
            if not isinstance(part, ConfigDict):
                yield f"{path}.{name}: there is no such setting; {path} is one value"
                break
            path = f"{path}.{name}"
            if name not in part:
                yield unknown_setting(path, part)
                break
            part = part[name]


def parse_flags(argv: Sequence[str]) -> Sequence[str]:
    """Exits with 0 after --help and with 2 and one line after bad usage, where absl would say 1 and much."""
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise ValueError(f"{rest[1]!r} is no flag")
        if fault := _fault_of_config(argv):
            raise ValueError(fault)
        return rest
    except SystemExit:
        sys.exit(0)
    except Exception as error:  # a config file is a program and can fail in any way
        what = one_line(error).strip(_QUOTES) if isinstance(error, KeyError) else one_line(error)
        say(_fault_of_config(argv) or f"{what.rstrip('.')}; --help shows what there is")
    sys.exit(BAD_USAGE)


def run(main: Callable[[], int | None]) -> None:
    """Runs a command; a ValueError (bad usage) or OSError ends it with one line and exit code 2, Ctrl-C with 130."""

    def guarded(argv: Sequence[str]) -> int | None:
        logging.set_verbosity(logging.WARNING)  # absl's default would show JAX's search for accelerators
        logging.get_absl_handler().setFormatter(standard_logging.Formatter(f"{_name()}: %(message)s"))
        try:
            return main()
        except ValueError as error:
            say(str(error))
        except OSError as error:  # ml_collections tells about a missing file on many lines
            say(one_line(error))
        return BAD_USAGE

    if sys.stderr is None:  # closed by who started us
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        app.run(guarded, flags_parser=parse_flags)
    except KeyboardInterrupt:  # before or behind what tells what it has saved
        say("stopped")
        sys.exit(INTERRUPTED)
