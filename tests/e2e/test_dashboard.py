"""The dashboard in a real browser: what it shows, how it is used, and that it stays by itself."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright
from safetensors.torch import load_file

from rlcore.weights import WEIGHTS
from tests.conftest import Served
from tests.e2e.browser import launched
from tests.e2e.prompts import PROMPTS
from tests.server.stand_in import StandIn
from tests.server.traffic import Traffic

KEY = "sk-monitor"
SPEEDUP = re.compile("^\\d\\.\\d\\d\N{MULTIPLICATION SIGN}$")
LONG_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright, launched(playwright) as browser:
        yield browser


class Watched:
    """A page, with what it complained of and whom it asked."""

    def __init__(self, browser: Browser, url: str, **options: object) -> None:
        self.context = browser.new_context(**{"reduced_motion": "reduce"} | options)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(LONG_MS)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._request)
        self.url = url
        self.page.goto(f"{url}/dashboard")

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _request(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)

    def live(self) -> None:
        expect(self.page.locator("#link-text")).to_have_text("Live", timeout=LONG_MS)

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with StandIn(tmp_path_factory.mktemp("stand-in"), past_s=600) as server:
        yield server


@pytest.fixture
def watched(browser: Browser, stand_in: StandIn) -> Iterator[Watched]:
    watched = Watched(browser, stand_in.url, viewport={"width": 1280, "height": 900})
    watched.live()
    yield watched
    assert watched.complaints == []
    assert watched.hosts == {urlsplit(stand_in.url).netloc}
    watched.close()


def painted(page: Page, chart: int) -> int:
    """Pixels of a chart's canvas that are not empty."""
    return page.evaluate(
        """(chart) => {
            const canvas = document.querySelectorAll("#charts canvas")[chart];
            const copy = new OffscreenCanvas(canvas.width, canvas.height)
                .getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, 0, 0);
            const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
            let seen = 0;
            for (let i = 3; i < data.length; i += 4) seen += data[i] > 0;
            return seen;
        }""",
        chart,
    )


def test_the_speed_up_is_the_first_thing_and_has_its_two_rates(watched: Watched):
    page = watched.page
    expect(page.locator("#speedup")).to_have_text(SPEEDUP)
    expect(page.locator("#speedup-note")).to_contain_text("with no speculation at the same traffic")
    expect(page.locator("#speedup-said")).to_contain_text("Speed-up")
    size = page.locator("#speedup").evaluate("e => parseFloat(getComputedStyle(e).fontSize)")
    assert size > 50
    assert all(painted(page, chart) > 1500 for chart in range(4))
    assert page.locator("#charts .none:visible").count() == 0


def test_learner_traces_and_tenants_are_told(watched: Watched):
    page = watched.page
    expect(page.locator("#learner-state")).to_have_text("training")
    expect(page.locator("#learner")).to_contain_text("Trained positions")
    expect(page.locator("#traces")).to_contain_text("opted out")
    expect(page.locator("#tenants tbody th")).to_have_text(["acme", "globex", "initech"])


def test_a_version_is_activated_by_keyboard_alone_and_the_swap_is_marked(watched: Watched):
    page = watched.page
    before = page.locator("#changes li").count()
    page.locator("#main").focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.version") == "5":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#confirm")).to_be_visible()
    expect(page.locator("#confirm-title")).to_have_text("Activate version 5?")
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    expect(page.locator("#versions tr[aria-current] th")).to_have_text("v3")
    assert page.evaluate("document.activeElement.dataset.version") == "5"
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("#result")).to_have_text(
        "Version 5 is live. The engine stood still for 31 ms."
    )
    expect(page.locator("#versions tr[aria-current] th")).to_have_text("v5")
    expect(page.locator("#changes li")).to_have_count(before + 1)
    expect(page.locator("#changes li").first).to_contain_text("swap to v5 from v3")

    page.locator("#rollback").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("#result")).to_contain_text("Version 3 is live")


def test_a_refused_version_says_why_and_changes_nothing(watched: Watched, stand_in: StandIn):
    page = watched.page
    live = page.locator("#versions tr[aria-current] th").inner_text()
    stand_in.swap_error = "read back something else"
    page.locator("button[data-version='1']").click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#result")).to_contain_text("Nothing was changed")
    expect(page.locator("#result")).to_contain_text("read back something else")
    stand_in.swap_error = None
    expect(page.locator("#versions tr[aria-current] th")).to_have_text(live)
    watched.complaints = [c for c in watched.complaints if "409" not in c]  # the browser's own word


