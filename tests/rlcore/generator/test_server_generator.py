"""Whatever a server answers becomes a completion or one line that says what is wrong."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rlcore.generator import server as module
from rlcore.generator.base import GeneratorError
from rlcore.generator.server import ServerGenerator
from rlcore.records.trace import Sampling

T = TypeVar("T")
DRAFT = {"x-paceline-draft-version": "3"}


def an_answer(**changed: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [5, 6, 7],
        "logprobs": {"token_logprobs": [-0.5, 1e-7, -2.0]},
        "finish_reason": "length",
    }
    usage = {"paceline": {"policy_versions": [[[0, 1], [2, 4]]]}}
    return {"choices": [{**choice, **changed}], "usage": usage}


@contextmanager
def answering(
    body: Any = None, status: int = 200, headers: dict[str, str] | None = None, hang: bool = False
) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives every request this answer; its URL, and what was asked."""
    asked: list[Any] = []
    release = threading.Event()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            asked.append((self.path, dict(self.headers), self.rfile.read(length)))
            if hang:
                release.wait(30)
                return
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def asking(
    url: str, ask: Callable[[ServerGenerator], Awaitable[T]], api_key: str | None = None
) -> T:
    async def run() -> T:
        generator = ServerGenerator(url, "policy", 600.0, api_key)
        try:
            return await ask(generator)
        finally:
            await generator.close()

    return asyncio.run(run())


def complete(generator: ServerGenerator) -> Awaitable[Any]:
    return generator.complete([1, 2], Sampling(temperature=0.7), 9, priority=-4)


def publish(generator: ServerGenerator) -> Awaitable[Any]:
    return generator.publish(5, Path("/policies/5"), "ab" * 32)


def status(generator: ServerGenerator) -> Awaitable[Any]:
    return generator.status()


def refused(url: str, ask: Callable[[ServerGenerator], Awaitable[Any]]) -> GeneratorError:
    with pytest.raises(GeneratorError) as error:
        asking(url, ask)
    assert "\n" not in str(error.value)
    assert url in str(error.value)
    return error.value


def test_tokens_go_in_and_come_out_with_their_versions():
    with answering(an_answer(), headers=DRAFT) as (url, asked):
        done = asking(url, complete, api_key="secret")
    assert done.token_ids == [5, 6, 7]
    assert done.logprobs == [-0.5, 0.0, -2.0], "a rounding above 0 is none"
    assert done.policy_versions == [1, 1, 4]
    assert (done.finish_reason, done.draft_version) == ("length", 3)
    path, headers, body = asked[0]
    sent = json.loads(body)
    assert path == "/v1/completions"
    assert (sent["prompt"], sent["max_tokens"], sent["temperature"]) == ([1, 2], 9, 0.7)
    assert (sent["repetition_penalty"], sent["min_p"]) == (1.0, 0.0), "not the model's defaults"
    assert (sent["top_k"], sent["priority"], sent["model"]) == (-1, -4, "policy")
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-paceline-learn"] == "1"


def test_an_empty_completion_is_one():
    answer = an_answer(token_ids=[], logprobs={"token_logprobs": []})
    answer["usage"]["paceline"]["policy_versions"] = [[]]
    with answering(answer, headers=DRAFT) as (url, _):
        assert asking(url, complete).token_ids == []


def without(key: str) -> dict[str, Any]:
    answer = an_answer()
    del answer["choices"][0][key]
    return answer


def versions(value: Any) -> dict[str, Any]:
    answer = an_answer()
    answer["usage"]["paceline"]["policy_versions"] = value
    return answer


@pytest.mark.parametrize(
    "answer",
    [
        without("token_ids"),
        without("logprobs"),
        without("finish_reason"),
        an_answer(logprobs=None),
        an_answer(logprobs={"token_logprobs": [-1.0, None, -1.0]}),
        an_answer(logprobs={"token_logprobs": [-1.0]}),
        an_answer(logprobs={"token_logprobs": [-1.0, math.nan, -1.0]}),
        an_answer(logprobs={"token_logprobs": [-1.0, -math.inf, -1.0]}),
        versions([]),
        versions([[]]),
        versions([[[1, 0]]]),
        versions([[3]]),
        {"choices": [], "usage": {}},
        {"choices": an_answer()["choices"], "usage": None},
        {},
        [],
        3,
    ],
)
def test_an_answer_without_what_a_rollout_needs_is_refused(answer):
    with answering(answer, headers=DRAFT) as (url, _):
        error = refused(url, complete)
    assert "Paceline server" in str(error)
    assert not error.gone


