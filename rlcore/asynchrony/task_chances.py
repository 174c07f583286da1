"""Which tasks are practised more: those whose groups are likely to differ in reward.

Late in a run most tasks are solved. Their groups have equal rewards and teach nothing, so that an update
needs many groups. What is known of a task's recent groups gives the chance that its next one is of use,
and a turn of a task with little chance is mostly passed over: it costs no rollout.

The share of right rollouts of a task is taken to be Beta distributed, with Jeffreys' prior (Jeffreys 1946)
and the recent rollouts as evidence. The chance that a group of G is all right is then the product over
i < G of (a + i) / (a + b + i). Practising what is neither solved nor hopeless is usual; Rutherford et al.
2024, "No Regrets", take p (1 - p) for it. Here it is 1 - P(all right) - P(all wrong), which is what decides.

No task is lost: a chance is never below FLOOR, a task is passed over at most MOST_PASSED times in a row,
and what is known of it fades. Draws depend on seed and turn alone, so a resumed run draws the same.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from random import Random

from rlcore.asynchrony.errors import EventError

PRIOR = 0.5
"""Of Jeffreys: most tasks are either nearly always or nearly never solved."""

MEMORY = 0.7
"""Share of the evidence that is left after each further group: about three groups count."""

FLOOR = 0.1
"""Least chance of a turn: a task that was forgotten again is found after ten of its turns on average."""

MOST_PASSED = 30
"""Turns of a task that are passed over in a row; without it one in 24 would be passed over longer."""

MOST_TASKS = 20_000
"""Tasks that are remembered, those seen last."""


@dataclass
class _Known:
    right: float = 0.0
    wrong: float = 0.0
    """Recent rollouts, faded."""
    passed: int = 0
    """Turns passed over since the last one taken."""


class TaskChances:
    """``takes`` for each turn, ``finished`` for each group. Tasks are named by any text."""

    def __init__(self, seed: int, group_size: int) -> None:
        self.seed = seed
        self.group_size = group_size
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def chance(self, task: str) -> float:
        """That a turn of it is taken; 1 where nothing is known."""
        known = self._known.get(task)
        if known is None:
            return 1.0
        unknown = self._differs(0.0, 0.0)
        return max(FLOOR, min(1.0, self._differs(known.right, known.wrong) / unknown))

    def takes(self, task: str, turn: int) -> bool:
        """Whether this turn of a task is taken, or passed over. To be asked once a turn."""
        taken = Random(f"{self.seed}:{turn}").random() < self.chance(task)
        known = self._known.get(task)
        if known is None:
            return True
        self._known.move_to_end(task)
        if taken or known.passed >= MOST_PASSED:
            known.passed = 0
            return True
        known.passed += 1
        return False

    def finished(self, task: str, right: int, wrong: int) -> None:
        """A group of it has ended, with so many rollouts of each."""
        if min(right, wrong) < 0:
            raise EventError(f"a group of {right} right and {wrong} wrong rollouts cannot be")
        known = self._known.setdefault(task, _Known())
        self._known.move_to_end(task)
        known.right = MEMORY * known.right + right
        known.wrong = MEMORY * known.wrong + wrong
        while len(self._known) > MOST_TASKS:
            self._known.popitem(last=False)

    def _differs(self, right: float, wrong: float) -> float:
        """The chance that the rollouts of a group are neither all right nor all wrong."""
        a, b = PRIOR + right, PRIOR + wrong
        all_right = all_wrong = 1.0
        for i in range(self.group_size):
            all_right *= (a + i) / (a + b + i)
            all_wrong *= (b + i) / (a + b + i)
        return 1.0 - all_right - all_wrong

    def state(self) -> dict[str, object]:
        """In the order in which the tasks were seen last."""
        return {"tasks": [[k, t.right, t.wrong, t.passed] for k, t in self._known.items()]}

    def load_state(self, state: dict) -> None:
        self._known = OrderedDict(
            (name, _Known(right, wrong, passed)) for name, right, wrong, passed in state["tasks"]
        )
