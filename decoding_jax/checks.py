"""What settings have to be: errors that name the setting, its value and what it may be."""

from __future__ import annotations

import numbers
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, Python's or NumPy's; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int, remedy: str = "") -> None:
    """ValueError where a setting is no whole number of at least `least`; the remedy follows it."""
    if not is_whole(value):
        raise ValueError(f"{name}={value!r}: must be a whole number")
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}{remedy and '; '}{remedy}")


def check_flag(name: str, value: Any) -> None:
    """ValueError where a setting is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def check_number(name: str, value: Any, most: float = float("inf")) -> None:
    """ValueError where a setting, a number or an array that holds one, is not finite or not from 0 to `most`."""
    try:
        number = float("nan") if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= most or number == float("inf"):
        upper = "" if most == float("inf") else f" to {most:g}"
        raise ValueError(f"{name}={value!r}: must be a finite number from 0{upper}")
