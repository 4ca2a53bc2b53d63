"""Tools that cannot work are found before the run starts."""

import pytest

from asyncrl.config.load import load_config
from asyncrl.run.preflight import check_surroundings


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{kind='mcp'}", "expected one of the two"),
        ("{kind='mcp',command=['no-such-program']}", "no-such-program"),
        ("{kind='python',functions=['absent.py:add']}", "no file"),
        ("{kind='python',functions=['os:getpid'],only=['other']}", "names other; the server has getpid"),
    ],
)
def test_tools_that_cannot_work_are_found_before_the_start(table: str, message: str):
    if "command" in table:
        pytest.importorskip("mcp", reason="the package mcp is not installed")
    loaded = load_config("coder", overrides=[f"tools.wanted={table}", "harnesses.repair.tools=['wanted','absent']"])

    found = {key: one.message for one in check_surroundings(loaded.config, loaded.base) for key in one.keys}

    assert message in found["tools.wanted"]
    assert found["harnesses.repair.tools"] == "names [tools.absent]; the config has wanted"
