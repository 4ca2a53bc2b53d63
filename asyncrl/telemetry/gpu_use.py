"""Use and memory of NVIDIA GPUs as NVML counts them; no figures without the package nvidia-ml-py or a driver."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from asyncrl.host import VISIBLE_GPUS

# Dense bfloat16 operations per second, in units of 1e12, by a part of the GPU's name; the first part that fits counts.
# Source: NVIDIA's data sheets.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "H800": 989.0,
    "L40S": 362.0,
    "L4": 121.0,
}


class GpuMeter:
    """The GPUs of some processes.

    These are the GPUs on which the processes run. A container hides their ids from NVML. Then these are the GPUs that
    `CUDA_VISIBLE_DEVICES` names by number, or all GPUs of the host.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:  # no driver, or one that does not answer
            return
        self._nvml = pynvml

    @property
    def peak_tflops(self) -> float | None:
        """Return the dense bfloat16 rate of the first GPU, 1e12 operations per second; None if it is not known."""
        if not self._gpus:
            return None
        name = str(self._nvml.nvmlDeviceGetName(self._gpus[0]))
        return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)

    def read(self, processes: Collection[int]) -> dict[str, float]:
        """Return the figures of the GPUs of these processes; empty without GPUs.

        Returns:
            `gpus`: how many; `gpu_share`: mean share of the newest second in which they computed, 0 to 1;
            `gpu_memory_bytes` in use on them, by whichever process; `gpu_memory_share` of their memory, 0 to 1.
        """
        if (nvml := self._nvml) is None:
            return {}
        try:
            gpus = [gpu for gpu in self._gpus if self._runs(gpu, processes)] or self._visible()
            shares = [nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in gpus]
            memories = [nvml.nvmlDeviceGetMemoryInfo(gpu) for gpu in gpus]
        except nvml.NVMLError:  # a GPU that fell off the bus
            return {}
        if not gpus:
            return {}
        used, total = sum(memory.used for memory in memories), sum(memory.total for memory in memories)
        return {
            "gpus": float(len(gpus)),
            "gpu_share": round(sum(shares) / len(gpus), 4),
            "gpu_memory_bytes": float(used),
            "gpu_memory_share": round(used / total, 4),
        }

    def _runs(self, gpu: Any, processes: Collection[int]) -> bool:
        return any(one.pid in processes for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu))

    def _visible(self) -> Sequence[Any]:
        named = os.environ.get(VISIBLE_GPUS)
        if named is None:
            return self._gpus
        numbers = [int(word) for word in named.split(",") if word.strip().isdecimal()]
        return [self._gpus[number] for number in numbers if number < len(self._gpus)]
