"""`learner.dtype = "auto"` is replaced as a config is loaded, so that the stored config of a run names the type."""

from pathlib import Path

import pytest

from asyncrl import host
from asyncrl.config.load import load_config


@pytest.mark.parametrize(("flags", "dtype"), [("avx2 amx_bf16", "bfloat16"), ("avx2 avx512f", "float32")])
def test_the_type_of_a_model_is_chosen_by_the_instructions_of_the_cpu(
    flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(host, "_CPU", tmp_path / "cpuinfo")

    assert load_config("demo", overrides=["learner.dtype=auto"]).config.learner.dtype == dtype
    on_gpu = load_config("demo", overrides=["learner.dtype=auto", "learner.device=cuda"]).config
    assert on_gpu.learner.dtype == "bfloat16"
