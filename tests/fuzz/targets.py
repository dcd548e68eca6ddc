"""Readers of untrusted bytes, each as a function that may only return or refuse in a sentence.

`python -m tests.fuzz` searches for inputs that break this, guided by coverage; `test_corpus.py`
replays the inputs that were kept.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from dgemma.config import load_config_file, load_generation_config
from dgemma.errors import CheckpointError, DgemmaError
from dgemma.images import Image
from dgemma.server.sentinels import find_hole, read_region, read_update
from dgemma.text.chat import ChatTemplate
from dgemma.text.messages import Message, Tool
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.files import read_header, read_headers
from dgemma.weights.gguf import GGUFFile
from dgemma.weights.gguf_config import read_gguf_config
from dgemma.weights.gguf_tokenizer import read_tokenizer
from tests.text.small import TEMPLATE, make_backend, small_tokenizer
from tests.tiny import VISION

Target = Callable[[bytes], object]
MAX_SENTENCE = 4000  # characters of a refusal
CONVERSATION = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="What is 2 + 2? <|turn>"),
    Message(role="assistant", content="4"),
    Message(role="user", content=("And", "3 + 3?")),
]


@cache
def scratch() -> Path:
    """Return a directory for the files of one process."""
    return Path(tempfile.mkdtemp(prefix="dgemma-fuzz-"))


def write(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.write_bytes(data)
    return path


def safetensors(data: bytes) -> None:
    read_header(write("model.safetensors", data))


def index(data: bytes) -> None:
    """Read bytes as an index beside the shard that the seed names."""
    directory = write("index/model.safetensors.index.json", data).parent
    (shard,) = set(json.loads(next(_index_seeds()))["weight_map"].values())
    if not (directory / shard).exists():
        (directory / shard).write_bytes(next(_safetensors_seeds()))
    read_headers(directory)


def gguf(data: bytes) -> None:
    path = write("model.gguf", data)
    file = GGUFFile(path)
    with suppress(DgemmaError):  # the tokenizer is read apart from the config
        read_gguf_config(file)
    read_tokenizer(file.metadata, path)


def config(data: bytes) -> None:
    """Read bytes as `config.json`, and as the generation defaults beside a whole one."""
    path = write("config/config.json", data)
    try:
        load_config_file(path)
    except DgemmaError:
        path.write_text('{"eos_token_id": 1}')
        write("config/generation_config.json", data)
        load_generation_config(path.parent)


def template(data: bytes) -> None:
    ChatTemplate(data.decode("utf-8", "replace"), small_tokenizer()).prompt(CONVERSATION)


def messages(data: bytes) -> None:
    """Read a conversation and tools as a request has them, and render them."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return  # refused before, by the reader of bodies
    parts = raw if isinstance(raw, dict) else {"messages": raw}
    listed, tools = parts.get("messages"), parts.get("tools")
    conversation = [Message.from_dict(each) for each in listed] if is_list(listed) else []
    known = [Tool.from_dict(each) for each in tools] if is_list(tools) else []
    chat_template().prompt(conversation, known, enable_thinking=bool(parts.get("thinking")))


def is_list(value: Any) -> bool:
    return isinstance(value, list)


@cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, small_tokenizer())


