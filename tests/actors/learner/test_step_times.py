"""Seconds of the learner by phase, and the rate of its operations."""

from pathlib import Path

import pytest

from actors.learner.step_times import StepTimes
from asyncrl.config.settings import LearnerSettings
from asyncrl.telemetry.gpu_use import GpuMeter
from asyncrl.training.ranks import work_of
from harness.models import made_model
from topics.batches import BatchGroup, BatchMember, BatchPacked, Objective
from topics.trajectories import Reference


def batch_of(*lengths: int) -> BatchPacked:
    members = [BatchMember("p0-0", 0, Reference(1, "x", 1), 1.0, 4, lengths=[length]) for length in lengths]
    return BatchPacked(1, "rl", [BatchGroup("p0", members)], 0, Objective())


async def test_the_phases_since_the_step_before_are_in_its_figures_once(tmp_path: Path):
    times = StepTimes(tmp_path, LearnerSettings(trainer="scripted"))

    async def nothing() -> str:
        return "saved"

    times.add("wait_s", 1.5)
    times.add("wait_s", 0.5)
    assert await times.of("save_s", nothing()) == "saved"
    first, second = times.take(batch_of(8), 2.0), times.take(batch_of(8), 3.0)

    assert first.keys() == {"wait_s", "save_s", "train_s"}
    assert (first["wait_s"], first["train_s"], first["save_s"] < 1) == (2.0, 2.0, True)
    assert second == {"wait_s": 0.0, "train_s": 3.0}


@pytest.mark.parametrize(("device", "peak"), [("cpu", None), ("cuda", 0.001)])
def test_the_rate_counts_the_operations_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, peak: float | None
):
    monkeypatch.setattr(GpuMeter, "peak_tflops", peak)
    learner = LearnerSettings(device=device, ranks=2, share_prefixes=False)
    work = work_of(made_model(tmp_path / "tiny"))

    found = StepTimes(tmp_path / "tiny", learner).take(batch_of(100, 300), 0.5)

    rate = (work.of(100) + work.of(300)) / 0.5 / 1e12
    assert found["train_tflops"] == round(rate, 6) > 0
    assert found.get("mfu") == (None if peak is None else round(rate / peak / 2, 4))


def test_a_model_whose_operations_are_not_known_has_no_rate(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")

    assert StepTimes(tmp_path, LearnerSettings()).take(batch_of(100), 0.5) == {"wait_s": 0.0, "train_s": 0.5}
