"""The keys file: who may ask, as which tenant, and what each tenant is allowed.

TOML. Keys stand in it as SHA-256 digests, so the file alone opens nothing; a plain hash is enough
because keys are 256 random bits, which nobody can try through.

    [tenants.team-a]
    learn = "opt-out"            # learned from unless a request says no; "opt-in"; "never"
    requests_per_minute = 600
    tokens_per_minute = 200_000  # prompt and output
    concurrent_requests = 8
    priority = 0                 # lower is served first, -100 to 100
    replay_share = 0.3           # of what is learned from, at most

    [[keys]]
    sha256 = "64 hex digits"
    tenant = "team-a"
    role = "tenant"              # "gateway", "monitor", "admin"
    learn = false                # nothing that comes with this key is learned from
    expires = 2027-01-01T00:00:00Z
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rlcore.errors import PacelineError

KEY_BYTES = 32
KEY_PREFIX = "pl-"
TENANT_PATTERN = "[A-Za-z0-9._@-]{1,64}"
DEFAULT_TENANT = "default"

Learn = Literal["opt-out", "opt-in", "never"]
Role = Literal["tenant", "gateway", "monitor", "admin"]
TenantName = Annotated[str, Meta(pattern=f"^{TENANT_PATTERN}$")]
Limit = Annotated[int, Meta(ge=1, le=10**12)]


class KeysError(PacelineError):
    """A keys file that cannot be used."""


class TenantRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tenant may do. A limit that is None does not exist."""

    learn: Learn = "opt-out"
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Prompt and output tokens together."""
    concurrent_requests: Limit | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Lower is served first."""
    replay_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The most that this tenant may be of what is learned from."""


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: TenantName = DEFAULT_TENANT
    role: Role = "tenant"
    learn: bool = True
    """False: nothing that comes with this key is learned from, whatever the request says."""
    expires: datetime | None = None

    def valid_at(self, now: float) -> bool:
        """``now``: seconds since the epoch."""
        return self.expires is None or now < self.expires.timestamp()


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole keys file."""

    keys: list[KeyEntry] = []
    tenants: dict[TenantName, TenantRules] = {}

    def rules(self, tenant: str) -> TenantRules:
        """Those of a tenant that the file does not name are the defaults."""
        return self.tenants.get(tenant, TenantRules())


def read_keys(path: Path) -> Keys:
    """Raises KeysError, in one line, for a file that cannot be read, trusted or understood."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except OSError as error:
        raise KeysError(f"cannot read the keys file {path}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise KeysError(f"others can read or write the keys file {path}; run: chmod 600 {path}")
    try:
        keys = msgspec.convert(tomllib.loads(content.decode()), Keys)
    except (ValueError, RecursionError) as error:  # of the encoding, of TOML, of a field
        raise KeysError(f"the keys file {path} cannot be used: {error}") from None
    digests = [entry.sha256 for entry in keys.keys]
    if len(set(digests)) != len(digests):
        raise KeysError(f"the keys file {path} has the same key twice")
    return keys


def digest_of(key: str) -> str:
    """What stands in the file for a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def append_key(path: Path, entry: KeyEntry, rules: TenantRules | None) -> None:
    """Add an entry at the end of a keys file, which is made if need be; the rest stays as it is.

    ``rules`` of a tenant that has none yet. Raises KeysError.
    """
    before, known = "", Keys()
    if path.exists():
        known = read_keys(path)
        before = path.read_text()
        if before and not before.endswith("\n"):
            before += "\n"
    text = before
    if rules is not None:
        if entry.tenant in known.tenants:
            raise KeysError(
                f"tenant {entry.tenant!r} has rules in {path} already; change them there"
            )
        text += _table(f"tenants.{_quoted(entry.tenant)}", rules, TenantRules())
    text += _table("[keys]", entry, None)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(text.lstrip("\n"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise KeysError(f"cannot write {path}: {error.strerror}") from None


def _table(name: str, values: msgspec.Struct, defaults: msgspec.Struct | None) -> str:
    lines = [f"\n[{name}]"]
    known = {} if defaults is None else msgspec.structs.asdict(defaults)
    for field, value in msgspec.structs.asdict(values).items():
        if value is None or (field in known and known[field] == value):
            continue
        lines.append(f"{field} = {_literal(value)}")
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """A TOML string of a tenant's name, a digest or a word: nothing in them needs an escape."""
    return f'"{text}"'
