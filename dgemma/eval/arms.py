"""Arms of `dgemma bench`: ways to answer the same workload.

An arm is written `MODE[:key=value,...]`: a mode of the engine with sampler settings, weights and
their format, or `endpoint:url=...` for a server with OpenAI's chat completions. It reports what a
user sees as a stream of `Shown` that ends with an `ArmAnswer`.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dgemma.config import MODES, Mode
from dgemma.diffusion.rules import Confidence
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.engine import Done, Draft, Engine, SamplingParams, Text
from dgemma.engine.generation import Generation
from dgemma.engine.request import Program, Task
from dgemma.engine.speculation import SpeculativeParams, speculative_task
from dgemma.errors import DgemmaError, UsageError
from dgemma.eval.workload import BenchCase, Workload
from dgemma.programs.edit.edit import EditParams, EditResult, edit_program
from dgemma.programs.infill.document import InfillDocument
from dgemma.programs.infill.infill import FillParams, FillResult, fill_program
from dgemma.programs.sudoku.grid import prompt_text
from dgemma.programs.sudoku.solve import SudokuParams, SudokuResult, solve_program
from dgemma.text.chat import Message, Prompt, Tool
from dgemma.weights.source import load_assistant

RETRY_TEMPERATURE = 0.8  # for AR retries: a greedy answer would only repeat
ENDPOINT = "endpoint"
MODEL_KEYS = {"model": str, "quant": str, "dtype": str}
SAMPLER_KEYS = {"steps": int, "bound": float, "confidence": float, "t_max": float, "t_min": float}
ENGINE_KEYS: Mapping[str, type] = {
    **MODEL_KEYS,
    **SAMPLER_KEYS,
    **{"preset": str, "rule": str, "canvas": int, "temperature": float},
    **{"drafts": str, "effort": str},
    **{"draft": str, "verify": str, "length": int},
}
ENDPOINT_KEYS: Mapping[str, type] = {"url": str, "model": str, "key": str, "mode": str}
AR_KEYS = {*MODEL_KEYS, "temperature", "draft", "length"}


class Shown(NamedTuple):
    """All text on the screen after an update, in pieces; the first ones are final."""

    pieces: tuple[str, ...]
    num_promised: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmAnswer:
    """The end of an attempt. None: not reported by the arm."""

    text: str
    written: str | None = None  # the part of the text that the arm wrote; None: all
    reported_tokens: int | None = None
    steps: int | None = None
    blocks: int | None = None
    finish: str = ""
    fault: str = ""
    converged_at: tuple[int, ...] = ()  # last step that changed each position of the first canvas
    prefill_seconds: float | None = None


Updates = Generator[Shown, None, ArmAnswer]


class Arm(Protocol):
    """Answers workloads in one way."""

    spec: "ArmSpec"

    def answer(self, workload: Workload, case: BenchCase, seed: int, *, retry: bool) -> Updates:
        """Answer a case; raises UsageError if this arm cannot do it."""

    def count_tokens(self, text: str) -> int | None:
        """Recount the tokens of a text; None if the arm's tokenizer is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """An arm as it is written on the command line."""

    text: str
    mode: str  # of the engine, or endpoint
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[tuple[str, str], ...]:
        """Settings that need a separate engine."""
        return tuple((k, str(v)) for k, v in sorted(self.settings.items()) if k in MODEL_KEYS)

    @property
    def is_endpoint(self) -> bool:
        return self.mode == ENDPOINT


def parse_arm(text: str) -> ArmSpec:
    """Read an arm; an unknown mode, setting or value is refused with what is allowed."""
    mode, _, rest = text.partition(":")
    if mode not in (*MODES, ENDPOINT):
        raise UsageError(f"arm {text!r}: {mode!r} is not known; use {', '.join(MODES)}, {ENDPOINT}")
    known = ENDPOINT_KEYS if mode == ENDPOINT else ENGINE_KEYS
    settings: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in known or not equals or (mode == "ar" and key not in AR_KEYS):
            allowed = sorted(AR_KEYS) if mode == "ar" else sorted(known)
            raise UsageError(f"arm {text!r}: {part!r} is not known; use {', '.join(allowed)}")
        try:
            settings[key] = known[key](value)
        except ValueError:
            kind = known[key].__name__
            raise UsageError(f"arm {text!r}: {key} is {value!r}; it must be of {kind}") from None
    if mode == ENDPOINT and "url" not in settings:
        raise UsageError(f"arm {text!r} lacks url=http://HOST:PORT/v1")
    return ArmSpec(text=text, mode=mode, settings=settings)


