"""A report in a real browser, over WebDriver: plots are drawn, nothing is fetched or executed, nothing overflows."""

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
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,900"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no Chromium: apt-get install chromium chromium-driver"),
]


@pytest.fixture
def webdriver(tmp_path):
    """``call(method, path, body)`` of a WebDriver session."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"

    def call(method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
            return json.load(reply)["value"]

    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        try:
            if call("GET", "/status")["ready"]:
                break
        except OSError:
            time.sleep(0.1)
    options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]}
    wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
    base += f"/session/{call('POST', '/session', wanted)['sessionId']}"
    yield call
    call("DELETE", "")
    driver.terminate()
    driver.wait(10)


def test_report(webdriver, tmp_path):
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
    page = write_report(runs, tmp_path / "report", title="In a browser")[0]
    webdriver("POST", "/url", {"url": page.as_uri()})

    def evaluate(expression):
        return webdriver("POST", "/execute/sync", {"script": f"return {expression}", "args": []})

    widths = evaluate("[...document.images].map(i => i.complete ? i.naturalWidth : 0)")
    assert len(widths) == 1 + 3 * 2
    assert min(widths) > 300
    assert evaluate("[...document.images].every(i => i.alt.length > 20)")
    fetched = evaluate("performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in fetched if not name.startswith("data:")] == []
    assert evaluate("document.title") == "In a browser"  # text of models is not executed
    png = base64.b64decode(webdriver("GET", "/screenshot"))
    grey = matplotlib.image.imread(io.BytesIO(png), format="png")[:, :, :3].mean(axis=2)
    assert np.median(grey) > 0.95  # dark text on white
    assert grey.min() < 0.15
    assert (grey < 0.5).mean() > 0.005
    best = "getComputedStyle(document.querySelector('.best'))"
    assert evaluate(f"[{best}.fontWeight, {best}.textDecorationLine]") == ["700", "underline"]
    evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert evaluate("document.documentElement.scrollWidth <= window.innerWidth")
