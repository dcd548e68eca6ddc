"""The web page in a real browser, with the built-in model behind it."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dgemma.engine import Engine
from dgemma.server.page_routes import FILES
from dgemma.server.security import Keys
from dgemma.server.service import Settings
from tests.server.conftest import Running, running, wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; see .ci/run")

ARGUMENTS = "--no-sandbox --disable-gpu --disable-background-networking --no-first-run".split()
QUICK = {"seed": 1, "max_tokens": 24, "max_denoising_steps": 10, "canvas_length": 64}
STORY = "Tell me a story about a fox and a lantern."
EVIL = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
MAX_MS = 40_000
SEEN = """() => {
  window.seen = new Set();
  const note = () => {
    const tokens = document.querySelector('.answer .tokens');
    if (tokens && tokens.textContent) window.seen.add(tokens.textContent);
  };
  const all = {subtree: true, childList: true, characterData: true};
  new MutationObserver(note).observe(document.body, all);
}"""


@pytest.fixture(scope="module")
def nano() -> Iterator[Running]:
    engine = Engine.load("nano", device="cpu", dtype="float32")
    with running(engine, Settings(names=("nano",))) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture
def visit(browser: Any, nano: Running) -> Iterator[Callable[..., Any]]:
    """Open the page as somebody new; nothing may go wrong on it, and nothing may be blocked."""
    wrong: list[str] = []
    with ExitStack() as stack:

        def open_page(url: str = nano.url, *, settings: Any = QUICK, **context: Any) -> Any:
            visitor = browser.new_context(**context)
            stack.callback(visitor.close)
            if settings is not None:
                kept = json.dumps(json.dumps(settings))
                visitor.add_init_script(f"localStorage['dgemma.settings'] = {kept}")
            page = visitor.new_page()
            page.set_default_timeout(MAX_MS)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
            page.goto(url)
            page.wait_for_selector("html[data-ready]")
            return page

        yield open_page
    # Statuses are the tests' own business; anything else is a fault of the page.
    assert not [line for line in wrong if not line.startswith("Failed to load resource")]


def said(page: Any) -> str:
    return str(page.locator("#announce").inner_text())


def ask(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def test_the_files_come_with_a_strict_policy_and_hold_no_inline_code(nano: Running) -> None:
    page = nano.get("/")
    policy = page.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "style-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "<style" not in page.text and " style=" not in page.text and "onclick" not in page.text
    assert all('src="' in part for part in page.text.split("<script")[1:])
    for name, data in FILES.items():
        file = nano.get(f"/page/{name}")
        assert file.content == data and file.headers["x-content-type-options"] == "nosniff"
        assert not any(
            word in data.decode() for word in ("innerHTML", "eval(", "https://", "//cdn")
        )
    again = nano.get("/", headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert nano.get("/page/..%2fapp.py").status_code == 404
    assert nano.get("/page/none.js").status_code == 404


def test_drafts_change_then_settle_on_the_answer(visit: Callable[..., Any], nano: Running) -> None:
    page = visit()
    page.evaluate(SEEN)
    ask(page, STORY)
    page.wait_for_selector(".answer .t.noise")
    assert page.locator("#stop").is_visible() and not page.locator("#send").is_visible()
    page.wait_for_selector(".answer .replay")
    assert len(page.evaluate("[...window.seen]")) >= 3
    dgemma = {"max_denoising_steps": 10, "canvas_length": 64}
    whole = nano.ask(STORY, seed=1, max_tokens=24, dgemma=dgemma).json()["choices"][0]
    assert page.locator(".answer .canvas").inner_text() == whole["message"]["content"].strip()
    assert f"{whole['dgemma']['steps']} steps" in page.locator(".answer footer").inner_text()
    # Screen readers are told what is promised, and nothing else.
    assert said(page).split() == whole["message"]["content"].split()
    assert page.locator(".answer .tokens").get_attribute("aria-hidden") == "true"

    page.click(".answer .replay")
    slider = page.locator(".answer input[type=range]")
    page.click(".answer .play")  # pause
    slider.focus()
    page.keyboard.press("Home")
    first = page.locator(".answer .canvas").inner_text()
    assert page.locator(".answer .t.noise").count() > 0
    page.keyboard.press("ArrowRight")
    assert page.locator(".answer .canvas").inner_text() != first
    assert "step 2" in page.locator(".answer .at").inner_text()
    page.click("text=Best guess")
    page.keyboard.press("Tab")
    slider.focus()
    page.keyboard.press("End")
    assert page.locator(".answer .canvas").inner_text() == whole["message"]["content"].strip()

    page.reload()
    page.wait_for_selector(".answer")
    assert page.locator(".mine").inner_text() == STORY
    assert page.locator(".answer .canvas").inner_text() == whole["message"]["content"].strip()
    page.click("#clear")
    assert page.locator("#hero").is_visible() and page.locator(".answer").count() == 0


def test_an_answer_is_stopped_by_a_key(visit: Callable[..., Any], nano: Running) -> None:
    page = visit(settings={"seed": 1, "max_tokens": 1024})
    ask(page, STORY)
    page.wait_for_selector(".answer .t.kept")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    wait_for(lambda: not nano.service.worker.running)
    assert "Stopped." in said(page)
    assert "stopped" in page.locator(".answer footer").inner_text()


def kept(page: Any) -> list[str]:
    """Who speaks in the conversation that the browser keeps."""
    store = page.evaluate("localStorage['dgemma.conversation']")
    return [message["role"] for message in json.loads(store)]


def test_a_page_left_in_the_middle_keeps_no_question_without_an_answer(
    visit: Callable[..., Any],
) -> None:
    page = visit(settings={"seed": 1, "max_tokens": 1024})
    ask(page, STORY)
    page.wait_for_selector(".answer .t.kept")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.input_value("#question") == STORY  # to be sent again
    assert kept(page) == [] and page.locator(".mine").count() == 0
    page.press("#question", "Enter")
    page.wait_for_selector(".answer .t.kept")
    page.fill("#question", "What next?")  # typed while an answer is on its way
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert kept(page) == [] and page.input_value("#question") == "What next?"


def test_what_was_promised_stays_and_a_cleared_conversation_stays_clear(
    visit: Callable[..., Any],
) -> None:
    page = visit(settings={"seed": 1, "max_tokens": 1024, "canvas_length": 16})
    ask(page, STORY)
    page.wait_for_selector("#announce p", state="attached")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert kept(page) == ["user", "assistant"]
    assert "stopped" in page.locator(".answer footer").inner_text()
    ask(page, STORY)
    page.wait_for_selector("#announce p", state="attached")
    page.click("#clear")
    page.wait_for_selector("#send:visible")
    assert kept(page) == [] and page.locator(".answer").count() == 0


def test_holes_are_opened_by_selecting_and_filled(visit: Callable[..., Any]) -> None:
    page = visit()
    page.keyboard.press("Alt+Digit2")
    page.click("#close-holes")
    page.evaluate(
        """() => {
          const text = document.getElementById('holed').firstChild;
          const start = text.data.indexOf('red ball'), range = document.createRange();
          range.setStart(text, start);
          range.setEnd(text, start + 8);
          getSelection().removeAllRanges();
          getSelection().addRange(range);
        }"""
    )
    page.keyboard.press("Alt+KeyH")
    assert page.locator("#holed .hole").count() == 1
    page.fill("#fill-longest", "4")
    page.click("#fill-go")
    page.wait_for_selector("#fill-stage .t.pinned")
    page.wait_for_selector("#fill-result:visible")
    text = page.locator("#fill-result .text").inner_text()
    filled = page.locator("#fill-result mark").inner_text()
    assert filled.strip() and text.startswith("Once upon a time there was a little girl who loved")
    assert text.endswith(" under a tree. She was very happy.") and f"found a {filled}" in text
    page.click("#fill-result >> text=Keep it")
    assert page.locator("#holed").inner_text() == text


def test_an_edit_is_shown_as_a_difference(visit: Callable[..., Any]) -> None:
    page = visit(settings={"seed": 1})
    page.click("#tab-edit")
    page.fill("#edit-text", "The little girl has a red ball. She was happy.")
    page.press("#edit-do", "Enter")
    page.wait_for_selector("#edit-result:visible")
    assert page.locator("#edit-result del").inner_text() == "red"
    assert page.locator("#edit-result ins").inner_text() == "blue"
    assert "red became blue" in said(page)
    page.click("#edit-result >> text=Keep it")
    assert page.input_value("#edit-text") == "The little girl has a blue ball. She was happy."


def test_a_sudoku_settles_and_is_gone_through_again(visit: Callable[..., Any]) -> None:
    page = visit(settings={"seed": 1})
    page.click("#tab-sudoku")
    page.click("#puzzles >> text=Hard")  # an easy one may settle in its first step
    page.click("#sudoku-go")
    page.wait_for_selector("#verdict b")
    assert page.locator("#verdict").inner_text().startswith("Solved")

    def cells() -> list[str]:
        found: list[str] = page.eval_on_selector_all("#grid input", "all => all.map(c => c.value)")
        return found

    solved = cells()
    assert all("".join(sorted(solved[9 * n : 9 * n + 9])) == "123456789" for n in range(9))
    page.locator("#sudoku-stage input[type=range]").focus()
    page.keyboard.press("Home")
    assert cells() != solved and page.locator("#grid .noise").count() > 0
    page.keyboard.press("End")
    assert cells() == solved


def test_both_ways_of_writing_have_their_clocks(visit: Callable[..., Any]) -> None:
    page = visit()
    page.click("#tab-compare")
    page.click("#race-go")
    page.wait_for_selector("#lane-diffusion .t.noise")
    page.wait_for_selector("#race-verdict:not(:empty)")
    for lane in ("#lane-diffusion", "#lane-ar"):
        assert float(page.locator(f"{lane} .clock").inner_text()) > 0
        assert page.locator(f"{lane} .canvas").inner_text().strip()
        assert "tokens a second" in page.locator(f"{lane} .took").inner_text()


def evil_stream() -> str:
    """What a model could send at worst: markup in every place."""
    draft = {"type": "draft", "block": 0, "step": 1, "tokens": [EVIL, "x"], "ids": [1, 2]}
    draft |= {"guess": [1, 2], "guess_tokens": [EVIL, "x"], "text": EVIL, "entropy": [3.0, None]}
    draft |= {"kept": [False, True], "pinned": [False, False]}
    took = {"mode": EVIL, "steps": 1, "blocks": 1, "tokens_per_step": 2, "seconds": 1, "seed": EVIL}
    took |= {"finish": EVIL, "fault": EVIL}
    chunks = [
        {"choices": [{"delta": {}}], "dgemma": draft},
        {"choices": [{"delta": {"reasoning_content": EVIL}}]},
        {"choices": [{"delta": {"content": EVIL}}]},
        {"choices": [{"delta": {}, "dgemma": took}]},
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_markup_stays_text_wherever_it_comes_from(
    visit: Callable[..., Any], tmp_path: Path
) -> None:
    page = visit(accept_downloads=True)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=200, content_type="text/event-stream", body=evil_stream()
        ),
    )
    ask(page, EVIL)
    page.wait_for_selector(".answer .replay")
    assert page.locator(".mine").inner_text() == EVIL
    assert page.locator(".answer .canvas").inner_text() == EVIL
    page.click(".answer .replay")
    with page.expect_download() as download:
        page.click(".answer .export")
    page.reload()  # what is kept in the browser is no more trusted
    page.wait_for_selector(".answer")
    assert page.locator(".answer .canvas").inner_text() == EVIL
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.hacked") is None

    file = tmp_path / "replay.html"
    download.value.save_as(file)
    page.goto(file.as_uri())
    page.wait_for_selector(".scrubber")
    page.locator("input[type=range]").focus()
    page.keyboard.press("End")
    assert page.locator(".canvas").inner_text() == EVIL
    assert page.locator("#asked").inner_text() == EVIL
    page.keyboard.press("Home")
    assert page.locator(".t.noise").count() == 1 and page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_key_is_asked_for_and_used(visit: Callable[..., Any]) -> None:
    engine = Engine.load("nano", device="cpu", dtype="float32")
    keys = Keys.of(["a-long-enough-key"])
    with running(engine, Settings(names=("nano",), keys=keys)) as server:
        assert server.get("/v1/models").status_code == 401 and server.get("/").status_code == 200
        page = visit(server.url)
        page.wait_for_selector("#login[open]")
        page.fill("#key", "not-the-right-one")
        page.press("#key", "Enter")
        page.wait_for_selector("#login[open]")
        page.fill("#key", "a-long-enough-key")
        page.press("#key", "Enter")
        page.wait_for_selector("#model:not(:empty)")
        ask(page, STORY)
        page.wait_for_selector(".answer .replay")
        assert page.evaluate("Object.values(localStorage).join()").find("a-long-enough") < 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_all_without_motion(visit: Callable[..., Any], scheme: str) -> None:
    size = {"width": 390, "height": 844}
    page = visit(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    assert page.locator("#title").inner_text() == "Text that settles all at once."
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, back[4:-1].split(","))) > 384) == (scheme == "light")
    ask(page, STORY)
    page.wait_for_selector(".answer .t.noise")
    moves = "getComputedStyle(document.querySelector('.t')).animationName"
    assert page.evaluate(moves) == "none"
    page.wait_for_selector(".answer .replay")
    page.click(".answer .replay")
    for tab in ("chat", "fill", "edit", "sudoku", "compare"):
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], tab
    asked = page.locator("#race-question")
    assert asked.evaluate("field => field.scrollHeight <= field.clientHeight")
    page.click("#tab-edit")
    assert page.locator("#edit-do").bounding_box()["width"] > size["width"] / 2
    names = "all => all.filter(b => !(b.getAttribute('aria-label') || b.textContent).trim()).length"
    assert page.eval_on_selector_all("button", names) == 0
    unlabelled = "all => all.filter(i => !i.labels?.length && !i.getAttribute('aria-label')).length"
    assert page.eval_on_selector_all("input, textarea, select", unlabelled) == 0


def test_what_cannot_be_done_is_said(visit: Callable[..., Any]) -> None:
    page = visit(settings={**QUICK, "canvas_length": 100_000})
    ask(page, STORY)
    page.wait_for_selector("#toast:visible")
    assert "canvas length is 100000" in page.locator("#toast").inner_text()
    assert page.input_value("#question") == STORY  # to be sent again
