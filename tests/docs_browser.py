"""Opens every page of the built site in Chromium, and finds what does not fit on the screen.

    mkdocs build --strict && python tests/docs_browser.py --site site

On a wide screen no code block and no table may be cut off. On a phone they may be scrolled, each
in its own box, but the page itself may not be wider than the screen. In the dark scheme, every
picture must have a background of its own. The search must find the page that is meant.
"""

# pyright: reportMissingImports=false

import functools as ft
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import tyro
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WIDE, PHONE = 1440, 390
# Chromium rounds both widths, so they may differ by a pixel.
CUT_OFF = """
for (const closed of document.querySelectorAll("details")) closed.open = true;
const wider = (box) => box.scrollWidth > box.clientWidth + 1;
const found = (boxes) => [...boxes].filter(wider).map((box) => box.textContent.trim().slice(0, 60));
const pre = document.querySelectorAll(".md-content pre > code");
const tables = document.querySelectorAll(".md-content .md-typeset__scrollwrap");
return {
  blocks: pre.length, tables: tables.length,
  cut_blocks: found(pre), cut_tables: found(tables),
  page: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
};
"""

# Drawings are black on nothing or on white: on a dark page they need a light background.
DARK_PICTURES = """
const images = [...document.querySelectorAll(".md-content img")];
const clear = (x) => getComputedStyle(x).backgroundColor !== "rgb(255, 255, 255)";
return {
  dark: document.body.dataset.mdColorScheme === "slate", pictures: images.length,
  unreadable: images.filter(clear).map((x) => x.getAttribute("src")),
};
"""


# What a reader searches, and the page that should be found first.
SEARCHES = {
    "OOM": "howto/out_of_memory/",
    "out of memory": "howto/out_of_memory/",
    "tensor parallel": "concepts/",
    "fsdp": "concepts/",
    "LoRA": "models/",
    "resume": "checkpoints/",
    "tokenizer": "howto/hugging_face/",
    "profile": "howto/profiling/",
    "early stopping": "howto/best_checkpoint/",
    "flax": "migration/flax/",
    "EMA": "training/",
    "freeze": "howto/parameter_groups/",
    "parameter groups": "howto/parameter_groups/",
    "samples during training": "howto/loggers/",
    "callback": "howto/loggers/",
    "bf16": "howto/bf16/",
    "learning rate schedule": "training/",
    "BatchNorm": "training/",
    "packing": "howto/packing/",
    "own dataset": "data/",
    "DataLoader": "data/",
    "wandb offline": "tracking/",
    "export": "howto/export/",
    "ONNX": "howto/export/",
    "sweep": "howto/ensembles/",
    "ensemble": "howto/ensembles/",
}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    handler = ft.partial(Quiet, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        raise SystemExit("Install Chromium first: apt-get install chromium chromium-driver.")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    chrome = webdriver.Chrome(options, Service(programs[1]))
    yield chrome
    chrome.quit()


def screen(chrome: webdriver.Chrome, width: int, height: int) -> None:
    # A window has at least 500 pixels, so the screen is emulated.
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width == PHONE}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def looked_at(chrome: webdriver.Chrome, url: str, width: int, picture: Path) -> dict[str, Any]:
    """What is cut off on a page of this width, and a picture of the page."""
    screen(chrome, width, 900)
    chrome.get(url)
    actual = chrome.execute_script(CUT_OFF)
    screen(chrome, width, min(actual["height"], 6000))
    picture.parent.mkdir(parents=True, exist_ok=True)
    chrome.save_screenshot(str(picture))
    return actual


def first_result(chrome: webdriver.Chrome, url: str, query: str) -> str:
    """The path of the first page that the site's search finds."""
    screen(chrome, WIDE, 900)
    chrome.get(f"{url}/?q={quote(query)}")
    link = ".md-search-result__item a"
    actual = WebDriverWait(chrome, 30).until(lambda x: x.find_elements(By.CSS_SELECTOR, link))
    address = str(actual[0].get_attribute("href"))
    return urlsplit(address).path.removeprefix("/")


def unreadable(url: str, paths: list[str], pictures: Path) -> list[str]:
    """The pictures without a background in the dark scheme; pages with pictures are saved."""
    faults, count = [], 0
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    with browser() as chrome:  # the site remembers the scheme of a browser's first page
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for path in paths:
            screen(chrome, WIDE, 900)
            chrome.get(f"{url}/{path}")
            actual = chrome.execute_script(DARK_PICTURES)
            count += actual["pictures"]
            faults += [f"{path or 'home'}: {x} is dark on dark" for x in actual["unreadable"]]
            if not actual["dark"]:
                faults.append(f"{path or 'home'} is not dark in the dark scheme")
            if actual["pictures"]:
                looked_at(chrome, f"{url}/{path}", WIDE, pictures / f"{named(path)}_dark.png")
    print(f"dark: {len(faults)} of {count} pictures cannot be read")
    return faults


def named(path: str) -> str:
    return path.rstrip("/").replace("/", ".") or "home"


def pages(site: Path) -> list[str]:
    """The paths of the pages, such as `sharding/`."""
    actual = sorted(path.relative_to(site).parent for path in site.rglob("index.html"))
    return ["" if path == Path() else f"{path.as_posix()}/" for path in actual]


def main(
    site: Path = Path("site"),
    pictures: Path = Path("runs/docs_browser"),
    page: tuple[str, ...] = (),
) -> None:
    """Checks the pages of a built site on a wide screen and on a phone.

    Args:
        site: Directory with the built site.
        pictures: Directory for a picture of each page on each screen.
        page: Only these pages, such as `sharding/`. By default all of them.
    """
    faults = []
    with served(site) as url, browser() as chrome:
        for width in (WIDE, PHONE):
            total = {"blocks": 0, "tables": 0, "cut_blocks": 0, "cut_tables": 0}
            for path in page or pages(site):
                picture = pictures / f"{named(path)}_{width}.png"
                actual = looked_at(chrome, f"{url}/{path}", width, picture)
                total["blocks"] += actual["blocks"]
                total["tables"] += actual["tables"]
                for kind in ("cut_blocks", "cut_tables"):
                    total[kind] += len(actual[kind])
                    if width == WIDE:
                        faults += [f"{path or 'home'}: {text!r}" for text in actual[kind]]
                if actual["page"] > width:
                    faults.append(f"{path or 'home'} is {actual['page']} pixels wide on {width}")
            print(
                f"{width} pixels: {total['cut_blocks']} of {total['blocks']} code blocks and "
                f"{total['cut_tables']} of {total['tables']} tables are wider than their box"
            )
        for query, path in () if page else SEARCHES.items():
            if (actual := first_result(chrome, url, query)) != path:
                faults.append(f"The search for {query!r} finds {actual or 'home'}, not {path}")
        faults += unreadable(url, list(page or pages(site)), pictures)
    if faults:
        raise SystemExit("\n".join(["Wider than the screen, or not found:", *faults]))


if __name__ == "__main__":
    tyro.cli(main)
