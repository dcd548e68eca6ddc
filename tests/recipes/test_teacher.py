"""The teacher: logits against transformers', batched texts against one at a time, its command."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from dgemma.errors import CheckpointError
from dgemma.weights.gguf import GGUFFile
from recipes.nano.teacher import batch as batches
from recipes.nano.teacher import generate as command
from recipes.nano.teacher.batch import TeacherBatch, TeacherReply, TeacherRequest, sample
from recipes.nano.teacher.chat import read_tokenizer, render, stop_ids
from recipes.nano.teacher.qwen import Qwen, QwenConfig, read_weights
from tests.weights.sample import finish_gguf

VOCABULARY, MAX_LEN = 97, 40


def write_gguf(path: Path, metadata: dict[str, object], weights: dict[str, np.ndarray]) -> Path:
    """Write a Qwen2 file by gguf-py."""
    writer = GGUFWriter(path, "qwen2")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            assert isinstance(value, float)
            writer.add_float32(key, value)
    finish_gguf(writer, weights)
    return path


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
        weights[name] = weight.numpy()
    metadata: dict[str, object] = {
        "qwen2.block_count": 2,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.head_count_kv": 2,
        "qwen2.embedding_length": 32,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.freq_base": 10000.0,
    }
    return write_gguf(tmp_path_factory.mktemp("teacher") / "tiny.gguf", metadata, weights)


def model(path: Path, num_slots: int) -> Qwen:
    config, weights = read_weights(GGUFFile(path), torch.device("cpu"), torch.float32)
    assert config == QwenConfig(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_size=32,
        rms_norm_eps=float(np.float32(1e-6)),
        rope_theta=10000.0,
    )
    return Qwen(config, weights, num_slots, MAX_LEN)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture llama; the teacher is qwen2"):
        QwenConfig.read(GGUFFile(tmp_path / "llama.gguf"))


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def test_logits_are_the_references(reference, path):
    teacher = model(path, 3)
    texts = [ids(9, 1), ids(14, 2)]
    filled = torch.zeros(2, 16, dtype=torch.long)
    for row, text in zip(filled, texts, strict=True):
        row[: len(text)] = text
    teacher.prefill(filled, torch.tensor([2, 0]))
    newest = torch.tensor([texts[1][-1], 5, texts[0][-1]])
    logits = teacher.decode(newest, torch.tensor([13, 0, 8]))
    with torch.no_grad():
        for slot, text in ((0, texts[1]), (1, torch.tensor([5])), (2, texts[0])):
            expected = reference(text[None]).logits[0, -1]
            torch.testing.assert_close(logits[slot], expected, rtol=1e-4, atol=1e-4)


# --- texts


def test_batched_texts_are_those_of_one_at_a_time(reference, path, monkeypatch):
    """Greedily, with slots used again and again and prompts of all lengths."""
    monkeypatch.setattr(batches, "MIN_P", 1.0)
    requests = [TeacherRequest(n, "", tuple(ids(1 + n * 5 % 17, n).tolist())) for n in range(11)]
    batch, end = TeacherBatch(model(path, 3), [7, 13, 55], max_tokens=12), {7, 13, 55}
    waiting, replies = list(requests), {}
    while len(replies) < len(requests):
        if count := min(len(batch.free_slots), len(waiting)):
            batch.add(waiting[:count])
            del waiting[:count]
        for _ in range(4):
            batch.step()
        replies |= {reply.request.number: reply for reply in batch.take_finished()}
    assert any(reply.ended for reply in replies.values())
    assert any(not reply.ended for reply in replies.values())
    for request in requests:
        text = torch.tensor([request.ids])
        with torch.no_grad():
            for _ in range(12):
                text = torch.cat([text, reference(text).logits[:, -1:].argmax(-1)], 1)
                if int(text[0, -1]) in end:
                    break
        expected = text[0, len(request.ids) :].tolist()
        ended = expected[-1] in end
        assert replies[request.number].ended == ended
        assert list(replies[request.number].ids) == (expected[:-1] if ended else expected)


def test_samples_are_of_likely_tokens_and_as_often_as_likely():
    p = torch.tensor([0.5, 0.3, 0.18, 0.02])  # the last one less than a twentieth of the first
    torch.manual_seed(0)
    sampled = sample(p.log().expand(20_000, 4))
    frequency = torch.bincount(sampled, minlength=4) / len(sampled)
    torch.testing.assert_close(
        frequency, torch.tensor([0.51, 0.306, 0.184, 0.0]), atol=0.01, rtol=0
    )


# --- the command


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, fences and the tokens of turns."""
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
    metadata: dict[str, object] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["Ġ a", "a b"],
    }
    found = read_tokenizer(GGUFFile(write_gguf(tmp_path / "a.gguf", metadata, {})))
    encoding = found.encode("ab ab\n\u00fc<|im_end|>")
    assert encoding.tokens == ["ab", "Ġa", "b", "Ċ", "Ã", "¼", "<|im_end|>"]
    assert found.decode(encoding.ids, skip_special_tokens=True) == "ab ab\n\u00fc"


def test_fences_and_end_tokens_stop_a_text(tokenizer):
    vocabulary = tokenizer.get_vocab()
    expected = [vocabulary[token] for token in ("```", "<|im_end|>", "<|endoftext|>")]
    assert stop_ids(tokenizer) == sorted(expected)


def test_every_request_is_answered_once(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "REPLIES_PER_FILE", 3)
    path = tmp_path / "requests.jsonl.xz"
    with lzma.open(path, "wt") as file:
        for number in range(8):
            long = "x" * 400 if number == 4 else ""  # too long, so dropped
            file.write(json.dumps({"prompt": f"{number}{long}", "prefix": "def "}) + "\n")

    class Echo:
        """Answers every request with its own prompt."""

        def __init__(self) -> None:
            self.requests: list[TeacherRequest | None] = [None] * 2

        @property
        def free_slots(self) -> list[int]:
            return [i for i, request in enumerate(self.requests) if request is None]

        def add(self, requests):
            for slot, request in zip(self.free_slots, requests, strict=False):
                self.requests[slot] = request

        def step(self):
            pass

        def take_finished(self):
            finished = [TeacherReply(r, r.ids, True) for r in self.requests if r]
            self.requests = [None] * 2
            return finished

    with command.ReplyFiles(tmp_path / "out", tokenizer) as replies:
        command.generate(Echo(), command.read_requests(path, tokenizer, 1), replies, 60.0)
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 2
    texts = [lzma.decompress(file.read_bytes()).decode() for file in files]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    assert sorted(line["number"] for line in lines) == [1, 2, 3, 5, 6, 7]
    text = render("2", "def ")
    for token in ("<|im_start|>", "<|im_end|>"):
        text = text.replace(token, "")
    assert {"number": 2, "prefix": "def ", "text": text, "ended": True} in lines
    with pytest.raises(SystemExit, match="not empty"):
        command.ReplyFiles(tmp_path / "out", tokenizer)
