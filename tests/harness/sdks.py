"""The stock SDKs of OpenAI and Anthropic, both in the extra `dev`; a module of tests is skipped where they are not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

anthropic, openai = pytest.importorskip("anthropic"), pytest.importorskip("openai")


@contextlib.asynccontextmanager
async def sdks(address: str, key: str = "sk-any") -> AsyncIterator[tuple[Any, Any]]:
    """Open both clients, which retry nothing: OpenAI's and Anthropic's."""
    async with (
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as first,
        anthropic.AsyncAnthropic(base_url=address, api_key=key, max_retries=0) as second,
    ):
        yield first, second
