"""Files of a run, of versions and of adapters with bytes that are no UTF-8, as a disk that fails leaves them."""

from pathlib import Path

import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.errors import DamagedFile
from asyncrl.run.directory import RunFiles
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.weights.adapters import ADAPTER_CONFIG, check_shape
from asyncrl.weights.delta import DeltaRecord, apply_delta
from asyncrl.weights.merging import merged
from asyncrl.weights.verify import TornVersion

NO_TEXT = b'{"run": "\xff", "url": "\xff", "dtype": "\xff", "target_modules": ["\xff"]}'


def test_a_run_directory_names_the_file_that_is_no_text(tmp_path: Path):
    files = RunFiles(tmp_path)
    for path in (files.config, files.address, tmp_path / "summary.json"):
        path.write_bytes(NO_TEXT)
    (tmp_path / "metrics.jsonl").write_bytes(NO_TEXT + b'\n{"event": "step", "step": 1}\n')

    with pytest.raises(DamagedFile, match=r"config.json holds no settings of a run: 'utf-8'"):
        files.read_config()
    with pytest.raises(DamagedFile, match=r"nats.json holds no credentials: 'utf-8'"):
        BusAddress.read(files.address)
    assert files.read_summary() == {}
    assert [row["step"] for row in files.newest_steps()] == [1]


def test_adapters_and_differences_that_are_no_text_are_torn(tmp_path: Path):
    (tmp_path / ADAPTER_CONFIG).write_bytes(NO_TEXT)
    (tmp_path / "base_model.json").write_bytes(NO_TEXT)
    (tmp_path / "delta.json").write_bytes(NO_TEXT)

    with pytest.raises(CheckpointError, match=r"adapter_config.json: 'utf-8'.* torn"):
        check_shape(tmp_path, None)
    with pytest.raises(TornVersion, match="its adapter cannot be read: 'utf-8'"):
        merged({}, tmp_path)
    with pytest.raises(TornVersion, match="is no difference: 'utf-8'"):
        apply_delta(tmp_path, tmp_path, tmp_path, expected=DeltaRecord("demo", "", "", []))
