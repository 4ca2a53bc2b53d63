"""The identity of this host, as far as memory can be shared in it, its instructions, and what hides its GPUs."""

from __future__ import annotations

from pathlib import Path

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # environment variable: the GPUs that a process sees
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHARED = Path("/dev/shm")
_CPU = Path("/proc/cpuinfo")
_BFLOAT16 = {"amx_bf16", "avx512_bf16"}  # flags of CPUs that multiply it faster than float32


def boot_id(length: int) -> str:
    """Return a name of the time since the kernel was started; "any" without a source."""
    return _BOOT.read_text().strip()[:length] if _BOOT.exists() else "any"


def host_name() -> str:
    """Return a name of this host since its start, or of the container with its own memory."""
    return f"{boot_id(18)}-{_SHARED.stat().st_dev if _SHARED.exists() else 0}"


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions that multiply matrices in bfloat16."""
    lines = _CPU.read_text().splitlines() if _CPU.exists() else []
    return any(_BFLOAT16 & set(line.split()) for line in lines if line.startswith("flags"))