@pytest.mark.parametrize("width", [360, 600, 761, 820, 1280])
def test_nothing_has_to_be_scrolled_sideways(browser: Browser, stand_in: StandIn, width: int):
    watched = Watched(browser, stand_in.url, viewport={"width": width, "height": 800})
    watched.live()
    page = watched.page
    expect(page.locator("#tenants tbody tr")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for table in ("#versions", "#tenants"):
        inner, outer = page.locator(table).evaluate(
            "t => [t.scrollWidth, t.parentElement.clientWidth]"
        )
        assert inner <= outer, table
    watched.close()


def test_the_theme_follows_the_system_and_can_be_chosen(browser: Browser, stand_in: StandIn):
    watched = Watched(browser, stand_in.url, color_scheme="dark")
    page = watched.page

    def ground() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = ground()
    button = page.locator("#theme")
    button.click()
    expect(button).to_have_text("Theme: light")
    light = ground()
    assert light != dark
    page.reload()
    assert ground() == light
    button.click()
    expect(button).to_have_text("Theme: dark")
    assert ground() == dark
    watched.close()


def test_text_can_be_read_in_both_themes(browser: Browser, stand_in: StandIn):
    """Contrast of 4.5 at least (WCAG 2.1, 1.4.3) for every colour that text has, on its card."""
    for scheme in ("light", "dark"):
        watched = Watched(browser, stand_in.url, color_scheme=scheme)
        ratios = watched.page.evaluate(
            """() => {
                const style = getComputedStyle(document.documentElement);
                const light = (name) => {
                    const hex = style.getPropertyValue(name).trim().slice(1);
                    const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
                        .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
                };
                const pairs = [["--text", "--card"], ["--soft", "--card"], ["--soft", "--ground"],
                    ["--accent", "--card"], ["--accent", "--accent-soft"], ["--warn", "--warn-soft"],
                    ["--on-accent", "--accent"], ["--warn", "--card"], ["--soft", "--grid"]];
                return pairs.map(([a, b]) => {
                    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
                    return [`${a} on ${b}`, (x + 0.05) / (y + 0.05)];
                });
            }"""
        )
        assert [pair for pair in ratios if pair[1] < 4.5] == [], scheme
        watched.close()


def test_the_key_is_asked_for_kept_in_the_tab_and_never_in_an_address(
    browser: Browser, tmp_path: Path
):
    with StandIn(tmp_path, key=KEY) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        addresses: list[str] = []
        page.on("request", lambda request: addresses.append(request.url))
        expect(page.locator("#key-dialog")).to_be_visible()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-why")).to_contain_text("The key was not taken")
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        watched.live()
        expect(page.locator("#speedup")).to_have_text(SPEEDUP)
        assert page.evaluate("Object.values(localStorage)") == []
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert not any(KEY in address for address in addresses)
        page.reload()
        watched.live()
        expect(page.locator("#key-dialog")).to_be_hidden()
        assert all("401" in complaint for complaint in watched.complaints), watched.complaints
        watched.close()


def test_a_server_that_goes_and_comes_back_is_found_again(browser: Browser, tmp_path: Path):
    first = StandIn(tmp_path)
    with first:
        watched = Watched(browser, first.url)
        watched.live()
        port = urlsplit(first.url).port
    expect(watched.page.locator("#link-text")).to_contain_text("trying again")
    assert watched.page.locator("#link").get_attribute("data-state") == "lost"
    with StandIn(tmp_path / "again", port=port or 0):
        watched.live()
        watched.close()


def test_what_is_missing_is_said(browser: Browser, tmp_path: Path):
    idle = Traffic(streams=0)
    with StandIn(tmp_path, traffic=idle, learner=False, versions=1) as server:
        watched = Watched(browser, server.url)
        watched.live()
        page = watched.page
        expect(page.locator("#speedup-note")).to_contain_text("No tokens were served")
        expect(page.locator("#learner-empty")).to_contain_text("--learner off")
        expect(page.locator("#traces-empty")).to_contain_text("Nothing has been captured yet")
        expect(page.locator("#changes-empty")).to_be_visible()
        expect(page.locator("#rollback")).to_be_disabled()
        expect(page.locator("#charts .none:visible")).to_have_count(4)
        assert watched.complaints == []
        watched.close()


def test_an_unknown_speed_up_says_why(browser: Browser, tmp_path: Path):
    with StandIn(tmp_path, traffic=Traffic(measured=False)) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        expect(page.locator("#speedup-note")).to_contain_text("no step without drafts")
        expect(page.locator("#speedup")).to_have_text("\N{EN DASH}")
        watched.close()


# --- on a real server ---


class Load:
    """Requests, one after the other, for as long as the block lasts."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._ending.is_set():
            number += 1
            self._served.openai.completions.create(
                model=self._served.model, prompt=f"{number}. {PROMPTS[number % len(PROMPTS)]}",
                max_tokens=64, temperature=0.0,
                extra_headers={"x-paceline-tenant": "acme"}, extra_body={"ignore_eos": True},
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.on_server("shipped")
def test_a_real_servers_dashboard_shows_its_traffic_and_swaps_its_drafter(
    served: Served, browser: Browser
):
    store = served.store
    live = served.server.status()["draft"]["live"]
    version = max(store.versions()) + 1
    manifest = msgspec.structs.replace(store.manifest(live), version=version, parent=live)
    config = msgspec.json.decode((store.folder(live) / "config.json").read_bytes())
    store.publish(load_file(store.folder(live) / WEIGHTS), config, manifest)
    url = served.server.openai_url.removesuffix("/v1")
    watched = Watched(browser, url, viewport={"width": 1280, "height": 900})
    page = watched.page
    with Load(served):
        watched.live()
        expect(page.locator("#speedup")).to_have_text(SPEEDUP, timeout=60_000)
        expect(page.locator("#tenants")).to_contain_text("acme")
        button = page.locator(f"button[data-version='{version}']")
        button.focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(page.locator("#result")).to_contain_text(
            f"Version {version} is live", timeout=60_000
        )
        expect(page.locator("#changes li").first).to_contain_text(f"swap to v{version}")
        expect(page.locator("#charts .none:visible")).to_have_count(0, timeout=60_000)
        assert all(painted(page, chart) > 500 for chart in range(4))
    assert watched.complaints == []
    assert watched.hosts == {urlsplit(url).netloc}
    watched.close()
    # Others share this server, and begin with the drafter that it came with.
    assert served.server.post(f"/v1/paceline/drafts/{live}/activate").json()["live"] == live
