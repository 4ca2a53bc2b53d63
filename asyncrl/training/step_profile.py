"""A trace of one optimiser step, by the profiler of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def step_profile(path: str) -> Iterator[None]:
    """Record the work of this thread, and of GPUs, as a Chrome trace; "" records nothing."""
    if not path:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as recorded:
        yield
    Path(path).parent.mkdir(exist_ok=True)
    recorded.export_chrome_trace(path)