def swept_arms(sweep: Sequence[str]) -> list[str]:
    """Return a diffusion arm for each combination of values, such as steps=8,16 and bound=1,4."""
    axes = []
    for text in sweep:
        key, equals, values = text.partition("=")
        if not (equals and all(values.split(","))):
            raise UsageError(f"sweep {text!r} has no values; write KEY=VALUE,VALUE")
        axes.append([f"{key}={value}" for value in values.split(",")])
    return [f"diffusion:{','.join(point)}" for point in product(*axes)] if axes else []


# --- the engine


class EngineArm:
    """A mode of a loaded checkpoint, through the scheduler that serves every request."""

    def __init__(self, spec: ArmSpec, engine: Engine) -> None:
        self.spec, self.engine = spec, engine
        self.mode: Mode = spec.mode  # type: ignore[assignment]  # parse_arm allows no other
        self.drafts = self.mode != "ar" and spec.settings.get("drafts", "on") != "off"
        self.speculation, self.preset = self._speculation(), spec.settings.get("preset")
        self.sampler = None if self.speculation is not None else self._sampler()

    def _speculation(self) -> SpeculativeParams | None:
        given = self.spec.settings
        if "verify" in given:
            if "steps" in given:
                raise UsageError(f"arm {self.spec.text!r}: a verified canvas takes one step a pass")
            length = given.get("length")
            return SpeculativeParams(
                drafter="canvas", accept=given["verify"], num_speculative_tokens=length
            )
        if "draft" in given:
            draft, length = given["draft"], given.get("length")
            if draft in ("ngram", "canvas"):
                return SpeculativeParams(drafter=draft, num_speculative_tokens=length)
            assistant = load_assistant(Path(draft), self.engine.model)
            return SpeculativeParams(
                drafter="assistant", assistant=assistant, num_speculative_tokens=length
            )
        return None

    def _sampler(self) -> Sampler | None:
        given = {k: v for k, v in self.spec.settings.items() if k in (*SAMPLER_KEYS, "rule")}
        if not given:
            return None
        sampler = self.engine.sampler_of(self.preset)
        if given.get("rule") == "confidence":
            rule: Confidence | EntropyBound = Confidence()
        elif isinstance(sampler.rule, EntropyBound) and given.get("rule", "entropy") == "entropy":
            names = {"bound": "entropy_bound", "confidence": "confidence_threshold"}
            changes = {name: given[key] for key, name in names.items() if key in given}
            rule = replace(sampler.rule, **changes)
        else:
            raise UsageError(f"arm {self.spec.text!r}: rule must be entropy or confidence")
        steps = given.get("steps", sampler.max_denoising_steps)
        t_max, t_min = given.get("t_max", sampler.t_max), given.get("t_min", sampler.t_min)
        return replace(sampler, rule=rule, max_denoising_steps=steps, t_max=t_max, t_min=t_min)

    def count_tokens(self, text: str) -> int:
        return len(self.engine.tokenizer.encode(text))

    def answer(self, workload: Workload, case: BenchCase, seed: int, *, retry: bool) -> Updates:
        self.engine.prefixes.clear()  # no attempt reuses a prompt
        if workload.program == "generate" or self.mode == "ar":
            return self._generate(workload, case, seed, retry)
        if workload.program == "sudoku":
            whole: Mode = "diffusion" if self.mode == "auto" else self.mode
            params = SudokuParams(mode=whole, seed=seed, drafts=self.drafts)
            return self._follow(solve_program(self.engine, case.prompt, params))
        sampler = self.sampler
        if sampler is None and self.preset is not None:
            sampler = self.engine.sampler_of(self.preset)
        if workload.program == "fill":
            fill = FillParams(
                max_tokens=workload.max_tokens,
                single_line=workload.single_line,
                effort=self.spec.settings.get("effort", "fast"),  # as editors ask
                seed=seed,
                sampler=sampler,
                drafts=self.drafts,
            )
            return self._follow(fill_program(self.engine, case.prompt, fill))
        edit = EditParams(seed=seed, sampler=sampler, drafts=self.drafts)
        return self._follow(edit_program(self.engine, case.prompt, case.instruction, edit))

    def _params(self, workload: Workload, seed: int, retry: bool) -> SamplingParams:
        settings = self.spec.settings
        temperature = settings.get("temperature")
        if self.mode == "ar" and retry and not temperature:
            temperature = RETRY_TEMPERATURE
        constraint = None
        if workload.schema is not None:
            constraint = self.engine.constraint(schema=workload.schema)
        return SamplingParams(
            mode=self.mode,
            max_tokens=workload.max_tokens,
            seed=seed,
            temperature=temperature,
            preset=self.preset,
            sampler=self.sampler,
            canvas_length=settings.get("canvas"),
            constraint=constraint,
            drafts=self.drafts,
        )

    def _generate(self, workload: Workload, case: BenchCase, seed: int, retry: bool) -> Updates:
        params = self._params(workload, seed, retry)
        if workload.program != "fill":
            return self._follow(self._task(self._prompt(workload, case), params))
        document = InfillDocument.parse(case.prompt)
        if document.num_holes != 1:
            raise UsageError("AR fills one hole: it writes from left to right")
        stop = ("\n",) if workload.single_line else ()
        prompt = self.engine.plain_prompt(document.pieces[0])
        task = self._task(prompt, replace(params, stop=stop))
        return self._filled(document, self._follow(task))

    def _task(self, prompt: Prompt, params: SamplingParams) -> Generation:
        """Return the task of a reply; requests that cannot be speculative are plain."""
        if self.speculation is None or params.constraint is not None:
            return self.engine.generation(prompt, params)
        plain = replace(
            params, mode="ar", sampler=None, preset=None, canvas_length=None, drafts=False
        )
        return speculative_task(self.engine, prompt, plain, self.speculation)

    def _filled(self, document: InfillDocument, updates: Updates) -> Updates:
        answer = yield from updates
        return replace(answer, text=document.join([answer.text]), written=answer.text)

    def _prompt(self, workload: Workload, case: BenchCase) -> Prompt:
        tools = [Tool(**tool) for tool in workload.tools]
        content = user_message(workload, case)
        if self.engine.template is None:
            return self.engine.plain_prompt(content)
        return self.engine.prompt([Message(role="user", content=content)], tools)

    def _follow(self, program: "Program[Any] | Task") -> Updates:
        """Run a request and show its promised text and drafts as a terminal does."""
        screen = Screen(frozenset(self.engine.stop_ids.ids))
        last: Any = None
        for event in self.engine.follow(program):
            last = event
            if isinstance(event, Draft):
                yield screen.draft(event)
            elif isinstance(event, Text):
                yield screen.promise(event.text)
        return screen.answer(last)


