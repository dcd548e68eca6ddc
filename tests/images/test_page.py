"""Pictures on the web page in a real browser, with a tiny tower behind the server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dgemma.engine import Engine
from dgemma.server.limits import Limits
from dgemma.server.service import Settings
from tests.images.test_sudoku_picture import PUZZLE, Spelling, spelled
from tests.images.tiny_tower import seeing_engine
from tests.server.conftest import Running, running
from tests.server.test_browser import MAX_MS, ask, browser, bubbles, pytestmark

__all__ = ["browser", "pytestmark"]

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
SETTINGS = {"seed": 1, "max_tokens": 8}
# Gives a picture of circles in one colour to an element, as people do.
GIVE = """async ([selector, way, colour]) => {
  const surface = document.createElement('canvas');
  surface.width = 600; surface.height = 400;
  const pen = surface.getContext('2d');
  pen.fillStyle = 'white'; pen.fillRect(0, 0, 600, 400);
  pen.fillStyle = colour;
  for (let i = 0; i < 5; i++) {
    pen.beginPath(); pen.arc(90 + 110 * i, 60 + 70 * i, 60, 0, 7); pen.fill();
  }
  const blob = await new Promise(resolve => surface.toBlob(resolve, 'image/png'));
  const files = new DataTransfer();
  files.items.add(new File([blob], 'circles.png', {type: 'image/png'}));
  const how = {bubbles: true, cancelable: true};
  const event = way === 'paste'
    ? new ClipboardEvent('paste', {...how, clipboardData: files})
    : new DragEvent('drop', {...how, dataTransfer: files});
  document.querySelector(selector).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    settings = Settings(names=("seeing",), limits=Limits(max_body=4 << 20))
    with running(seeing_engine(), settings) as server:
        yield server


def opened(browser: Any, url: str, **context: Any) -> Any:
    """Open the page as somebody new, who asks for short answers."""
    visitor = browser.new_context(**context)
    kept = json.dumps(json.dumps(SETTINGS))
    visitor.add_init_script(f"localStorage['dgemma.settings'] = {kept}")
    page = visitor.new_page()
    page.set_default_timeout(MAX_MS)
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    return page


def give(page: Any, selector: str, way: str, colour: str) -> None:
    page.evaluate(GIVE, [selector, way, colour])


def pixel(page: Any, selector: str, x: int, y: int) -> list[int]:
    """Return a pixel of a thumbnail, in red, green and blue."""
    script = "(c, [x, y]) => [...c.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)"
    found: list[int] = page.locator(selector).evaluate(script, [x, y])
    return found


@pytest.mark.parametrize("context", [{}, PHONE], ids=["desktop", "phone"])
def test_pictures_that_are_pasted_and_dropped_are_seen_by_the_model(
    browser: Any, seeing: Running, context: Any
) -> None:
    page = opened(browser, seeing.url, **context)
    page.wait_for_selector("#picture:visible")
    answers = []
    for way, selector, colour in (
        ("paste", "#question", "red"),
        ("drop", "main", "blue"),
        ("drop", "main", "red"),
    ):
        give(page, selector, way, colour)
        page.wait_for_selector(".chosen canvas[width]:not([width='1'])")
        ask(page, "What is in the picture?")
        answers.append(bubbles(page, 2)[1])
        assert page.locator(".mine .thumb").count() == 1
        width, height = page.locator(".mine .thumb").evaluate("c => [c.width, c.height]")
        shade = pixel(page, ".mine .thumb", round(width * 90 / 600), round(height * 60 / 400))
        assert shade == ([255, 0, 0] if colour == "red" else [0, 0, 255])
        assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
        box = page.locator(".mine .thumb").bounding_box()
        assert 40 < box["width"] <= 330 and box["height"] > 30
        page.click("#clear")
    assert answers[0] == answers[2] != answers[1] and all(answers)
    page.context.close()


def test_two_pictures_in_two_turns_are_both_seen_and_kept(browser: Any, seeing: Running) -> None:
    page = opened(browser, seeing.url)
    page.wait_for_selector("#picture:visible")
    for turn, colour in enumerate(("red", "blue"), 1):
        give(page, "#question", "paste", colour)
        page.wait_for_selector(".chosen")
        with page.expect_response("**/v1/chat/completions") as reply:
            ask(page, "What is it?")
        sent = json.loads(reply.value.request.post_data)["messages"]
        assert str(sent).count("image_url', 'image_url'") == turn
        bubbles(page, 2 * turn)
    page.reload()
    page.wait_for_selector(".mine .thumb >> nth=1")
    page.context.close()


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_puzzle_that_is_dropped_or_pasted_is_read_and_solved(browser: Any, way: str) -> None:
    """nano solves what it reads; its soft tokens are chosen by the test."""
    engine = Engine.load("nano", device="cpu", dtype="float32")
    spelling: Any = Spelling(engine, spelled(PUZZLE))
    spelling.vision = engine.tower().vision
    engine.images = spelling
    with running(engine, Settings(names=("nano",))) as server:
        page = opened(browser, server.url)
        page.wait_for_selector("#picture", state="attached")
        page.click("text=Sudoku >> nth=0")
        page.wait_for_selector("#sudoku-picture:visible")
        give(page, "#grid", way, "black")
        page.wait_for_selector("#verdict b.good")
        cells = page.locator("#grid input").evaluate_all("all => all.map(cell => cell.value)")
        assert all(PUZZLE[i] in ("0", value) for i, value in enumerate(cells)) and all(cells)
        page.context.close()
