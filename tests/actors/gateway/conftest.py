"""The inference server of the gateway's tests."""

from collections.abc import AsyncIterator

import pytest

from harness.sglang_like import LikeSGLang, like_sglang


@pytest.fixture
async def inference() -> AsyncIterator[LikeSGLang]:
    async with like_sglang() as inference:
        yield inference
