"""Drafts on their way from the worker to the scheduler, with word of the version that proposed them.

Read against vLLM 0.32.0: the scheduler is in another process than the worker, and what
``take_draft_token_ids`` returns travels from one to the other after each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.outputs import DraftTokenIds


@dataclass
class VersionedDrafts(DraftTokenIds):
    version: int
    rates: list[float]
    """Conditional acceptance by position that is expected of the version; empty where unknown."""
