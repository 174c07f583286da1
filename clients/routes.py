"""Our routes as a client calls them: ``client.paceline.status()`` and so on, sync and async.

A connection that could not be made is tried again; a request that was sent never is, because making a
version live twice is not the same as once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from clients.answers import (
    Activated,
    Changes,
    CoresStatus,
    Drafts,
    LiveChange,
    PolicyState,
    PolicySwap,
    Purged,
    Status,
)
from clients.events import FeedEvent, FeedParser

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
SWAP_SECONDS = 120.0
"""A swap waits for the step at hand, and reads and checks a file."""
POLICY_SECONDS = 600.0
"""A policy is as large as the target."""
PURGE_SECONDS = 120.0
"""The learner and its files are asked, and the server gives up before that."""
FEED_SECONDS = 15.0
"""A feed has a sample every second; one that is silent for so long is broken."""
CONNECT_RETRIES = 2

Answer = TypeVar("Answer")


class PacelineAPIError(Exception):
    """A request to a server's own routes failed. ``status``: its HTTP status, None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message if status is None else f"{message} (HTTP {status})")
        self.message = message
        self.status = status


def is_local(url: str) -> bool:
    return urlsplit(url).hostname in LOOPBACK


class _Call:
    """One request: where to, and what its answer is."""

    def __init__(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        *,
        body: dict[str, Any] | None = None,
        seconds: float = READ_SECONDS,
    ) -> None:
        self.arguments: dict[str, Any] = {
            "method": method,
            "url": path,
            "json": body,
            "timeout": _timeout(seconds),
        }
        self.kind: Any = kind

    def answer(self, response: httpx.Response) -> Any:
        if response.is_error:
            raise _refusal(response.status_code, response.content)
        try:
            return msgspec.json.decode(response.content, type=self.kind)
        except msgspec.DecodeError as error:
            where = self.arguments["url"]
            raise PacelineAPIError(
                f"{where} answered what this client cannot read: {error}"
            ) from None


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=CONNECT_SECONDS)


def _refusal(status: int, content: bytes) -> PacelineAPIError:
    """What the server says is wrong: FastAPI's ``detail``, or an OpenAI error's message."""
    message: Any = None
    try:
        body = msgspec.json.decode(content, type=dict[str, Any])
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        message = message or body.get("detail")
    except msgspec.DecodeError:
        message = content[:200].decode(errors="replace").strip()
    return PacelineAPIError(str(message or "the server gave no reason"), status)


def _unreachable(base_url: str, error: httpx.HTTPError) -> PacelineAPIError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return PacelineAPIError(f"no server answers at {base_url}")
    what = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error)
    return PacelineAPIError(f"{base_url}: {what or type(error).__name__}")


STATUS = _Call("GET", "status", Status)
DRAFTS = _Call("GET", "drafts", Drafts)
HISTORY = _Call("GET", "history", Changes)
POLICY = _Call("GET", "policy", PolicyState)
ROLLBACK = _Call("POST", "drafts/rollback", Activated, seconds=SWAP_SECONDS)


def _activate(version: int) -> _Call:
    return _Call("POST", f"drafts/{version}/activate", Activated, seconds=SWAP_SECONDS)


def _set_cores(cores: int) -> _Call:
    return _Call("POST", "cores", CoresStatus, body={"cores": cores})


def _set_policy(folder: Path, version: int, sha256: str) -> _Call:
    body = {"folder": str(folder), "version": version, "sha256": sha256}
    return _Call("POST", "policy", PolicySwap, body=body, seconds=POLICY_SECONDS)


def _purge(tenant: str) -> _Call:
    where = f"tenants/{quote(tenant, safe='')}/traces"
    return _Call("DELETE", where, Purged, seconds=PURGE_SECONDS)


def _feed(history_s: int | None) -> dict[str, Any]:
    params = None if history_s is None else {"history": history_s}
    return {"method": "GET", "url": "feed", "params": params, "timeout": _timeout(FEED_SECONDS)}


