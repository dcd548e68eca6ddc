"""Pictures over HTTP, on real sockets, with a tiny random tower behind the server."""

import base64
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image as Pillow

from dgemma.server.limits import Limits
from dgemma.server.service import Settings
from tests.images.fuzz import spoilt
from tests.images.test_pixels import png_of
from tests.images.tiny_tower import encoded, noise_image, photo, seeing_engine
from tests.server.conftest import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = seeing_engine()
    with running(engine, Settings(names=("seeing",), limits=Limits(max_body=4 << 20))) as found:
        yield found


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), **more}}


def file_of(seed: int) -> bytes:
    source = noise_image(seed).source
    assert isinstance(source, bytes)
    return source


def ask(server: Running, *parts: Any, **fields: Any) -> httpx.Response:
    text = {"type": "text", "text": "What is it?"}
    messages = [{"role": "user", "content": [*parts, text]}]
    fields = {"seed": 1, "max_tokens": 8, **fields}
    return server.post("/v1/chat/completions", {"messages": messages, **fields})


def test_three_pictures_have_three_answers_and_the_same_one_the_same(server: Running) -> None:
    answers = [ask(server, part(file_of(seed), detail="low")) for seed in (1, 2, 3, 1)]
    assert [answer.status_code for answer in answers] == [200] * 4
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert len(set(texts)) == 3 and texts[0] == texts[3]
    usage = answers[3].json()["usage"]
    details = usage["prompt_tokens_details"]
    assert 60 <= details["image_tokens"] <= 70 < usage["prompt_tokens"]
    assert details["cached_tokens"] > details["image_tokens"]


def test_openai_s_client_sends_pictures_to_both_of_its_routes(server: Running) -> None:
    client = server.client()
    card = client.models.list().data[0]
    assert card.modalities == {"vision": True}  # type: ignore[attr-defined]
    chat = client.chat.completions.create(
        model="seeing",
        seed=1,
        max_tokens=8,
        messages=[{"role": "user", "content": [part(file_of(1), detail="low")]}],  # type: ignore[misc, list-item]
    )
    image = {"type": "input_image", "image_url": url_of(file_of(1)), "detail": "low"}
    response = client.responses.create(
        model="seeing",
        max_output_tokens=8,
        input=[{"role": "user", "content": [image]}],  # type: ignore[list-item, misc]
        extra_body={"seed": 1},
    )
    assert chat.choices[0].message.content == response.output_text
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_the_budget_is_chosen_by_the_request_and_a_shrunk_picture_is_noted(
    server: Running,
) -> None:
    small = encoded(photo(200, 100))
    counts = {}
    for tokens in (70, 280):
        reply = ask(server, part(small), dgemma={"image_tokens": tokens}).json()
        counts[tokens] = reply["usage"]["prompt_tokens_details"]["image_tokens"]
    assert counts[70] <= 70 < counts[280] <= 280
    large = encoded(Pillow.new("L", (800, 600)))
    (note,) = ask(server, part(large, detail="low")).json()["choices"][0]["dgemma"]["notes"]
    assert note.startswith("messages[0].content[0] was shrunk from 800x600")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "no address is opened"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}, "no file is opened"),
        ({"type": "image_url", "image_url": {"url": "/etc/hosts"}}, "is not a data: URL"),
        ({"type": "input_audio", "input_audio": {}}, "the model has no audio"),
        ({"type": "video_url", "video_url": {}}, "send its frames as images"),
        ({"type": "file", "file": {}}, "files are not read"),
        (part(b"hello"), "messages[0].content[0] is not a JPEG, PNG, WEBP or GIF file"),
        (part(png_of(12_000, 12_000)), "a picture may have 64 megapixels"),
        (part(encoded(photo(90, 90))[:500]), "messages[0].content[0] is damaged"),
    ],
)
def test_what_cannot_be_read_is_a_400_with_its_sentence(
    server: Running, given: dict[str, Any], sentence: str
) -> None:
    reply = ask(server, given)
    assert reply.status_code == 400 and sentence in reply.json()["error"]["message"]


def test_limits_come_before_decoding(server: Running) -> None:
    many = ask(server, *[part(file_of(1))] * 17)
    assert many.status_code == 400 and "17 pictures; at most 16" in many.text
    large = ask(server, part(bytes(4 << 20)))
    assert large.status_code == 413
    system = [{"role": "system", "content": [part(file_of(1))]}, {"role": "user", "content": "x"}]
    refused = server.post("/v1/chat/completions", {"messages": system})
    assert refused.status_code == 400 and "only user and tool messages may" in refused.text


def test_nobody_waits_for_a_decode(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a picture is being decoded, another request is answered whole."""
    from dgemma import images

    decoding, go_on = threading.Event(), threading.Event()
    decode = images.decode

    def slow(data: bytes, name: str) -> Any:
        decoding.set()
        assert go_on.wait(60)
        return decode(data, name)

    monkeypatch.setattr(images, "decode", slow)
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(ask(server, part(file_of(4)))))
    thread.start()
    try:
        assert decoding.wait(60)
        assert server.ask("Hello", seed=1, max_tokens=8).status_code == 200
        assert server.get("/health").status_code == 200 and not replies
    finally:
        go_on.set()
        thread.join(60)
    assert replies[0].status_code == 200


def test_a_model_without_a_tower_refuses_pictures_and_says_so() -> None:
    engine = seeing_engine()
    engine.images = None
    with running(engine, Settings(names=("blind",))) as blind:
        card = blind.get("/v1/models").json()["data"][0]
        reply = ask(blind, part(file_of(1)))
    assert card["modalities"] == {"vision": False}
    assert reply.status_code == 400 and "this checkpoint has no image tower" in reply.text


def test_spoilt_pictures_are_never_a_server_error(server: Running) -> None:
    import numpy as np

    generator = np.random.default_rng(1)
    sound = [encoded(photo(40, 30), form) for form in ("PNG", "JPEG", "GIF", "WEBP")]
    begin, statuses = time.monotonic(), []
    for index in range(60):
        data = spoilt(sound[index % 4], generator)
        statuses.append(ask(server, part(data, detail="low"), max_tokens=1).status_code)
        if time.monotonic() - begin > 60:
            break
    assert set(statuses) <= {200, 400} and 400 in statuses
    assert ask(server, part(file_of(1))).status_code == 200


def test_llm_sends_attachments(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pytest.importorskip("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "clients" / "llm-dgemma")
    import llm_dgemma

    model = llm_dgemma.Dgemma("dgemma", server.url)
    texts = []
    for seed in (1, 2):
        attachment = llm.Attachment(content=file_of(seed), type="image/png")
        response = model.prompt("What is it?", attachments=[attachment], stream=False, seed=1)
        texts.append(response.text())
        assert response.response_json["usage"]["prompt_tokens_details"]["image_tokens"] > 60
    assert texts[0] != texts[1]
    sys.modules.pop("llm_dgemma")
