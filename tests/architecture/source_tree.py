"""Reads the tree's Python files into plain facts: what each module imports and which words it uses. No judgement here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "connectors", "router", "prefill_node", "decode_node", "deploy", "bench", "tests")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One parsed file; module is its dotted name, is_package says that it is an __init__."""

    path: Path
    module: str
    is_package: bool
    tree: ast.Module

    def where(self, line: int) -> str:
        """path:line, as tools and editors show it."""
        return f"{self.path.relative_to(ROOT)}:{line}"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, in full (for `from a import b` where a.b is a module: a.b)."""

    module: str
    line: int


def read_tree(*packages: str) -> list[SourceFile]:
    """Every Python file of the packages (all of ours when none is named)."""
    return [
        SourceFile(
            path=path,
            module=".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"),
            is_package=path.name == "__init__.py",
            tree=ast.parse(path.read_text(), filename=str(path)),
        )
        for package in packages or PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def imports_of(source: SourceFile) -> Iterator[Import]:
    """Every import of the file, also inside functions, and import_module("a.b") with a constant name."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_base(source, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if _is_our_module(full) else base, node.lineno)
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value, node.lineno)


def words_of(source: SourceFile) -> Iterator[tuple[str, int]]:
    """Every string constant (docstrings included), name and attribute, with its line."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Constant(value=str() as text):
                yield text, node.lineno
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno


def _absolute_base(source: SourceFile, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    package = parts if source.is_package else parts[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_our_module(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _called_name(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
