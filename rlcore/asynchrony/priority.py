"""The priority of a rollout request in the engine's priority scheduler: lower runs sooner.

Sooner run the rollouts whose tokens are needed soonest and teach most: those of groups near completion
(one missing rollout keeps the whole group from being trained) and of groups whose rewards differ
already (they will not be passed over for a zero advantage).

The engine is given a priority once, with the request, so age cannot be a term that grows. It is in the
number itself: the count of groups admitted before this one, less a bonus of at most LARGEST_BONUS. A
request is so overtaken only by those of the LARGEST_BONUS groups admitted next after its own; all later
ones are behind it, and nothing starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.errors import PacelineError

MIXED_BONUS = 16
"""Groups that one with different rewards overtakes."""

COMPLETION_BONUS = 16
"""Groups that one overtakes of which all rollouts but this one are finished. As much as mixed rewards:
a group needs both, completion to be trained at all and different rewards to be worth it."""

LARGEST_BONUS = MIXED_BONUS + COMPLETION_BONUS


@dataclass(frozen=True)
class GroupProgress:
    """What is known of a request's group when the request is made."""

    admitted: int
    """Groups admitted before it."""
    size: int
    """Rollouts in it."""
    rewards: Sequence[float] = ()
    """Of those that are finished; there may be none, and at least this request's own is missing."""


def request_priority(group: GroupProgress) -> int:
    """Raises PacelineError when the group is complete already."""
    missing = group.size - len(group.rewards)
    if missing < 1:
        raise PacelineError(
            f"a group of {group.size} with {len(group.rewards)} rewards needs no more"
        )
    others = group.size - 1
    bonus = COMPLETION_BONUS * len(group.rewards) // others if others else 0
    if len(set(group.rewards)) > 1:
        bonus += MIXED_BONUS
    return group.admitted - bonus
