"""A report in a real browser, over WebDriver: everything is drawn, nothing is fetched, nothing spills."""

import base64
import io
import json
import shutil
import socket
import subprocess
import time
import urllib.request

import matplotlib.image
import numpy as np
import pytest

from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.evaluation.reports.report import write_report
from coca_mindspeed.evaluation.runs import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="no Chromium: apt-get install chromium chromium-driver"
    ),
]
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,900"),
)


class Browser:
    """The few WebDriver commands that are needed here."""

    def __init__(self, profile):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._base = f"http://127.0.0.1:{probe.getsockname()[1]}"
        port = self._base.rpartition(":")[2]
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(200):
            try:
                if self._call("GET", "/status")["ready"]:
                    break
            except OSError:
                time.sleep(0.1)
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        self._base += f"/session/{self._call('POST', '/session', {'capabilities': capabilities})['sessionId']}"

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
            return json.load(reply)["value"]

    def open(self, path):
        self._call("POST", "/url", {"url": path.as_uri()})

    def run(self, script):
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def screenshot(self):
        png = base64.b64decode(self._call("GET", "/screenshot"))
        return matplotlib.image.imread(io.BytesIO(png), format="png")[:, :, :3]

    def close(self):
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(10)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    rng = np.random.default_rng(0)
    runs = []
    for label in ("coca", "rlvr"):
        rows = []
        for dataset in ("gsm8k", "math500", "simpleqa"):
            stated = np.round(rng.random(200), 2)
            right = rng.random(200) < (stated if label == "coca" else 0.4)
            text = "<script>document.title='hacked'</script>" + "long" * 500
            rows += [Prediction(str(i), dataset, text, text, float(stated[i]), bool(right[i]), 10) for i in range(200)]
        runs.append(Run(label, rows, [{"step": i, "reward/answer": i / 9} for i in range(9)]))
    [path, _] = write_report(runs, tmp_path_factory.mktemp("report"), title="In a browser")
    browser.open(path)
    return browser


def test_every_picture_is_drawn(page):
    widths = page.run("return [...document.images].map(i => i.complete ? i.naturalWidth : 0)")
    assert len(widths) == 2 + 3 * 3
    assert min(widths) > 300
    assert page.run("return [...document.images].every(i => i.alt.length > 20)")


def test_nothing_is_fetched(page):
    fetched = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in fetched if not name.startswith("data:")] == []


def test_model_text_does_not_run(page):
    assert page.run("return document.title") == "In a browser"


def test_the_page_is_no_wider_than_the_window(page):
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")


def test_best_is_told_apart_without_colour(page):
    style = page.run(
        "const s = getComputedStyle(document.querySelector('.best'));"
        "return [s.fontWeight, s.textDecorationLine, getComputedStyle(document.body).color]"
    )
    assert style == ["700", "underline", "rgb(17, 17, 17)"]


def test_it_is_dark_text_on_white(page):
    page.run("window.scrollTo(0, 0)")
    grey = page.screenshot().mean(axis=2)
    assert np.median(grey) > 0.95
    assert grey.min() < 0.15
    assert (grey < 0.5).mean() > 0.005
