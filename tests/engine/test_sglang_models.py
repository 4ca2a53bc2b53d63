"""Bodies of requests against SGLang's own classes."""

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from aiohttp import web

from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.embedded import schema
from asyncrl.engine.embedded.request import Sampling
from harness.sglang_real import ABSENT, FOUND, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOUND, reason=ABSENT)]

CLASSES = {
    "/generate": "GenerateReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/abort_request": "AbortReq",
    "sampling_params": "SamplingParams",
}
# The embedded engine takes 128 tokens, or what the context leaves of them; both numbers of `top_k` mean all tokens.
DIFFERENT = {"max_new_tokens": (None, 128), "top_k": (-1, 1 << 30)}
ASK = """
import dataclasses, json, sys
import msgspec
from pydantic import TypeAdapter
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams

classes, bodies = json.load(sys.stdin)
found = {}
for place, name in classes.items():
    kind = getattr(io_struct, name, SamplingParams)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
    plain = (bool, int, float, str)
    found[place] = {f.name: f.default if isinstance(f.default, plain) else None for f in fields}
for place, body in bodies:
    TypeAdapter(getattr(io_struct, classes[place])).validate_python(body)
    samplings = body.get("sampling_params", [])
    for sampling in samplings if isinstance(samplings, list) else [samplings]:
        SamplingParams(**sampling).verify(1000)
print("FOUND" + json.dumps(found))
"""


def ask_sglang(bodies: list[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields of SGLang's classes with their defaults, by path; an error where it refuses a body."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | environment(),
        input=msgspec.json.encode([CLASSES, bodies]),
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return msgspec.json.decode(done.stdout.rpartition(b"FOUND")[2])


async def bodies_of_the_client() -> list[tuple[str, Any]]:
    """Everything that the client sends, with every option of a request set once."""
    bodies: list[tuple[str, Any]] = []

    async def record(request: web.Request) -> web.Response:
        bodies.append((request.path, await request.json()))
        return web.json_response({"output_ids": [], "meta_info": {"finish_reason": {"type": "length"}}})

    application = web.Application()
    application.router.add_post("/{path:.*}", record)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        every = SamplingParams(5, 0.5, 0.9, 3, 0.1, 1, ["x"], [2], seed=4, ignore_eos=True)
        await client.generate([1, 2], SamplingParams(5))
        await client.generate([1, 2], every, extra_key="v1")
        for mode in ("abort", "in_place", "retract"):
            await client.pause(mode)
        await client.update_weights("/models/x", "v1", flush_cache=False)
        await client.continue_generation()
        await client.abort("one")
        await client.abort_all()
    finally:
        await client.close()
        await runner.cleanup()
    return bodies


async def test_sglangs_classes_take_what_the_client_sends_and_know_every_field():
    bodies = await bodies_of_the_client()

    fields = ask_sglang(bodies)

    assert {path for path, _ in bodies} | {"sampling_params"} == set(CLASSES)
    for path, body in bodies:
        assert body.keys() <= fields[path].keys()
        sampling = body.get("sampling_params", {})
        assert sampling.keys() <= fields["sampling_params"].keys()


def test_the_embedded_engines_bodies_have_sglangs_names_and_defaults():
    fields = ask_sglang([])

    bodies = {
        "/generate": schema.GenerateBody,
        "/pause_generation": schema.PauseBody,
        "/update_weights_from_disk": schema.UpdateBody,
        "/abort_request": schema.AbortBody,
        "sampling_params": schema.SamplingBody,
    }
    for path, body in bodies.items():
        for field in msgspec.structs.fields(body):
            assert field.name in fields[path], f"{path}: SGLang has no {field.name}"
            if isinstance(field.default, bool | int | float | str) and fields[path][field.name] is not None:
                assert field.default == fields[path][field.name], f"{path}: {field.name}"
    ours = msgspec.structs.asdict(Sampling())
    theirs = {name: fields["sampling_params"][name] for name in ours}
    different = {
        name: (ours[name], value) for name, value in theirs.items() if value is not None and ours[name] != value
    }
    assert different == DIFFERENT
