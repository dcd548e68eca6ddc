"""The web page in a real browser, with the built-in model behind it."""

import base64
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dgemma.engine import Engine
from dgemma.server.app import PAGE_FILES
from dgemma.server.auth import Keys
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


def shown(page: Any) -> list[str]:
    """The words of a finished answer."""
    return str(page.locator(".answer .rendered").inner_text()).split()


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
    for name, data in PAGE_FILES.items():
        file = nano.get(f"/page/{name}")
        assert file.content == data and file.headers["x-content-type-options"] == "nosniff"
        assert not any(
            word in data.decode() for word in ("innerHTML", "eval(", "https://", "//cdn")
        )
    again = nano.get("/", headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert nano.get("/page/..%2fapp.py").status_code == 404
    assert nano.get("/page/none.js").status_code == 404


def test_drafts_change_then_converge_on_the_answer(
    visit: Callable[..., Any], nano: Running
) -> None:
    page = visit()
    page.evaluate(SEEN)
    ask(page, STORY)
    page.wait_for_selector(".answer .t.noise")
    assert page.locator("#stop").is_visible() and not page.locator("#send").is_visible()
    page.wait_for_selector(".answer .replay")
    assert len(page.evaluate("[...window.seen]")) >= 3
    dgemma = {"max_denoising_steps": 10, "canvas_length": 64}
    whole = nano.ask(STORY, seed=1, max_tokens=24, dgemma=dgemma).json()["choices"][0]
    assert shown(page) == whole["message"]["content"].split()
    assert f"{whole['dgemma']['steps']} steps" in page.locator(".answer footer").inner_text()
    # Screen readers are told what is promised, and nothing else.
    assert said(page).split() == whole["message"]["content"].split()
    assert page.locator(".answer .tokens").get_attribute("aria-hidden") == "true"

    page.click(".answer .replay")
    slider = page.locator(".answer input[type=range]")
    page.keyboard.press("ArrowLeft")  # arrows step it, with the focus where the click left it
    at = page.locator(".answer .at").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".answer .at").inner_text() != at
    assert page.locator(".answer .play").get_attribute("aria-label") == "Play"  # it is paused
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
    assert shown(page) == whole["message"]["content"].split()

    page.reload()
    page.wait_for_selector(".answer")
    assert page.locator(".mine").inner_text() == STORY
    assert shown(page) == whole["message"]["content"].split()
    page.click("#clear")
    assert page.locator("#hero").is_visible() and page.locator(".answer").count() == 0


def test_an_answer_is_stopped_by_a_key(visit: Callable[..., Any], nano: Running) -> None:
    page = visit(settings={"seed": 1, "max_tokens": 1024})
    ask(page, STORY)
    page.wait_for_selector(".answer .t")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    wait_for(lambda: not nano.service.worker.num_running)
    assert "Stopped." in said(page)
    assert "stopped" in page.locator(".answer footer").inner_text()


def kept(page: Any) -> list[str]:
    """Who speaks in the conversation that the browser keeps."""
    store = page.evaluate("localStorage['dgemma.conversation.' + sessionStorage['dgemma.last']]")
    return [message["role"] for message in json.loads(store)["messages"]] if store else []


def test_a_page_left_in_the_middle_keeps_no_question_without_an_answer(
    visit: Callable[..., Any],
) -> None:
    page = visit(settings={"seed": 1, "max_tokens": 1024, "canvas_length": 128})
    ask(page, STORY)
    page.wait_for_selector(".answer .t")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.input_value("#question") == STORY  # to be sent again
    assert kept(page) == [] and page.locator(".mine").count() == 0
    page.press("#question", "Enter")
    page.wait_for_selector(".answer .t")
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
    page.eval_on_selector(
        "#holed",
        """field => {
          const start = field.value.indexOf('red ball');
          field.setSelectionRange(start, start + 8);
        }""",
    )
    page.keyboard.press("Alt+KeyH")
    assert page.input_value("#holed").count("<|fill|>") == 1
    page.fill("#fill-longest", "4")
    page.click("#fill-go")
    page.wait_for_selector("#fill-stage .t.pinned")
    page.wait_for_selector("#fill-result:visible")
    text = page.locator("#fill-result .text").inner_text()
    filled = page.locator("#fill-result mark").inner_text()
    assert filled.strip() and text.startswith("Once upon a time there was a little girl who loved")
    assert text.endswith(" under a tree. She was very happy.") and f"found a {filled}" in text
    page.click("#fill-result >> text=Keep it")
    assert page.input_value("#holed") == text


