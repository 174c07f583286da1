"""Which traffic is held out from training: a pure function of the prompt, with a memory.

A prompt's tokens decide by their hash, so all spans and repeats of a prompt fall on the same side.
While fewer than ``wanted`` held-out tokens are known, a larger share is held out, so that the first
candidate can be judged early; what was decided for a prompt stays decided.
"""

from __future__ import annotations

from collections import OrderedDict

EARLY_SHARE = 0.5
"""Share held out until there is enough to judge a first candidate on."""

REMEMBERED_PROMPTS = 100_000


class HeldoutSplit:
    def __init__(self, share: float, wanted: int) -> None:
        self._share = share
        self._wanted = wanted
        self._known: OrderedDict[str, bool] = OrderedDict()

    def is_heldout(self, prompt_hash: str, heldout_tokens: int) -> bool:
        """Decide for a prompt, given how many held-out tokens there are at present."""
        if prompt_hash not in self._known:
            share = self._share if heldout_tokens >= self._wanted else EARLY_SHARE
            # The hash is uniform; its first 8 hex digits are a number below 2^32.
            self._known[prompt_hash] = int(prompt_hash[:8], 16) < max(share, self._share) * 2**32
            while len(self._known) > REMEMBERED_PROMPTS:
                self._known.popitem(last=False)
        return self._known[prompt_hash]

    def forget(self, prompt_hash: str) -> None:
        """Keep nothing of a prompt, not even its hash."""
        self._known.pop(prompt_hash, None)

    def state(self) -> dict[str, bool]:
        return dict(self._known)

    def load_state(self, known: dict[str, bool]) -> None:
        self._known = OrderedDict(known)
