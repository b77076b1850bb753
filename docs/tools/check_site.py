# SPDX-License-Identifier: Apache-2.0
"""Opens every page of the built site in a headless Chromium and measures whether it is wider than its screen.

    mkdocs build -f docs/site/mkdocs.yml && python docs/tools/check_site.py [FOLDER] [--widths 1280,400] [--pictures DIR]

Speaks Chromium's debugging protocol over a pipe, so it needs the browser and no package (Debian: apt-get install
chromium-headless-shell). Prints a line per page that is too wide, with the elements that stick out, or that loads something
from elsewhere, or in which a picture is missing; exits non-zero if there is one.
"""
from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEASURE = """(() => {
  const screen = __WIDTH__, page = document.documentElement;
  const scrolls = e => { for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== 'visible') return true; return false; };
  const out = [...document.querySelectorAll('body *')].filter(e => e.getClientRects().length
    && e.getBoundingClientRect().right > screen + 1 && !scrolls(e)).slice(0, 5)
    .map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 40));
  return JSON.stringify({width: Math.max(page.scrollWidth, document.body.scrollWidth), height: page.scrollHeight, out,
    broken: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
    foreign: performance.getEntriesByType('resource').map(r => r.name).filter(n => n.startsWith('http'))});
})()"""


class Browser:
    """One page of a headless Chromium, driven over its debugging pipe."""

    def __init__(self, program: str, profile: str):
        here_in, self.to = os.pipe()
        self.answers, here_out = os.pipe()

        def pipes():
            a, b = os.dup(here_in), os.dup(here_out)
            os.dup2(a, 3)
            os.dup2(b, 4)
        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--user-data-dir={profile}", "about:blank"], preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL)
        self.count, self.rest, self.session = 0, b"", None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")

    def message(self) -> dict:
        while b"\0" not in self.rest:
            self.rest += os.read(self.answers, 1 << 16)
        one, _, self.rest = self.rest.partition(b"\0")
        return json.loads(one)

    def ask(self, method: str, **params) -> dict:
        self.count += 1
        sent = {"id": self.count, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.to, json.dumps(sent).encode() + b"\0")
        while (got := self.message()).get("id") != self.count:
            continue
        if "error" in got:
            raise RuntimeError(f"{method}: {got['error']}")
        return got["result"]

    def measure(self, page: Path, width: int, picture: Path | None) -> dict:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Page.navigate", url=page.as_uri())
        while self.message().get("method") != "Page.loadEventFired":
            continue
        found = json.loads(self.ask("Runtime.evaluate", expression=MEASURE.replace("__WIDTH__", str(width)),
                                    returnByValue=True)["result"]["value"])
        if picture:
            shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                            clip={"x": 0, "y": 0, "width": width, "height": min(found["height"], 5000), "scale": 1})
            picture.write_bytes(base64.b64decode(shot["data"]))
        return found

    def close(self) -> None:
        self.ask("Browser.close")
        self.process.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "site")
    parser.add_argument("--widths", default="1280,400", help="of the screen, in pixels")
    parser.add_argument("--pictures", type=Path, help="write a picture of each page into this folder")
    options = parser.parse_args()
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    pages = sorted(options.folder.resolve().rglob("*.html"))
    if program is None or not pages:
        why = f"no page in {options.folder}" if program else f"no Chromium on PATH: {', '.join(names)}"
        print(f"check_site.py: {why}", file=sys.stderr)
        return 2
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    widths, wrong, begun = list(map(int, options.widths.split(","))), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(program, profile)
        for page in pages:
            name = str(page.relative_to(options.folder.resolve()))
            for width in widths:
                picture = options.pictures / f"{name.replace('/', '_')[:-5]}_{width}.png" if options.pictures else None
                found = browser.measure(page, width, picture)
                if found["width"] > width or found["out"] or found["broken"] or found["foreign"]:
                    wrong += 1
                    print(f"{name} at {width}: {found['width']} wide {found['out']} {found['broken']} {found['foreign']}")
        browser.close()
    print(f"{len(pages)} pages at {widths} pixels, {wrong} wrong, {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
