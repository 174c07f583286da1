"""Pictures of the dashboard: ``python -m tests.e2e.screenshots FOLDER``, both themes at three widths."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.e2e.browser import launched
from tests.server.stand_in import StandIn

WIDTHS = {"phone": (360, 780), "tablet": (820, 1100), "desktop": (1280, 900)}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as home,
        StandIn(Path(home), past_s=900) as server,
        sync_playwright() as playwright,
        launched(playwright) as browser,
    ):
        for theme in ("light", "dark"):
            for name, (width, height) in WIDTHS.items():
                page = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=theme
                )
                page.goto(f"{server.url}/dashboard")
                page.wait_for_selector("#versions tbody tr")
                page.wait_for_timeout(2500)
                page.screenshot(path=folder / f"{theme}-{name}.png", full_page=True)
                page.screenshot(path=folder / f"{theme}-{name}-top.png")
                page.close()


if __name__ == "__main__":
    main()
