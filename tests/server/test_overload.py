"""How many requests there may be, how large, and how slow: places, rates and bodies without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import overload
from server.overload import LONGEST_RETRY, Body, Places, check_head, retry_after


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.floats(0, 1000))
def test_to_come_back_is_always_asked_within_bounds(waiting, ended, seconds):
    assert 1 <= retry_after(waiting, ended, seconds) <= LONGEST_RETRY


def test_half_the_line_at_the_measured_rate():
    assert retry_after(waiting=40, ended=60, seconds=30.0) == 10
    assert retry_after(waiting=0, ended=60, seconds=30.0) == 1
    assert retry_after(waiting=40, ended=2, seconds=30.0) == overload.FIRST_GUESS


@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.lists(st.tuples(st.booleans(), st.floats(0, 30)), max_size=60),
)
def test_never_more_inside_than_there_are_places_and_none_refused_while_one_is_free(
    running, waiting, events
):
    places, now = Places(running, waiting), 100.0
    inside = turned_away = 0
    for enters, passed in events:
        now += passed
        if enters:
            refusal = places.enter(now)
            assert (refusal is None) == (inside < running + waiting)
            inside += refusal is None
            if refusal is not None:
                turned_away += 1
                assert refusal.status == 429
                assert 1 <= refusal.retry_after <= LONGEST_RETRY
        elif inside:
            places.leave(now)
            inside -= 1
        assert places.taken == inside
    assert places.turned_away == turned_away


def test_the_rate_is_of_the_time_with_somebody_inside():
    """Two a second, however long nobody was there before."""
    places, now = Places(1, 20), 0.0
    assert places.enter(now) is None
    places.leave(now)
    now = 10_000.0
    for _ in range(21):
        assert places.enter(now) is None
    for _ in range(20):
        now += 0.5
        places.leave(now)
        assert places.enter(now) is None
    assert places.enter(now).retry_after == 5


def body_of(chunks: list[tuple[float, bytes]], most: int, more: bool = False) -> Body:
    """A body whose chunks come after so many seconds each."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        if not left:
            return {"type": "http.disconnect"}
        delay, chunk = left.pop(0)
        await asyncio.sleep(delay)
        return {"type": "http.request", "body": chunk, "more_body": bool(left) or more}

    return Body(receive, most)


async def read(body: Body) -> bytes:
    content = b""
    while True:
        message = await body()
        if message["type"] != "http.request":
            return content
        content += message["body"]
        if not message["more_body"]:
            return content


def test_a_body_within_the_limit_passes_as_it_is():
    async def run() -> None:
        body = body_of([(0, b"abc"), (0, b"def")], most=6)
        assert await read(body) == b"abcdef"
        assert body.refusal is None
        assert (await body())["type"] == "http.disconnect"

    asyncio.run(run())


def test_a_body_is_given_up_at_the_byte_that_is_too_many():
    async def run() -> None:
        body = body_of([(0, b"abc"), (0, b"d"), (0, b"never read")], most=3)
        assert await read(body) == b"abc"
        assert body.refusal.status == 413
        assert (await body())["type"] == "http.disconnect"

    asyncio.run(run())


def test_a_body_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overload, "BODY_DEADLINE", 0.2)

    async def run() -> None:
        body = body_of([(0.05, b"x")] * 100, most=1000)
        assert 0 < len(await read(body)) < 10
        assert body.refusal.status == 408

    asyncio.run(run())


def test_a_complete_body_has_no_deadline(monkeypatch: pytest.MonkeyPatch):
    """What is received then is only that the client has gone."""
    monkeypatch.setattr(overload, "BODY_DEADLINE", 0.05)

    async def run() -> None:
        body = body_of([(0, b"x"), (0.3, b"")], most=10)
        body._complete = False
        first = await body()
        assert first["body"] == b"x"
        body._complete = True
        await body()
        assert body.refusal is None

    asyncio.run(run())


def test_heads_that_are_too_long_or_announce_too_much_are_refused():
    fine = [(b"host", b"here"), (b"content-length", b"10")]
    assert check_head(fine, 10, 1000, 10) is None
    assert check_head(fine, 1, 1000, 10).status == 431
    assert check_head(fine, 10, 5, 10).status == 431
    assert check_head(fine, 10, 1000, 9).status == 413
    assert check_head([(b"content-length", b"9" * 4000)], 10, 9000, 10).status == 413
    assert check_head([(b"content-length", b"nonsense")], 10, 9000, 10) is None
