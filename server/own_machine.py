"""What a server without a key, which listens on loopback only, takes from a browser on its machine.

Any page that a user of the machine opens can send requests to loopback, and one whose name is made to
resolve to it (DNS rebinding) can read the answers. Both show in the headers that the browser writes: the
page's own place in ``Origin``, the name that was asked for in ``Host``.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def stranger(headers: dict[bytes, bytes]) -> str | None:
    """Why a request comes from elsewhere, in words; None if nothing says so."""
    host = headers.get(b"host")
    if host is not None and not _is_here(f"//{host.decode('latin-1')}"):
        return f"without a key only this machine is served, and not by the name {_shown(host)}"
    origin = headers.get(b"origin")
    if origin is not None and not _is_here(origin.decode("latin-1")):
        return f"without a key only pages of this machine are served, not {_shown(origin)}"
    return None


def _is_here(url: str) -> bool:
    try:
        name = urlsplit(url).hostname
    except ValueError:
        return False
    if name is None:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _shown(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))
