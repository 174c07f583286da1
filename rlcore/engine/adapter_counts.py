"""Acceptance by adapter and draft version, for a bounded number of both."""

from __future__ import annotations

from typing import Any

from rlcore.records.acceptance import AcceptanceCount, AdapterAcceptance

POLICY_ID = 2**30
"""vLLM's number of a policy that is an adapter; those that it is given by name it counts from 1."""

MOST_NAMED = 64
"""Adapters counted each by itself; all that come later are one."""

OTHER = "(other)"

KEPT_VERSIONS = 4
"""Draft versions counted each by itself, those seen last: the live one and what it is compared with."""

ANY_VERSION = -1


def name_of(request: Any) -> str:
    """The adapter that a request of the model runner asked for by name; empty for none."""
    lora = request.lora_request
    return "" if lora is None or lora.lora_int_id == POLICY_ID else str(lora.lora_name)


class AdapterCounts:
    """What is accepted of the drafts for each adapter; one drafter serves them all."""

    def __init__(self) -> None:
        self._totals: dict[str, AcceptanceCount] = {}
        self._versions: dict[str, dict[int, AcceptanceCount]] = {}

    def observe(self, adapter: str, version: int, k: int, accepted: int) -> None:
        """A step of a request for ``adapter``, in which ``accepted`` of ``k`` drafts of ``version`` were."""
        if adapter not in self._totals and len(self._totals) >= MOST_NAMED:
            adapter = OTHER
        self._totals.setdefault(adapter, AcceptanceCount(ANY_VERSION)).observe(k, accepted)
        versions = self._versions.setdefault(adapter, {})
        if version not in versions and len(versions) >= KEPT_VERSIONS:
            del versions[next(iter(versions))]
        versions.setdefault(version, AcceptanceCount(version)).observe(k, accepted)

    def counts(self) -> list[AdapterAcceptance]:
        return [
            AdapterAcceptance(adapter, total, list(self._versions[adapter].values()))
            for adapter, total in self._totals.items()
        ]
