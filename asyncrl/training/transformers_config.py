"""The configuration of a model directory as transformers reads it, with the reasons for which a model is refused."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from asyncrl.data.model_dir import ModelError, read_json

_REMOTE = "auto_map"


def read_transformers_config(directory: Path, **changes: Any) -> Any:
    """Read the configuration of a causal language model; of a model with images that of its language model.

    Args:
        changes: other values of fields.

    Raises:
        ModelError: transformers has no causal language model of this type, or it needs code from its directory.
    """
    # transformers takes seconds to import.
    from asyncrl.training.transformers_parts import AutoConfig  # isort: skip - it prepares the import of the others
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    raw = read_json(directory / "config.json")
    kind = str(raw.get("model_type", ""))
    if kind not in CONFIG_MAPPING:
        if raw.get(_REMOTE):
            raise ModelError(
                f"{directory}: model type {kind!r} has its code among its files ({_REMOTE} in config.json), which "
                "asyncrl never runs; name a model that transformers has"
            )
        version = importlib.metadata.version("transformers")
        raise ModelError(
            f"{directory}: transformers {version} has no model type {kind!r}; install a version that has it, or name "
            "another model"
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, **changes)
    except (ValueError, TypeError, KeyError, OSError, StrictDataclassError) as error:
        raise ModelError(
            f"{directory / 'config.json'}: transformers cannot read it ({error}); fetch it again"
        ) from error
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(model, tuple):
        model = model[0]
    text = config.get_text_config()
    if model is None or (text is not config and model.config_class is not type(text)):
        raise ModelError(
            f"{directory}: {(raw.get('architectures') or [kind])[0]} is no language model alone, but one with images "
            f"or other inputs; expected a causal language model of transformers, such as its text model"
        )
    return text
