"""The batches of a plan for one process, made ahead of time by Grain's threads."""

from __future__ import annotations

import sys
from typing import Any

import grain

from train.data.batches import Batch, Plan

_MOST_THREADS = 4


class Feed:
    """An endless iterator over a process's share of the batches: rows [p * B / P, (p + 1) * B / P) of each.

    Threads make the next `prefetch` batches while the device computes. The state counts only the batches that were
    handed out, so a feed that is set to it goes on exactly there. It holds for any number of processes.
    """

    def __init__(self, plan: Plan, process_index: int = 0, process_count: int = 1, prefetch: int = 4) -> None:
        """
        Args:
          plan: from `make_plan`.
          process_index, process_count: p and P.
          prefetch: how many batches are kept ready; 0: each is made when it is asked for, without threads.

        Raises:
          ValueError: there is no such process, or `prefetch` is negative.
        """
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index={process_index}: must be one of the process_count={process_count}")
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: must be at least 0")
        source: Any = grain.MapDataset.source(_Batches(plan, process_index, process_count))
        options = grain.ReadOptions(num_threads=min(prefetch, _MOST_THREADS), prefetch_buffer_size=prefetch)
        self._iterator = iter(source.to_iter_dataset(options))

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        batch: Batch = next(self._iterator)
        return batch

    def get_state(self) -> dict[str, Any]:
        """Where the iteration stands, as JSON takes it."""
        state: dict[str, Any] = self._iterator.get_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where a feed of the same plan stood; ValueError where the state is not one of `get_state`."""
        try:
            self._iterator.set_state(state)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the place in the data that a checkpoint holds cannot be read ({error})") from None

    def close(self) -> None:
        """Ends the threads; the feed yields no more."""
        self._iterator.close()


def rows_of_process(batch: Batch, process_index: int, process_count: int) -> Batch:
    """The rows of a batch that process p of P feeds to its devices.

    Raises:
      ValueError: the rows cannot be shared out evenly.
    """
    rows = len(batch["examples"])
    if rows % process_count:
        raise ValueError(
            f"a batch of {rows} rows cannot be shared by {process_count} processes; make the plan with a rows_multiple "
            "that they divide"
        )
    share = rows // process_count
    return {name: value[process_index * share : (process_index + 1) * share] for name, value in batch.items()}


class _Batches:
    """A plan as Grain's random access source, without an end."""

    def __init__(self, plan: Plan, process_index: int, process_count: int) -> None:
        self._plan, self._process_index, self._process_count = plan, process_index, process_count

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        return rows_of_process(self._plan.batch(index), self._process_index, self._process_count)
