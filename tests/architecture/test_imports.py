"""Imports go one way: every import of the tree is read against the table of allowed edges."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.architecture.import_table import (
    BACKEND_NAMES,
    CLOSED_TO_ALL,
    CLOSED_TO_CORE,
    FORBIDDEN_EVERYWHERE,
    IMPORT_TABLE,
    MAY_NAME_BACKENDS,
    NODE_SHELL,
    PLUGINS_OF_OTHERS,
    Room,
    is_within,
    room_of,
)
from tests.architecture.source_tree import PACKAGES, ROOT, Import, SourceFile, imports_of, read_tree, words_of

ROOMS_IN_TABLE = tuple(package for package in PACKAGES if package != "tests")


def find_violation(source: SourceFile, imported: Import) -> str | None:
    """Why the table forbids this import, or None."""
    name = room_of(source.module, IMPORT_TABLE)
    if name is None:
        return f"{source.where(1)}: {source.module} belongs to no room of the table"
    room, top = IMPORT_TABLE[name], imported.module.partition(".")[0]
    where = source.where(imported.line)
    if top in FORBIDDEN_EVERYWHERE:
        return f"{where}: {top} is forbidden everywhere"
    if top in sys.stdlib_module_names:
        return None
    if top in PACKAGES:
        return None if _may_import_ours(name, room, imported.module) else f"{where}: {name} may not import {imported.module}"
    if top in room.outside or (name == "connectors" and source.module != "connectors"):  # client libraries: see below
        return None
    return f"{where}: {name} may not import the outside package {top}"


def _may_import_ours(name: str, room: Room, module: str) -> bool:
    if name in ("core", *NODE_SHELL) and is_within(module, CLOSED_TO_CORE):
        return False
    if is_within(module, CLOSED_TO_ALL) and name not in CLOSED_TO_ALL:
        return False
    # A package above the room's modules (`import core`) brings no more than its empty __init__.
    return is_within(module, (name, *room.ours)) or any(allowed.startswith(f"{module}.") for allowed in room.ours)


def test_imports_every_edge_is_in_the_table() -> None:
    sources = read_tree(*ROOMS_IN_TABLE)
    violations = [found for source in sources for imported in imports_of(source) if (found := find_violation(source, imported))]
    assert not violations, "\n".join(violations)


def test_imports_tests_and_bench_are_imported_by_nobody_else() -> None:
    violations = [
        f"{source.where(imported.line)}: imports {imported.module}"
        for source in read_tree(*(room for room in ROOMS_IN_TABLE if room != "bench"))
        for imported in imports_of(source)
        if is_within(imported.module, ("tests", "bench"))
    ]
    assert not violations, "\n".join(violations)


def test_imports_one_client_library_per_connector_file_and_one_file_per_library() -> None:
    modules_by_library: dict[str, set[str]] = defaultdict(set)
    libraries_by_module: dict[str, set[str]] = defaultdict(set)
    for source in read_tree("connectors"):
        if room_of(source.module, IMPORT_TABLE) not in ("connectors", *PLUGINS_OF_OTHERS):
            continue
        for imported in imports_of(source):
            top = imported.module.partition(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES or top in IMPORT_TABLE["connectors"].outside:
                continue
            modules_by_library[top].add(source.module)
            libraries_by_module[source.module].add(top)
    for plugin, libraries in PLUGINS_OF_OTHERS.items():
        assert libraries_by_module.pop(plugin) == libraries
        assert all(modules_by_library.pop(library) == {plugin} for library in libraries)
    too_many = {module: libraries for module, libraries in libraries_by_module.items() if len(libraries) > 1}
    scattered = {library: modules for library, modules in modules_by_library.items() if len(modules) > 1}
    assert not too_many, f"a connector file imports one client library: {too_many}"
    assert not scattered, f"a client library is imported in one file: {scattered}"


def test_imports_plugins_of_other_engines_are_imported_by_nobody() -> None:
    importers = [
        source.where(imported.line)
        for source in read_tree(*ROOMS_IN_TABLE)
        for imported in imports_of(source)
        if is_within(imported.module, tuple(PLUGINS_OF_OTHERS))
    ]
    assert not importers, "\n".join(importers)


def test_imports_pickle_and_its_kin_are_nowhere() -> None:
    violations = [
        f"{source.where(imported.line)}: {imported.module}"
        for source in read_tree()
        for imported in imports_of(source)
        if imported.module.partition(".")[0] in FORBIDDEN_EVERYWHERE
    ]
    assert not violations, "\n".join(violations)


def test_imports_type_checking_guards_are_nowhere() -> None:
    guard = "TYPE_" + "CHECKING"
    violations = [
        source.where(line)
        for source in read_tree()
        if source.module != __name__
        for word, line in words_of(source)
        if word == guard
    ]
    assert not violations, f"a type that needs {guard} lives in the wrong room: {violations}"


def test_core_names_no_backend_not_even_in_a_string() -> None:
    pattern = re.compile(rf"(?<![a-z])({'|'.join(BACKEND_NAMES)})(?![a-z])", re.IGNORECASE)
    violations = [
        f"{source.where(line)}: {found.group()}"
        for source in read_tree("core")
        if not is_within(source.module, MAY_NAME_BACKENDS)
        for word, line in words_of(source)
        if (found := pattern.search(word))
    ]
    assert not violations, "\n".join(violations)


def test_core_imports_torch_only_in_model() -> None:
    violations = [
        source.where(imported.line)
        for source in read_tree("core")
        if not is_within(source.module, ("core.model",))
        for imported in imports_of(source)
        if imported.module.partition(".")[0] in ("torch", "transformers", "safetensors")
    ]
    assert not violations, "\n".join(violations)


def test_router_loads_neither_torch_nor_transformers_nor_a_store() -> None:
    program = (
        "import sys, router.server\n"
        "heavy = {'torch', 'transformers', 'numpy', 'redis', 'ray', 'connectors', 'core.model', 'core.scheduler'}\n"
        "print(','.join(sorted(heavy & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("module", "imported", "is_allowed"),
    [
        ("core.scheduler", "core.kv.block_pool", True),
        ("core.scheduler", "core.model.runner", False),
        ("core.scheduler", "connectors.registry", False),
        ("core.node", "core.model.loading", False),
        ("core.node", "zmq", True),
        ("core.kv.block_pool", "core.step", False),
        ("core.wire.messages", "core.kv.hashing", False),
        ("core.wire.messages", "zmq", True),
        ("core.model.runner", "core.scheduler", False),
        ("core.model.runner", "torch", True),
        ("core.engine", "torch", False),
        ("connectors.anything", "core.request", False),
        ("connectors.anything", "core.kv.connector", True),
        ("connectors.anything", "connectors.contract.node", False),
        ("connectors.anything", "core.model.device_pool", False),
        ("connectors.vllm_plugin", "core.model.device_pool", True),
        ("connectors.contract.anything", "pytest", True),
        ("router.server", "core.kv.block_pool", False),
        ("router.server", "core.kv.hashing", True),
        ("router.server", "torch", False),
        ("prefill_node.__main__", "decode_node.__main__", False),
        ("prefill_node.__main__", "router.policy", False),
        ("deploy.cli", "router.__main__", True),
        ("router.server", "deploy.cli", False),
        ("router.server", "pickle", False),
        ("somewhere.new", "json", False),
    ],
)
def test_import_table_known_edges_are_judged(module: str, imported: str, is_allowed: bool) -> None:
    source = read_tree("core")[0]
    probe = SourceFile(path=source.path, module=module, is_package=False, tree=source.tree)
    assert (find_violation(probe, Import(imported, 1)) is None) == is_allowed


def test_import_table_names_the_rows_of_the_document() -> None:
    document = (ROOT / "ARCHITECTURE.md").read_text()
    for package in ROOMS_IN_TABLE:
        if package != "bench":
            assert package in document, f"{package} has no row in ARCHITECTURE.md"
