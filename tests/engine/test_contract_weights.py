"""Weights that reach the embedded engine and a real SGLang 0.5.17 past their files: the same cases against both."""

import pytest
import torch

from asyncrl.engine.client import EngineRefused
from asyncrl.ports import free_port
from asyncrl.weights.transfer_manifest import GroupPlace
from harness.client_contract import (  # noqa: F401 - pytest runs the imported cases
    has_weights,
    test_a_halted_server_returns_every_token_and_samples_none_by_the_next_weights,
    test_weights_come_out_of_the_memory_of_another_process,
    test_weights_come_over_a_group_in_several_calls_of_which_the_last_names_them,
)

pytestmark = pytest.mark.slow


async def test_a_group_of_an_unknown_kind_is_refused_and_the_weights_stay(served, client):
    place = GroupPlace("pigeon", "127.0.0.1", free_port(), "absent", 2)
    store = torch.distributed.TCPStore(place.address, place.port, 2, True, wait_for_workers=False)
    with pytest.raises(EngineRefused):
        await client.join_group(place)
    del store

    assert (await client.model_info())["weight_version"] == "none"
    assert await has_weights(served, client, served.model)
