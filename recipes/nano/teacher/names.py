"""Find the names that a function uses without defining them.

A training function must be self-contained: the names it needs are built in, in the standard
library, or so usual in teaching code (`TreeNode`, `deque`) that no import is shown.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
import typing

USUAL = (
    "TreeNode ListNode Node xrange deque defaultdict Counter OrderedDict namedtuple ChainMap "
    "heappush heappop heapify heapreplace heappushpop nlargest nsmallest lru_cache cache reduce "
    "partial wraps cmp_to_key permutations combinations combinations_with_replacement product "
    "accumulate chain groupby zip_longest islice starmap takewhile dropwhile pairwise bisect_left "
    "bisect_right insort gcd lcm sqrt isqrt inf ceil floor log log2 comb factorial hypot date "
    "datetime timedelta timezone Path Fraction Decimal dataclass field Enum ascii_lowercase "
    "ascii_uppercase ascii_letters digits punctuation itemgetter attrgetter contextmanager "
    "suppress deepcopy randint shuffle __name__"
)
KNOWN = frozenset([*dir(builtins), *sys.stdlib_module_names, *typing.__all__, *USUAL.split()])


def free_names(code: str) -> set[str]:
    """Return names that the code reads and nothing in it binds."""
    top = symtable.symtable(code, "code", "exec")
    bound = {name.get_name() for name in top.get_symbols() if is_bound(name)}
    read, tables = set[str](), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {n.get_name() for n in table.get_symbols() if n.is_global() and n.is_referenced()}
    return read - bound


def is_bound(name: symtable.Symbol) -> bool:
    return name.is_assigned() or name.is_imported() or name.is_namespace()


def unknown_names(code: str, defined: frozenset[str] = frozenset()) -> set[str]:
    """Return names that neither the code, `defined` nor Python has, and foreign modules."""
    try:
        free = free_names(code)
    except SyntaxError:  # a nonlocal name, which the function around this one had
        return {"nonlocal"}
    return (free - KNOWN - defined) | foreign_modules(ast.parse(code))


def foreign_modules(tree: ast.AST) -> set[str]:
    """Return imported modules that are not of the standard library."""
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." if node.level else (node.module or "").split(".")[0])
    return modules - sys.stdlib_module_names


def defined_names(tree: ast.Module) -> set[str]:
    """Return names that a module defines or imports from the standard library."""
    names = set[str]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom) and not foreign_modules(node):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
