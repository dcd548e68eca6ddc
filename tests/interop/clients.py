"""Checks of other projects' clients: `clients.py NAME URL MODEL TOKENIZER`.

Run by test_clients.py with the Python of an environment of their own: it imports nothing of ours.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "Write a short story about a dog."
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": {**FUNCTION, "strict": True}}]


def litellm(url: str, model: str, _: str) -> dict[str, Any]:
    """Three of its providers: OpenAI's, Anthropic's and Ollama's form of the same server."""
    import litellm

    litellm.telemetry = False
    bases = {"openai": f"{url}/v1", "anthropic": url, "ollama_chat": url}
    done: dict[str, Any] = {}
    for provider, base in bases.items():
        asked: Any = {"model": f"{provider}/{model}", "api_base": base, "api_key": "unused-key"}
        asked |= {"messages": MESSAGES, "max_tokens": 24, "num_retries": 0}
        whole = litellm.completion(**asked).choices[0].message.content
        chunks = list(litellm.completion(**asked, stream=True))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole and streamed, provider
        done[provider] = ["chat", "stream"]
        if provider != "ollama_chat":  # whose API has no tool_choice
            forced = {**asked, "max_tokens": 64, "tools": TOOLS, "tool_choice": "required"}
            (call,) = litellm.completion(**forced).choices[0].message.tool_calls
            assert (
                call.function.name == "weather" and json.loads(call.function.arguments) is not None
            )
        try:
            litellm.completion(**{**asked, "model": f"{provider}/missing"})
            raise AssertionError(f"{provider}: a model that is not served was answered")
        except (litellm.NotFoundError, litellm.APIConnectionError) as error:
            assert "not served here" in str(error)
            done[provider].append("error")
    return done


def langchain(url: str, model: str, _: str) -> dict[str, Any]:
    """ChatOpenAI over chat completions, then over the Responses API."""
    import openai
    from langchain_openai import ChatOpenAI

    done = {}
    for name, more in (("chat", {}), ("responses", {"use_responses_api": True})):
        asked: Any = {"base_url": f"{url}/v1", "api_key": "unused-key", "max_retries": 0, **more}
        chat = ChatOpenAI(model=model, max_completion_tokens=64, **asked)
        assert chat.invoke(PROMPT).text
        assert "".join(chunk.text for chunk in chat.stream(PROMPT))
        called = chat.bind_tools(TOOLS, tool_choice="required").invoke(PROMPT)
        assert called.tool_calls[0]["name"] == "weather"
        schema = {**PARAMETERS, "title": "place", "required": ["city"]}
        schema["additionalProperties"] = False
        place = chat.with_structured_output(schema, method="json_schema").invoke(PROMPT)
        assert isinstance(place["city"], str)
        try:
            ChatOpenAI(model="missing", **asked).invoke(PROMPT)
            raise AssertionError("a model that is not served was answered")
        except openai.NotFoundError as error:
            assert "not served here" in str(error)
        done[name] = "chat stream tools schema error"
    return done


def lm_eval(url: str, model: str, tokenizer: str) -> dict[str, Any]:
    """Likelihoods and generation by `local-completions`, generation by `local-chat-completions`."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    def requests(kind: str, *arguments: Any) -> list[Any]:
        return [
            Instance(request_type=kind, doc={}, arguments=given, idx=i)
            for i, given in enumerate(arguments)
        ]

    api = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model=model,
        tokenizer_backend="huggingface",
        tokenizer=tokenizer,
        add_bos_token=True,
        max_length=1024,
        batch_size=2,
    )
    pairs = [("Once upon a time", " there was"), ("Once upon a time", " zq xv"), ("One", " two")]
    scored = api.loglikelihood(requests("loglikelihood", *pairs))
    assert all(math.isfinite(total) and total < 0 for total, _ in scored)
    assert scored[0][0] > scored[1][0], "words that follow are likelier than noise"
    until = {"until": ["\n"], "max_gen_toks": 16}
    (text,) = api.generate_until(requests("generate_until", (PROMPT, until)))
    chat = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", model=model)
    turn = json.dumps(MESSAGES)
    from lm_eval.models.api_models import JsonChatStr

    said = chat.generate_until(requests("generate_until", (JsonChatStr(turn), dict(until))))
    assert isinstance(text, str) and isinstance(said[0], str)
    return {"loglikelihood": scored, "generated": [text, said[0]]}


def lm_eval_tasks(url: str, model: str, tokenizer: str) -> dict[str, Any]:
    """Two tasks by the harness's command, as docs/serve.md has it."""
    tasks = Path(__file__).parent / "lm_eval"
    calls = {
        "dgemma_cloze": (
            "local-completions",
            f"base_url={url}/v1/completions,tokenizer={tokenizer},add_bos_token=True",
            [],
        ),
        "dgemma_edit": (
            "local-chat-completions",
            f"base_url={url}/v1/chat/completions,num_concurrent=8",
            ["--apply_chat_template"],
        ),
    }
    scores = {}
    for task, (kind, arguments, more) in calls.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "lm_eval", "--model", kind, "--tasks", task]
            command += ["--include_path", str(tasks), "--output_path", folder, *more]
            command += ["--model_args", f"model={model},{arguments}"]
            subprocess.run(command, check=True, stdout=sys.stderr)
            (results,) = Path(folder).rglob("results_*.json")
            found = json.loads(results.read_text())["results"][task]
        scores[task] = {name: value for name, value in found.items() if "," in name}
    assert scores["dgemma_cloze"]["acc,none"] >= 0.7, scores
    assert scores["dgemma_edit"]["exact_match,none"] >= 0.5, scores
    return scores


CHECKS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "litellm": litellm,
    "langchain": langchain,
    "lm_eval": lm_eval,
    "lm_eval_tasks": lm_eval_tasks,
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps(CHECKS[name](*arguments)))
