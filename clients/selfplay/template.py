"""What the target's chat template puts around a user's turn, asked of the server that applies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

SENTINEL = "PACELINE7QX4"
"""Stands where the user's text goes; no template and hardly any text holds it."""


class SelfPlayError(RuntimeError):
    """The target cannot be served to itself like this; one line says why."""


@dataclass(frozen=True)
class UserTurn:
    opening: str
    """Everything before the user's text: what was said so far, and how the turn begins."""
    end: str
    """What follows the text, up to white space; empty when nothing does."""


class ChatTemplate:
    """Asks vLLM's ``/tokenize`` and ``/detokenize``, so that no file of the target is needed."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        """``http`` has the server's address as its base."""
        self._http = http

    async def user_turn(self, before: Sequence[dict[str, str]] = ()) -> UserTurn:
        """The user's turn after those messages; raises SelfPlayError, or what httpx raises."""
        messages = [*before, {"role": "user", "content": SENTINEL}]
        tokens = await self._post("/tokenize", {"messages": messages})
        text = str((await self._post("/detokenize", {"tokens": tokens["tokens"]}))["prompt"])
        opening, found, rest = text.rpartition(SENTINEL)
        if not found:
            raise SelfPlayError(
                "the target's chat template does not show the user's text as it is; "
                "self-play needs one that does"
            )
        return UserTurn(opening, next(iter(rest.split()), ""))

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._http.post(path, json=body)
        if response.status_code == httpx.codes.BAD_REQUEST:
            raise SelfPlayError(
                "the target's chat template cannot be applied, and self-play needs one; "
                f"the server says: {_first_line(response)}"
            )
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


def _first_line(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text
    return next(iter(message.strip().splitlines()), "nothing")
