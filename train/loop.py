"""The training loop: one step after the other, with logs, evaluations and checkpoints at their times."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

import decoding_jax as dj
from decoding_jax.checkpoints.cache_files import write_atomically
from decoding_jax.checkpoints.orbax import by_path, is_complete, write_model_files
from decoding_jax.models.functional import transformer_model
from decoding_jax.models.sharding import TRAINING_RULES, place
from decoding_jax.registry import make_decoder
from decoding_jax.types import Array, Model
from train.checkpoints import Checkpoints
from train.command import say
from train.data.feed import Feed, rows_of_process
from train.evaluation import bits_per_character, evaluate_decoding, perplexity, samples_of
from train.metrics import Logs, Progress, plot_losses, read_scalars
from train.optimizers import learning_rate
from train.setup import (
    Data,
    base_model,
    check_decoding,
    check_rows,
    make_layout,
    make_objective,
    model_config,
    open_data,
    to_devices,
    workdir_tokenizer,
)
from train.signals import Interrupted, Signals
from train.state import Layout, TrainState, make_evaluation, make_mesh, make_step

CONFIG, RESULTS = "train_config.json", "results.json"
# What may change between two starts of one run: none of it changes what is learnt.
_FREE = ("log_every", "checkpoint", "evaluation", "distillation", "profile", "compilation_cache", "mesh", "remat")
_FREE_DATA = ("prefetch", "data_dir")


def check_workdir(workdir: Path, config: ConfigDict) -> None:
    """Compares the config with that of the run in the folder, if there is one.

    Raises:
      ValueError: the folder belongs to a run with another config; it names the differences.
    """
    file = workdir / CONFIG
    if not file.exists():
        return
    try:
        there = _flat(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); restore it, or remove the folder to start again") from None
    here = _flat(json.loads(config.to_json()))
    different = [name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)]
    different = [name for name in different if not _is_free(name)]
    if different:
        listed = ", ".join(f"{name} was {there.get(name)!r}, is {here.get(name)!r}" for name in different[:5])
        listed += f" and {len(different) - 5} more" if len(different) > 5 else ""
        raise ValueError(
            f"workdir={str(workdir)!r} belongs to a run with another config ({listed}); choose another "
            "--workdir, or remove that folder"
        )


def claim_workdir(workdir: Path, config: ConfigDict) -> None:
    """Writes the resolved config into the folder, which is the run's from then on."""
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(workdir / CONFIG, (json.dumps(json.loads(config.to_json()), indent=2) + "\n").encode())


def _is_free(name: str) -> bool:
    free = [*_FREE, *(f"data.{part}" for part in _FREE_DATA)]
    return any(name == part or name.startswith(f"{part}.") for part in free)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        name: leaf for key, part in tree.items() for name, leaf in _flat(part, f"{prefix}.{key}".strip(".")).items()
    }


