"""The keys file: what is read is what was written, and what cannot be trusted is refused."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.keyring import LOOK_EVERY_S, KeyRing
from server.keys import (
    KeyEntry,
    Keys,
    KeysError,
    TenantRules,
    append_key,
    digest_of,
    new_key,
    read_keys,
)

NAMES = st.from_regex(r"[A-Za-z0-9._@-]{1,64}", fullmatch=True)
LIMITS = st.none() | st.integers(1, 10**12)
RULES = st.builds(
    TenantRules,
    learn=st.sampled_from(["opt-out", "opt-in", "never"]),
    requests_per_minute=LIMITS,
    tokens_per_minute=LIMITS,
    concurrent_requests=LIMITS,
    priority=st.integers(-100, 100),
    replay_share=st.floats(0.01, 1),
)
ENTRIES = st.builds(
    KeyEntry,
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    tenant=NAMES,
    role=st.sampled_from(["tenant", "gateway", "monitor", "admin"]),
    learn=st.booleans(),
    expires=st.none()
    | st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(
        lambda at: at.replace(microsecond=0, tzinfo=UTC)
    ),
)


@given(
    added=st.lists(
        st.tuples(ENTRIES, RULES), unique_by=(lambda a: a[0].sha256, lambda a: a[0].tenant)
    )
)
def test_what_was_added_is_read_back(tmp_path_factory, added):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    for entry, rules in added:
        append_key(path, entry, rules)
    if added:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        found = read_keys(path)
        assert found == Keys([entry for entry, _ in added], {e.tenant: r for e, r in added})


def test_what_stood_in_the_file_stays_as_it_was(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("# ours\n[tenants.a]\npriority = 3 # urgent")
    path.chmod(0o600)
    append_key(path, KeyEntry(sha256="0" * 64, tenant="a"), None)
    assert path.read_text().startswith("# ours\n[tenants.a]\npriority = 3 # urgent\n")
    assert read_keys(path).rules("a").priority == 3
    with pytest.raises(KeysError, match="has rules in"):
        append_key(path, KeyEntry(sha256="1" * 64, tenant="a"), TenantRules())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o606, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused_in_one_line(tmp_path, mode):
    path = tmp_path / "keys.toml"
    path.write_text("")
    path.chmod(mode)
    with pytest.raises(KeysError, match=r"^others can .* run: chmod 600 \S+$"):
        read_keys(path)


@pytest.mark.parametrize(
    "text",
    [
        "[[keys]]\nsha256 = 'abc'",
        "[[keys]]\ntenant = 'a'",
        f"[[keys]]\nsha256 = '{'0' * 64}'\nadmin = true",
        f"[[keys]]\nsha256 = '{'0' * 64}'\nrole = 'root'",
        f"[[keys]]\nsha256 = '{'0' * 64}'\ntenant = 'a b'",
        f"[[keys]]\nsha256 = '{'0' * 64}'\n[[keys]]\nsha256 = '{'0' * 64}'",
        "[tenants.a]\nrequests_per_minute = 0",
        "[tenants.a]\nlearn = true",
        "[tenants.a]\nreplay_share = 0.0",
        "[tenants.'a b']\n",
        "[tenants",
        "\xff",
    ],
)
def test_a_file_that_is_not_understood_is_refused_whole(tmp_path, text):
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(KeysError) as caught:
        read_keys(path)
    assert "\n" not in str(caught.value)


def test_keys_are_random_and_long():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 43 for key in keys)


# --- the file changes ---


def write(path: Path, *keys: str) -> None:
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_text("".join(f"[[keys]]\nsha256 = '{digest_of(key)}'\n" for key in keys))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_EVERY_S
        return self.now


def holds(ring: KeyRing, key: str) -> bool:
    return ring.find(bytes.fromhex(digest_of(key))) is not None


def test_a_changed_file_is_in_force_without_a_restart(tmp_path):
    path = tmp_path / "keys.toml"
    write(path, "one")
    ring = KeyRing(path, Clock())
    heard: list[int] = []
    ring.on_change.append(lambda: heard.append(1))
    assert (holds(ring, "one"), holds(ring, "two")) == (True, False)
    write(path, "two")
    assert (holds(ring, "one"), holds(ring, "two")) == (False, True)
    assert heard == [1]


@pytest.mark.parametrize("damage", ["malformed", "gone", "readable by all"])
def test_a_file_that_breaks_leaves_the_last_good_keys_in_force(tmp_path, damage):
    path = tmp_path / "keys.toml"
    write(path, "one")
    ring = KeyRing(path, Clock())
    if damage == "malformed":
        path.write_text("[[keys")
    elif damage == "gone":
        path.unlink()
    else:
        write(path, "two")
        path.chmod(0o644)
    assert holds(ring, "one")
    assert not holds(ring, "two")
    write(path, "two")
    assert holds(ring, "two")
    assert not holds(ring, "one")


def test_the_file_is_not_looked_at_for_every_request(tmp_path):
    path = tmp_path / "keys.toml"
    write(path, "one")
    ring = KeyRing(path, lambda: 5.0)
    write(path, "two")
    assert holds(ring, "one")
