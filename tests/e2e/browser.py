"""The Chromium that the tests of the dashboard drive: the system's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Playwright

CHROMIUM = Path("/usr/bin/chromium")

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def launched(playwright: Playwright) -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.fail(f"{CHROMIUM} is missing; install it: apt-get install chromium")
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=FLAGS)
    try:
        yield browser
    finally:
        browser.close()
