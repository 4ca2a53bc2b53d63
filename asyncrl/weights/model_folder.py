"""Folders with a Hugging Face model: its tensors, and the configuration and tokenizer that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from asyncrl.data.model_dir import read_json
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.weights.folders import Folder
from asyncrl.weights.tensors import FileRecord, Files, WrittenFile, write_files, write_indexes


def write_model(folder: Folder, tensors: Files, source: Path | None) -> None:
    """Fill a folder with a Hugging Face model and its tokenizer, which no program has to convert.

    Args:
        source: as for `describe_model`.
    """
    describe_model(folder, write_files(folder, tensors), source)


def describe_model(
    folder: Folder, written: Sequence[WrittenFile], source: Path | None, config: bytes | None = None
) -> dict[str, FileRecord]:
    """Make a Hugging Face model of a folder with the tensors in it.

    Args:
        written: the files of all ranks.
        source: model directory whose configuration and tokenizer belong to the tensors, if there is one.
        config: `config.json` in place of the source's.

    Returns:
        The further files, by name.
    """
    beside = {}
    # Every engine version that read the source can read its original config and tokenizer; a config rewritten by
    # transformers may fail.
    for path in source.iterdir() if source is not None else ():
        if path.is_file() and ".safetensors" not in path.name and path.suffix not in (".bin", ".pt", ".pth"):
            content = config if config is not None and path.name == "config.json" else path.read_bytes()
            with folder.file(path.name) as file:
                file.write(content)
            beside[path.name] = FileRecord(len(content), xxhash.xxh3_64_hexdigest(content))
    return beside | write_indexes(folder, written)


def name_stop_tokens(directory: Path) -> None:
    """Add the end of a turn to `generation_config.json` of a model directory, if its files do not name the token.

    Raises:
        TokenizerError: its tokenizer cannot be read.
    """
    if not (directory / "tokenizer.json").is_file():
        return
    tokenizer = TaskTokenizer.load(directory)
    if tokenizer.stop_ids:
        file = directory / "generation_config.json"
        content = (read_json(file) if file.is_file() else {}) | {"eos_token_id": tokenizer.eos_ids}
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
