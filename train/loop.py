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
from decoding_jax.checkpoints.orbax import by_path, write_model_files
from decoding_jax.models.functional import transformer_model
from decoding_jax.models.sharding import TRAINING_RULES, place
from decoding_jax.types import Array, Model
from train.checkpoints import Checkpoints
from train.command import say
from train.data.feed import Feed, rows_of_process
from train.evaluation import bits_per_character, evaluate_decoding, perplexity, samples_of
from train.metrics import Logs, Progress, plot_losses, read_scalars
from train.optimizers import learning_rate
from train.settings import evaluation_decoder
from train.setup import (
    Data,
    base_model,
    check_decoding,
    check_kept_shape,
    check_rows,
    kept_model,
    make_layout,
    make_objective,
    model_config,
    open_data,
    to_devices,
)
from train.signals import Stopped, StopSignals
from train.state import Layout, TrainState, make_evaluation, make_mesh, make_step
from train.workdir import (
    CONFIG,
    RESULTS,
    check_origins,
    check_workdir,
    claim_workdir,
    find_origins,
    has_learnt,
    locked,
)

_MOST_NAMED = 100  # examples of a batch, in a message


class Trainer:
    """A run: its data, its state on the devices, and what it writes.

    Args:
      config: of the run, as `train.config.default_config` lists it.
      workdir: the folder of the run, which is locked until `run` or `close`.

    Raises:
      ValueError: a setting does not fit, the workdir belongs to another run or is in use, its checkpoints cannot be
        read, or what was learnt from has changed since.
    """

    def __init__(self, config: ConfigDict, workdir: Path):
        self.config, self.workdir = config, workdir
        with contextlib.ExitStack() as stack:  # closes what is open if anything that follows is refused
            self._prepare(stack)
            self.close = stack.pop_all().close

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        config, workdir = self.config, self.workdir
        with locked(workdir) if workdir.exists() else contextlib.nullcontext():
            check_workdir(workdir, config)
        learnt = has_learnt(workdir)
        mesh = make_mesh(config.mesh)
        kept = kept_model(workdir) if learnt else None
        base = base_model(config, mesh) if kept is None else None
        known = kept or base
        check_rows(config, mesh)
        self.data: Data = open_data(config, None if known is None else known.tokenizer)
        self.tokenizer = self.data.tokenizer
        shape = model_config(config, self.tokenizer, known.config if known and config.init_from else None)
        if kept is not None:
            check_kept_shape(workdir, kept.config, shape)
        check_decoding(config, self.data, shape)
        self.layout: Layout = make_layout(config, shape, mesh)
        self.objective = make_objective(config, self.layout, self.tokenizer).fit(self.data.examples["train"])
        for split, examples in self.data.examples.items():
            if note := self.objective.examine(examples):
                say(f"{split}: {note}")
        # Nothing of a teacher is read when evaluating.
        self.untaught = dataclasses.replace(self.objective, teacher=None) if config.teacher.path else self.objective
        self.decoder = evaluation_decoder(config)
        self.origins = find_origins(config, workdir, self.data, self.objective.teacher, made=not config.init_from)
        # Only what can be trained takes the folder: after a slip in the settings the next start must not be refused.
        stack.enter_context(locked(workdir))
        if jax.process_index() == 0:
            if not learnt and (workdir / CONFIG).exists():
                say(f"there is no checkpoint in {workdir}; starting at step 0")
            claim_workdir(workdir, config)
        self.checkpoints = Checkpoints(workdir, config.checkpoint.keep_last, config.checkpoint.keep_best)
        stack.callback(self.checkpoints.close)
        self.feed = Feed(self.data.plans["train"], *self.layout.share, config.data.prefetch)
        stack.callback(self.feed.close)
        self.first_step, self.state = self._restore_or_start(base)
        if kept is None and jax.process_index() == 0:  # only now: had the texts changed, it would be another tokenizer
            write_model_files(shape, self.tokenizer, self.tokenizer.eos_ids, workdir)
        self.train_step = make_step(self.layout, config)
        self.evaluate_batch = make_evaluation(self.layout, config)
        self.rate = learning_rate(config.optimizer, config.total_steps)
        self.logs = Logs(workdir, self.first_step)
        stack.callback(self.logs.close)
        self.validated: tuple[int, float] | None = None  # the step and loss of the newest validation

    # --- the state, in memory and on disk

    def _restore_or_start(self, base: Model | None) -> tuple[int, TrainState]:
        abstract = self.layout.abstract_state
        found = self.checkpoints.restore(self.layout.as_tree(abstract.decoding), abstract.rest)
        if found is not None:
            check_origins(self.origins, found.extra, found.step, self.workdir)
            done = found.step == self.config.total_steps
            say(f"all {found.step} steps are done" if done else f"going on from step {found.step} in {self.workdir}")
            self.feed.set_state(found.extra["feed"])
            return found.step, self.layout.rejoin(by_path(found.model)[0], found.state)
        if base is not None:
            return 0, self.layout.adopt(by_path(base.params)[0], self.config.seed)
        return 0, self.layout.initialise(self.config.seed)

    def save(self, step: int) -> None:
        """Starts to save the state after a step; the step after it may begin at once."""
        metric = self.validated[1] if self.validated is not None and self.validated[0] == step else None
        extra = {"feed": self.feed.get_state()} | {key: origin.digest for key, origin in self.origins.items()}
        self.checkpoints.save(step, self.layout.as_tree(self.state.decoding), self.state.rest, extra, metric)

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
        loss = total / count
        if not math.isfinite(loss):
            raise _diverged(f"step {step}: validation loss {loss}")
        values = {"validation_loss": loss}
        if "accuracy" in sums[0]:
            hits, of = (sum(float(part["accuracy"][i]) for part in sums) for i in (0, 1))
            values["validation_accuracy"] = hits / of
        if self.objective.is_likelihood:
            values["validation_perplexity"] = perplexity(loss)
            values["validation_bits_per_character"] = bits_per_character(total, examples.characters)
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

    def run(self, signals: StopSignals | None = None) -> dict[str, float]:
        """Trains to the last step and closes all; the results of the model that `dj.load` takes from the workdir.

        Args:
          signals: that can stop it; None: nothing does.

        Raises:
          Stopped: a signal came; the steps that are done are saved.
          RuntimeError: the loss or the params are no numbers any more.
          OSError: a checkpoint or a log could not be written.
        """
        signals = signals or StopSignals()
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            progress = Progress(self.config.total_steps, self.first_step)
            stack.callback(progress.close)
            if self._owes_validation():
                self._say_validation(self.first_step)
                assert self.validated is not None
                self.checkpoints.add_metric(*self.validated)
            with signals.held():
                self._steps(progress, signals)
            self.checkpoints.wait()
            return self._results()

    def _steps(self, progress: Progress, signals: StopSignals) -> None:
        config, pending = self.config, None
        for step, batch in self._batches():
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                arrays = to_devices(batch, self.layout)
                self.state, metrics = self.train_step(self.state, arrays, self.objective)
            # The metrics of a step are read when the next one is on its way, so that the devices never wait.
            if pending is not None:
                self._settle(progress, *pending)
            pending = step, metrics
            saves, validates = self._saves(step), self._validates(step)
            decodes = config.evaluation.decode_every > 0 and step % config.evaluation.decode_every == 0
            stops = signals.due(step)
            if not (validates or saves or decodes or stops):
                continue
            self._settle(progress, *pending)
            pending = None
            # Who is told to stop may have seconds left: saving goes first.
            stops = stops or self._evaluate(step, validates, decodes, signals)
            if saves or stops:
                self.save(step)
            if stops:
                self.checkpoints.wait()
                raise signals.stopped()

    def _saves(self, step: int) -> bool:
        return step % self.config.checkpoint.every == 0 or step == self.config.total_steps

    def _validates(self, step: int) -> bool:
        return step % self.config.evaluation.every == 0 or self._saves(step)  # the best checkpoint is chosen by it

    def _owes_validation(self) -> bool:
        """Whether the run was stopped before that of its newest step."""
        step = self.first_step
        due = step > 0 and self._validates(step) and "validation" in self.data.plans
        return due and self.checkpoints.metric(step) is None

    def _validation_losses(self) -> dict[float, float]:
        """All that are logged, by step."""
        lines = read_scalars(self.workdir)
        return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}

    def _say_validation(self, step: int) -> None:
        if values := self.validate(step):
            say(f"step {step}: validation loss {values['validation_loss']:.4g}")

    def _evaluate(self, step: int, validates: bool, decodes: bool, signals: StopSignals) -> bool:
        """What is due of evaluations; whether a signal has cut them short."""
        try:
            with signals.heard():
                if validates:
                    self._say_validation(step)
                if decodes:
                    self.decode_now(step)
        except Stopped:
            return True
        return False

    def _batches(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Steps from 1 on with their batches; the profiler's window opens and closes around them."""
        first = max(self.config.profile.first_step, self.first_step)
        last = min(self.config.profile.first_step + self.config.profile.steps, self.config.total_steps)
        if self.first_step < self.config.total_steps:
            say("compiling the step")
        for step in range(self.first_step + 1, self.config.total_steps + 1):
            if step == first + 1 <= last:
                jax.profiler.start_trace(self.workdir / "profile")
            yield step, next(self.feed)
            if first < step == last:
                jax.profiler.stop_trace()

    def _settle(self, progress: Progress, step: int, metrics: dict[str, Array]) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not all(math.isfinite(values[name]) for name in ("loss", "gradient_norm", "parameter_norm")):
            examples = self.data.plans["train"].examples_of(step - 1)
            listed = ", ".join(map(str, examples[:_MOST_NAMED])) + (", ..." if len(examples) > _MOST_NAMED else "")
            raise _diverged(
                f"step {step}: loss {values['loss']}, gradient norm {values['gradient_norm']}, norm of the params "
                f"after it {values['parameter_norm']}; the batch is made of the examples {listed} of "
                f"the training split ({len(examples)}, counted from 0)"
            )
        progress.update(step, int(values["tokens"]), values["loss"])
        if step % self.config.log_every == 0 or step in (1, self.config.total_steps):
            values["learning_rate"] = float(self.rate(jnp.int32(step - 1)))
            self.logs.scalars(step, values)

    def _results(self) -> dict[str, float]:
        """The scores and samples of the best checkpoint, written to results.json, and the plot of the losses."""
        step, best = self.config.total_steps, self.checkpoints.best_step()
        if jax.process_index() == 0:
            plot_losses(self.workdir)
        results: dict[str, float] = {"step": step, "best_step": best}
        # Not the lowest of all: steps between two checkpoints are validated too, and their params are gone.
        losses = self._validation_losses()
        named = {"last_validation_loss": step, "best_validation_loss": best}
        results |= {name: losses[at] for name, at in named.items() if at in losses}
        samples: list[dict[str, Any]] = []
        if jax.process_count() == 1:  # of several, one machine decodes later, by the model that it loads from here
            scores, samples = self._decode_best()
            results |= scores
        if jax.process_index() == 0:
            text = json.dumps(results | {"samples": samples}, indent=2, ensure_ascii=False)
            write_atomically(self.workdir / RESULTS, f"{text}\n".encode())
        return results

    def _decode_best(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """What the best checkpoint makes of the validation and the test split, or of the prompts: scores, samples."""
        del self.state  # before the model takes its place
        mesh = self.layout.mesh
        model = dj.load(self.workdir, placement=place(mesh, TRAINING_RULES) if mesh.size > 1 else None)
        scores: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        begun = time.monotonic()
        if "source" in self.data.texts.fields:
            for split in ("validation", "test"):
                if split in self.data.texts.splits:
                    say(f"decoding the {split} split, {len(self.data.texts.splits[split]):,} pairs")
                    values, some = self.decode_split(model, split, None)
                    scores |= values
                    samples += some
        else:
            samples = self.continue_prompts(self.config.total_steps, model)
        return scores | {"decoding_seconds": time.monotonic() - begun}, samples


def _diverged(what: str) -> RuntimeError:
    return RuntimeError(f"{what}; try a lower learning rate or a longer warmup")
