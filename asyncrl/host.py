"""The identity of this host, as far as memory can be shared in it, and what hides its GPUs from a process."""

from __future__ import annotations

from pathlib import Path

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # environment variable: the GPUs that a process sees
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHARED = Path("/dev/shm")


def boot_id(length: int) -> str:
    """Return the beginning of what names the time since the kernel was started; "any" where nothing does."""
    return _BOOT.read_text().strip()[:length] if _BOOT.exists() else "any"


def host_name() -> str:
    """Return a name of this host since it was started, or of the container that has memory of its own."""
    return f"{boot_id(18)}-{_SHARED.stat().st_dev if _SHARED.exists() else 0}"