def pasted(page: Any, selector: str, text: str) -> None:
    """Paste a text as a person does: the clipboard's event, then the browser's own insertion."""
    page.eval_on_selector(
        selector,
        """(field, text) => {
          field.focus();
          if (field.select) field.select();
          const clipboardData = new DataTransfer();
          clipboardData.setData('text/plain', text);
          const how = {clipboardData, bubbles: true, cancelable: true};
          const isLeft = field.dispatchEvent(new ClipboardEvent('paste', how));
          if (isLeft) document.execCommand('insertText', false, text);
        }""",
        text,
    )


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return <|fill|>\n\n", "a <|fill|>\r\nb <|fill|> c\r\n", "<|fill|>"]
)
def test_what_was_pasted_is_sent_byte_for_byte(visit: Callable[..., Any], text: str) -> None:
    page = visit()
    page.click("#tab-fill")
    sent: list[Any] = []

    def refuse(route: Any) -> None:
        sent.append(route.request.post_data_json["text"])
        route.fulfill(status=400, json={"error": {"message": "not today"}})

    page.route("**/v1/dgemma/fill", refuse)
    pasted(page, "#holed", text)
    page.click("#fill-go")
    page.wait_for_selector("#notice-fill:visible")
    page.focus("#holed")
    page.keyboard.press("Control+End")
    page.keyboard.insert_text("a\n<|fill|>\n")
    page.click("#fill-go")
    page.wait_for_selector("#notice-fill:visible")
    assert len(sent) == 2
    end = "\r\n" if "\r" in text else "\n"
    assert sent == [text.split("<|fill|>"), f"{text}a{end}<|fill|>{end}".split("<|fill|>")]
    assert page.locator("#fill-stage").is_hidden() and page.locator("#fill-took").inner_text() == ""


def test_a_clock_runs_while_a_text_is_filled_or_edited(visit: Callable[..., Any]) -> None:
    page = visit()
    for tab in ("fill", "edit"):
        page.route(f"**/v1/dgemma/{tab}", lambda route: None)  # the server takes its time
        page.click(f"#tab-{tab}")
        page.click(f"#{tab}-go")
        clock = page.locator(f"#{tab}-took")
        for at_least in (0.1, 0.4):
            while float(clock.inner_text().split()[0]) < at_least:
                page.wait_for_timeout(20)
        page.click(f"#{tab}-stop")
        page.wait_for_selector(f"#{tab}-go:visible")
        assert clock.inner_text() == ""


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


def test_a_sudoku_converges_and_is_gone_through_again(visit: Callable[..., Any]) -> None:
    page = visit(settings={"seed": 1})
    page.click("#tab-sudoku")
    page.click("#puzzles >> text=Hard")  # an easy one may converge in its first step
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


def test_a_sudoku_is_pasted_in_any_usual_form(visit: Callable[..., Any]) -> None:
    page = visit()
    page.click("#tab-sudoku")
    line = "200080300060070084030500209000105408000000000402706000301007040720040060004010003"
    rows = [line[i : i + 9] for i in range(0, 81, 9)]
    drawn = "\n".join([*rows[:3], "---+---+---", *rows[3:]]).replace("0", ".")
    for text in (line, drawn, " ".join(line), "\n".join("|".join(row) for row in rows)):
        page.click("#puzzles >> text=Easy")
        pasted(page, "#grid input >> nth=40", text)
        cells = page.eval_on_selector_all("#grid input", "all => all.map(c => c.value || '0')")
        assert "".join(cells) == line
    pasted(page, "#grid input >> nth=0", line[:80])
    assert "80 cells; a Sudoku has 81" in page.locator("#notice-sudoku").inner_text()
    page.click("#notice-sudoku button")
    assert not page.locator("#notice-sudoku").is_visible()


