"""Take the pictures of the web page; needs playwright and chromium.

python docs/make_pictures.py
"""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from dgemma.engine import Engine
from dgemma.server.app import make_app
from dgemma.server.lifecycle import bind, make_server
from dgemma.server.service import Settings

PICTURES = Path(__file__).parent / "pictures"
ARGUMENTS = "--no-sandbox --disable-gpu --disable-background-networking --no-first-run".split()
STORY = "Tell me a story about a fox and a lantern."
KNOBS = '{"seed": 3, "max_tokens": 128}'


@contextmanager
def served() -> Iterator[str]:
    taken = bind("127.0.0.1", 0)
    server = make_server(make_app(Engine.load("nano"), Settings(names=("nano",))))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield "http://{}:{}".format(*taken.getsockname())
    finally:
        server.should_exit = True
        thread.join()


def take(page: Any, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    picture = Image.open(BytesIO(page.screenshot())).convert("P", palette=Image.Palette.ADAPTIVE)
    picture.save(PICTURES / f"{name}.png", optimize=True)


def until(page: Any, selector: str, count: int) -> None:
    """Wait for so many elements; the page's policy allows no scripts of ours to wait in it."""
    while page.locator(selector).count() < count:
        page.wait_for_timeout(20)


def click(page: Any, *selectors: str) -> None:
    for selector in selectors:
        page.click(selector)


def chat(page: Any) -> None:
    page.fill("#question", STORY)
    page.press("#question", "Enter")
    until(page, ".answer .t.accepted", 50)
    take(page, "chat")


def sudoku(page: Any) -> None:
    click(page, "#tab-sudoku", "#puzzles >> text=Hard", "#sudoku-go")
    until(page, "#grid .found", 14)
    take(page, "sudoku")


def edit(page: Any) -> None:
    click(page, "#tab-edit", "#edit-go")
    page.wait_for_selector("#edit-result:visible")
    page.wait_for_timeout(300)
    take(page, "edit")


def fill(page: Any) -> None:
    page.click("#tab-fill")
    page.fill("#fill-longest", "4")
    page.click("#fill-go")
    page.wait_for_selector("#fill-result:visible")
    page.locator("#fill-stage input[type=range]").focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)
    take(page, "fill")


def compare(page: Any) -> None:
    page.click("#tab-compare")
    page.click("#race-go")
    page.wait_for_selector("#race-verdict span")
    take(page, "compare-dark")


def hero(page: Any) -> None:
    page.wait_for_selector("#limits:not(:empty)")
    page.wait_for_timeout(2500)  # the title settles
    take(page, "hero")


def phone(page: Any) -> None:
    page.fill("#question", STORY)
    page.press("#question", "Enter")
    page.wait_for_selector(".answer .replay")
    page.click(".answer .replay")
    page.wait_for_timeout(3600)
    take(page, "phone")


def main() -> None:
    wide, narrow = {"width": 1180, "height": 760}, {"width": 390, "height": 780}
    shots = [
        (hero, wide, "light"),
        (chat, wide, "light"),
        (fill, wide, "light"),
        (edit, {**wide, "height": 860}, "light"),
        (sudoku, wide, "light"),
        (compare, wide, "dark"),
        (phone, narrow, "dark"),
    ]
    with served() as url, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=ARGUMENTS
        )
        for shot, size, scheme in shots:
            context = chromium.new_context(
                viewport=size, color_scheme=scheme, device_scale_factor=1.5
            )
            context.add_init_script(f"localStorage['dgemma.settings'] = '{KNOBS}'")
            page = context.new_page()
            page.set_default_timeout(120_000)
            page.goto(url)
            page.wait_for_selector("html[data-ready]")
            shot(page)
            context.close()
        chromium.close()


if __name__ == "__main__":
    main()
