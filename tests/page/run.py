#!/usr/bin/env python3
"""Looks at kvmaster's page in a headless Chromium, over real daemons.

    python3 tests/page/run.py [--bin target/debug] [--shots DIRECTORY]

It needs `pip install playwright` and a Chromium (`apt-get install chromium`). Without them it says what is missing
and ends with code 0, or with code 1 under KVPOOL_REQUIRE_CHROMIUM=1.
"""

import argparse
import contextlib
import http.server
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
SPACE = "llama-3.1-70b/fp8:tp4"
HOSTILE = {
    "markup": "<img src=x onerror=\"document.title='owned'\"><script>owned()</script>",
    "long": "x" * 1024,
    "right to left": "ab\u202edc\u202c\u05d0\u05d1",
    "quotes": "'\"`--></style></script>{{nonce}}",
}
LOOKS = [
    ("light-wide", 1280, 900, "light"),
    ("dark-wide", 1280, 900, "dark"),
    ("light-phone", 390, 844, "light"),
    ("dark-phone", 390, 844, "dark"),
]


def missing():
    """Why this cannot run here; None if it can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "the Python package playwright is missing: pip install playwright"
    if chromium() is None:
        return "no Chromium found: apt-get install chromium, or set KVPOOL_CHROMIUM"
    return None


def chromium():
    names = [os.environ.get("KVPOOL_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    return next((found for found in map(shutil.which, filter(None, names)) if found), None)


class Pool:
    """A kvmaster and its store nodes as processes."""

    def __init__(self, binaries, directory):
        self.binaries, self.directory = binaries, directory
        self.processes = {}
        ready = self.start(
            "kvmaster", "master", "--data-dir", str(directory / "metadata"),
            "--suspect-after", "2s", "--drop-after", "8s",
        )
        self.master, self.http = f"http://{ready['listen']}", f"http://{ready['http']}"

    def start(self, binary, name, *flags):
        ready = self.directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        with open(self.directory / f"{name}.log", "ab") as log:
            command = [self.binaries / binary, *flags, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
            self.processes[name] = subprocess.Popen(
                [*command, "--ready-file", str(ready)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait(f"{name} serves", ready.exists)
        return json.loads(ready.read_text())

    def node(self, name, *flags):
        socket = str(self.directory / f"{name}.sock")
        self.start(
            "kvstore-node", name, "--master", self.master, "--name", name,
            "--segment", "64MiB", "--shm-path", socket, *flags,
        )

    def kvctl(self, *arguments, **options):
        command = [self.binaries / "kvctl", "--master", self.master, *arguments]
        return subprocess.run(command, check=True, capture_output=True, **options).stdout

    def fill(self, first, blocks):
        for n in range(first, first + blocks):
            self.kvctl("put", f"block-{n}", "-", input=os.urandom(MIB))

    def overview(self):
        with urllib.request.urlopen(f"{self.http}/v1/overview", timeout=5) as answer:
            return json.load(answer)

    def signal(self, name, number):
        self.processes[name].send_signal(number)

    def stop(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def wait(what, condition, limit=20.0):
    """Waits until `condition` holds and returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > limit:
            raise AssertionError(f"{what}: not within {limit} s")
        time.sleep(0.02)
    return time.monotonic() - start


