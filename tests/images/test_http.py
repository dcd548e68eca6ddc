"""Pictures over HTTP, on real sockets, with a tiny random tower behind the server."""

import base64
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from PIL import Image as Pillow

from dgemma.server.limits import Limits
from dgemma.server.service import Settings
from tests.images.fuzz import over_http
from tests.images.tiny_tower import encoded, noise_image, photo, png_of, seeing_engine
from tests.server.conftest import Running, opened, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = seeing_engine()
    with running(engine, Settings(names=("seeing",), limits=Limits(max_body=4 << 20))) as found:
        yield found


QUESTION = {"type": "text", "text": "What is it?"}


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), **more}}


def file_of(seed: int) -> bytes:
    source = noise_image(seed).source
    assert isinstance(source, bytes)
    return source


def ask(server: Running, *parts: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
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
    assert note.startswith("picture 1 was shrunk from 800x600")


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def test_anthropic_s_client_sends_pictures_and_results_that_hold_them(server: Running) -> None:
    data = base64.b64encode(file_of(1)).decode()
    block: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }
    text: Any = {"type": "text", "text": "What is it?"}
    asked: Any = {"model": "seeing", "max_tokens": 8}
    low: Any = {"seed": 1, "dgemma": {"image_tokens": 70}}
    client = server.anthropic().messages
    messages: Any = [{"role": "user", "content": [block, text]}]
    (answer,) = client.create(**asked, messages=messages, extra_body=low).content
    assert answer.text == text_of(ask(server, part(file_of(1), detail="low")))  # type: ignore[union-attr]
    assert client.count_tokens(model="seeing", messages=messages).input_tokens > 240
    call: Any = {"type": "tool_use", "id": "a", "name": "camera", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "a", "content": [text, block]}
    messages = [
        {"role": "user", "content": "Look outside."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    (seen,) = client.create(**asked, messages=messages, extra_body=low).content
    call = {"id": "a", "type": "function", "function": {"name": "camera", "arguments": "{}"}}
    image = part(file_of(1), detail="low")
    messages = [
        {"role": "user", "content": "Look outside."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [text, image]},
    ]
    fields = {"messages": messages, "seed": 1, "max_tokens": 8}
    assert seen.text == text_of(server.post("/v1/chat/completions", fields))  # type: ignore[union-attr]


def test_ollama_s_client_sends_pictures_to_both_of_its_routes(server: Running) -> None:
    client = ollama.Client(host=server.url, timeout=60)
    opened(client._client)
    options = {"seed": 1, "num_predict": 8}
    expected = text_of(ask(server, part(file_of(1))))
    message = {"role": "user", "content": "What is it?", "images": [file_of(1)]}
    chat = client.chat(model="seeing", messages=[message], options=options)
    assert chat.message.content == expected
    asked: Any = {"model": "seeing", "images": [file_of(1)], "options": options}
    assert client.generate(prompt="What is it?", **asked).response == expected
    assert client.generate(prompt="", **asked).response != ""
    assert "vision" in (client.show("seeing").capabilities or ())
    with pytest.raises(ollama.ResponseError, match="leave out raw and suffix"):
        client.generate(prompt="x", raw=True, **asked)


def test_results_of_responses_hold_pictures(server: Running) -> None:
    image = {"type": "input_image", "image_url": url_of(file_of(1)), "detail": "low"}
    call = {"type": "function_call", "call_id": "a", "name": "camera", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [image]}
    items = [{"role": "user", "content": "Look outside."}, call, output]
    reply = server.post("/v1/responses", {"input": items, "max_output_tokens": 8}).json()
    assert 60 <= reply["usage"]["input_tokens_details"]["image_tokens"] <= 70


def test_pictures_of_earlier_turns_are_seen(server: Running) -> None:
    texts = set()
    for first in (1, 2):
        messages = [
            {"role": "user", "content": [part(file_of(first), detail="low")]},
            {"role": "assistant", "content": "A thing."},
            {"role": "user", "content": [part(file_of(3), detail="low"), QUESTION]},
        ]
        fields = {"messages": messages, "seed": 1, "max_tokens": 8, "logprobs": True}
        choice = server.post("/v1/chat/completions", fields).json()["choices"][0]
        texts.add(str(choice["logprobs"]["content"]))
    assert len(texts) == 2


def video_part(*frames: bytes, **more: Any) -> dict[str, Any]:
    data = ",".join(base64.b64encode(frame).decode() for frame in frames)
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{data}", **more}}


def test_frames_are_a_video(server: Running) -> None:
    frames = [encoded(photo(40, 20, seed=seed), "JPEG") for seed in range(3)]
    reply = ask(server, video_part(*frames, fps=0.5), part(file_of(1), detail="low"))
    usage = reply.json()["usage"]
    count = usage["prompt_tokens_details"]["image_tokens"]
    assert reply.status_code == 200 and 190 < count <= 280
    other = ask(server, video_part(*frames, fps=10), part(file_of(1), detail="low")).json()
    assert other["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < count, "its times differ"
    many = ask(server, video_part(*frames * 11), video_part(*frames * 11))
    assert many.status_code == 400 and "66 frames; at most 60 may be" in many.text
    large = ask(server, video_part(frames[0], png_of(4000, 3000)))
    assert large.status_code == 400 and "frame 2 of video 1 is 4000x3000 pixels" in large.text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "no address is opened"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}, "no file is opened"),
        ({"type": "image_url", "image_url": {"url": "/etc/hosts"}}, "is not a data: URL"),
        ({"type": "input_audio", "input_audio": {}}, "the model has no audio"),
        (
            {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}},
            "no address is opened; send the",
        ),
        ({"type": "video", "video": "y.mp4"}, "send its frames as video_url"),
        ({"type": "file", "file": {}}, "files are not read"),
        (part(b"hello"), "picture 1 is not a JPEG, PNG, WEBP or GIF file"),
        (part(png_of(12_000, 12_000)), "a picture may have 64 megapixels"),
        (part(encoded(photo(90, 90))[:500]), "picture 1 is damaged"),
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
    """While more pictures are decoded than may be at once, other requests are answered whole."""
    from dgemma import images

    decoding, go_on = threading.Event(), threading.Event()
    decode = images.decode

    def slow(*given: Any) -> Any:
        decoding.set()
        assert go_on.wait(60)
        return decode(*given)

    monkeypatch.setattr(images, "decode", slow)
    replies: list[httpx.Response] = []

    def show(seed: int) -> None:
        replies.append(ask(server, part(file_of(seed))))

    threads = [threading.Thread(target=show, args=(seed,)) for seed in range(4, 8)]
    for thread in threads:
        thread.start()
    try:
        assert decoding.wait(60)
        assert server.ask("Hello", seed=1, max_tokens=8).status_code == 200
        assert server.get("/health").status_code == 200 and not replies
    finally:
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert [reply.status_code for reply in replies] == [200] * 4