def test_both_ways_of_writing_have_their_clocks(visit: Callable[..., Any]) -> None:
    page = visit()
    page.click("#tab-compare")
    page.click("#race-go")
    page.wait_for_selector("#lane-diffusion .t.noise")
    page.wait_for_selector("#race-verdict:not(:empty)")
    for lane in ("#lane-diffusion", "#lane-ar"):
        assert float(page.locator(f"{lane} .clock").inner_text()) > 0
        assert page.locator(f"{lane} .canvas").inner_text().strip()
        assert "tokens in" in page.locator(f"{lane} .took").inner_text()
    verdict = page.locator("#race-verdict").inner_text()
    assert re.search(
        r"answered in .* s, .* in .* s: .* s sooner, .* times as fast|Both took", verdict
    )
    assert "tokens a second" not in page.locator("#compare").inner_text()


def evil_stream() -> str:
    """What a model could send at worst: markup in every place."""
    draft = {"type": "draft", "block": 0, "step": 1, "tokens": [EVIL, "x"], "ids": [1, 2]}
    draft |= {"guess": [1, 2], "guess_tokens": [EVIL, "x"], "text": EVIL, "entropy": [3.0, None]}
    draft |= {"accepted": [False, True], "pinned": [False, False]}
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
    assert page.locator(".answer .rendered").inner_text() == EVIL
    page.click(".answer .replay")
    with page.expect_download() as download:
        page.click(".answer .export")
    page.reload()  # what is kept in the browser is no more trusted
    page.wait_for_selector(".answer")
    assert page.locator(".answer .rendered").inner_text() == EVIL
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
    page.wait_for_selector("#notice-chat:visible")
    assert "canvas length is 100000" in page.locator("#notice-chat").inner_text()
    assert page.input_value("#question") == STORY  # to be sent again
    assert page.locator("#messages li").count() == 0  # and no bubble of it is left
    assert page.locator("#hero").is_visible() and kept(page) == []
    box, field = (page.locator(name).bounding_box() for name in ("#notice-chat", "#composer"))
    assert box["y"] + box["height"] <= field["y"]  # above the field, in the flow of the page
    page.click("#tab-fill")
    assert not page.locator("#notice-chat").is_visible()
    page.click("#tab-chat")
    page.click("#notice-chat button")
    assert not page.locator("#notice-chat").is_visible()


def reply_with(*texts: str, **took: Any) -> Callable[[Any], None]:
    """Answer each request with the next text, and remember what was asked."""
    cost = {"mode": "ar", "steps": 3, "blocks": 0, "tokens_per_step": 1, "seconds": 1.0, "seed": 7}
    cost |= {"finish": "stop", "fault": "", **took}
    left = list(texts)

    def answer(route: Any) -> None:
        answer.asked.append(route.request.post_data_json)  # type: ignore[attr-defined]
        delta = {"choices": [{"delta": {"content": left.pop(0)}, "dgemma": cost}]}
        usage = {"choices": [], "usage": {"total_tokens": 1234}}
        body = "".join(f"data: {json.dumps(part)}\n\n" for part in (delta, usage))
        route.fulfill(status=200, content_type="text/event-stream", body=body + "data: [DONE]\n\n")

    answer.asked = []  # type: ignore[attr-defined]
    return answer


def bubbles(page: Any, count: int) -> list[str]:
    """Wait for so many messages that are whole; their texts."""
    page.wait_for_selector(f"#messages li:nth-child({count}) .copy")
    found: list[str] = page.locator("#messages .mine > p, #messages .rendered").all_inner_texts()
    assert len(found) == count
    return found


def test_a_conversation_is_asked_again_and_changed(visit: Callable[..., Any]) -> None:
    page = visit()
    answer: Any = reply_with("one", "two", "three", "four")
    page.route("**/v1/chat/completions", answer)
    page.click("#instruct")
    page.fill("#system", "Be brief.")
    page.click("#instructions-form .primary")
    ask(page, "first")
    assert bubbles(page, 2) == ["first", "one"]
    assert answer.asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.click(".answer .again")  # another answer: the seed of the last one is not repeated
    page.wait_for_selector(".rendered >> text=two")
    assert bubbles(page, 2) == ["first", "two"] and answer.asked[1]["seed"] == 8
    ask(page, "second")
    assert bubbles(page, 4) == ["first", "two", "second", "three"]
    assert page.locator(".again:visible").count() == 1  # of the last answer alone

    page.hover(".mine >> nth=0")
    page.click(".mine .change >> nth=0")
    page.fill(".changer textarea", "changed")
    page.click(".send-change")
    page.wait_for_selector(".rendered >> text=four")
    assert bubbles(page, 2) == ["changed", "four"]
    assert answer.asked[3]["messages"][1:] == [{"role": "user", "content": "changed"}]


