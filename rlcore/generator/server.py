"""A running Paceline server as the generator, over its OpenAI-compatible API and our own routes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from rlcore.generator.base import Completion, GeneratorError, GeneratorStatus, Published
from rlcore.records.trace import Sampling

PUBLISH_DEADLINE = 750.0
"""Seconds for a policy to be checked and to go live: more than the engine's own deadlines together."""

STATUS_DEADLINE = 15.0

CORES_DEADLINE = 60.0
"""Seconds for the engine to be told: it answers between two steps, and the server gives up before that."""

CONNECT_DEADLINE = 10.0

IDLE_CONNECTION = 2.0
"""Seconds that an unused connection is kept: fewer than the five after which the server closes it, or a
request could be sent into one that is just being closed."""


UNCHANGED = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""A model's own defaults may be others, and the trainer would not know of them."""


class ServerGenerator:
    def __init__(self, url: str, model: str, deadline_s: float, api_key: str | None = None) -> None:
        """``url``: of the server, without ``/v1``. ``model``: its name there.

        ``deadline_s``: for one completion, its time in the queue included.
        """
        self._deadline_s = deadline_s
        self.url = url.rstrip("/")
        self._model = model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_CONNECTION),
        )

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        priority: int = 0,
        tenant: str = "default",
        learn: bool = True,
    ) -> Completion:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            **UNCHANGED,
            "logprobs": 0,
            "return_token_ids": True,
            "priority": priority,
        }
        headers = {
            "x-paceline-tenant": tenant,
            "x-paceline-learn": "1" if learn else "0",
            "x-paceline-policy-versions": "1",
        }
        response = await self._request("POST", "/v1/completions", body, self._deadline_s, headers)
        try:
            return _completion(_json(response), int(response.headers["x-paceline-draft-version"]))
        except (LookupError, TypeError, ValueError) as error:
            raise self._strange("a rollout", error) from None

    async def publish(self, version: int, folder: Path, sha256: str) -> Published:
        body = {"version": version, "folder": str(folder), "sha256": sha256}
        response = await self._request("POST", "/v1/paceline/policy", body, PUBLISH_DEADLINE, {})
        answer = _json(response)
        try:
            return Published(version, answer["stall_seconds"], answer["frozen_tokens"])
        except (LookupError, TypeError) as error:
            raise self._strange("a publication", error) from None

    async def status(self) -> GeneratorStatus:
        answer = _json(await self._request("GET", "/v1/paceline/status", None, STATUS_DEADLINE, {}))
        try:
            total = answer["acceptance"]["total"]
            return GeneratorStatus(
                policy_version=answer["target"]["version"],
                draft_version=answer["draft"]["live"],
                target_id=answer["target"]["id"],
                emitted=total["emitted"],
                draft_steps=total["steps"],
                plain_steps=total["plain_steps"],
            )
        except (LookupError, TypeError) as error:
            raise self._strange("a status", error) from None

    async def compute_on(self, cores: int) -> None:
        await self._request("POST", "/v1/paceline/cores", {"cores": cores}, CORES_DEADLINE, {})

    async def longest(self) -> int:
        """Tokens of the longest sequence that it takes."""
        answer = _json(await self._request("GET", "/v1/models", None, STATUS_DEADLINE, {}))
        try:
            return int(answer["data"][0]["max_model_len"])
        except (LookupError, TypeError, ValueError) as error:
            raise GeneratorError(
                f"{self.url}/v1/models names no longest sequence ({error!r})"
            ) from None

    async def healthy(self) -> bool:
        """Whether it answers and its engine is alive."""
        try:
            await self._request("GET", "/ready", None, STATUS_DEADLINE, {})
        except GeneratorError:
            return False
        return True

    async def close(self) -> None:
        await self._client.aclose()

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        deadline: float,
        headers: dict[str, str],
    ) -> httpx.Response:
        """Raises GeneratorError, for answers that are errors too.

        An answer of 500 and above says that its engine is gone.
        """
        if self._client.is_closed:
            raise GeneratorError(f"{self.url} was given up", gone=True)
        try:
            response = await self._client.request(
                method,
                path,
                json=body,
                timeout=httpx.Timeout(deadline, connect=min(deadline, CONNECT_DEADLINE)),
                headers=headers,
            )
        except httpx.ConnectTimeout:
            raise GeneratorError(
                f"{self.url} cannot be reached within {CONNECT_DEADLINE:.0f} s", gone=True
            ) from None
        except httpx.TimeoutException:
            raise GeneratorError(
                f"{self.url}{path} did not answer within {deadline:.0f} s"
            ) from None
        except httpx.HTTPError as error:
            raise GeneratorError(
                f"{self.url} cannot be reached ({type(error).__name__})", gone=True
            ) from None
        if response.status_code >= 400:
            raise GeneratorError(
                f"{self.url}{path}: {_error_of(response)}", gone=response.status_code >= 500
            )
        return response

    def _strange(self, wanted: str, error: Exception) -> GeneratorError:
        return GeneratorError(
            f"{self.url} answered without what {wanted} needs ({error!r}); is it a Paceline "
            "server of this version?"
        )


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = response.json()
    except ValueError:  # no JSON, or not even text
        raise GeneratorError(f"{response.url} did not answer in JSON") from None
    return answer


def _error_of(response: httpx.Response) -> str:
    """The message of an OpenAI-style error, or whatever the server said."""
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"


def _completion(answer: dict[str, Any], draft_version: int) -> Completion:
    choice = answer["choices"][0]
    token_ids: list[int] = choice["token_ids"]
    logprobs: list[float] = choice["logprobs"]["token_logprobs"]
    spans: list[list[int]] = answer["usage"]["paceline"]["policy_versions"][0]
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(logprobs)} log-probabilities of {len(token_ids)} tokens")
    if not all(math.isfinite(value) for value in logprobs):
        raise ValueError("a log-probability is not finite")
    if token_ids and (not spans or spans[0][0] != 0):
        raise ValueError("the first token has no policy version")
    versions = [0] * len(token_ids)
    for first, version in spans:
        versions[first:] = [version] * len(versions[first:])
    return Completion(
        token_ids=token_ids,
        logprobs=[min(0.0, value) for value in logprobs],
        policy_versions=versions,
        finish_reason=choice["finish_reason"],
        draft_version=draft_version,
    )