class Screen:
    """Text as a user sees it: final text, then the guess of the current canvas."""

    def __init__(self, stops: frozenset[int]) -> None:
        self.stops = stops
        self.promised: list[str] = []
        self.first_canvas: list[tuple[int, ...]] = []

    def promise(self, text: str) -> Shown:
        self.promised.append(text)
        return Shown(tuple(self.promised), len(self.promised))

    def draft(self, draft: Draft) -> Shown:
        if draft.block == 0:
            if draft.step == 1:  # a retried canvas
                self.first_canvas.clear()
            self.first_canvas.append(draft.guess)
        ends = (i for i, token in enumerate(draft.guess) if token in self.stops)
        visible = draft.guess_tokens[: next(ends, len(draft.guess))]
        return Shown((*self.promised, *visible), len(self.promised))

    def converged_at(self) -> tuple[int, ...]:
        """Return the last step that changed each position of the first canvas."""
        guesses = self.first_canvas
        if not guesses or len(set(map(len, guesses))) > 1:
            return ()
        last = [1] * len(guesses[0])
        for step, (before, now) in enumerate(pairwise(guesses), start=2):
            for position in range(len(now)):
                if now[position] != before[position]:
                    last[position] = step
        return tuple(last)

    def answer(self, last: Done | FillResult | EditResult | SudokuResult) -> ArmAnswer:
        if isinstance(last, Done):
            calls = last.reply.tool_calls
            as_json = [json.dumps({"name": c.name, "arguments": c.arguments}) for c in calls]
            return ArmAnswer(
                text="\n".join([*([last.text] if last.text else []), *as_json]),
                reported_tokens=None if calls else last.tokens,
                steps=last.steps,
                blocks=last.blocks,
                finish=last.finish,
                fault=last.fault,
                converged_at=self.converged_at(),
                prefill_seconds=last.prefill_seconds,
            )
        if isinstance(last, SudokuResult):
            return ArmAnswer(text=last.reply, steps=last.steps, converged_at=self.converged_at())
        # Several canvases propose texts: positions of the first one mean nothing.
        if isinstance(last, FillResult):
            written = [hole.text for hole in last.holes]
        else:
            written = [change.new for change in last.changed]
        return ArmAnswer(
            text=last.text,
            written="\n".join(written),
            steps=last.steps,
            blocks=last.canvases,
        )


