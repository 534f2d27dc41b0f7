"""Self-speculative decoding: the target drafts for itself, with fewer layers or with coarser weights."""

from __future__ import annotations

import dataclasses

import jax
from flax import struct

from decoding_jax.checks import check_whole, is_whole
from decoding_jax.decoders.drafting import AcceptanceHistory, ModelDraft, counted
from decoding_jax.decoders.prefix import Accepted, Draft, PrefixState
from decoding_jax.rows import Context
from decoding_jax.types import ModelSpec, PyTree


@struct.dataclass
class SelfSpeculative(ModelDraft):
    """Drafts with a part of the target, in the target's own cache: no second model and no prefill of one.

    What drafting writes into the cache the verifying call writes again, in full. The part is either of

    - `exit_layer`: leave before this layer (LayerSkip, Elhoushi et al. 2024; good for models trained to);
    - `skip_layers`: leave these out (Draft & Verify, Zhang et al. 2024);
    - neither: a copy of the target with coarser weights, given as `decode(..., drafter=quantized(model))`.

    Attributes:
      exit_layer: E, from 1 on; the last norm and the readout follow.
      skip_layers: layers to leave out.
      num_draft, acceptance, tree, adaptive, draft_cost, position_cost, min_confidence: as in `Speculative`.
    """

    exit_layer: int | None = struct.field(pytree_node=False, default=None)
    skip_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())

    drafter_hint = "exit_layer, skip_layers, or as drafter a coarser copy (dj.quantized(model), in commands int8)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer is not None:
            check_whole("exit_layer", self.exit_layer, 1, "one layer has to run")
        skipped = self.skip_layers
        if not isinstance(skipped, tuple) or not all(map(is_whole, skipped)) or len(set(skipped)) < len(skipped):
            raise ValueError(f"skip_layers={skipped!r}: give different numbers of layers, such as (1, 3)")
        if self.exit_layer is not None and self.skip_layers:
            raise ValueError("exit_layer and skip_layers are two ways to draft; give one of them")

    @property
    def takes_drafter(self) -> bool:  # type: ignore[override]
        """Whether `decode` has to be given a coarser copy."""
        return self.exit_layer is None and not self.skip_layers

    def check(self, ctx: Context) -> None:
        """ValueError where the target has no such layers, or the coarser copy is of another model."""
        super().check(ctx)
        if not self.takes_drafter:
            named = f"skip_layers={self.skip_layers}" if self.skip_layers else f"exit_layer={self.exit_layer}"
            try:
                self._part(ctx.model)
            except ValueError as error:
                raise ValueError(f"{named}: {error}") from None
            layers = getattr(ctx.model.apply, "num_layers", None)
            if self.exit_layer == layers:
                raise ValueError(f"{named}: the model has no more layers, so all of it would draft; leave it earlier")
        elif ctx.drafter is not None and _empty_cache(ctx.drafter) != _empty_cache(ctx.model):
            raise ValueError(
                "drafter: its cache is not the target's, in which SelfSpeculative drafts; give a coarser copy of the "
                "target, or choose Speculative (in configs speculative)"
            )

    def begin(self, ctx: Context) -> AcceptanceHistory:
        """No history yet."""
        return self.no_history(ctx)

    def propose(self, ctx: Context, state: PrefixState) -> tuple[Draft, PrefixState]:
        """What the target's part draws."""
        part = ctx.of_drafter if self.takes_drafter else dataclasses.replace(ctx, model=self._part(ctx.model))
        draft, cache, calls, _ = self.draft(part, state.rows, state.cache, self.lengths(state.carry), committed=1)
        return draft, dataclasses.replace(counted(state, calls), cache=cache)

    def observe(self, ctx: Context, state: PrefixState, draft: Draft, result: Accepted) -> AcceptanceHistory:
        """Remembers how much was kept."""
        return self.learn(state.carry, state, draft, result)

    def _part(self, model: ModelSpec) -> ModelSpec:
        return model.view(exit=self.exit_layer, skip=self.skip_layers)


def _empty_cache(model: ModelSpec) -> PyTree:
    """Shapes and dtypes of a cache's leaves."""
    return jax.eval_shape(lambda: model.init_cache(1, 1))