@pytest.mark.parametrize("headers", [{}, {"x-paceline-draft-version": "none"}])
def test_an_answer_without_its_draft_version_is_refused(headers):
    with answering(an_answer(), headers=headers) as (url, _):
        assert "Paceline server" in str(refused(url, complete))


@pytest.mark.parametrize("ask", [publish, status])
@pytest.mark.parametrize("answer", [{}, [], None, {"target": 3, "acceptance": {"total": {}}}])
def test_another_servers_publication_or_status_is_refused(ask, answer):
    with answering(answer) as (url, _):
        assert "Paceline server" in str(refused(url, ask))


def test_a_publication_and_a_status_are_read():
    with answering({"stall_seconds": 0.5, "frozen_tokens": 40}) as (url, asked):
        published = asking(url, publish)
    assert (published.version, published.stall_s, published.reprefilled) == (5, 0.5, 40)
    body = json.loads(asked[0][2])
    assert body == {"version": 5, "folder": "/policies/5", "sha256": "ab" * 32}
    answer = {
        "target": {"id": "m-1", "version": 5},
        "draft": {"live": 2},
        "acceptance": {"total": {"emitted": 30, "steps": 10, "plain_steps": 4}},
    }
    with answering(answer) as (url, _):
        found = asking(url, status)
    assert (found.policy_version, found.draft_version, found.target_id) == (5, 2, "m-1")
    assert (found.emitted, found.draft_steps, found.plain_steps) == (30, 10, 4)


def test_cores_are_asked_for_and_a_refusal_keeps_its_words():
    with answering({"usable": 4, "allotted": 3, "threads": 3}) as (url, asked):
        asking(url, lambda generator: generator.compute_on(3))
    assert (asked[0][0], json.loads(asked[0][2])) == ("/v1/paceline/cores", {"cores": 3})
    with answering({"error": {"message": "on 1 to 4 cores"}}, status=409) as (url, _):
        error = refused(url, lambda generator: generator.compute_on(5))
    assert "on 1 to 4 cores" in str(error)
    assert not error.gone


@pytest.mark.parametrize("ask", [complete, publish, status])
@pytest.mark.parametrize("body", [b"<html>", b"", b"\xff\xfe\xff"])
def test_what_is_no_json_is_refused(ask, body):
    with answering(body, headers=DRAFT) as (url, _):
        assert "JSON" in str(refused(url, ask))


def test_an_error_keeps_the_servers_own_words():
    openai = {"error": {"message": "the prompt is too long", "type": "BadRequestError"}}
    with answering(openai, status=400) as (url, _):
        error = refused(url, complete)
    assert "/v1/completions: 400: the prompt is too long" in str(error)
    assert not error.gone


@pytest.mark.parametrize("body", [b"not found", {"detail": "x"}, {"error": "x"}, [], b"\xff"])
def test_an_error_of_any_other_form_has_its_status(body):
    with answering(body, status=404) as (url, _):
        assert ": 404: " in str(refused(url, complete))


@pytest.mark.parametrize("code", [500, 503])
def test_a_server_without_its_engine_is_gone(code):
    with answering({"error": {"message": "engine dead"}}, status=code) as (url, _):
        assert refused(url, complete).gone
        assert asking(url, lambda generator: generator.healthy()) is False


def test_a_server_that_answers_is_healthy():
    with answering(b"") as (url, asked):
        assert asking(url, lambda generator: generator.healthy()) is True
    assert asked[0][0] == "/ready"


def test_nobody_there_is_gone():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for ask in (complete, publish, status):
            assert refused(url, ask).gone


def test_a_connection_that_breaks_off_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drop() -> None:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.close()

        thread = threading.Thread(target=drop)
        thread.start()
        assert refused(f"http://127.0.0.1:{listener.getsockname()[1]}", complete).gone
        thread.join()


def test_a_server_that_hangs_is_given_up_at_the_deadline_and_is_not_gone(monkeypatch):
    monkeypatch.setattr(module, "STATUS_DEADLINE", 0.2)
    with answering({}, hang=True) as (url, _):
        error = refused(url, status)
    assert "/v1/paceline/status did not answer within" in str(error)
    assert not error.gone


def test_a_closed_generator_asks_nobody():
    async def run() -> None:
        generator = ServerGenerator("http://127.0.0.1:9", "policy", 600.0)
        await generator.close()
        with pytest.raises(GeneratorError) as error:
            await complete(generator)
        assert error.value.gone

    asyncio.run(run())
