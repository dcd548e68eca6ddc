"""Classes whose objects change in place are listed, and nobody else writes an engine's fields.

CONTRIBUTING.md, "What changes in place", says which kinds of objects may be on the list.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dgemma"
INITIAL = {"__init__", "__post_init__"}
# By package or module, the classes that assign fields of `self` outside of those.
MUTABLE = {
    "backends": "CompilePool CudaBackend DecodeRunner ExpertStream Graphs Staging",
    "cli": "Conversation MinuteLines Samples SudokuReport WordWrap",
    "constrain": "ConstrainedCanvas Matcher SchemaLogic _GrammarWriter _PrefixStep _Rewriter",
    "cpu_threads": "LoadMeter SpinControl",
    "engine": (
        "ConstrainedReply Engine EngineCore Generation HostTask ImageFeatures Prefill PrefixStore "
        "Request Scheduler SpeculativeReply Task TokenSequence"
    ),
    "model": "Buffer KVCache",
    "programs": "BeamSearch CandidatePool EditRun EditWindows",
    "scale": "Fleet FleetMetrics Front Relay Replay",
    "server": "BoundedProtocol DraftText Drain Server Stream Worker",
    "text": "ReplyParser StopStrings _CallParser _Thought",
    "train": "CapturedStep Meter Objective PersistentCanvases RecordingRouter TimeBudget Trainer",
    "weights": "_Header",
}
# Not objects of their own: the counters of a `Generation`, and an error's traceback.
WRITTEN = {"progress", "error"}


def assigned(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that statements below a node assign."""
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part for part in parts if isinstance(part, ast.Attribute))


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"


def mutable_classes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            methods = [
                m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            later = [method for method in methods if method.name not in INITIAL]
            if any(is_own(attribute) for method in later for attribute in assigned(method)):
                yield node.name


def test_every_class_that_changes_in_place_is_listed() -> None:
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        owner = path.relative_to(PACKAGE).with_suffix("").parts[0]
        found[owner] |= set(mutable_classes(path))
    assert {owner: names for owner, names in found.items() if names} == {
        owner: set(names.split()) for owner, names in MUTABLE.items()
    }


def test_the_engine_s_objects_write_their_own_fields() -> None:
    """Requests, tasks, the scheduler and the caches are changed by their methods alone."""
    foreign = [
        f"{path.name}:{attribute.lineno} {ast.unparse(attribute)}"
        for path in sorted((PACKAGE / "engine").glob("*.py"))
        for attribute in assigned(ast.parse(path.read_text(encoding="utf-8")))
        if not is_own(attribute) and ast.unparse(attribute.value).split(".")[-1] not in WRITTEN
    ]
    assert foreign == []