def test_past_conversations_are_opened_and_deleted(visit: Callable[..., Any]) -> None:
    page = visit()
    answer: Any = reply_with("four", "five")
    page.route("**/v1/chat/completions", answer)
    ask(page, "changed")
    bubbles(page, 2)
    page.click("#clear")
    ask(page, "another")
    assert bubbles(page, 2) == ["another", "five"]
    assert answer.asked[1]["messages"] == [{"role": "user", "content": "another"}]
    page.click("#past-open")
    assert page.locator(".past-open").count() == 2
    page.click(".past-open >> text=changed")
    assert bubbles(page, 2) == ["changed", "four"]
    page.click("#past-open")
    page.click("[aria-label='Delete “changed”']")  # the one that is open
    page.click("#past .primary")
    assert page.locator("#hero").is_visible() and page.locator("#messages li").count() == 0
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.click("#past-open")
    assert page.locator(".past-open").all_inner_texts()[0].startswith("another")
    page.click("[aria-label='Delete “another”']")
    assert page.locator("#past-none").is_visible()
    assert "another" not in page.evaluate("Object.values(localStorage).join()")


def test_a_refused_change_leaves_the_conversation_as_it_was(visit: Callable[..., Any]) -> None:
    page = visit()
    page.route("**/v1/chat/completions", reply_with("one"))
    ask(page, "first")
    bubbles(page, 2)
    page.unroute("**/v1/chat/completions")
    refusal = {"status": 400, "json": {"error": {"message": "not today"}}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**refusal))
    page.click(".answer .again")
    page.wait_for_selector("text=not today")
    assert bubbles(page, 2) == ["first", "one"] and kept(page) == ["user", "assistant"]
    page.hover(".mine")
    page.click(".mine .change")
    page.fill(".changer textarea", "changed")
    page.press(".changer textarea", "Enter")
    page.wait_for_selector(".changer textarea")
    assert page.input_value(".changer textarea") == "changed"  # to be sent again
    page.press(".changer textarea", "Escape")
    assert bubbles(page, 2) == ["first", "one"]


MARKDOWN = """# Title

Some **bold**, *soft*, `a*b*c` and snake_case_name, 2 * 3 * 4, \\*kept\\*.
<b>no</b> [site](http://example.org) [bad](javascript:alert(1))

- one
- two
  1. inner

> said

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x):
    return "<i>" + x
```
"""


def test_markdown_and_code_become_elements_and_markup_does_not(visit: Callable[..., Any]) -> None:
    page = visit()
    page.route("**/v1/chat/completions", reply_with(MARKDOWN, '{"a": "<b>"}', ">" * 5000))
    ask(page, "first")
    bubbles(page, 2)
    answer = page.locator(".rendered")

    def texts(selector: str) -> list[str]:
        found: list[str] = answer.locator(selector).all_inner_texts()
        return found

    assert texts("h3") == ["Title"] and texts("strong") == ["bold"] and texts("em") == ["soft"]
    assert texts("p > code") == ["a*b*c"] and texts("blockquote") == ["said"]
    paragraph = answer.locator("p").first.inner_text()
    assert "snake_case_name, 2 * 3 * 4, *kept*." in paragraph and "<b>no</b>" in paragraph
    assert "[bad](javascript:alert(1))" in paragraph
    assert answer.locator("a").evaluate_all("all => all.map(a => a.href)") == [
        "http://example.org/"
    ]
    assert texts("ul > li > ol > li") == ["inner"] and texts("td") == ["1", "2"]
    assert texts(".code pre") == ['def f(x):\n    return "<i>" + x']
    assert answer.locator("b, i, script").count() == 0
    ask(page, "second")
    assert bubbles(page, 4)[3].endswith('{"a": "<b>"}')
    ask(page, "third")  # nothing that a model writes makes the page give up
    bubbles(page, 6)


