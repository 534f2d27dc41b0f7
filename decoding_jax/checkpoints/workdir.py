"""The folder of a training run: how its checkpoints are laid out, and a decodable model out of them.

workdir/config.json, tokenizer.json ...   the model, as `save` writes it
workdir/checkpoints/<step>/model/         the params that decode: {"layers/0/attention/qkv/kernel": array, ...}
workdir/checkpoints/<step>/state/         everything else that training needs, likewise by path
workdir/checkpoints/<step>/about/         JSON: the metric, what the arrays are called, the trainer's own record
workdir/checkpoints/<step>/manifest.json  sizes and digests of all these files, so that damage is seen before reading

Orbax writes a step beside its final place and renames it, so a folder named by a number alone was finished once.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from decoding_jax.checkpoints.cache_files import fault_of
from decoding_jax.checkpoints.huggingface import Placement
from decoding_jax.checkpoints.orbax import by_path, read_model_files, reason, restore_params
from decoding_jax.models.functional import abstract_transformer, transformer_model
from decoding_jax.types import Model

CHECKPOINTS = "checkpoints"
LATE_METRIC = "metric.json"  # in a checkpoint's folder: of a validation that came after the save
MODEL, STATE, ABOUT = "model", "state", "about"

logger = logging.getLogger("decoding_jax")


def is_workdir(folder: Path) -> bool:
    """Whether a folder of our own format is that of a training run, not one that `save` wrote."""
    return (folder / CHECKPOINTS).is_dir() and not (folder / "params").exists()


def workdir_around(path: Path) -> Path | None:
    """The workdir of the run that a checkpoint, a part of one, or the folder of them is in; None if it is in none."""
    here = path.absolute()
    folders = [folder.parent for folder in (here, *here.parents[:2]) if folder.name == CHECKPOINTS]
    return next((folder for folder in folders if (folder / "config.json").exists()), None)


def load_workdir(workdir: Path, dtype: Any = None, placement: Placement = None) -> Model:
    """The model of a training run at its best checkpoint: lowest metric; without metrics, the newest.

    Checkpoints that cannot be read are skipped with a warning.

    Raises:
      ValueError: there is no checkpoint yet, or none that can be read.
    """
    folder = workdir / CHECKPOINTS
    steps = finished_steps(folder)
    if not steps:
        raise ValueError(f"{folder}: no checkpoint yet; load it again when training has saved its first one")
    config, dtype, fields = read_model_files(workdir, dtype)
    abstract, _ = by_path(abstract_transformer(config, dtype)[1])
    abouts: dict[int, dict[str, Any]] = {}
    faults: dict[int, str] = {}
    for step in steps:
        try:
            abouts[step] = read_about(folder / str(step))
        except ValueError as error:
            faults[step] = str(error)
    for step in sorted(abouts, key=lambda step: rank(step, abouts[step]["metric"])):
        problems = differences(MODEL, abouts[step]["arrays"][MODEL], abstract, types=False)
        if problems:
            raise ValueError(
                f"{workdir / 'config.json'} describes another model than {folder / str(step)} holds; put the config "
                f"back that it was trained with:\n  {shortened(problems)}"
            )
        try:
            check_whole(folder / str(step), MODEL)
            params = restore_params(folder / str(step), config, dtype, placement, item=MODEL)
        except ValueError as error:
            faults[step] = str(error)
            continue
        for broken, fault in faults.items():
            logger.warning("checkpoint %d is skipped: %s", broken, fault)
        return transformer_model(config, params, **fields)
    listed = "\n  ".join(faults.values())
    raise ValueError(f"{folder}: none of the {len(faults)} checkpoints can be read; train again:\n  {listed}")


def finished_steps(folder: Path) -> list[int]:
    """The steps of the finished checkpoints in a folder, ascending."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())


def rank(step: int, metric: float | None) -> tuple[bool, float, int]:
    """Sorts the best checkpoint first: lower metrics, then later steps; those without a metric last."""
    return metric is None, 0.0 if metric is None else metric, -step


def check_whole(step_folder: Path, item: str | None = None) -> None:
    """ValueError where a checkpoint, or one item of it, is not what was written."""
    fault = fault_of(step_folder, "" if item is None else f"{item}/")
    if fault is not None:
        raise ValueError(f"{step_folder} is damaged ({fault})")


def read_about(step_folder: Path) -> dict[str, Any]:
    """What a checkpoint says about itself; ValueError where that cannot be read."""
    check_whole(step_folder, ABOUT)
    try:
        with orbax_context():
            about = ocp.load_checkpointables(step_folder.absolute(), {ABOUT: None})[ABOUT]
        late = step_folder / LATE_METRIC
        if about["metric"] is None and late.exists():
            about["metric"] = json.loads(late.read_text(encoding="utf-8"))
        metric = about["metric"]
        if metric is not None and not math.isfinite(metric):
            raise ValueError(f"its metric is {metric}")
    except Exception as error:  # Orbax raises many kinds
        raise ValueError(f"{step_folder / ABOUT} cannot be read ({reason(error)})") from error
    return about


def form_of(x: Any) -> str:
    """An array's type and shape as text, "float32[24,40]"."""
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"


def differences(item: str, stored: Mapping[str, str], wanted: Mapping[str, Any], types: bool = True) -> list[str]:
    """How the stored arrays of an item, as `form_of` tells them, differ from those wanted; types may be left out."""
    forms = {path: form_of(x) for path, x in wanted.items()}
    lines = [f"missing: {item} {path} {form}" for path, form in forms.items() if path not in stored]
    lines += [f"unknown: {item} {path} {form}" for path, form in stored.items() if path not in forms]
    for path in forms.keys() & stored.keys():
        there, here = (form if types else form[form.index("[") :] for form in (stored[path], forms[path]))
        if there != here:
            lines.append(f"differs: {item} {path} is {there}, the config wants {here}")
    return sorted(lines)


def shortened(lines: Sequence[str], most: int = 5) -> str:
    """The first of many lines, for an error."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n  ".join([*lines[:most], *more])


def orbax_context() -> ocp.Context:
    """How Orbax reads and writes a step: what is "about" is JSON, never a pytree of numbers."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=ABOUT)
    context = ocp.Context()
    context.checkpointables.registry = registry
    return context
