"""Bytes never become code: nothing in our rooms unpickles, evaluates, or lets a library do it.

Imports of pickle and its kin are judged by test_imports.py's table; here are the calls that bring it in by another door.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.import_table import FORBIDDEN_EVERYWHERE
from tests.architecture.source_tree import PACKAGES, SourceFile, imports_of, read_tree

OUR_ROOMS = tuple(package for package in PACKAGES if package != "tests")
EVALUATING = frozenset({"eval", "exec", "compile"})  # as plain names: model.eval() and re.compile() are something else
UNPICKLING = frozenset({"recv_pyobj", "send_pyobj", "recv_serialized", "read_pickle", "to_pickle", "unsafe_load", "full_load"})
SAFE_YAML_LOADERS = frozenset({"SafeLoader", "CSafeLoader"})
# A keyword, and the only value that it may have.
MUST_BE = {"allow_pickle": False, "trust_remote_code": False, "shell": False, "weights_only": True}


def find_dangers(source: SourceFile) -> Iterator[str]:
    """Each call that can turn bytes into code, as path:line: what."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield from (f"{source.where(node.lineno)}: {what}" for what in _dangers_of_call(node))
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "yaml"):
            # By their bare names they could not be told from other functions.
            for alias in node.names:
                if alias.name in ("load", "load_all", *UNPICKLING):
                    yield f"{source.where(node.lineno)}: from {node.module} import {alias.name}"
    for imported in imports_of(source):
        if imported.module.partition(".")[0] in FORBIDDEN_EVERYWHERE:
            yield f"{source.where(imported.line)}: {imported.module}"


def _dangers_of_call(call: ast.Call) -> Iterator[str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    function = call.func
    if isinstance(function, ast.Name) and function.id in EVALUATING:
        yield f"{function.id}()"
    for name, allowed in MUST_BE.items():
        if name in keywords and not (isinstance(value := keywords[name], ast.Constant) and value.value is allowed):
            yield f"{name} must be {allowed}"
    if not isinstance(function, ast.Attribute):
        return
    if function.attr in UNPICKLING:
        yield f".{function.attr}()"
    owner = getattr(function.value, "id", "")
    if owner == "torch" and function.attr == "load" and "weights_only" not in keywords:
        yield "torch.load() without weights_only"
    if owner == "yaml" and function.attr in ("load", "load_all"):
        loader = keywords.get("Loader", call.args[1] if len(call.args) > 1 else None)
        if getattr(loader, "attr", getattr(loader, "id", "")) not in SAFE_YAML_LOADERS:
            yield f"yaml.{function.attr}() without a safe loader"


def probe(code: str) -> SourceFile:
    """A file of core with this code."""
    path = Path(read_tree("core")[0].path)
    return SourceFile(path=path, module="core.probe", is_package=False, tree=ast.parse(code))


def test_our_rooms_bytes_never_become_code() -> None:
    dangers = [danger for source in read_tree(*OUR_ROOMS) for danger in find_dangers(source)]
    assert not dangers, "\n".join(dangers)


@pytest.mark.parametrize(
    "code",
    [
        *(f"import {name}" for name in ("pickle", "marshal", "shelve", "dill", "cloudpickle", "_pickle", "joblib", "jsonpickle")),
        "from pickle import loads",
        "import importlib; importlib.import_module('pickle')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load",
        "numpy.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=is_trusted)",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "yaml.full_load(text)",
        "from yaml import load",
        "eval(text)",
        "exec(text)",
        "compile(text, 'f', 'exec')",
        "socket.recv_pyobj()",
        "socket.send_pyobj(object())",
        "pandas.read_pickle(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_danger_planted_is_found(code: str) -> None:
    assert list(find_dangers(probe(code)))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "re.compile('a')",
        "torch.load(path, weights_only=True)",
        "numpy.load(path, allow_pickle=False)",
        "numpy.load(path)",
        "yaml.safe_load(text)",
        "yaml.load(text, Loader=yaml.CSafeLoader)",
        "json.loads(text)",
        "import json",
    ],
)
def test_danger_harmless_code_is_none(code: str) -> None:
    assert not list(find_dangers(probe(code)))
