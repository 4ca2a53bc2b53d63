"""Figures of GPUs, from a driver library that is made for the test: no GPU is needed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from asyncrl.telemetry.gpu_use import GpuMeter


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Two H100: process 7 runs on the second one."""
    made = ModuleType("pynvml")
    made.NVMLError = type("NVMLError", (Exception,), {})
    made.nvmlInit = lambda: None
    made.nvmlDeviceGetCount = lambda: 2
    made.nvmlDeviceGetHandleByIndex = lambda gpu: gpu
    made.nvmlDeviceGetName = lambda gpu: "NVIDIA H100 80GB HBM3"
    made.nvmlDeviceGetUtilizationRates = lambda gpu: SimpleNamespace(gpu=[20, 80][gpu])
    made.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(used=[10, 60][gpu], total=80)
    made.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [[], [SimpleNamespace(pid=7)]][gpu]
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def test_the_gpus_on_which_a_process_runs_are_counted(driver: ModuleType):
    meter = GpuMeter()

    found = meter.read([7])

    assert found == {"gpus": 1.0, "gpu_share": 0.8, "gpu_memory_bytes": 60.0, "gpu_memory_share": 0.75}
    assert meter.peak_tflops == 989.0


@pytest.mark.parametrize(("visible", "gpus", "share"), [(None, 2.0, 0.5), ("0", 1.0, 0.2)])
def test_in_a_container_the_visible_gpus_are_counted(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: float, share: float
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    found = GpuMeter().read([99])

    assert (found["gpus"], found["gpu_share"]) == (gpus, share)


def test_without_the_package_there_are_no_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)

    meter = GpuMeter()

    assert (meter.read([7]), meter.peak_tflops) == ({}, None)


def test_a_driver_that_fails_later_gives_no_figures(driver: ModuleType):
    def lost(gpu: int) -> None:
        raise driver.NVMLError("GPU is lost")

    meter = GpuMeter()
    driver.nvmlDeviceGetMemoryInfo = lost

    assert meter.read([7]) == {}
