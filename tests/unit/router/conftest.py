"""Model folders and a running router with two nodes, shared by the tests that do not disturb them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.tokenizer import Tokenizer
from tests.unit.router.running_router import RunningRouter
from tests.unit.router.tiny_model import build_byte_fallback_folder, build_byte_level_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny byte-level model."""
    return build_byte_level_folder(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer(model_folder)


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of the other kind."""
    return Tokenizer(build_byte_fallback_folder(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="module")
def cluster(model_folder: Path) -> Iterator[RunningRouter]:
    """A router with a prefill and a decode node."""
    with RunningRouter(model_folder, max_choices=8) as router:
        router.add_node("prefill")
        router.add_node("decode")
        yield router
