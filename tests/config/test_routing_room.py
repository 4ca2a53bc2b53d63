"""The room that experts of tokens take."""

import math

import msgspec

from asyncrl.config.room import CHECKPOINT_SHARE, PAUSE_SHARE, needs
from asyncrl.config.settings import Config


def test_experts_of_tokens_have_room_in_the_blob_stream():
    config = msgspec.convert({"rollout": {"max_new_tokens": 64}, "model": {"create": {"context": 100}}}, Config)
    before, after = (needs(config, 300, route_bytes=size) for size in (0, 384))

    batch = 64 * 8 * 100 * 384
    assert after["BLOBS"].least - before["BLOBS"].least == math.ceil(5 * batch / PAUSE_SHARE)
    assert after["BLOBS"].ample - before["BLOBS"].ample == math.ceil((3 + 2 * 20) * batch / CHECKPOINT_SHARE)
    assert {name: need for name, need in after.items() if name != "BLOBS"}.items() <= before.items()
