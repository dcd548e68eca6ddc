"""The import graph is the architecture: a module may import only from rows above its own."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dgemma"
ROWS = [
    "errors options",
    "config",
    "images",
    "video",
    "text device cpu_threads roofline",
    "model",
    "diffusion quant",
    "backends constrain",
    "weights",
    "engine",
    "programs",
    "train",
    "eval server",
    "scale",
    "cli",
    "__main__",
]
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row.split()}
# May not bring in torch by being imported; what their functions import later is another matter.
TORCH_FREE = {"errors", "options", "config", "images", "video", "roofline", "text"}
TORCH_FREE |= {"server", "scale", "cli"}
TORCH_FREE_FILES = {"dgemma.weights.files", "dgemma.weights.hub", "dgemma.train"}
# Draw what the engine yields, and are imported inside the commands that need them.
LATE = {"dgemma.cli.show"}
IMPORTED_AS = {"pillow": "PIL"}  # packages whose module has another name

# May ask for the device, since torch has a grouped product on a GPU alone.
CHOOSES_PRODUCT = {"moe.py"}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def statements(node: ast.AST, *, lazy: bool, typing: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports below a node; `lazy`: inside functions too; `typing`: for the checker too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif (typing or not is_typing_only(child)) and (lazy or not is_function(child)):
            yield from statements(child, lazy=lazy, typing=typing)


@cache
def imported(path: Path, *, lazy: bool = True, typing: bool = True) -> frozenset[str]:
    """Full names of what a file imports: modules, or names inside of them."""
    names: set[str] = set()
    for node in statements(parse(path), lazy=lazy, typing=typing):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@cache
def modules_of(names: frozenset[str]) -> frozenset[str]:
    """Return our modules of these names."""
    known = {module_name(path) for path in files()}
    found: set[str] = set()
    for name in names:
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        found |= {name} & known
    return frozenset(found)


def owner(module: str) -> str:
    return module.split(".")[1]


def test_every_module_has_its_row() -> None:
    owners = {owner(module_name(path)) for path in files() if path != PACKAGE / "__init__.py"}
    assert owners <= RANK.keys(), f"give {sorted(owners - RANK.keys())} a row"


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_a_module_imports_only_from_rows_above_its_own(path: Path) -> None:
    module = module_name(path)
    if module == "dgemma":
        return  # its names are resolved on first use, which the command line tests watch
    for target in modules_of(imported(path)):
        if target == "dgemma" or owner(target) == owner(module):
            continue
        assert RANK[owner(target)] < RANK[owner(module)], f"{module} must not import {target}"


def test_nothing_imports_in_a_circle() -> None:
    graph = {module_name(p): modules_of(imported(p, typing=False)) for p in files()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for target in graph[module] - {module}:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def reach(module: str) -> set[str]:
    """All that importing a module brings in, as full names."""
    paths = {module_name(path): path for path in files()}
    seen, names, waiting = set(), set(), [module]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        names |= imported(paths[current], lazy=False, typing=False) | {current}
        parents = {current.rpartition(".")[0]} & paths.keys()
        waiting += modules_of(imported(paths[current], lazy=False, typing=False)) | parents
    return names


def brings_torch(module: str) -> bool:
    return any(name.split(".")[0] == "torch" for name in reach(module))


def test_what_must_start_quickly_brings_in_no_torch() -> None:
    modules = [module_name(path) for path in files()]
    quick = [m for m in modules if m == "dgemma" or owner(m) in TORCH_FREE or m in TORCH_FREE_FILES]
    assert len(quick) > 10
    assert [module for module in quick if brings_torch(module)] == sorted(
        module for module in modules if module in LATE
    )
    commands = [m for m in modules if m.startswith("dgemma.cli") and m not in LATE]
    assert [module for module in commands if LATE & reach(module)] == []


def test_the_config_and_the_errors_need_the_standard_library_alone() -> None:
    for path in (*(PACKAGE / "config").glob("*.py"), PACKAGE / "errors.py"):
        roots = {full.split(".")[0] for full in imported(path)}
        assert roots <= sys.stdlib_module_names | {"dgemma"}, path


def test_transformers_is_imported_nowhere() -> None:
    for path in files():
        assert "transformers" not in {name.split(".")[0] for name in imported(path)}, path


def test_every_foreign_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [
        line for name, lines in extras.items() if name not in ("test", "dev") for line in lines
    ]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
    declared = {IMPORTED_AS.get(name, name) for name in declared}
    # Comes with torch on a GPU.
    allowed = declared | sys.stdlib_module_names | {"dgemma", "triton"}
    for path in files():
        foreign = {name.split(".")[0] for name in imported(path)} - allowed
        assert not foreign, f"{path} imports {foreign}"


def test_the_model_knows_nothing_of_devices_files_or_sampling() -> None:
    paths = sorted((PACKAGE / "model").glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        owners = {owner(module) for module in modules_of(imported(path))}
        assert owners <= {"config", "errors", "model"}, path
        if path.name not in CHOOSES_PRODUCT:
            assert "cuda" not in path.read_text(encoding="utf-8"), path


def test_an_engine_does_not_load_torch_s_compiler() -> None:
    """Only training compiles, and it takes as long to load as torch itself."""
    program = "import sys, dgemma.engine; print('torch._dynamo' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
    assert run.stdout.split() == [b"False"]


def test_the_sampler_never_sees_a_model_or_a_generator() -> None:
    path = PACKAGE / "diffusion" / "sampler.py"
    owners = {owner(module) for module in modules_of(imported(path))}
    assert owners <= {"config", "diffusion", "errors"}
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"torch\.rand|multinomial|Generator|manual_seed", source)
