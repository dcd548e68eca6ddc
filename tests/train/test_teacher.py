"""The teacher: its file, its numbers against transformers', its texts against one at a time."""

import json
import lzma
import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from dgemma.errors import CheckpointError
from recipes.teacher import desk as desks
from recipes.teacher import write as writer
from recipes.teacher.desk import Desk, Request, draw
from recipes.teacher.gguf import Gguf
from recipes.teacher.qwen import Qwen, Shape, read_weights
from recipes.teacher.spell import prompt, read_tokenizer, stops

VOCABULARY, ROOM = 97, 40


# --- the file


def gguf(
    path: Path, facts: dict[str, object], weights: dict[str, tuple[tuple, int, bytes]]
) -> Path:
    """A file with these facts and weights (shape, kind, bytes)."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def fact(value: object) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            kind = 8 if isinstance(value[0], str) else 4
            inner = [text(v) if kind == 8 else struct.pack("<I", v) for v in value]
            return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(inner)
        return struct.pack("<Id", 12, value)

    head, data = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(facts)), b""
    for name, value in facts.items():
        head += text(name) + fact(value)
    for name, (shape, kind, stored) in weights.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += text(name) + sizes + struct.pack("<IQ", kind, len(data))
        data += stored + bytes(-len(stored) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def four_bits(block: bytes) -> list[float]:
    """The definition, number by number."""
    factor, least = struct.unpack("<ee", block[:4])
    scales, numbers, out = block[4:16], block[16:], []
    for part in range(8):
        if part < 4:
            scale, low = scales[part] & 63, scales[part + 4] & 63
        else:
            scale = scales[part + 4] & 15 | scales[part - 4] >> 6 << 4
            low = scales[part + 4] >> 4 | scales[part] >> 6 << 4
        own = numbers[part // 2 * 32 :][:32]
        out += [factor * scale * (b >> 4 if part % 2 else b & 15) - least * low for b in own]
    return out


def six_bits(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (factor,) = struct.unpack("<e", block[208:])
    out = []
    for at in range(256):
        half, rest = divmod(at, 128)
        quarter, place = divmod(rest, 32)
        nibble = low[64 * half + 32 * (quarter % 2) + place] >> 4 * (quarter // 2) & 15
        upper = high[32 * half + place] >> 2 * quarter & 3
        out.append(factor * scales[at // 16] * ((nibble | upper << 4) - 32))
    return out


@pytest.mark.parametrize(("kind", "size", "define"), [(12, 144, four_bits), (14, 210, six_bits)])
def test_blocks_are_read_as_defined(tmp_path, kind, size, define):
    random = torch.Generator().manual_seed(kind)
    blocks = torch.randint(256, (6, size), generator=random, dtype=torch.uint8)
    halves = [0, 2] if kind == 12 else [208]
    for at in halves:  # no factor may be infinite
        blocks[:, at + 1] &= 0x3F
    stored = blocks.numpy().tobytes()
    file = Gguf(gguf(tmp_path / "a.gguf", {}, {"w": ((3, 512), kind, stored)}))
    wanted = [x for at in range(6) for x in define(stored[at * size :][:size])]
    assert file.weight("w").shape == (3, 512)
    torch.testing.assert_close(file.weight("w").flatten(), torch.tensor(wanted))


def test_what_a_file_does_not_have_is_named(tmp_path):
    path = gguf(tmp_path / "a.gguf", {"one": "two", "list": [1, 2]}, {"w": ((4,), 77, b"")})
    file = Gguf(path)
    assert file.facts == {"one": "two", "list": [1, 2]}
    with pytest.raises(CheckpointError, match="no weight v"):
        file.weight("v")
    with pytest.raises(CheckpointError, match="form 77"):
        file.weight("w")
    path.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="no GGUF"):
        Gguf(path)


# --- the model


@pytest.fixture(scope="module")
def reference() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, float("norm" in name), 0.4)
    return model


@pytest.fixture(scope="module")
def path(reference, tmp_path_factory) -> Path:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    weights = {}
    for name, weight in reference.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        weights[name] = (tuple(weight.shape), 0, weight.numpy().tobytes())
    facts: dict[str, object] = {
        "qwen2.block_count": 2.0,
        "qwen2.attention.head_count": 4.0,
        "qwen2.attention.head_count_kv": 2.0,
        "qwen2.embedding_length": 32.0,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.freq_base": 10000.0,
    }
    return gguf(tmp_path_factory.mktemp("teacher") / "tiny.gguf", facts, weights)


def model(path: Path, places: int) -> Qwen:
    shape, weights = read_weights(Gguf(path), torch.device("cpu"), torch.float32)
    assert shape == Shape(layers=2, heads=4, key_heads=2, width=32, eps=1e-6, theta=10000.0)
    return Qwen(shape, weights, places, ROOM)


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def test_logits_are_the_references(reference, path):
    teacher = model(path, 3)
    texts = [ids(9, 1), ids(14, 2)]
    filled = torch.zeros(2, 16, dtype=torch.long)
    for row, text in zip(filled, texts, strict=True):
        row[: len(text)] = text
    teacher.encode(filled, torch.tensor([2, 0]))
    newest = torch.tensor([texts[1][-1], 5, texts[0][-1]])
    logits = teacher.step(newest, torch.tensor([13, 0, 8]))
    with torch.no_grad():
        for place, text in ((0, texts[1]), (1, torch.tensor([5])), (2, texts[0])):
            wanted = reference(text[None]).logits[0, -1]
            torch.testing.assert_close(logits[place], wanted, rtol=1e-4, atol=1e-4)


# --- texts


def test_texts_written_together_are_those_of_one_at_a_time(reference, path, monkeypatch):
    """Of the likeliest token alone, places taken again and again, prompts of all lengths."""
    monkeypatch.setattr(desks, "LEAST_SHARE", 1.0)
    requests = [Request(n, "", tuple(ids(1 + n * 5 % 17, n).tolist())) for n in range(11)]
    desk, end = Desk(model(path, 3), ends=[7, 13, 55], longest=12), {7, 13, 55}
    waiting, replies = list(requests), {}
    while len(replies) < len(requests):
        if count := min(len(desk.free), len(waiting)):
            desk.seat(waiting[:count])
            del waiting[:count]
        for _ in range(4):
            desk.advance()
        replies |= {reply.request.number: reply for reply in desk.take()}
    assert any(reply.ended for reply in replies.values())
    assert any(not reply.ended for reply in replies.values())
    for request in requests:
        text = torch.tensor([request.ids])
        with torch.no_grad():
            for _ in range(12):
                text = torch.cat([text, reference(text).logits[:, -1:].argmax(-1)], 1)
                if int(text[0, -1]) in end:
                    break
        wanted = text[0, len(request.ids) :].tolist()
        ended = wanted[-1] in end
        assert replies[request.number].ended == ended
        assert list(replies[request.number].ids) == (wanted[:-1] if ended else wanted)


def test_draws_are_of_likely_tokens_and_as_often_as_likely():
    p = torch.tensor([0.5, 0.3, 0.18, 0.02])  # the last one less than a twentieth of the first
    torch.manual_seed(0)
    drawn = draw(p.log().expand(20_000, 4))
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(share, torch.tensor([0.51, 0.306, 0.184, 0.0]), atol=0.01, rtol=0)


# --- the command


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Bytes, fences and the marks of turns."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "``", "```", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    pairs = [("`", "`"), ("``", "`")]
    found = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(tokens[-3:])
    return found


def test_the_files_tokens_are_read(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "Ġa", "ab", "<|im_end|>"]
    facts: dict[str, object] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["Ġ a", "a b"],
    }
    found = read_tokenizer(Gguf(gguf(tmp_path / "a.gguf", facts, {})))
    spelled = found.encode("ab ab\n\u00fc<|im_end|>")
    assert spelled.tokens == ["ab", "Ġa", "b", "Ċ", "Ã", "¼", "<|im_end|>"]
    assert found.decode(spelled.ids, skip_special_tokens=True) == "ab ab\n\u00fc"


def test_fences_and_ends_of_turns_stop_a_text(tokenizer):
    vocabulary = tokenizer.get_vocab()
    wanted = [vocabulary[token] for token in ("```", "<|im_end|>", "<|endoftext|>")]
    assert stops(tokenizer) == sorted(wanted)


def test_every_request_is_answered_once(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PART", 3)
    asks = tmp_path / "asks.jsonl.xz"
    with lzma.open(asks, "wt") as file:
        for number in range(8):
            long = "x" * 400 if number == 4 else ""  # too long, so left out
            file.write(json.dumps({"ask": f"{number}{long}", "begin": "def "}) + "\n")

    class Echo:
        """Answers every request with its own prompt."""

        def __init__(self) -> None:
            self.requests: list[Request | None] = [None] * 2

        @property
        def free(self) -> list[int]:
            return [i for i, one in enumerate(self.requests) if one is None]

        def seat(self, requests):
            for place, request in zip(self.free, requests, strict=False):
                self.requests[place] = request

        def advance(self):
            pass

        def take(self):
            taken = [desks.Reply(one, one.ids, True) for one in self.requests if one]
            self.requests = [None] * 2
            return taken

    with writer.Parts(tmp_path / "out", tokenizer) as parts:
        writer.write(Echo(), writer.requests(asks, tokenizer, 1), parts, 60.0)
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 2
    texts = [lzma.decompress(file.read_bytes()).decode() for file in files]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    assert sorted(line["number"] for line in lines) == [1, 2, 3, 5, 6, 7]
    said = prompt("2", "def ")
    for mark in ("<|im_start|>", "<|im_end|>"):
        said = said.replace(mark, "")
    assert {"number": 2, "begin": "def ", "text": said, "ended": True} in lines
    with pytest.raises(SystemExit, match="not empty"):
        writer.Parts(tmp_path / "out", tokenizer)