class Look:
    """The page in one window. It notes every message of the console and every request elsewhere."""

    def __init__(self, browser, url, width=1280, height=900, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.wrong = []
        self.page.on("console", lambda message: self.note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.note("error", str(error)))
        self.page.on("request", lambda request: self.request(url, request.url))
        self.page.goto(url)
        # Playwright's own waits evaluate strings in the page, which the policy refuses.
        wait("a snapshot", lambda: self.page.evaluate("document.body.dataset.seq"))

    def note(self, kind, text):
        if kind in ("error", "warning"):
            self.wrong.append(f"{kind}: {text}")

    def request(self, url, wanted):
        if not wanted.startswith((url, "data:")):
            self.wrong.append(f"request to {wanted}")

    def states(self):
        script = "[...document.querySelectorAll('#nodes tr')].map(r => [...r.children].map(c => c.innerText.trim()))"
        return {row[0]: row[1] for row in self.page.evaluate(script) if len(row) > 1}

    def spaces(self):
        rows = "[...document.querySelectorAll('#spaces tr')]"
        script = rows + ".map(r => [...r.children].map(c => c.innerText).join('|'))"
        return "\n".join(self.page.evaluate(script))

    def text(self, selector):
        return self.page.inner_text(selector)

    def close(self):
        self.context.close()
        assert not self.wrong, self.wrong


def follows(look, pool, name, state, limit=2.0):
    """The page shows the state within `limit` seconds of the master's own knowledge."""

    def known():
        nodes = {node["name"]: node["state"] for node in pool.overview()["nodes"]}
        return nodes.get(name) == state

    wait(f"the master finds {name} {state}", known)
    took = wait(f"the page shows {name} {state}", lambda: look.states().get(name) == state, limit)
    print(f"  {name} {state}: on the page {took:.2f} s after /v1/overview")


def life_of_a_pool(browser, pool, shots):
    """Nodes come, fill, hang and die; the page follows."""
    look = Look(browser, pool.http)
    assert "no live store node" in look.text("#alerts"), look.text("#alerts")
    for name in ("node-0", "node-1", "node-2"):
        pool.node(name, *ssd(pool, name))
        follows(look, pool, name, "live")
    wait("no alert", lambda: "No alert" in look.text("#alerts"))
    pool.fill(0, 120)
    wait("a fill is shown", lambda: "0.0 %" != look.text("#tile-memory .value"), 3)
    for n in range(20):
        pool.kvctl("--namespace", SPACE, "put", f"key-{n}", "-", input=bytes(MIB))
    wait("the namespace is shown", lambda: f"{SPACE}|20|20.0 MiB" in look.spaces(), 3)
    with load(pool):
        wait("gets are charted", lambda: look.text("#chart-gets .more") != "most 0/s", 15)
        time.sleep(8)
        for name, width, height, scheme in LOOKS:
            screenshot(browser, pool.http, shots / f"{name}.png", width, height, scheme)
    pool.signal("node-1", signal.SIGSTOP)
    follows(look, pool, "node-1", "suspect")
    alert = "Node node-1 has been silent"
    wait("the alert names the node", lambda: alert in look.text("#alerts"), 2)
    pool.signal("node-1", signal.SIGCONT)
    follows(look, pool, "node-1", "live")
    pool.signal("node-2", signal.SIGKILL)
    follows(look, pool, "node-2", "suspect")
    screenshot(browser, pool.http, shots / "alerts-wide.png", 1280, 900, "light")
    screenshot(browser, pool.http, shots / "alerts-phone.png", 390, 844, "dark")
    follows(look, pool, "node-2", "gone")
    assert "dropped" in look.text("#alerts")
    # A stream ends after 25 s and the browser comes back without a message.
    time.sleep(27)
    assert look.text("#live") == "live", look.text("#live")
    pool.signal("master", signal.SIGSTOP)
    wait("the page says that nobody answers", lambda: "no answer" in look.text("#live"), 8)
    pool.signal("master", signal.SIGCONT)
    wait("the page comes back", lambda: look.text("#live") == "live", 10)
    refused = look.page.evaluate(
        """async () => {
            const box = document.createElement('div');
            box.setAttribute('style', 'color: red');
            const script = document.createElement('script');
            try { script.text = 'window.owned = 1'; document.body.append(script); } catch (error) { return true; }
            return window.owned === undefined;
        }"""
    )
    assert refused, "a script without the nonce ran"
    # The attempts above are reported; everything else is a fault.
    refused = "Content Security Policy", "TrustedScript"
    look.wrong = [wrong for wrong in look.wrong if not any(text in wrong for text in refused)]
    look.close()


def ssd(pool, name):
    return ["--ssd", f"path={pool.directory / name}.ssd,size=256MiB"] if name == "node-1" else []


@contextlib.contextmanager
def load(pool):
    """Puts and gets that go on for a while."""
    command = [pool.binaries / "kvctl", "--master", pool.master, "bench"]
    options = ["--block-size", "256KiB", "--duration", "60s", "--working-set", "80MiB"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def screenshot(browser, url, file, width, height, scheme):
    look = Look(browser, url, width, height, scheme)
    time.sleep(1.5)
    assert look.page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    look.page.screenshot(path=str(file), full_page=True)
    look.close()


class Facts(http.server.BaseHTTPRequestHandler):
    """The page of the master with made-up facts: names that no node may have, and 1,000 nodes."""

    page, policy, snapshot = b"", "", {}

    def do_GET(self):
        self.send_response(200)
        if self.path == "/":
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Security-Policy", self.policy)
            self.end_headers()
            self.wfile.write(self.page)
            return
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for n in range(15):
            # Each snapshot changes every node.
            for node in self.snapshot["nodes"]:
                node["used_bytes"] = (node["used_bytes"] + 7 * MIB) % node["capacity_bytes"]
            self.snapshot["seq"] += 1
            self.snapshot["history"] = [dict(self.snapshot["history"][-1], seq=self.snapshot["seq"], puts=n)]
            event = f"id: 1\ndata: {json.dumps(self.snapshot)}\n\n"
            self.wfile.write(event.encode())
            time.sleep(0.3)

    def log_message(self, *_):
        pass


def many_nodes(browser, pool, nodes=1000):
    """The time of a refresh with many nodes, and hostile names, which the daemons themselves refuse."""
    with urllib.request.urlopen(pool.http + "/", timeout=5) as answer:
        Facts.page, Facts.policy = answer.read(), answer.headers["Content-Security-Policy"]
    print(f"  the page has {len(Facts.page)} bytes")
    assert len(Facts.page) < 40 << 10
    snapshot = pool.overview()
    like = next(node for node in snapshot["nodes"] if node["media"])
    snapshot["nodes"] = [dict(like, name=f"node-{n:04}", used_bytes=n * 65536) for n in range(nodes)]
    hostile = list(HOSTILE.values())
    for node, name in zip(snapshot["nodes"], hostile):
        node.update(name=name, state="suspect", data_address=name)
    alert = {"severity": "warning", "kind": "node_suspect", "metric": ""}
    snapshot["alerts"] = [dict(alert, object=name, message=f"Node {name} is silent") for name in hostile]
    snapshot["namespaces"] = [dict(snapshot["namespaces"][0], name=name) for name in hostile]
    snapshot["masters"][0]["http_address"] = "javascript:owned()"
    Facts.snapshot = snapshot
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Facts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    look = Look(browser, f"http://127.0.0.1:{server.server_port}")
    times = []
    for _ in range(10):
        seq = look.page.evaluate("document.body.dataset.seq")
        wait("a snapshot", lambda: look.page.evaluate("document.body.dataset.seq") != seq)
        times.append(float(look.page.evaluate("document.body.dataset.refresh")))
    shown = look.page.evaluate("[...document.querySelectorAll('#nodes td.name')].map(n => n.textContent)")
    assert shown[: len(hostile)] == hostile, shown[:4]
    spaces = look.page.evaluate("[...document.querySelectorAll('#spaces td.name')].map(n => n.textContent)")
    assert spaces == hostile, spaces
    said = look.page.evaluate("[...document.querySelectorAll('#alerts p')].map(n => n.textContent)")
    assert said == [f"Node {name} is silent" for name in hostile]
    assert look.page.evaluate("document.querySelectorAll('main img, main script, a[href^=javascript]').length") == 0
    assert look.page.title() == f"({len(hostile)}) kvpool"
    look.page.fill("#find", "node-0999")
    assert list(look.states()) == ["node-0999"], look.states()
    look.close()
    server.shutdown()
    print(f"  {nodes} nodes: a refresh takes {sorted(times)[5]:.1f} ms (median), {max(times):.1f} ms (most)")
    assert max(times) < 200, times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "target" / "debug")
    parser.add_argument("--shots", type=pathlib.Path, help="keep the screenshots here")
    options = parser.parse_args()
    if reason := missing():
        print(f"skipped: {reason}")
        sys.exit(1 if os.environ.get("KVPOOL_REQUIRE_CHROMIUM") == "1" else 0)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="kvpool-page-") as directory, sync_playwright() as playwright:
        directory = pathlib.Path(directory)
        shots = options.shots or directory
        shots.mkdir(parents=True, exist_ok=True)
        pool = Pool(options.bin.resolve(), directory)
        try:
            # Chromium's own sandbox needs rights that a container lacks.
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            for case in (life_of_a_pool, many_nodes):
                print(case.__name__)
                case(browser, pool, shots) if case is life_of_a_pool else case(browser, pool)
            browser.close()
        finally:
            pool.stop()
    print("passed")


if __name__ == "__main__":
    main()
