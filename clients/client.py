"""``PacelineClient`` and ``AsyncPacelineClient``: the ``openai`` package's clients, and our routes.

    client = PacelineClient()                                  # http://127.0.0.1:8000
    client.chat.completions.create(...)                        # as ever
    client.for_requests(learn=False, usage=True).chat.completions.create(...)
    client.paceline.status().draft.live

Inference raises what the ``openai`` package raises and is retried as it does; our routes raise
PacelineAPIError.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any, Self

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from clients.answers import PacelineUsage, usage_of
from clients.routes import AsyncRoutes, PacelineAPIError, Routes, is_local

__all__ = [
    "AsyncPacelineClient",
    "PacelineAPIError",
    "PacelineClient",
    "PacelineUsage",
    "request_headers",
    "usage_of",
]

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "PACELINE_API_KEY"


def request_headers(
    *, learn: bool | None = None, tenant: str | None = None, usage: bool | None = None
) -> dict[str, str]:
    """The headers of a request, for ``extra_headers``; None leaves a thing as the server has it.

    ``learn``: whether the drafter may learn from it. ``tenant``: whose it is, where the server trusts the
    caller to say so. ``usage``: whether the answer's usage lists what each draft version did (``usage_of``).
    """
    headers = {}
    if learn is not None:
        headers["x-paceline-learn"] = "true" if learn else "false"
    if tenant is not None:
        headers["x-paceline-tenant"] = tenant
    if usage is not None:
        headers["x-paceline-usage"] = "true" if usage else "false"
    return headers


def openai_url(url: str) -> str:
    """A server's address with the ``/v1`` that OpenAI clients want."""
    bare = url.rstrip("/")
    return bare if bare.endswith("/v1") else f"{bare}/v1"


def _key(given: Any) -> Any:
    """OPENAI_API_KEY is not looked at: that key is another service's."""
    return given or os.environ.get(KEY_VARIABLE) or "none"


class PacelineClient(OpenAI):
    """An ``openai.OpenAI`` for a Paceline server; ``paceline`` has the server's own routes.

    ``base_url`` with or without ``/v1``. ``api_key`` defaults to the environment's PACELINE_API_KEY.
    ``options`` are those of ``openai.OpenAI``.
    """

    def __init__(self, base_url: Any = DEFAULT_URL, *, api_key: Any = None, **options: Any) -> None:
        url = openai_url(str(base_url))
        options["http_client"] = options.get("http_client") or DefaultHttpxClient(
            trust_env=not is_local(url)
        )
        super().__init__(base_url=url, api_key=_key(api_key), **options)

    @cached_property
    def paceline(self) -> Routes:
        return Routes(str(self.base_url).rstrip("/"), self.api_key)

    def for_requests(
        self, *, learn: bool | None = None, tenant: str | None = None, usage: bool | None = None
    ) -> Self:
        """This client with every request as ``request_headers`` says; the connections are shared."""
        headers = request_headers(learn=learn, tenant=tenant, usage=usage)
        return self.with_options(default_headers=headers)

    def close(self) -> None:
        super().close()
        if "paceline" in self.__dict__:
            self.paceline.close()


class AsyncPacelineClient(AsyncOpenAI):
    """As PacelineClient, on ``openai.AsyncOpenAI``."""

    def __init__(self, base_url: Any = DEFAULT_URL, *, api_key: Any = None, **options: Any) -> None:
        url = openai_url(str(base_url))
        options["http_client"] = options.get("http_client") or DefaultAsyncHttpxClient(
            trust_env=not is_local(url)
        )
        super().__init__(base_url=url, api_key=_key(api_key), **options)

    @cached_property
    def paceline(self) -> AsyncRoutes:
        return AsyncRoutes(str(self.base_url).rstrip("/"), self.api_key)

    def for_requests(
        self, *, learn: bool | None = None, tenant: str | None = None, usage: bool | None = None
    ) -> Self:
        """This client with every request as ``request_headers`` says; the connections are shared."""
        headers = request_headers(learn=learn, tenant=tenant, usage=usage)
        return self.with_options(default_headers=headers)

    async def close(self) -> None:
        await super().close()
        if "paceline" in self.__dict__:
            await self.paceline.close()
