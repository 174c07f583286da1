"""The drafter types by the name vLLM loads them by."""

from __future__ import annotations

from learner.drafters.base import Drafter
from learner.drafters.draft_model import DraftModel
from learner.drafters.eagle3 import Eagle3

DRAFTERS: dict[str, type[Drafter]] = {d.method: d for d in (Eagle3, DraftModel)}
