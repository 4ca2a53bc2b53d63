"""vLLM's command line and environment variables, as far as the run depends on them."""

from __future__ import annotations

from asyncrl.config.engine_settings import EngineGroup

FRONTS = "--api-server-count"
LOGPROBS = "--logprobs-mode"
MEMORY_SHARE = "--gpu-memory-utilization"
SLEEP = "--enable-sleep-mode"
CPU_MEMORY = "VLLM_CPU_KVCACHE_SPACE"
"""GiB for keys and values; names a group whose vLLM is a build for the CPU."""
KEY_FILE = "ASYNCRL_VLLM_KEY_FILE"
WORKER = "asyncrl.engine.vllm.transfer.Worker"
SCALED = "processed_logprobs"
"""Log-probs at the temperature of a request, which is what a trainer compares with."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def tensor_ranks(group: EngineGroup) -> int:
    """Processes among which one server divides its tensors."""
    return group.number_of("--tensor-parallel-size", "-tp")


def copies(group: EngineGroup) -> int:
    """Stages of a server's pipeline, times copies of its model."""
    return group.number_of("--pipeline-parallel-size", "-pp") * group.number_of("--data-parallel-size", "-dp")


def adapter_room(rank: int) -> list[str]:
    """Arguments that give a server room for the adapter of one version, and the next."""
    room = next((size for size in _RANKS if size >= rank), rank)
    return ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(room)]
