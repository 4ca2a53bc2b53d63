"""What a server says about a fault goes into logs, vital signs and errors: of megabytes, its beginning alone."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.generator import Generator, Watch
from asyncrl.engine.request_options import RequestOptions
from harness.sglang_like import Asked, Fault, LikeSGLang, like_sglang
from topics.actors import Waiting
from topics.engines import EngineReady

LONG = "x" * 3_000_000
MOST = 1_000


def never(error: BaseException) -> None:
    raise error


class Listening(Watch):
    """Keeps the faults that it is told of."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    @contextlib.contextmanager
    def waiting(self, waits_for: Waiting) -> Iterator[None]:
        self.faults += [waits_for.fault] if waits_for.fault else []
        yield


async def refuse(server: LikeSGLang, asked: Asked) -> dict[str, Any]:
    raise Fault(500, LONG)


async def end_aborted(server: LikeSGLang, asked: Asked) -> dict[str, Any]:
    answer = server.answer(asked, [], "abort")
    answer["meta_info"]["finish_reason"] |= {"status_code": 500, "message": LONG}
    return answer


async def send_error(server: LikeSGLang, asked: Asked) -> dict[str, Any]:
    return {"error": {"message": LONG, "code": 500}}


async def name_others(server: LikeSGLang, asked: Asked) -> dict[str, Any]:
    return server.answer(asked, asked.tokens(), weight_version=LONG)


@pytest.mark.parametrize("fault", [refuse, end_aborted, send_error, name_others])
@pytest.mark.parametrize("portion", [2, 100], ids=["streamed", "whole"])
async def test_words_of_megabytes_about_a_fault_are_cut(portion: int, fault: Any):
    async with like_sglang() as server:
        server.weight_version = "0:0:made"

        async def serve(asked: Asked) -> dict[str, Any]:
            return await (fault(server, asked) if len(server.asked) == 1 else server.whole(asked))

        server.serve = serve
        fleet = Fleet(lambda _, address: EngineClient(address, generate_timeout_s=20), counts={}, fail=never)
        fleet.apply(EngineReady("engine-1", server.address, 0, 0, "made", 32))
        generator = Generator(fleet, ModelInfo("any", 64, 128), str, counts={}, manner=RequestOptions(portion=portion))
        watch = Listening()

        answer = await generator.generate(np.array([5], np.int32), SamplingParams(4), watch=watch)
        await fleet.close()

    assert len(answer.tokens) == 4
    [words] = watch.faults
    assert "x" * 20 in words
    assert len(words) < MOST
