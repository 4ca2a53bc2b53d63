"""The HTTP calls of vLLM that a run needs, and how to find those that a server lacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

GENERATE = "/inference/v1/generate"
_DEVELOPER = "VLLM_SERVER_DEV_MODE=1"
_CONTROL = ("/pause", "/resume", "/abort_requests", "/collective_rpc", "/weight_info", "/update_weight_version")
_DIRECT = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")

ALWAYS = {GENERATE: "--enable-scale-out", **dict.fromkeys((*_CONTROL, "/reset_prefix_cache"), _DEVELOPER)}
"""Calls that every run makes, with the variable or argument that enables each."""
DIRECT = dict.fromkeys(_DIRECT, _DEVELOPER)
SLEEP = dict.fromkeys(("/sleep", "/wake_up"), _DEVELOPER)
ADAPTERS = dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")

_FIND = """
import importlib.util, pathlib
found = importlib.util.find_spec("vllm")
files = pathlib.Path(found.origin).with_name("entrypoints").rglob("*.py") if found and found.origin else None
text = "".join(file.read_text(errors="replace") for file in files or ())
print("none" if files is None else "found " + " ".join(path for path in PATHS if '"' + path + '"' in text))
"""


def program(needed: Collection[str]) -> str:
    """A program that prints which calls are in the sources of vLLM: to import vLLM takes half a minute."""
    return f"PATHS = {[*needed]!r}\n{_FIND}"


def lacking(paths: Collection[str], needed: Mapping[str, str]) -> str:
    """Return the missing calls of a server in words; empty if it has all.

    Args:
        paths: that the server has.
        needed: calls, and what enables each.
    """
    return ", ".join(f"{path} (enabled by {how})" for path, how in needed.items() if path not in paths)
