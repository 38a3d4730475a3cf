"""What an HTML page says and needs: as parsed, and as a browser shows it."""

import glob
import html
import html.parser
import json
import os
import re
import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
# Where `playwright install chromium` puts it.
PLAYWRIGHT = "~/.cache/ms-playwright/chromium*/*/*"
# What the page has come to when everything is loaded, as text at its end.
ASKING = """<pre id="seen"></pre><script>
addEventListener("load", () => {
  const shown = [...document.images].map((each) => each.complete && each.naturalWidth > 0);
  const drawn = [...document.querySelectorAll("svg")].map((each) => each.getBBox().width > 0);
  const fetched = performance.getEntriesByType("resource").map((each) => each.name);
  const cells = [...document.querySelectorAll("tbody tr")].map(
    (row) => [...row.cells].map((cell) => cell.innerText));
  const width = [document.documentElement.scrollWidth, innerWidth];
  document.getElementById("seen").textContent = JSON.stringify(
    {shown, drawn, cells, width, fetched: fetched.filter((each) => !each.startsWith("data:"))});
});
</script></body>"""


class Page(html.parser.HTMLParser):
    """What a page says, and what it asks the network for."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.cells, self.links, self.headings = [], [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        # Within the page (#..., data:...) is no network; names of XML are not fetched.
        self.links += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:"))
        ]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("td", "th") and data.strip():
            self.cells.append(data)
        if self.tags and self.tags[-1] == "h2" and data.strip():
            self.headings.append(data)


def browser():
    """The path of a Chromium; the test is skipped where there is none."""
    found = [shutil.which(each) for each in (os.environ.get("CHROMIUM") or "", *NAMES)]
    of_playwright = [
        each
        for each in glob.glob(os.path.expanduser(PLAYWRIGHT))
        if os.path.basename(each) in ("chrome", "headless_shell", "chrome-headless-shell")
    ]
    path = next(filter(None, [*found, *of_playwright]), None)
    if path is None:
        pytest.skip("there is no Chromium; CHROMIUM may name one")
    return path


def seen_in_browser(path, folder):
    """What headless Chromium shows of a page, and the messages of its console."""
    asking = folder / "asking.html"
    asking.write_text(path.read_text().replace("</body>", ASKING))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--window-size=1280,800", "--dump-dom"]
    command = [browser(), *flags, asking.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(text[1])) | {"console": console}