class Trainer:
    """A run: its data, its state on the devices, and what it writes.

    Args:
      config: of the run, as `train.config.default_config` lists it.
      workdir: the folder of the run.

    Raises:
      ValueError: a setting does not fit, the workdir belongs to another run, or its checkpoints cannot be read.
    """

    def __init__(self, config: ConfigDict, workdir: Path):
        self.config, self.workdir = config, workdir
        check_workdir(workdir, config)
        mesh = make_mesh(config.mesh)
        base = base_model(config, mesh)
        kept = workdir_tokenizer(workdir)
        tokenizer = kept or (None if base is None else base.tokenizer)
        check_rows(config, mesh)
        self.data: Data = open_data(config, tokenizer)
        self.tokenizer = self.data.tokenizer
        shape = model_config(config, self.tokenizer, base)
        check_decoding(config, self.data, shape)
        self.layout: Layout = make_layout(config, shape, mesh)
        self.objective = make_objective(config, self.layout, self.tokenizer)
        # Nothing of a teacher is read when evaluating.
        self.untaught = dataclasses.replace(self.objective, teacher=None) if config.teacher.path else self.objective
        self.decoder = make_decoder(config.evaluation.decoder, config.evaluation.get(config.evaluation.decoder, {}))
        # Only what can be trained takes the folder: after a slip in the settings the next start must not be refused.
        if jax.process_index() == 0:
            claim_workdir(workdir, config)
            if not is_complete(workdir):
                write_model_files(shape, self.tokenizer, self.tokenizer.eos_ids, workdir)
        self.checkpoints = Checkpoints(workdir, config.checkpoint.keep_last, config.checkpoint.keep_best)
        self.feed = Feed(self.data.plans["train"], *self.layout.share, config.data.prefetch)
        self.first_step, self.state = self._restore_or_start(base)
        self.train_step = make_step(self.layout, config)
        self.evaluate_batch = make_evaluation(self.layout, config)
        self.rate = learning_rate(config.optimizer, config.total_steps)
        self.logs = Logs(workdir, self.first_step)
        self.validated: tuple[int, float] | None = None  # the step and loss of the newest validation

    # --- the state, in memory and on disk

    def _restore_or_start(self, base: Model | None) -> tuple[int, TrainState]:
        abstract = self.layout.abstract_state
        found = self.checkpoints.restore(self.layout.as_tree(abstract.decoding), _rest(abstract))
        if found is not None:
            say(f"going on from step {found.step} in {self.workdir}")
            if found.extra["texts"] != self.data.texts.digest:
                raise ValueError(
                    f"data.name={self.config.data.name!r}: the texts have changed since step {found.step} of the run "
                    f"in {self.workdir}; restore them, or choose another --workdir"
                )
            self.feed.set_state(found.extra["feed"])
            params, _ = by_path(found.model)
            rest = found.state
            split = lambda frozen: {p: x for p, x in params.items() if self.layout.is_frozen(p) == frozen}
            averaged = abstract.ema is not None
            state = TrainState(
                step=rest["step"],
                params=rest["params"] if averaged else split(False),
                frozen=split(True),
                optimizer=rest["optimizer"],
                ema=split(False) if averaged else None,
            )
            return found.step, state
        if base is not None:
            return 0, self.layout.adopt(by_path(base.params)[0])
        return 0, self.layout.initialise(self.config.seed)

    def save(self, step: int) -> None:
        """Starts to save the state after a step; the step after it may begin at once."""
        metric = self.validated[1] if self.validated is not None and self.validated[0] == step else None
        extra = {"feed": self.feed.get_state(), "texts": self.data.texts.digest}
        self.checkpoints.save(step, self.layout.as_tree(self.state.decoding), _rest(self.state), extra, metric)

    def model(self) -> Model:
        """The model as it is now, for decoding; its params stay where they are, or come here from other processes."""
        params: Any = self.state.decoding
        if jax.process_count() > 1:
            params = jax.device_put(multihost_utils.process_allgather(params, tiled=True), jax.local_devices()[0])
        tree = self.layout.as_tree(params)
        return transformer_model(
            self.layout.config, tree, tokenizer=self.tokenizer, eos_ids=tuple(self.tokenizer.eos_ids)
        )

    # --- evaluation

    def validate(self, step: int) -> dict[str, float]:
        """The loss over the whole validation split, logged; nothing where there is none."""
        if "validation" not in self.data.plans:
            return {}
        plan, examples = self.data.plans["validation"], self.data.examples["validation"]
        params = self.state.decoding
        batches = (rows_of_process(plan.batch(i), *self.layout.share) for i in range(plan.batches_per_epoch))
        sums = []
        for rows in batches:
            sums.append(self.evaluate_batch(params, to_devices(rows, self.layout), self.untaught))
            if self.layout.mesh.size > 1 and jax.default_backend() == "cpu":
                # XLA's CPU devices share their threads: two programs in flight can each hold those that the other's
                # collectives wait for, for ever.
                jax.block_until_ready(sums[-1])
        sums = jax.device_get(sums)  # at the end, so that the devices never wait for the host
        total, count = (sum(float(part["nats_per_token"][i]) for part in sums) for i in (0, 1))
        hits = sum(float(part["accuracy"][0]) for part in sums)
        loss = total / count
        if not math.isfinite(loss):
            raise self._diverged(f"step {step}: validation loss {loss}")
        values = {
            "validation_loss": loss,
            "validation_perplexity": perplexity(loss),
            "validation_accuracy": hits / count,
            "validation_bits_per_character": bits_per_character(total, examples.characters),
        }
        self.validated = step, loss
        self.logs.scalars(step, values)
        return values

    def decode_split(
        self, model: Model, split: str, count: int | None
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Decodes the first `count` pairs of a split, all if None: scores, and samples."""
        settings = self.config.evaluation
        pairs = self.data.texts.splits[split]
        chosen = [pairs[i] for i in range(len(pairs) if count is None else min(count, len(pairs)))]
        mesh = self.layout.mesh if jax.process_count() == 1 and self.layout.mesh.size > 1 else None
        report = evaluate_decoding(
            model,
            [pair["source"] for pair in chosen],
            [pair["target"] for pair in chosen],
            self.decoder,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            language=settings.language,
            mesh=mesh,
        )
        values = {f"{split}_{name}": value for name, value in report.scores.values.items()}
        values[f"{split}_tokens_per_call"] = report.tokens_per_call
        sources, references = ([pair[field] for pair in chosen] for field in ("source", "target"))
        samples = samples_of(sources, report.hypotheses, references, settings.samples)
        return values, [{"split": split} | sample for sample in samples]

    def continue_prompts(self, step: int, model: Model) -> list[dict[str, Any]]:
        """Samples of a language model."""
        settings = self.config.evaluation
        if not settings.prompts:
            return []
        sampling, prompts = dj.Sampling(temperature=settings.temperature), list(settings.prompts)
        out = dj.decode(
            model, prompts, self.decoder, max_new_tokens=settings.max_new_tokens, sampling=sampling, seed=step
        )
        return [{"prompt": prompt, "continuation": text} for prompt, text in zip(prompts, out.text or [], strict=True)]

    def decode_now(self, step: int) -> None:
        """The evaluation by decoding that goes on while training does; scores and samples go to the log."""
        model = self.model()
        if "source" in self.data.texts.fields:
            split = "validation" if "validation" in self.data.texts.splits else "train"
            values, samples = self.decode_split(model, split, self.config.evaluation.examples)
            self.logs.scalars(step, values)
        else:
            samples = self.continue_prompts(step, model)
        self.logs.samples(step, samples)

    # --- the loop

    def run(self) -> dict[str, float]:
        """Trains to the last step; the results of the model that `dj.load` takes from the workdir.

        Raises:
          Interrupted: a signal came; everything is saved.
          RuntimeError: the loss is no number any more.
          OSError: a checkpoint or a log could not be written.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.feed.close)
            stack.callback(self.logs.close)
            stack.callback(self.checkpoints.close)
            progress = Progress(self.config.total_steps, self.first_step)
            stack.callback(progress.close)
            with Signals() as signals:
                self._steps(progress, signals)
            self.checkpoints.wait()
            return self._results()

    def _steps(self, progress: Progress, signals: Signals) -> None:
        config, pending = self.config, None
        for step, batch in self._batches():
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                arrays = to_devices(batch, self.layout)
                self.state, metrics = self.train_step(self.state, arrays, self.objective)
            # The metrics of a step are read when the next one is on its way, so that the devices never wait.
            if pending is not None:
                self._settle(progress, *pending)
            pending = step, metrics, batch["examples"]
            saves = step % config.checkpoint.every == 0 or step == config.total_steps
            validates = step % config.evaluation.every == 0 or saves  # the best checkpoint is chosen by it
            decodes = config.evaluation.decode_every and step % config.evaluation.decode_every == 0
            stops = signals.stop_after(step)
            if not (validates or saves or decodes or stops):
                continue
            self._settle(progress, *pending)
            pending = None
            if validates and (values := self.validate(step)):
                say(f"step {step}: validation loss {values['validation_loss']:.4g}")
            if decodes:
                self.decode_now(step)
            if saves or stops:
                self.save(step)
            if stops:
                self.checkpoints.wait()
                raise Interrupted(signals.received, step)

    def _batches(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Steps from 1 on with their batches; the profiler's window opens and closes around them."""
        first = max(self.config.profile.first_step, self.first_step)
        last = min(self.config.profile.first_step + self.config.profile.steps, self.config.total_steps)
        for step in range(self.first_step + 1, self.config.total_steps + 1):
            if step == first + 1 <= last:
                jax.profiler.start_trace(self.workdir / "profile")
            yield step, next(self.feed)
            if first < step == last:
                jax.profiler.stop_trace()

    def _settle(self, progress: Progress, step: int, metrics: dict[str, Array], examples: np.ndarray) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not math.isfinite(values["loss"]) or not math.isfinite(values["gradient_norm"]):
            listed = ", ".join(map(str, examples[examples >= 0][:8]))
            raise self._diverged(
                f"step {step}: loss {values['loss']}, gradient norm {values['gradient_norm']}; the batch holds the "
                f"examples {listed}, ... of the training split"
            )
        progress.update(step, int(values["tokens"]), values["loss"])
        if step % self.config.log_every == 0 or step == self.config.total_steps:
            values["learning_rate"] = float(self.rate(jnp.int32(step - 1)))
            self.logs.scalars(step, values)

    def _diverged(self, what: str) -> RuntimeError:
        steps = self.checkpoints.all_steps()
        good = f"the last good checkpoint is that of step {steps[-1]}" if steps else "there is no checkpoint yet"
        return RuntimeError(f"{what}; {good}; try a lower learning rate or a longer warmup")

    def _results(self) -> dict[str, float]:
        """The scores and samples of the best checkpoint, written to results.json, and the plot of the losses."""
        step, samples = self.config.total_steps, []
        if jax.process_index() == 0:
            plot_losses(self.workdir)
        losses = [line["validation_loss"] for line in read_scalars(self.workdir) if "validation_loss" in line]
        results: dict[str, float] = {"step": step}
        if losses:
            results |= {"last_validation_loss": losses[-1], "best_validation_loss": min(losses)}
        if jax.process_count() == 1:  # of several, one machine decodes later, by the model that it loads from here
            del self.state  # before the model takes its place
            mesh = self.layout.mesh
            model = dj.load(self.workdir, placement=place(mesh, TRAINING_RULES) if mesh.size > 1 else None)
            begun = time.monotonic()
            if "source" in self.data.texts.fields:
                for split in ("validation", "test"):
                    if split in self.data.texts.splits:
                        say(f"decoding the {split} split, {len(self.data.texts.splits[split]):,} pairs")
                        values, some = self.decode_split(model, split, None)
                        results |= values
                        samples += some
            else:
                samples = self.continue_prompts(step, model)
            results["decoding_seconds"] = time.monotonic() - begun
        if jax.process_index() == 0:
            text = json.dumps(results | {"samples": samples}, indent=2, ensure_ascii=False)
            write_atomically(self.workdir / RESULTS, f"{text}\n".encode())
        return results


def _rest(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds beside the params that decode."""
    rest = {"step": state.step, "optimizer": state.optimizer}
    return rest if state.ema is None else rest | {"params": state.params}