def test_the_meter_counts_the_servers_tokens(visit: Callable[..., Any], nano: Running) -> None:
    page = visit()
    page.route("**/v1/chat/completions", reply_with("one"))
    ask(page, "first")
    page.wait_for_selector("text=1,234 of 2,048 tokens")
    page.fill("#question", STORY)
    tokens = len(nano.post("/tokenize", {"content": STORY}).json()["tokens"])
    page.wait_for_selector(f"text=1,234 + {tokens} of 2,048 tokens")


def test_starters_lead_with_what_the_model_does_well(visit: Callable[..., Any]) -> None:
    page = visit(settings={"seed": 3, "max_tokens": 100})
    page.wait_for_selector("#limits:not(:empty)")
    assert "knows few facts" in page.locator("#limits").inner_text()
    names = page.locator("#starters b").all_inner_texts()
    assert names[:4] == ["Solve a Sudoku", "Change red to blue", "Fill a hole", "Answer as JSON"]
    page.click("#starters >> text=Answer as JSON")
    page.wait_for_selector(".answer .again")
    call = json.loads(page.locator(".answer .code pre").inner_text())
    assert list(call) == ["name", "arguments"]
    page.click("#clear")
    page.click("#starters >> text=Change red to blue")
    assert bubbles(page, 2)[1] == "The little girl has a blue ball."
    page.click("#clear")
    page.click("#starters >> text=Solve a Sudoku")
    page.wait_for_selector("#verdict b.good")


def test_an_end_that_the_limit_wrote_is_named(visit: Callable[..., Any]) -> None:
    page = visit()
    page.click("#instruct")
    page.fill(
        "#schema", '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'
    )
    page.click("#instructions-form .primary")
    ask(page, STORY)
    page.wait_for_selector(".answer .again")
    told = page.locator(".answer footer").inner_text()
    assert "is the limit's, not the model's" in told and "cut at its longest" not in told


PICTURE = """async selector => {
  const surface = document.createElement('canvas');
  surface.width = 2000; surface.height = 1000;
  surface.getContext('2d').fillRect(0, 0, 900, 900);
  const blob = await new Promise(resolve => surface.toBlob(resolve, 'image/png'));
  const files = new DataTransfer();
  files.items.add(new File([blob], 'a.png', {type: 'image/png'}));
  const isPaste = selector === '#question';
  const event = new Event(isPaste ? 'paste' : 'drop', {bubbles: true, cancelable: true});
  event[isPaste ? 'clipboardData' : 'dataTransfer'] = files;
  document.querySelector(selector).dispatchEvent(event);
}"""


def test_pictures_are_chosen_dropped_and_pasted_where_the_model_reads_them(
    visit: Callable[..., Any], nano: Running
) -> None:
    page = visit()
    models = nano.get("/v1/models").json()
    models["data"][0]["modalities"] = {"vision": False}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.reload()
    page.wait_for_selector("#limits:not(:empty)")
    assert not page.locator("#picture").is_visible()
    page.evaluate(PICTURE, "main")
    page.wait_for_selector("text=This model reads no pictures")

    page.unroute("**/v1/models")
    answer: Any = reply_with("A black square.", "Still one.")
    page.route("**/v1/chat/completions", answer)
    page.reload()
    page.wait_for_selector("#picture:visible")
    page.evaluate(PICTURE, "main")
    page.evaluate(PICTURE, "#question")
    with page.expect_file_chooser() as chooser:
        page.click("#picture")
    no_picture = {"name": "x.png", "mimeType": "image/png", "buffer": b"no picture"}
    chooser.value.set_files(files=[no_picture])
    page.wait_for_selector("text=cannot read x.png as a picture")
    page.wait_for_selector(".chosen >> nth=1")
    page.click(".chosen button >> nth=0")
    assert page.locator(".chosen").count() == 1
    ask(page, "What is it?")
    bubbles(page, 2)
    assert page.locator(".chosen").count() == 0 and page.locator(".mine .thumb").count() == 1
    picture, text = answer.asked[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert struct.unpack(">II", data[16:24]) == (1536, 768)  # made smaller before it is sent
    page.reload()  # it is kept with the conversation, and sent again with the next question
    page.wait_for_selector(".mine .thumb")
    ask(page, "And now?")
    bubbles(page, 4)
    assert answer.asked[1]["messages"][0]["content"] == [picture, text]
