"""Finds the source text that a definition is made of: itself and all that it reaches inside the package.

``texts`` follows names from definition to definition through the package's imports, on the syntax tree: nothing is
imported but packages. It reads statements, not whole files, because files such as kernels/key.py hold constants that
kernels compile in beside names that change often. A statement at the top of a module that binds no name counts as soon
as the module is reached. Comments, docstrings and blank lines do not count. The same text comes from every Python.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
ALL = "*"  # every name of a module
ALIAS = "@"  # before a name: only what an import binds it to
Name = tuple[str, str]  # module, name in it


@dataclass
class Module:
    """A parsed module: by_name has the statements that bind each name, imported what an import binds it to."""

    statements: list[ast.stmt]
    lines: list[str]
    by_name: dict[str, list[int]] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    always: list[int] = field(default_factory=list)


def texts(roots: Iterable[Name], outside: frozenset[str] = frozenset()) -> dict[Name, str]:
    """Text of every definition reached from ``roots``, by module and name; modules named in ``outside`` are left out.

    The text of a name that an import binds is what it stands for.
    """
    found, waiting = {}, list(roots)
    while waiting:
        module, name = waiting.pop()
        if (module, name) in found or module in outside:
            continue
        parsed = _parse(module)
        found[module, name] = ""
        waiting.append((module, ""))  # the statements that bind no name
        if name == ALL:
            waiting += [(module, one) for one in (*parsed.by_name, *parsed.imported)]  # a re-export, too
        elif name.startswith(ALIAS):
            found[module, name] = parsed.imported[name.removeprefix(ALIAS)]
        elif name in parsed.imported:
            waiting += [(module, ALIAS + name), *_target(parsed.imported[name])]
        elif name in parsed.by_name or not name:
            wanted = [parsed.statements[i] for i in (parsed.by_name[name] if name else parsed.always)]
            found[module, name] = "\n".join(_text(parsed, statement) for statement in wanted)
            for statement in wanted:
                waiting += _uses(module, parsed, statement)
        elif not _is_module(f"{module}.{name}"):
            waiting.append((module, ALL))  # a local variable named like a module, or __getattr__
        else:
            waiting.append((f"{module}.{name}", ALL))
    return {name: text for name, text in sorted(found.items()) if text}


def _uses(module: str, parsed: Module, statement: ast.stmt) -> Iterator[Name]:
    """Names of the package that a statement mentions."""
    inner = [node for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = parsed.imported | {name: target for node in inner for name, target in _bindings(node)}
    attributes = {id(node.value): node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    for node in ast.walk(statement):
        if not isinstance(node, ast.Name):
            continue
        if node.id in parsed.by_name:
            yield module, node.id
        if node.id in parsed.imported:
            yield module, ALIAS + node.id
        if target := imported.get(node.id):
            attribute = attributes.get(id(node))
            yield from [(target, attribute)] if attribute and _is_module(target) else _target(target)


def _target(dotted: str) -> list[Name]:
    """(module, name) of an imported object; none outside the package."""
    if dotted.partition(".")[0] != PACKAGE:
        return []
    if _is_module(dotted):
        return [(dotted, ALL)]
    module, _, name = dotted.rpartition(".")
    return [(module, name)]


def _bindings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """(name, dotted path of what it stands for) of each name that an import binds."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        else:
            name = alias.asname or alias.name.partition(".")[0]
            yield name, alias.name if alias.asname else name


def _is_module(dotted: str) -> bool:
    return dotted.partition(".")[0] == PACKAGE and _spec(dotted) is not None


@cache
def _spec(dotted: str) -> ModuleSpec | None:
    """Where a module is. find_spec imports its parent: asked for packages' modules only, it imports no kernel."""
    parent = dotted.rpartition(".")[0]
    above = _spec(parent) if parent else None
    if parent and (above is None or above.submodule_search_locations is None):
        return None
    return find_spec(dotted)


@cache
def _parse(module: str) -> Module:
    source = Path(_spec(module).origin).read_text(encoding="utf-8")
    tree = ast.parse(source)
    parsed = Module(tree.body, _code_lines(source, tree))
    for i, statement in enumerate(tree.body):
        names = set(_bound(statement))
        for name in names:
            parsed.by_name.setdefault(name, []).append(i)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            parsed.imported.update(_bindings(statement))
        elif not names:
            parsed.always.append(i)
    parsed.by_name = {name: at for name, at in parsed.by_name.items() if name not in parsed.imported}
    return parsed


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement at a module's top binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (name for name, _ in _bindings(node))


def _text(parsed: Module, statement: ast.stmt) -> str:
    first = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", ()))])
    lines = parsed.lines[first - 1 : statement.end_lineno]
    return "\n".join(filter(None, lines))


def _code_lines(source: str, tree: ast.Module) -> list[str]:
    """Lines without comments, docstrings and space at their ends, as many as there were."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                for row in range(value.lineno, value.end_lineno + 1):
                    lines[row - 1] = ""
    return [line.rstrip() for line in lines]