DATA = base64.b64encode(file_of(1)).decode()
WAYS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part(file_of(1))]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [video_part(file_of(1))]}]}),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": url_of(file_of(1))}],
                }
            ]
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "base64", "data": DATA}}],
                }
            ],
        },
    ),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [DATA]}]}),
    ("/api/generate", {"prompt": "x", "images": [DATA]}),
]


def test_a_model_without_a_tower_refuses_pictures_and_says_so() -> None:
    engine = seeing_engine()
    engine.images = None
    with running(engine, Settings(names=("blind",))) as blind:
        card = blind.get("/v1/models").json()["data"][0]
        replies = [blind.post(path, body) for path, body in WAYS]
    assert card["modalities"] == {"vision": False}
    for reply in replies:
        assert reply.status_code == 400 and "this checkpoint has no image tower" in reply.text


def addressed(value: Any) -> Any:
    """Return a body whose picture is an address."""
    match value:
        case {"type": "base64"}:
            return {"type": "url", "url": "https://x/y.png"}
        case dict():
            return {name: addressed(inner) for name, inner in value.items()}
        case list():
            return [addressed(inner) for inner in value]
        case str() if value.endswith(DATA):
            return "https://x/y.png"
    return value


@pytest.mark.parametrize(("path", "body"), WAYS, ids=lambda value: str(value)[:20])
def test_an_address_is_refused_on_every_route(server: Running, path: str, body: Any) -> None:
    reply = server.post(path, addressed(body))
    assert reply.status_code == 400 and "no address is opened; send the" in reply.text


def test_spoilt_pictures_are_never_a_server_error(server: Running) -> None:
    """`python -m tests.images.fuzz --http` sends thousands, and watches memory."""
    found = over_http(server.url, 40)
    assert set(found.statuses) == {200, 400} and found.statuses.total() == 40
    assert found.neighbour.seconds and max(found.neighbour.seconds) < 20
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
