"""How many rollout groups may be started, and which are trained next, so that none is too stale.

A version of the policy is the number of optimizer updates taken. Staleness of a rollout is the number of
them between the version that sampled its oldest token and the version that its own update is applied to:
where u updates are taken on a batch, the last of them is u - 1 further off than the first. It is bounded
by starting fewer groups, not by discarding any: discarding starves long rollouts and biases the data.
The usual form (AReaL, Fu et al. 2025; SkyRL) is

    capacity = (S + version + 1) * B - (consumed + running + finished and waiting)

with the bound S and B groups in a batch, which is one update. Taken literally it holds neither when a
long group is overtaken again and again by later ones nor when updates consume another number of groups
than planned: with fewer consumed it admits too much, with more (groups of equal rewards that dynamic
sampling passes over) it admits nothing any more. So here

- capacity is what the batches that a group of the published version can be in have room for, less the
  open groups: (S + 1 - updates not yet published) // u batches of B;
- a group is admitted at the published version, which may be behind the trainer's;
- a batch may be taken if all that stay open can still be trained in time, B a batch, oldest first.
  Where they could not, the batch waits for the old groups that are running (``blocking``).

Open groups can always be trained in time, by induction: at admission they fit into the batches that
remain, the last rule keeps it so, and an update that is skipped only makes staleness less. When all
groups are finished, either B or more wait, and the oldest B are such a batch, or fewer do, and capacity
is above 0 as soon as the last version has been published.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlcore.asynchrony.errors import EventError
from rlcore.errors import UsageError


@dataclass
class _Group:
    oldest: int
    """Oldest policy version that a token of it has, or may have as long as it is running."""
    versions: list[int]
    """The same for each of its rollouts; empty as long as it is running."""


class Admission:
    """Events in; ``capacity`` and ``take_batch`` out. All numbers are of whole groups.

    Raises EventError when an event cannot follow those before it.
    """

    def __init__(
        self,
        max_off_policy_steps: int,
        groups_per_update: int,
        version: int = 0,
        updates_per_batch: int = 1,
    ) -> None:
        """``max_off_policy_steps``: S, 0 for rollouts by the very version that is trained.

        ``groups_per_update``: B, the groups of a batch. ``version``: optimizer updates taken so far, all of
        them published. ``updates_per_batch``: u, the most that are taken on one batch.
        """
        if max_off_policy_steps < 0 or groups_per_update < 1 or updates_per_batch < 1:
            raise UsageError(
                "max_off_policy_steps must be 0 or more, groups_per_update and updates_per_batch 1 or more"
            )
        if max_off_policy_steps < updates_per_batch - 1:
            raise UsageError(
                f"the last of {updates_per_batch} updates on a batch is {updates_per_batch - 1} off policy; "
                f"max_off_policy_steps {max_off_policy_steps} is less"
            )
        self.max_off_policy_steps = max_off_policy_steps
        self.groups_per_update = groups_per_update
        self.updates_per_batch = updates_per_batch
        self.version = version
        """Of the policy in the trainer, which is optimizer updates taken."""
        self.published_version = version
        """Of the policy in every engine that samples."""
        self.histogram = [0] * (max_off_policy_steps + 1)
        """Rollouts trained, by their staleness."""
        self._groups: dict[str, _Group] = {}
        """The open ones, in order of admission."""
        self._training: tuple[str, ...] = ()

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        behind = self.version - self.published_version
        batches = (self.max_off_policy_steps + 1 - behind) // self.updates_per_batch
        return max(0, batches * self.groups_per_update - len(self._groups))

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(name for name, group in self._groups.items() if not group.versions)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Finished and not in training; oldest version first, among equals in order of admission."""
        finished = [
            (group.oldest, name)
            for name, group in self._groups.items()
            if group.versions and name not in self._training
        ]
        return tuple(name for _, name in sorted(finished, key=lambda pair: pair[0]))

    def admit(self, group: str) -> None:
        """A group is started."""
        if group in self._groups:
            raise EventError(f"group {group} was admitted before; give each a name of its own")
        if self.capacity == 0:
            raise EventError(f"no capacity for group {group}; wait until a version is published")
        self._groups[group] = _Group(self.published_version, [])

    def finished(self, group: str, versions: Sequence[int]) -> None:
        """All rollouts of a group are scored. ``versions``: the oldest policy version of each."""
        known = self._open(group)
        if known.versions or not versions:
            raise EventError(
                f"group {group} finished twice, or with no rollout; drop it if it failed"
            )
        if min(versions) < known.oldest or max(versions) > self.version:
            raise EventError(
                f"group {group} has tokens of versions {min(versions)} to {max(versions)}, but was "
                f"admitted at {known.oldest} and the trainer is at {self.version}"
            )
        known.oldest, known.versions = min(versions), list(versions)

    def dropped(self, group: str) -> None:
        """A group is gone untrained (its environment failed, its rewards are equal): room again."""
        if group in self._training:
            raise EventError(f"group {group} is in training; leave it out of trained() instead")
        self._open(group)
        del self._groups[group]

    def take_batch(self) -> tuple[str, ...]:
        """The groups of the next batch, oldest first; empty when there is no such batch yet.

        They stay open until ``trained``, and until then there is no other batch.
        """
        batch = self.waiting[: self.groups_per_update]
        if self._training or len(batch) < self.groups_per_update or self._late(batch):
            return ()
        self._training = batch
        return batch

    def blocking(self) -> tuple[str, ...]:
        """Running groups that a batch waits for although enough others are finished."""
        batch = self.waiting[: self.groups_per_update]
        if self._training or len(batch) < self.groups_per_update or not (late := self._late(batch)):
            return ()
        return tuple(name for name in self.running if self._groups[name].oldest <= max(late))

    def trained(self, before: Mapping[str, int], updates: int) -> None:
        """The batch is done with, after so many optimizer updates.

        ``before``: the groups of it that one was taken on, and how many of the updates came before that one.
        """
        most = self.updates_per_batch
        if not before.keys() <= set(self._training):
            raise EventError("trained() names groups that are not in the batch taken")
        if not 0 <= updates <= most or any(not 0 <= n < updates for n in before.values()):
            raise EventError(
                f"trained() tells of {updates} updates, {before} before; {most} are the most"
            )
        for name, earlier in before.items():
            for version in self._groups[name].versions:
                self.histogram[self.version + earlier - version] += 1
        for name in self._training:
            del self._groups[name]
        self._training = ()
        self.version += updates

    def published(self, version: int) -> None:
        """Every token from now on is sampled by this version, or a later one."""
        if not self.published_version <= version <= self.version:
            raise EventError(
                f"version {version} cannot be published: {self.published_version} was before, and "
                f"the trainer is at {self.version}"
            )
        self.published_version = version

    def _late(self, batch: Collection[str]) -> list[int]:
        """Oldest versions of the open groups that would be trained too late after ``batch``."""
        left = sorted(group.oldest for name, group in self._groups.items() if name not in batch)
        late = []
        for rank, oldest in enumerate(left):
            batches = 1 + rank // self.groups_per_update  # before its own, this one included
            newest = self.version + batches * self.updates_per_batch + self.updates_per_batch - 1
            if newest > oldest + self.max_off_policy_steps:
                late.append(oldest)
        return late

    def _open(self, group: str) -> _Group:
        if group not in self._groups:
            raise EventError(f"group {group} is not open; it was never admitted, or is done with")
        return self._groups[group]

    def state(self) -> dict[str, object]:
        """A batch in training is among the finished ones: it is taken again after a resume."""
        return {
            "bound": [self.max_off_policy_steps, self.groups_per_update, self.updates_per_batch],
            "version": self.version,
            "published_version": self.published_version,
            "histogram": list(self.histogram),
            "groups": [[k, g.oldest, list(g.versions)] for k, g in self._groups.items()],
        }

    def load_state(self, state: dict) -> None:
        """Running groups come back as such: start them again under their names, or drop them.

        Raises UsageError when the bound is another: what is open need not fit into it.
        """
        bound = [self.max_off_policy_steps, self.groups_per_update, self.updates_per_batch]
        if state["bound"] != bound:
            names = "max_off_policy_steps, groups_per_update and updates_per_batch"
            raise UsageError(
                f"the checkpoint has {names} {state['bound']}, not {bound}; resume with the same"
            )
        self.version = state["version"]
        self.published_version = state["published_version"]
        self.histogram = list(state["histogram"])
        self._groups = {k: _Group(oldest, list(v)) for k, oldest, v in state["groups"]}
        self._training = ()
