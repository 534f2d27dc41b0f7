"""What the commands share: how flags are read, how errors are shown, which exit code they give."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging

FAILED, BAD_USAGE = 1, 2
_QUOTES = "\"'"  # around what a KeyError misses


def say(text: str) -> None:
    """One line on standard error, with the command's name in front."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.stem == "__main__" else path.stem
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """An error's message without line breaks; of a quoted traceback only the first and the last line."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def parse_flags(argv: Sequence[str]) -> Sequence[str]:
    """Exits with 0 after --help and with 2 and one line after bad usage, where absl would say 1 and much."""
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise ValueError(f"{rest[1]!r} is no flag")
        return rest
    except SystemExit:
        sys.exit(0)
    except (AttributeError, KeyError) as error:
        say(f"--config has no such setting, or its file fails: {one_line(error).strip(_QUOTES)}")
    except Exception as error:  # a config file is a program and can fail in any way
        say(f"{one_line(error)}; --help shows what there is")
    sys.exit(BAD_USAGE)


def run(main: Callable[[], int | None]) -> None:
    """Runs a command; a ValueError (bad usage) or OSError ends it with one line and exit code 2."""

    def guarded(argv: Sequence[str]) -> int | None:
        logging.set_verbosity(logging.WARNING)  # absl's default would show JAX's search for accelerators
        try:
            return main()
        except ValueError as error:
            say(str(error))
        except OSError as error:  # ml_collections tells about a missing file on many lines
            say(one_line(error))
        return BAD_USAGE

    app.run(guarded, flags_parser=parse_flags)
