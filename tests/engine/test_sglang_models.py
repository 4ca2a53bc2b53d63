"""Bodies of requests, and command lines, against SGLang's own classes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from asyncrl.config.engine_settings import EngineGroup, EngineSettings, RouterSettings
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.embedded import schema
from asyncrl.engine.embedded.request import Sampling
from asyncrl.engine.sglang.control import SGLangControl
from asyncrl.weights.transfer_manifest import Described, GroupPlace
from benchmarks.engine import save_random_model
from harness.sglang_real import ABSENT, FOUND, arguments, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOUND, reason=ABSENT)]

CLASSES = {
    "/generate": "GenerateReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
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


PARSE = """
import json, sys
from sglang.srt.server_args import prepare_server_args

lines, names = json.load(sys.stdin)
read = [prepare_server_args(line) for line in lines]
print("FOUND" + json.dumps([{name: getattr(one, name) for name in names} for one in read]))
"""


def ask_sglang(bodies: list[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields of SGLang's classes with their defaults, by path; an error where it refuses a body."""
    found: dict[str, dict[str, Any]] = run_with_sglang(ASK, CLASSES, bodies)
    return found


def run_with_sglang(program: str, *given: Any) -> Any:
    """Return what a program prints as JSON where SGLang can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment(),
        input=msgspec.json.encode(given),
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
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 3, None]]}
        return web.json_response({"output_ids": [3], "meta_info": meta})

    application = web.Application()
    application.router.add_post("/{path:.*}", record)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        every = SamplingParams(5, 0.5, 0.9, 3, 0.1, 1, ["x"], [2], seed=4, ignore_eos=True, routed=1)
        every = msgspec.structs.replace(every, top=2, priority=1, schema='{"type": "object"}')
        await client.generate([1, 2], SamplingParams(5))
        await client.generate([1, 2], every, extra_key="v1")
        for mode in ("abort", "in_place", "retract"):
            await client.pause(mode)
        await client.update_weights("/models/x", "v1", flush_cache=False)
        await client.update_from_memory(b"packed", "v1", ranks=2)
        place = GroupPlace("nccl", "127.0.0.1", 1, "group", 3)
        await client.join_group(place)
        for version in (None, "v1"):
            await client.update_from_group(place.name, [Described("a", "bfloat16", [2, 3], 12)], version)
        await client.leave_group(place.name)
        await client.release_memory()
        await client.resume_memory()
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
        "/update_weights_from_tensor": schema.FromMemoryBody,
        "/update_weights_from_distributed": schema.FromGroupBody,
        "/init_weights_update_group": schema.GroupBody,
        "/destroy_weights_update_group": schema.LeaveBody,
        "/release_memory_occupation": schema.MemoryBody,
        "/resume_memory_occupation": schema.MemoryBody,
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


def test_sglang_reads_the_command_lines_of_its_servers(tmp_path: Path):
    save_random_model(tmp_path, vocab=64, hidden=32, layers=2)
    (tmp_path / "key").write_text("secret")
    given = {
        "plain": ["--stream-interval", "8"],
        "parallel": ["--tp-size", "2", "--pp-size=2"],
        "attention": ["--tp", "4", "--dp-size", "2", "--enable-dp-attention"],
        "first": ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"],
        "second": ["--disaggregation-mode=decode", "--disaggregation-transfer-backend=nixl"],
    }
    pools = {name: EngineGroup(kind="sglang", arguments=[*arguments(), *extra]) for name, extra in given.items()}
    settings = EngineSettings(groups=pools, context=100, router=RouterSettings(1))
    homes = [
        ServerSpec(f"engine-{name}-2", settings, tmp_path, tmp_path / f"{name}.log", tmp_path / "key") for name in given
    ]
    servers = [SGLangControl(home) for home in homes]
    expected = {
        "tp_size": [1, 2, 4, 1, 1],
        "pp_size": [1, 2, 1, 1, 1],
        "dp_size": [1, 1, 2, 1, 1],
        "disaggregation_mode": ["null", "null", "null", "prefill", "decode"],
        "disaggregation_transfer_backend": ["mooncake", "mooncake", "mooncake", "nixl", "nixl"],
        "stream_interval": [8, 16, 16, 16, 16],  # the last of two alike counts
        "port": [int(server.address.rpartition(":")[2]) for server in servers],
    }
    everywhere = {
        "host": "127.0.0.1",
        "api_key": "secret",
        "model_path": str(tmp_path),
        "weight_version": "none",
        "max_running_requests": 256,
        "context_length": 100,
        "incremental_streaming_output": True,
    }
    names = [*expected, *everywhere, "disaggregation_bootstrap_port"]

    read = run_with_sglang(PARSE, [server.arguments()[2:] for server in servers], names)

    assert {name: [one[name] for one in read] for name in expected} == expected
    assert [{name: one[name] for name in everywhere} for one in read] == [everywhere] * len(read)
    assert read[3]["disaggregation_bootstrap_port"] == 8999  # of the second server of its group
    needed = [group.gpus_needed for group in pools.values()]
    assert needed == [one["tp_size"] * one["pp_size"] for one in read]
