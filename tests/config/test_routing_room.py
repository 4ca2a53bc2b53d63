"""The room that experts of tokens take."""

import math

import msgspec
import pytest

from asyncrl.config.settings import Config
from asyncrl.config.stream_capacity import CHECKPOINT_SHARE, PAUSE_SHARE, needs


@pytest.mark.parametrize(("most", "in_progress"), [(64, 0), (65, 1)])  # of 64 tokens no progress is stored
def test_experts_of_tokens_have_room_in_the_blob_stream(most, in_progress):
    config = msgspec.convert({"rollout": {"max_new_tokens": most}, "model": {"create": {"context": 100}}}, Config)
    before, after = (needs(config, 300, route_bytes=size) for size in (0, 384))

    batch = 64 * 8 * 100 * 384
    assert after["BLOBS"].least - before["BLOBS"].least == math.ceil((5 + 3 * in_progress) * batch / PAUSE_SHARE)
    assert after["BLOBS"].ample - before["BLOBS"].ample == math.ceil(
        (3 + 3 * in_progress + 2 * 20) * batch / CHECKPOINT_SHARE
    )
    assert {name: need for name, need in after.items() if name != "BLOBS"}.items() <= before.items()
