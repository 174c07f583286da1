"""``paceline keys new``: a tenant's key; ``paceline keys curve``: a pair for an encrypted link."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import Field

from rlcore.curve import PUBLIC_SUFFIX, make_pair
from rlcore.errors import UsageError
from rlcore.home import Home
from rlcore.settings import CommonSettings, load
from server.keys import TENANT_PATTERN, KeyEntry, KeysError, Role, append_key, digest_of, new_key

KEYS_FILE = "keys.toml"


class NewKeySettings(CommonSettings):
    """Make a key. It is printed once; the keys file holds its digest only."""

    tenant: str = Field("default", description="Whose key it is")
    role: Role = Field(
        "tenant",
        description="'tenant': its own; 'gateway': names the tenant of each request; 'monitor': sees all "
        "figures; 'admin': changes what is served",
    )
    learn: bool = Field(True, description="Whether what comes with it may be learned from")
    expires_days: float | None = Field(
        None, gt=0, description="Days until it expires; default: never"
    )
    keys_file: Path | None = Field(
        None, description=f"The file; default: {KEYS_FILE} in the home folder"
    )


class CurveSettings(CommonSettings):
    """Make a pair of CURVE keys, for a server and a learner on different machines."""

    out: Path = Field(description="File of the pair; the public half goes beside it, as .pub")


def main(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name == "new":
        return _new(load(NewKeySettings, rest, "paceline keys new"))
    if name == "curve":
        return _curve(load(CurveSettings, rest, "paceline keys curve"))
    if name in ("-h", "--help"):
        print(
            "usage: paceline keys new --tenant NAME [flags]\n"
            "       paceline keys curve --out FILE\n\n"
            "paceline keys new --help lists its flags"
        )
        return 0
    raise UsageError("paceline keys what? There are: new, curve")


def _new(settings: NewKeySettings) -> int:
    path = settings.keys_file or Home(settings.home).root / KEYS_FILE
    key, expires = new_key(), None
    if settings.expires_days is not None:
        expires = (datetime.now(UTC) + timedelta(days=settings.expires_days)).replace(microsecond=0)
    if re.fullmatch(TENANT_PATTERN, settings.tenant) is None:
        raise KeysError("--tenant takes 1 to 64 letters, digits or . _ @ -")
    entry = KeyEntry(digest_of(key), settings.tenant, settings.role, settings.learn, expires)
    append_key(path, entry, None)
    print(key)
    print(f"paceline: {path} holds its digest; the key is shown only now", file=sys.stderr)
    return 0


def _curve(settings: CurveSettings) -> int:
    make_pair(settings.out)
    print(f"{settings.out}{PUBLIC_SUFFIX}")
    return 0