class Routes:
    """``/v1/paceline/...`` of one server. Every method raises PacelineAPIError."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """``base_url`` ends in ``/v1``."""
        self._url = base_url
        self._http = httpx.Client(
            base_url=f"{base_url}/paceline/",
            headers={"authorization": f"Bearer {api_key}"},
            transport=httpx.HTTPTransport(retries=CONNECT_RETRIES) if is_local(base_url) else None,
            trust_env=not is_local(base_url),
        )

    def status(self) -> Status:
        answer: Status = self._call(STATUS)
        return answer

    def drafts(self) -> Drafts:
        answer: Drafts = self._call(DRAFTS)
        return answer

    def history(self) -> list[LiveChange]:
        """What was live when, and why it changed, oldest first."""
        answer: Changes = self._call(HISTORY)
        return answer.changes

    def policy(self) -> PolicyState:
        answer: PolicyState = self._call(POLICY)
        return answer

    def activate(self, version: int) -> Activated:
        """Make a draft version live."""
        answer: Activated = self._call(_activate(version))
        return answer

    def rollback(self) -> Activated:
        """Make the draft version that was live before live again."""
        answer: Activated = self._call(ROLLBACK)
        return answer

    def set_policy(self, folder: Path, version: int, sha256: str) -> PolicySwap:
        """Make a checkpoint in a folder of the server's machine the live target."""
        answer: PolicySwap = self._call(_set_policy(folder, version, sha256))
        return answer

    def set_cores(self, cores: int) -> CoresStatus:
        """Have the model compute on so many of the server's cores, on a CPU."""
        answer: CoresStatus = self._call(_set_cores(cores))
        return answer

    def purge(self, tenant: str) -> Purged:
        """Delete all that is kept of a tenant's traffic; an error with status 503 means not yet."""
        answer: Purged = self._call(_purge(tenant))
        return answer

    def feed(self, history_s: int | None = None) -> Iterator[FeedEvent]:
        """A History of the last ``history_s`` seconds, then a Sample a second and every Change.

        It ends when the server ends it.
        """
        parser = FeedParser()
        try:
            with self._http.stream(**_feed(history_s)) as response:
                if response.is_error:
                    raise _refusal(response.status_code, response.read())
                for line in response.iter_lines():
                    if (event := parser.line(line)) is not None:
                        yield event
        except httpx.HTTPError as error:
            raise _unreachable(self._url, error) from None
        except msgspec.DecodeError as error:
            raise PacelineAPIError(f"the feed sent what this client cannot read: {error}") from None

    def close(self) -> None:
        self._http.close()

    def _call(self, call: _Call) -> Any:
        try:
            return call.answer(self._http.request(**call.arguments))
        except httpx.HTTPError as error:
            raise _unreachable(self._url, error) from None


class AsyncRoutes:
    """As Routes, for use in one event loop."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """``base_url`` ends in ``/v1``."""
        self._url = base_url
        self._http = httpx.AsyncClient(
            base_url=f"{base_url}/paceline/",
            headers={"authorization": f"Bearer {api_key}"},
            transport=httpx.AsyncHTTPTransport(retries=CONNECT_RETRIES)
            if is_local(base_url)
            else None,
            trust_env=not is_local(base_url),
        )

    async def status(self) -> Status:
        answer: Status = await self._call(STATUS)
        return answer

    async def drafts(self) -> Drafts:
        answer: Drafts = await self._call(DRAFTS)
        return answer

    async def history(self) -> list[LiveChange]:
        """What was live when, and why it changed, oldest first."""
        answer: Changes = await self._call(HISTORY)
        return answer.changes

    async def policy(self) -> PolicyState:
        answer: PolicyState = await self._call(POLICY)
        return answer

    async def activate(self, version: int) -> Activated:
        """Make a draft version live."""
        answer: Activated = await self._call(_activate(version))
        return answer

    async def rollback(self) -> Activated:
        """Make the draft version that was live before live again."""
        answer: Activated = await self._call(ROLLBACK)
        return answer

    async def set_policy(self, folder: Path, version: int, sha256: str) -> PolicySwap:
        """Make a checkpoint in a folder of the server's machine the live target."""
        answer: PolicySwap = await self._call(_set_policy(folder, version, sha256))
        return answer

    async def set_cores(self, cores: int) -> CoresStatus:
        """Have the model compute on so many of the server's cores, on a CPU."""
        answer: CoresStatus = await self._call(_set_cores(cores))
        return answer

    async def purge(self, tenant: str) -> Purged:
        """Delete all that is kept of a tenant's traffic; an error with status 503 means not yet."""
        answer: Purged = await self._call(_purge(tenant))
        return answer

    async def feed(self, history_s: int | None = None) -> AsyncIterator[FeedEvent]:
        """A History of the last ``history_s`` seconds, then a Sample a second and every Change.

        It ends when the server ends it.
        """
        parser = FeedParser()
        try:
            async with self._http.stream(**_feed(history_s)) as response:
                if response.is_error:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if (event := parser.line(line)) is not None:
                        yield event
        except httpx.HTTPError as error:
            raise _unreachable(self._url, error) from None
        except msgspec.DecodeError as error:
            raise PacelineAPIError(f"the feed sent what this client cannot read: {error}") from None

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, call: _Call) -> Any:
        try:
            return call.answer(await self._http.request(**call.arguments))
        except httpx.HTTPError as error:
            raise _unreachable(self._url, error) from None