def user_message(workload: Workload, case: BenchCase) -> str:
    """Return the task as a chat message, for arms without its program."""
    if workload.program == "edit":
        return f"{case.instruction}\n\n{case.prompt}"
    if workload.program == "sudoku":
        return prompt_text(case.prompt)
    if workload.program == "fill":
        return (
            "Replace <|fill|> in this text by what belongs there. Reply with the whole text "
            f"alone.\n\n{case.prompt}"
        )
    return case.prompt


# --- endpoints


class EndpointArm:
    """A server with OpenAI's chat completions, streamed."""

    def __init__(self, spec: ArmSpec) -> None:
        self.spec, self.url = spec, spec.settings["url"].rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"arm {spec.text!r}: url must begin with http:// or https://")

    def count_tokens(self, text: str) -> int | None:
        return None

    def answer(self, workload: Workload, case: BenchCase, seed: int, *, retry: bool) -> Updates:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": user_message(workload, case)}],
            "max_tokens": workload.max_tokens,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if "model" in self.spec.settings:
            body["model"] = self.spec.settings["model"]
        if workload.schema is not None:
            held = {"name": "answer", "schema": workload.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": held}
        if workload.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in workload.tools]
        if "mode" in self.spec.settings:
            body["dgemma"] = {"mode": self.spec.settings["mode"]}
        return self._stream(body)

    def _stream(self, body: dict[str, Any]) -> Updates:
        pieces: list[str] = []
        calls: dict[int, dict[str, str]] = {}
        tokens, finish = None, ""
        for chunk in self._events(body):
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            for choice in chunk.get("choices", []):
                finish = choice.get("finish_reason") or finish
                delta = choice.get("delta") or {}
                for call in delta.get("tool_calls") or []:
                    known = calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
                    for key in known:
                        known[key] += (call.get("function") or {}).get(key) or ""
                if delta.get("content"):
                    pieces.append(delta["content"])
                    yield Shown(tuple(pieces), len(pieces))
        text = "".join(pieces)
        as_json = [json.dumps(_call(call)) for call in calls.values()]
        text = "\n".join([*([text] if text else []), *as_json])
        return ArmAnswer(text=text, reported_tokens=None if calls else tokens, finish=finish)

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if variable := self.spec.settings.get("key"):
            headers["Authorization"] = f"Bearer {os.environ.get(variable, '')}"
        request = urllib.request.Request(
            f"{self.url}/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                for line in response:
                    data = line.decode("utf-8").strip().removeprefix("data:").strip()
                    if data.startswith("{"):
                        event = json.loads(data)
                        if "error" in event:
                            raise DgemmaError(f"{self.url} failed: {event['error']}")
                        yield event
        except urllib.error.HTTPError as error:
            detail = error.read(500).decode("utf-8", "replace")
            raise DgemmaError(f"{self.url} answered {error.code}: {detail}") from None
        except OSError as error:
            raise DgemmaError(f"{self.url} cannot be reached: {error}; start it first") from None


def _call(call: Mapping[str, str]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError:
        arguments = call["arguments"]
    return {"name": call["name"], "arguments": arguments}
