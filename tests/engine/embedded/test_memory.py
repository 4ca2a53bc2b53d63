"""The embedded engine's memory, given back and taken again over HTTP."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.engine.client import EngineClient, EngineRefused, SamplingParams
from benchmarks.engine import CONTEXT, save_random_model, served
from harness.stage import until

GREEDY = SamplingParams(8, temperature=0.0)
PROMPT = [7 * position % 64 for position in range(40)]  # whole blocks of it are cached
STORE = 2 * 2 * 2 * 512 * CONTEXT * 32 * 4  # bytes: layers, keys and values, heads, rows, positions, width, float32


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def test_released_memory_is_free_until_it_is_taken_again_and_answers_wait_for_weights(tmp_path):
    save_random_model(tmp_path / "model", vocab=64, hidden=128, layers=2)
    async with served(tmp_path / "model", "--max-running-requests", "512", "--weight-version", "0") as address:
        client = EngineClient(address)
        pid = (await client.server_info())["pid"]
        first = await client.generate(PROMPT, GREEDY, extra_key="a")

        await client.resume_memory()  # what is there stays
        await client.release_memory()
        await client.release_memory()  # what is away stays away
        await client.resume_memory()
        await client.update_weights(tmp_path / "model", "0", False)
        full = SamplingParams(CONTEXT - len(PROMPT), temperature=1.0)
        await asyncio.gather(*(client.generate(PROMPT, full, extra_key=str(row)) for row in range(512)))
        await client.pause("in_place")
        occupied = resident(pid)
        await client.release_memory()
        assert resident(pid) < occupied - 1.7 * STORE  # that of the rows, and as much of the prefix cache

        await client.continue_generation()
        with pytest.raises(EngineRefused, match="the memory of the weights is released"):
            await client.update_weights(tmp_path / "model", "1", False)
        with pytest.raises(EngineRefused, match=r"tag 'graphs'; expected one of weights, kv_cache, cuda_graph"):
            await client._call("POST", "/release_memory_occupation", {"tags": ["graphs"]})
        await client.resume_memory()
        await client.update_weights(tmp_path / "model", "1", False)
        second = await client.generate(PROMPT, GREEDY, extra_key="a")
        assert second.token_ids.tolist() == first.token_ids.tolist()
        await client.close()


async def test_what_clients_send_to_a_paused_engine_keeps_no_memory_and_what_came_before_does(tmp_path):
    save_random_model(tmp_path / "model", vocab=64, hidden=32, layers=2)
    async with served(tmp_path / "model", "--max-running-requests", "4", "--weight-version", "0") as address:
        client = EngineClient(address)

        async def queued(count: int) -> bool:
            return (await client.load()).requests == count

        await client.release_memory()
        early = asyncio.create_task(client.generate([1], GREEDY))
        await until(lambda: queued(1), "it waits for memory")
        await client.pause("retract")
        late = asyncio.create_task(client.generate([1, 2, 3], GREEDY))
        await until(lambda: queued(2), "the other one came")
        with pytest.raises(EngineRefused, match="2 requests run or wait; abort them first"):
            await client.release_memory()
        await client.abort_all()
        assert len((await early).token_ids) == len((await late).token_ids) == 0

        late = asyncio.create_task(client.generate([1, 2, 3], GREEDY))
        await until(lambda: queued(1), "one came behind the abort")
        await client.release_memory()
        await client.resume_memory()
        await client.update_weights(tmp_path / "model", "1", False)
        await client.continue_generation()
        assert len((await late).token_ids) == 8
        await client.close()


async def test_a_request_waits_for_memory_and_weights_and_a_busy_engine_keeps_its_memory(tmp_path):
    save_random_model(tmp_path / "model", vocab=64, hidden=32, layers=2)
    async with served(tmp_path / "model", "--max-running-requests", "4", "--weight-version", "0") as address:
        client = EngineClient(address)
        await client.release_memory()
        asked = asyncio.create_task(client.generate([1, 2, 3], GREEDY))

        async def queued() -> bool:
            return (await client.load()).requests == 1

        await until(queued, "the request waits")
        with pytest.raises(EngineRefused, match="1 requests run or wait; abort them first"):
            await client.release_memory()
        await client.resume_memory()
        assert (await client.load()).requests == 1  # there are no weights yet
        update = asyncio.create_task(client.update_weights(tmp_path / "model", "1", False))
        assert len((await asked).token_ids) == 8
        await update
        await client.close()
