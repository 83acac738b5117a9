"""The dashboard's page: read-only, self-contained, loopback only, and right in a real browser, dark and on a phone."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from dflash_serve.errors import UsageError
from dflash_serve.observe import metrics
from dflash_serve.observe.gpu import Gpu
from dflash_serve.observe.live import Watcher
from dflash_serve.observe.page import PageServer, page

from .browser import Browser
from .replay import Replay, tiny

H200 = Gpu(0, "NVIDIA H200", "GPU-1", 98 * 2**30, 140 * 2**30, 512.3, 700.0, 0.87, 61.0)
BAND = "dflash:expected_acceptance_length_min 2.2\ndflash:expected_acceptance_length_max 8\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Replay]:
    made = tiny(step=2.0, gauges=BAND)
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(server: Replay) -> Iterator[str]:
    watcher = Watcher(lambda: metrics.scrape(server.url), lambda: (H200,))
    with PageServer(watcher, interval=0.5, port=0, source=server.url) as made:
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        yield made.url
        made.close()
        thread.join(10)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (390, False), (390, True)])
def test_it_is_right_in_a_browser(served: str, browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    browser.look_as(width=width, height=800, dark=dark)
    browser.open(served)
    browser.until("document.querySelectorAll('#positions .row').length === 7")
    browser.until("document.querySelectorAll('.chart canvas').length === 4")
    text = browser.value("document.body.innerText")
    assert "2.41 tokens a verification" in text
    assert "band 2.2 to 8" in text
    assert "4 running, 2 waiting" in text
    assert "98.0 of 140 GiB, 512 W" in text
    assert browser.value("document.getElementById('acceptance').className") == "value good"
    # Nothing sticks out to the right, and nothing but this page was loaded.
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value("performance.getEntriesByType('resource').every(e => e.name.endsWith('/data.json'))")
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 17, 21)" if dark else "rgb(255, 255, 255)")
    # The curve is drawn: its canvas holds more than the band and the grid.
    assert browser.value("charts.output_tok_s.data[1].filter(v => v > 0).length") >= 1
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert [c for c in browser.complaints if "favicon" not in c] == []


def test_contrast_of_text_is_readable(served: str, browser: Browser) -> None:
    """WCAG's 4.5 to 1 for the text colours on the cards, in both schemes."""
    for dark in (False, True):
        browser.look_as(width=1100, height=800, dark=dark)
        browser.open(served)
        browser.until("typeof css === 'function'")
        card = _luminance(browser.value("css('--card')"))
        for name in ("--text", "--dim", "--good", "--bad"):
            color = _luminance(browser.value(f"css('{name}')"))
            contrast = (max(card, color) + 0.05) / (min(card, color) + 0.05)
            assert contrast >= 4.5, (name, dark, contrast)


def _luminance(color: str) -> float:
    parts = (
        [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        if len(color) == 7
        else [int(c, 16) / 15 for c in color[1:]]
    )
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_lost_server_is_marked(served: str, server: Replay, browser: Browser) -> None:
    browser.look_as(width=1100, height=800, dark=False)
    browser.open(served)
    server.fault = 503
    try:
        browser.until("document.getElementById('state').textContent.includes('no answer for')")
        assert browser.value("document.getElementById('state').className") == "bad"
    finally:
        server.fault = None
    browser.until("document.getElementById('state').className === ''")


def test_a_text_from_the_server_cannot_become_markup(browser: Browser, tmp_path: Path) -> None:
    """A model may be named anything."""
    name = "<img src=x onerror=document.title=1>"
    evil = tiny(step=1.0)
    evil._rows = [(series.replace('model_name="tiny"', f'model_name="{name}"'), v, g) for series, v, g in evil._rows]
    try:
        with PageServer(Watcher(lambda: metrics.scrape(evil.url), tuple), interval=0.5, port=0, source="x") as made:
            thread = threading.Thread(target=made.run, daemon=True)
            thread.start()
            browser.open(made.url)
            browser.until("document.getElementById('model').textContent.includes('onerror')")
            assert browser.value("document.images.length") == 0
            made.close()
            thread.join(10)
    finally:
        evil.close()


def test_it_answers_this_machine_only_and_only_reads(served: str) -> None:
    good = requests.get(served, timeout=5)
    assert good.status_code == 200
    assert "default-src 'none'" in good.headers["Content-Security-Policy"]
    assert requests.get(served, headers={"Host": "evil.example"}, timeout=5).status_code == 421
    assert requests.post(served, data="x", timeout=5).status_code == 501
    assert requests.get(served + "../etc/passwd", timeout=5).status_code == 404
    assert requests.head(served, timeout=5).text == ""
    assert served.startswith("http://127.0.0.1:")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page().decode()
    outside = re.findall(r"""(?:src|href|url\()\s*=?\s*["']?(https?:[^"')\s]+)""", text)
    assert outside == []
    assert "uPlot (v1.6.32)" in text
    assert len(text) < 100_000


def test_a_taken_port_is_refused(served: str, server: Replay) -> None:
    port = int(served.rstrip("/").rsplit(":", 1)[1])
    with pytest.raises(UsageError, match="can't be used"):
        PageServer(Watcher(lambda: metrics.scrape(server.url), tuple), interval=1, port=port, source="x")


def test_a_tab_that_is_closed_while_it_loads_is_no_error(served: str, capfd: pytest.CaptureFixture[str]) -> None:
    address = ("127.0.0.1", int(served.rstrip("/").rsplit(":", 1)[1]))
    for _ in range(20):
        with socket.create_connection(address) as tab:
            tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            tab.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert requests.get(served, timeout=5).status_code == 200
    assert capfd.readouterr().err == ""


def test_an_error_of_the_looking_ends_the_page(server: Replay) -> None:
    """Figures that no longer move would look like a quiet server."""
    watcher = Watcher(lambda: metrics.scrape(server.url), tuple)
    with PageServer(watcher, interval=0.1, port=0, source="x") as made:
        watcher._gpus = lambda: 1 / 0  # type: ignore[assignment,return-value]
        with pytest.raises(ZeroDivisionError):
            made.run()
