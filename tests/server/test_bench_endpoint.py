"""The bench's endpoint arm on our own server over HTTP."""

import json

import pytest
import torch

from dgemma.errors import DgemmaError
from dgemma.eval.arms import EndpointArm, parse_arm
from dgemma.eval.bench import BenchParams, EngineSource, run_bench
from dgemma.eval.checks import CheckSpec
from dgemma.eval.machine import Machine
from dgemma.eval.numbers import cells
from dgemma.eval.workload import BenchCase, Workload
from tests.server.conftest import QUESTION, TOOLS, Running


def workload(to: str, **fields: object) -> Workload:
    case = BenchCase(prompt=QUESTION, checks=(CheckSpec.read("exact", {"to": to}, "here"),))
    return Workload(
        name="w",
        title="w",
        area="chat",
        max_tokens=32,
        cases=(case,),
        **fields,  # type: ignore[arg-type]
    )


def test_an_endpoint_gives_the_server_s_answers(shared: Running) -> None:
    said = shared.ask(QUESTION, max_tokens=32, seed=0).json()["choices"][0]["message"]["content"]
    spec = parse_arm(f"endpoint:url={shared.url}/v1,model=taught")
    params = BenchParams(
        workloads=(workload(said),), arms=(spec,), rounds=1, attempts=1, warm_up=False
    )
    machine = Machine(torch.device("cpu"), "float32")
    run = run_bench(EngineSource(lambda spec: pytest.fail("none")), "none", machine, params)
    (cell,), (attempt,) = cells(run), run.attempts
    assert cell.accepted is not None and cell.accepted.value == 1.0, run.attempts
    assert attempt.reported_tokens is not None and attempt.tokens is None
    assert attempt.first_visible is not None and 0 < attempt.first_visible <= attempt.seconds


def test_an_endpoint_s_tool_calls_are_its_answer(caller: Running) -> None:
    tool = TOOLS[0]["function"]
    arm = EndpointArm(parse_arm(f"endpoint:url={caller.url}/v1"))
    task = workload("", tools=(tool,))
    for seed in (0, 1):  # the model closes one call, then both
        said = caller.ask(QUESTION, tools=TOOLS, max_tokens=32, seed=seed).json()
        calls = [call["function"] for call in said["choices"][0]["message"]["tool_calls"]]
        updates = arm.answer(task, task.cases[0], seed, retry=False)
        with pytest.raises(StopIteration) as stop:
            while True:
                next(updates)
        found = [json.loads(line) for line in stop.value.value.text.splitlines()]
        assert found and [(call["name"], call["arguments"]) for call in found] == [
            (call["name"], json.loads(call["arguments"])) for call in calls
        ]


def test_a_refusal_of_the_server_is_an_error_in_a_sentence(shared: Running) -> None:
    arm = EndpointArm(parse_arm(f"endpoint:url={shared.url}/v2"))
    task = workload("")
    with pytest.raises(DgemmaError, match="answered 404"):
        next(arm.answer(task, task.cases[0], 0, retry=False))
    arm = EndpointArm(parse_arm("endpoint:url=http://127.0.0.1:9/v1"))
    with pytest.raises(DgemmaError, match="cannot be reached"):
        next(arm.answer(task, task.cases[0], 0, retry=False))
