"""An engine whose number of drafts is drawn anew in every step, and a worker that tells its drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rlcore.engine.scheduler import PacelineScheduler
from tests.e2e.faulty_worker import FaultyWorker


class ChangingScheduler(PacelineScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._draw = random.Random(7)

    def drafts_for(self, requests: Sequence[str]) -> int:
        """Often none for several steps on end, so that much is to be caught up with."""
        return self._draw.choice([0, 0, 0, 0, *range(1, self.num_spec_tokens + 1)])


class TellingWorker(FaultyWorker):
    """Remembers what was drafted, by request and position."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._drafted: dict[str, list[int]] = {}

    def take_draft_token_ids(self) -> Any:
        taken = super().take_draft_token_ids()
        if taken is not None:
            for request_id, drafts in zip(taken.req_ids, taken.draft_token_ids, strict=True):
                if drafts:
                    at = self.model_runner.requests[request_id].num_tokens
                    # Ids end in random letters when the front side gives them out.
                    self._drafted[f"{request_id.split('-')[0]}@{at}"] = list(drafts)
        return taken

    def test_drafted(self) -> dict[str, list[int]]:
        return self._drafted


class WarmWorker(TellingWorker):
    """With vLLM's own upkeep: a step without drafts runs the whole drafter."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        del self.model_runner.drafter.propose  # the instance's; the class has vLLM's
        self._note_proposals()
