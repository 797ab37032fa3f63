"""Compiles the CPU kernels (src/*.cpp) with torch's extension builder at first use, and keeps the result in the cache folder.

load_native() is what the model room calls. The compiler runs in a child process (python -m core.model.native.build), so that one
that is killed or fails leaves nothing half done: a finished library is moved to its place by one rename.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from core.config import user_cache_dir

_logger = logging.getLogger(__name__)
MODULE_NAME = "kvrelay_native"
SOURCES = Path(__file__).parent / "src"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-Wno-ignored-attributes", "-Wno-psabi")
BUILD_TIMEOUT_S = 900.0


@functools.cache
def load_native() -> Any:
    """The extension module, built if need be (a minute, once per machine), or None with a warning that says what is missing."""
    return try_load(user_cache_dir() / "native", SOURCES)


def try_load(cache_dir: Path, sources: Path) -> Any:
    """load_native for a folder of sources and one for what is built of them."""
    try:
        library = find_or_build(cache_dir, sources)
        try:
            return _import(library)
        except ImportError:  # damaged, or of a system that has changed under it
            library.unlink()
            return _import(find_or_build(cache_dir, sources))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _logger.warning("CPU kernels cannot be compiled, plain torch serves instead, several times slower: %s", error)
        return None


def find_or_build(cache_dir: Path, sources: Path) -> Path:
    """The library of `sources` for this machine, compiler and torch. Processes that want the same one wait for the first.

    Raises RuntimeError with the compiler's words, or OSError where the cache folder cannot be written.
    """
    compiler = os.environ.get("CXX", "c++")
    missing = [name for name in (compiler, "ninja") if shutil.which(name, path=_search_path()) is None]
    if missing:
        raise RuntimeError(f"no {' and no '.join(missing)}: install g++ and ninja (apt install g++ ninja-build)")
    folder = cache_dir / _key(compiler, sources)
    library = folder / f"{MODULE_NAME}.so"
    if library.exists():
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.info("another process compiles the CPU kernels: waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)  # a process that dies gives it up
        if not library.exists():
            _build(folder, sources)
    return library


def _build(folder: Path, sources: Path) -> None:
    """Compile into a folder beside `folder` and move the library there. The lock is held by the caller."""
    started_s = time.monotonic()
    _logger.info("compiling CPU kernels, once for this machine (about a minute) ...")
    for stale in folder.parent.glob("build-*"):  # we hold the lock: whoever made it is gone
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-", ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "core.model.native.build", scratch, str(sources.absolute())],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PATH": _search_path()},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise RuntimeError("\n".join((done.stdout + done.stderr).strip().splitlines()[-15:]))
        folder.mkdir(exist_ok=True)
        (Path(scratch) / f"{MODULE_NAME}.so").replace(folder / f"{MODULE_NAME}.so")
    _logger.info("compiled CPU kernels in %.0f s", time.monotonic() - started_s)


def _search_path() -> str:
    """Of programs: Python's own folder too, where pip puts ninja."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))


def _key(compiler: str, sources: Path) -> str:
    """Differs whenever the library would: sources, flags, versions, and what instructions this CPU has."""
    digest = hashlib.sha256(repr((FLAGS, torch.__version__, sys.version_info[:3], platform.machine(), _cpu_flags())).encode())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout)
    for path in sorted(sources.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "")


def _import(library: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(library))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(folder: str, sources: str) -> None:
    """The child process."""
    from torch.utils import cpp_extension

    cpp_extension.load(
        MODULE_NAME,
        sorted(str(path) for path in Path(sources).glob("*.cpp")),
        extra_cflags=list(FLAGS),
        extra_ldflags=["-fopenmp"],
        build_directory=folder,
    )


if __name__ == "__main__":
    _compile(sys.argv[1], sys.argv[2])
