"""The page at ``/``: how it is served, and in Debian's chromium, without a window, what it shows."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import aiohttp
import pytest

from tests.router.servers_for_tests import FakeEngine, http, routed

LINES = 250
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
BAD = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"


def root(url):
    return url.removesuffix("/v1") + "/"


def test_it_is_one_static_file_that_reaches_only_its_server():
    with routed(FakeEngine("<confidence> 0.9 </confidence> 42")) as (url, _):
        answer = http.get(root(url))
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'sha256-" in policy
        assert len(answer.text.splitlines()) <= LINES
        assert not any(text in answer.text for text in ("http:", "https:", "innerHTML", "src="))
        own, host = root(url).rstrip("/"), root(url).split("/")[2]
        codes = {origin: asked(url, origin) for origin in (own, "http://evil.example", f"http://{host}.evil.example")}
        assert list(codes.values()) == [200, 403, 403]


def asked(url, origin):
    body = {"model": "coca", "messages": [{"role": "user", "content": "q"}]}
    return http.post(f"{url}/chat/completions", json=body, headers={"origin": origin}).status_code


def test_it_can_be_turned_off():
    with routed(FakeEngine("<confidence> 0.9 </confidence> 42"), listen={"page": False}) as (url, _):
        assert http.get(root(url)).status_code == 404
        assert asked(url, root(url).rstrip("/")) == 403


class Browser:
    """A page in chromium, by its DevTools protocol."""

    def __init__(self, socket):
        self._socket, self._sent = socket, 0

    async def send(self, method, **parameters):
        self._sent += 1
        await self._socket.send_json({"id": self._sent, "method": method, "params": parameters})
        async for message in self._socket:
            if (answer := json.loads(message.data)).get("id") == self._sent:
                return answer["result"]
        raise AssertionError("the browser has ended")

    async def value(self, expression):
        return (await self.send("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")

    async def until(self, expression):
        ends = time.monotonic() + 60
        while not await self.value(expression):
            assert time.monotonic() < ends, (expression, await self.value("document.body.innerText"))
            await asyncio.sleep(0.05)

    async def press(self, key, modifiers=0):
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Enter": 13, "Escape": 27}[key]
            await self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers
            )


async def in_browser(directory, address, work):
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=390,800"]
    process = subprocess.Popen(
        [CHROMIUM, *options, f"--user-data-dir={directory}", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = directory / "DevToolsActivePort"
        ends = time.monotonic() + 120
        while not (port.exists() and port.read_text().count("\n")):
            assert time.monotonic() < ends
            await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json") as listed:
                [page] = [target for target in await listed.json() if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                await browser.until("document.readyState === 'complete' && document.activeElement.id === 'question'")
                await work(browser)
    finally:
        process.terminate()
        process.wait(30)


@needs_chromium
@pytest.mark.timeout(300)
def test_confidence_tiers_and_answer_are_shown_and_nothing_is_rendered(tmp_path):
    async def work(browser):
        await browser.send("Input.insertText", text="6 x 7?")
        await browser.press("Enter", modifiers=2)  # Ctrl
        await browser.until("document.getElementById('state').textContent === 'Done.'")
        tiers = await browser.value("[...document.querySelectorAll('#tiers strong')].map((e) => e.textContent)")
        assert tiers == ["small: confidence 0.20", "large: states no confidence"]
        answer = await browser.value("document.getElementById('answer').textContent")
        assert answer.strip() == f"It is 42. {BAD}"
        assert await browser.value("document.querySelectorAll('#answer *, img').length") == 0
        assert await browser.value("document.title") == "coca-router"
        assert await browser.value("document.documentElement.scrollWidth <= innerWidth")
        if pictures := os.environ.get("PICTURES"):
            await take_pictures(browser, pictures)

    small = FakeEngine("<confidence> 0.2 </confidence>", " 41")
    large = FakeEngine("It is ", "42. ", BAD)
    with routed(small, large) as (url, _):
        asyncio.run(in_browser(tmp_path / "profile", root(url), work))


async def take_pictures(browser, directory):
    """Write a picture of each scheme of colours into ``directory``, to be looked at."""
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await browser.send("Emulation.setEmulatedMedia", features=features)
        picture = (await browser.send("Page.captureScreenshot"))["data"]
        Path(directory, f"page_{scheme}.png").write_bytes(base64.b64decode(picture))


@needs_chromium
@pytest.mark.timeout(300)
def test_escape_stops_and_an_error_is_said(tmp_path):
    async def work(browser):
        await browser.send("Input.insertText", text="6 x 7?")
        await browser.press("Enter", modifiers=2)
        await browser.until("document.getElementById('answer').textContent.includes('first')")
        await browser.press("Escape")
        await browser.until("document.getElementById('state').textContent === 'Stopped.'")
        engine.fault, engine.status = "status", 400
        await browser.press("Enter", modifiers=2)
        await browser.until("document.getElementById('state').textContent.startsWith('Error: ')")

    engine = FakeEngine("<confidence> 0.9 </confidence>", " first", *[" more"] * 400, delay=0.05)
    with routed(engine) as (url, _):
        asyncio.run(in_browser(tmp_path / "profile", root(url), work))
