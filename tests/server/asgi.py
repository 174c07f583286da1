"""Plain ASGI requests, for apps that are tested without a server."""

from __future__ import annotations

from typing import Any


async def call(app: Any, scope: dict[str, Any], body: bytes = b"") -> list[dict[str, Any]]:
    """Every message that the app sends for one request."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


def http(path: str = "/", method: str = "GET", **headers: str) -> dict[str, Any]:
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
    }  # fmt: skip
