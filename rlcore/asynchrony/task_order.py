"""Which task comes next, so that over any kill none is skipped, lost or trained twice.

A task's turn is a position, 0, 1, 2 and so on without end. Position p is task p of a list without end
(procedural environments), or, of a list of ``size`` tasks, the (p mod size)-th of epoch p // size, each
of which has its own order out of the seed. A turn is

    pending -> in flight -> finished -> trained       (``returned``: in flight or finished -> pending)

or, with no rollout, pending -> in flight -> passed over, or given up.

Only those in flight and finished are kept one by one; all others below the cursor are done with, which
keeps the state small. It has to be saved in one piece with the policy: what was trained after the last
checkpoint is then trained again, on a policy that has not seen it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from rlcore.asynchrony.errors import EventError
from rlcore.errors import UsageError


@dataclass(frozen=True)
class Turn:
    position: int
    """Which turn of the run; what the other events name."""
    task: int
    """Index of the task: below ``size``, or the position itself in a list without end."""
    epoch: int


class TaskOrder:
    """``take`` out, the turns' fates in. Raises EventError for a fate that its turn cannot have."""

    def __init__(self, seed: int, size: int | None = None) -> None:
        """``size``: tasks in the list; None for one without end."""
        if size is not None and size < 1:
            raise UsageError("there are no tasks; give a file or an environment that has some")
        self.seed = seed
        self.size = size
        self._cursor = 0
        """The first position never taken."""
        self._again: list[int] = []
        """Heap of positions below the cursor that are pending."""
        self._in_flight: set[int] = set()
        self._finished: set[int] = set()

    @property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(sorted(self._in_flight))

    @property
    def finished_untrained(self) -> tuple[int, ...]:
        return tuple(sorted(self._finished))

    @property
    def trained_count(self) -> int:
        """Turns that are done with."""
        return self._cursor - len(self._again) - len(self._in_flight) - len(self._finished)

    def take(self) -> Turn:
        """The next turn, which is in flight from now on; those that came back go first."""
        if self._again:
            position = heapq.heappop(self._again)
        else:
            position = self._cursor
            self._cursor += 1
        self._in_flight.add(position)
        return self.turn(position)

    def turn(self, position: int) -> Turn:
        if self.size is None:
            return Turn(position, position, 0)
        epoch, place = divmod(position, self.size)
        return Turn(position, _order(self.seed, epoch, self.size)[place], epoch)

    def finished(self, position: int) -> None:
        """All its rollouts are scored."""
        if position not in self._in_flight:
            raise EventError(f"turn {position} finished without being in flight")
        self._in_flight.remove(position)
        self._finished.add(position)

    def returned(self, position: int) -> None:
        """It failed, or its rollouts were lost: it is to be done again."""
        if position not in self._in_flight | self._finished:
            raise EventError(f"turn {position} cannot come back, it is not open")
        self._in_flight.discard(position)
        self._finished.discard(position)
        heapq.heappush(self._again, position)

    def trained(self, position: int) -> None:
        """Its rollouts are in the policy, or have nothing to teach (equal rewards): it is done with."""
        if position not in self._finished:
            raise EventError(f"turn {position} trained without being finished, or twice")
        self._finished.remove(position)

    def given_up(self, position: int) -> None:
        """It failed so often that it is left out: done with, untrained."""
        if position not in self._in_flight:
            raise EventError(f"turn {position} cannot be given up, it is not in flight")
        self._in_flight.remove(position)

    def passed_over(self, position: int) -> None:
        """Its task is left out this time: done with, unplayed."""
        if position not in self._in_flight:
            raise EventError(f"turn {position} cannot be passed over, it is not in flight")
        self._in_flight.remove(position)

    def state(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "size": self.size,
            "cursor": self._cursor,
            "again": sorted(self._again),
            "in_flight": sorted(self._in_flight),
            "finished": sorted(self._finished),
        }

    def load_state(self, state: dict, rollouts: Collection[int] = ()) -> None:
        """``rollouts``: positions whose finished rollouts came back with the checkpoint.

        They are finished still; all other open turns are pending. Raises UsageError when the
        checkpoint is of other tasks.
        """
        if (state["seed"], state["size"]) != (self.seed, self.size):
            raise UsageError(
                f"the checkpoint is of {_tasks(state['size'])} with seed {state['seed']}, not "
                f"{_tasks(self.size)} with seed {self.seed}; resume with the same, or start anew"
            )
        finished = set(state["finished"])
        if not finished.issuperset(rollouts):
            raise EventError(f"turns {sorted(set(rollouts) - finished)} were not finished")
        self._cursor = state["cursor"]
        self._finished = set(rollouts)
        self._in_flight = set()
        self._again = sorted({*state["again"], *state["in_flight"], *finished} - self._finished)


def _tasks(size: int | None) -> str:
    return "tasks without end" if size is None else f"{size} tasks"


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> list[int]:
    """The tasks in the order of one epoch. By sorted draws: ``random()`` is the same in every Python."""
    draw = Random(f"{seed}:{epoch}")
    keys = [draw.random() for _ in range(size)]
    return sorted(range(size), key=keys.__getitem__)
