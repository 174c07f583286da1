"""Which part of a streamed text was drafted: steps and tokens in, coloured pieces out. Pure.

A step of the engine emits the drafts that the target accepted, then one token of the target's own. So of
a step of n tokens the first n - 1 are accepted drafts. (The end-of-answer token, which has no text, may be
a draft too: the step is cut behind it.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """``accepted``: True for a draft's text, False for the target's own, None where it is not known."""

    text: str
    accepted: bool | None


def origins(steps: Sequence[int]) -> list[bool]:
    """For each token that the steps emitted, whether it is an accepted draft."""
    return [i + 1 < emitted for emitted in steps for i in range(emitted)]


class Pieces:
    """Cuts a stream's text where the origin of its tokens changes.

    The text of a token may come later than the token does, and special tokens have none in the answer.
    """

    def __init__(self) -> None:
        self._tokens: deque[tuple[str, bool]] = deque()

    def add(self, text: str, tokens: Sequence[str], steps: Sequence[int]) -> list[Piece]:
        """One chunk: its text, its tokens as text, and the steps that they were emitted by.

        What comes out is ``text``, cut. A chunk whose steps are not told is of unknown origin.
        """
        accepted = origins(steps)
        if len(accepted) != len(tokens):
            self._tokens.clear()
        else:
            self._tokens.extend(zip(tokens, accepted, strict=True))
        pieces: list[Piece] = []
        while text:
            self._skip_to(text)
            if not self._tokens:
                pieces.append(Piece(text, None))
                break
            token, origin = self._tokens.popleft()
            taken = min(len(token), len(text))
            pieces.append(Piece(text[:taken], origin))
            if taken < len(token):
                self._tokens.appendleft((token[taken:], origin))
            text = text[taken:]
        return _joined(pieces)

    def _skip_to(self, text: str) -> None:
        """Forget the tokens before the first one that the text goes on with; all, if none is."""
        while self._tokens:
            token = self._tokens[0][0]
            if token and (text.startswith(token) or token.startswith(text)):
                return
            self._tokens.popleft()


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].accepted is piece.accepted:
            joined[-1] = Piece(joined[-1].text + piece.text, piece.accepted)
        else:
            joined.append(piece)
    return joined
