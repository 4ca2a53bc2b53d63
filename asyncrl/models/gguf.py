"""A GGUF file as a Hugging Face model directory in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.data.model_dir import ModelError


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the dequantised model and the tokenizer of a GGUF file into an empty folder.

    Raises:
        ModelError: transformers cannot read the file.
    """
    # torch and transformers take seconds to import.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        read: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        read = read.to(torch.bfloat16)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{file} cannot be read as a GGUF model: {error}; give another GGUF file") from error
    values = read.config.to_dict() | {"dtype": "bfloat16"}
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(name, None)
    # save_pretrained of a model that was read from GGUF refuses, so its weights go into a plain one.
    plain = type(read)(type(read.config)(**values)).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
