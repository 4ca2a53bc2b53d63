"""Settings under old names: configs warn, recorded runs keep working."""

from pathlib import Path

import msgspec

from asyncrl.config.load import load_config
from asyncrl.config.reference import known_settings
from asyncrl.config.renamed import RENAMED, current_names, read_settings
from asyncrl.config.settings import Config

OLD = """
[buffer]
ahead = 0
[placement]
share = "turns"
[autoscale.pools]
rollout = { least = 1, most = 3 }
"""


def test_a_config_with_old_names_works_and_names_the_new_ones(tmp_path: Path):
    path = tmp_path / "old.toml"
    path.write_text(OLD.replace('share = "turns"', 'share = "none"'))
    loaded = load_config(str(path), overrides=["supervision.spares=1"])

    assert loaded.config.buffer.max_batches_ahead == 0
    assert loaded.config.autoscale.pools["rollout"].max == 3
    assert loaded.config.supervision.standbys == 1
    assert "buffer.ahead is now called buffer.max_batches_ahead" in loaded.warnings
    assert "supervision.spares is now called supervision.standbys" in loaded.warnings
    assert len(loaded.warnings) == 5


def test_a_fault_is_reported_at_the_line_of_the_old_name(tmp_path: Path):
    path = tmp_path / "old.toml"
    path.write_text("[buffer]\nahead = 5\n")
    try:
        load_config(str(path))
    except Exception as error:
        assert str(error).startswith(f"{path}:2: buffer.max_batches_ahead: ")
    else:
        raise AssertionError("5 was accepted")


def test_a_recorded_run_with_old_names_is_read():
    recorded = msgspec.to_builtins(Config())
    recorded["weights"]["direct"] = "ipc"
    del recorded["weights"]["transport"]
    recorded["placement"]["share"] = "turns"
    del recorded["placement"]["colocate"]
    config = read_settings(recorded)

    assert (config.weights.transport, config.placement.colocate) == ("ipc", "time_slice")
    assert recorded["weights"]["direct"] == "ipc", "the record itself is not changed"


def test_each_new_name_is_a_setting_and_no_old_name_is():
    settings = known_settings()

    assert set(RENAMED.values()) <= set(settings)
    assert not set(RENAMED) & set(settings)
    assert current_names({})[1] == {}