def sentinels(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    find_hole(text)
    for read in (read_region, read_update):
        with suppress(DgemmaError):
            read(text)


def tokenizer(data: bytes) -> None:
    found = Tokenizer.load(write("tokenizer/tokenizer.json", data).parent)
    found.encode("A text of some words, twice: " * 20)


def image(data: bytes) -> None:
    Image(data).prepare(VISION)


TARGETS: dict[str, Target] = {
    "safetensors": safetensors,
    "index": index,
    "gguf": gguf,
    "config": config,
    "template": template,
    "messages": messages,
    "sentinels": sentinels,
    "tokenizer": tokenizer,
    "image": image,
}


def check(name: str, data: bytes) -> None:
    """Run a target; raises unless it returns or refuses in one sentence."""
    for directory in ("index", "config", "tokenizer"):
        (scratch() / directory).mkdir(exist_ok=True)
    (scratch() / "config" / "generation_config.json").unlink(missing_ok=True)
    try:
        TARGETS[name](data)
    except DgemmaError as error:
        sentence = str(error)
        assert sentence and len(sentence) <= MAX_SENTENCE, sentence[:200]
        assert not isinstance(error, CheckpointError) or "\n" not in sentence, sentence


def seeds(name: str) -> Iterator[bytes]:
    """Yield small valid inputs to start from."""
    yield from SEEDS.get(name, tuple)()


def words(name: str) -> list[bytes]:
    """Return the words of the seeds, for mutations to use."""
    found = {word for seed in seeds(name) for word in re.findall(rb"\w{2,40}|<\S{1,20}>", seed)}
    extra = [
        b'{"',
        b'":',
        b'"',
        b"[[",
        b"]]",
        b"},",
        b"null",
        b"true",
        b"1e999",
        b"-1",
        b"{%",
        b"%}",
    ]
    return sorted(found)[:2000] + extra


def _safetensors_seeds() -> Iterator[bytes]:
    entry = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}
    for header in ({"a": entry, "__metadata__": {"format": "pt"}}, {}):
        text = json.dumps(header).encode()
        yield len(text).to_bytes(8, "little") + text + bytes(8 if header else 0)


def _index_seeds() -> Iterator[bytes]:
    weight_map = {"a": "model-00001-of-00001.safetensors"}
    yield json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}).encode()


def _gguf_seeds() -> Iterator[bytes]:
    """Yield a header with a small tokenizer, and one that keeps the config alone."""
    from tests.weights.gguf_tiny import tiny_keys, tokenizer_keys, write_tiny

    for keys in (tiny_keys() | tokenizer_keys(), tiny_keys()):
        yield write_tiny(scratch() / "seed.gguf", keys, {}).read_bytes()


def _config_seeds() -> Iterator[bytes]:
    from dgemma.config import GenerationConfig, config_to_json, generation_config_to_json
    from tests.tiny import TINY

    yield json.dumps(config_to_json(TINY)).encode()
    yield json.dumps(generation_config_to_json(GenerationConfig())).encode()


def _template_seeds() -> Iterator[bytes]:
    yield TEMPLATE.encode()
    yield (
        b"{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content | trim }}<turn|>"
        b"{% endfor %}"
    )


def _messages_seeds() -> Iterator[bytes]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    parts = [{"type": "text", "text": "Hello"}]
    yield json.dumps(
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "1"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "thinking": True,
        }
    ).encode()


def _sentinel_seeds() -> Iterator[bytes]:
    yield b"<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    yield b"[SUFFIX]b[PREFIX]a"
    yield b"a<|fill|>b"
    yield (
        b"<|current_file_content|>\ncurrent_file_path: a.py\nx\n<|code_to_edit|>\ny\n"
        b"<|/code_to_edit|>\nz<|/current_file_content|><|edit_diff_history|>d<|/edit_diff_history|>"
    )
    yield b"<|original_code|>\nx<|/original_code|><|update_snippet|>\ny\n<|/update_snippet|>"


def _tokenizer_seeds() -> Iterator[bytes]:
    yield make_backend().to_str().encode()


def _image_seeds() -> Iterator[bytes]:
    from PIL import Image as Pillow

    gradient = Pillow.linear_gradient("L").resize((24, 16))
    for kind, mode in (
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("JPEG", "RGB"),
        ("GIF", "P"),
        ("WEBP", "RGB"),
    ):
        data = BytesIO()
        gradient.convert(mode).save(data, kind)
        yield data.getvalue()


SEEDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "safetensors": _safetensors_seeds,
    "index": _index_seeds,
    "gguf": _gguf_seeds,
    "config": _config_seeds,
    "template": _template_seeds,
    "messages": _messages_seeds,
    "sentinels": _sentinel_seeds,
    "tokenizer": _tokenizer_seeds,
    "image": _image_seeds,
}
