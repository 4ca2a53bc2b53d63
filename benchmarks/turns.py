"""Time to switch a GPU between learner and engine that time-share it, and the memory that each keeps on it."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import torch

from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.host import VISIBLE_GPUS
from asyncrl.process import with_parent
from asyncrl.training.host_memory import host_memory
from benchmarks.random_model import Served
from benchmarks.stage import BenchError, Stage, bench_config, report
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.engines import ENGINE_READY, EngineReady
from topics.gpu_handoff import CARD_LEFT, CARD_REQUESTED, CARD_RETURNED, CardReturned
from topics.topic import ENGINES, TRAINING
from topics.wire import decode

_GROUP = 8
_STEPS = 1_000_000  # more than a measurement needs
_WARM = 1  # turns that are not counted: they allocate host memory
_DEADLINE_S = 1800.0
_COPY_BYTES = 1 << 30
_JUST_BEFORE_NS = 200_000_000
_Samples: TypeAlias = list[tuple[int, str]]


async def bench_turns(*, rounds: int, size: list[int], device: str, **options: Any) -> dict[str, float]:
    """Measure the turns of a run whose rewards are random.

    Args:
        rounds: counted turns.
        size: rows of a step, and greatest number of tokens of an answer.
        device: device of the trainer.
        options: fields of `Served`.

    Returns:
        Medians; times are in seconds.

        - `leave_s`: from the request until the engine has left the GPU.
        - `restore_s`: until the learner's tensors are on the GPU.
        - `offload_s`: until the learner's tensors are in host memory again. It consists of `offload_wait_s`,
          `offload_copy_s` and `offload_free_s` (`asyncrl.training.protocol.Offloaded`).
        - `returned_s`: from the end of `offload_s` to the begin of `ready_s`; the version is written in this time.
        - `ready_s`: from the permission until the engine samples. It consists of `back_resume_s`, `back_hold_s` and
          `back_load_s`; `back_fetch_s` runs during `back_resume_s`.
        - `switches_s`: the sum of the switches.
        - `offloaded_gb`, `copied_gb`: tensors that left the GPU; of these, tensors that host memory did not have.
        - rates of both ways; on a GPU also their ratios to one copy between the device and page-locked memory.
        - `left_gib`: GPU memory in use when both have left; of this, the learner's allocator has `learner_left_gib`.

    Raises:
        BenchError: an actor failed, or there were too few turns in time.
    """
    rows, tokens = size
    wanted = 1 + _WARM + rounds + 1  # the start, and a turn after the last one, which ends the last one
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        async with (
            Stage.open(_config(Path(scratch), Served(**options), device, rows, tokens)) as stage,
            _samples(device, "--query-gpu=memory.used") as used,
            _samples(device, "--query-compute-apps=used_memory,name") as processes,
        ):
            await stage.enter_all(deadline_s=_DEADLINE_S)
            report("learner and engine have started")
            await stage.enter("prompter")

            def last(record: Record) -> bool:
                turn = decode(CardReturned, record.data).turn
                report(f"the GPU is returned, turn {turn}")
                return turn >= wanted

            await stage.until(stage.follow(TRAINING, CARD_RETURNED, last), _DEADLINE_S)
            turns = await _turns(stage, used, processes)
    if len(turns) <= _WARM:
        raise BenchError(f"{len(turns)} turns were complete; expected more than {_WARM}, which is the warm-up")
    figures = {name: statistics.median(turn[name] for turn in turns[_WARM:]) for name in turns[-1]}
    figures |= {"turns": float(len(turns[_WARM:]))}
    if device != "cpu":
        for way, rate in _pinned_rates(device).items():
            figures |= {f"pinned_{way}_gb_per_s": rate, f"{way}_over_pinned": figures[f"{way}_gb_per_s"] / rate}
    return figures


def _config(scratch: Path, server: Served, device: str, rows: int, tokens: int) -> Config:
    model, dtype = scratch / "model", "float32" if device == "cpu" else "bfloat16"
    server.write_model(model, context=tokens + 16, dtype=dtype)
    return bench_config(
        "bench-turns",
        model={"path": str(model)},
        placement={"colocate": "time_slice"},
        task={"source": "reverse", "options": {"letters": 6}},
        reward={"function": "random"},
        rollout={"slots": rows, "group_size": _GROUP, "max_new_tokens": tokens},
        buffer={"batch_groups": max(1, rows // _GROUP), "max_lag": 1},
        learner={
            "trainer": "torch",
            "device": device,
            "dtype": dtype,
            "moments": dtype,
            "steps": _STEPS,
            "checkpoint_every": _STEPS,
        },
        engine=server.table(rows),
    )


async def _turns(stage: Stage, used: _Samples, processes: _Samples) -> list[dict[str, float]]:
    """Return figures of each turn in which the learner trained and after which the engine sampled."""
    asked, returned = [
        [one.time_ns for one in await stage.read(TRAINING, [of])] for of in (CARD_REQUESTED, CARD_RETURNED)
    ]
    left, ready = [await stage.read(ENGINES, [of]) for of in (CARD_LEFT, ENGINE_READY)]
    trained = await stage.read(TRAINING, [BATCH_TRAINED])
    offloads = _rows(stage.files.logs / "learner-1.log", "trainer offloaded")
    resumed = _rows(stage.files.logs / "engine-1.log", "GPU taken again")
    found = []
    for begin, end in zip(asked, returned, strict=False):
        within = [decode(BatchTrained, one.data) for one in trained if begin < one.time_ns < end]
        gone, back = (
            [at for one in left if begin < (at := one.time_ns) < end],
            [one for one in ready if one.time_ns > end],
        )
        if not (within and gone and back):
            continue
        moved_at, moved = [(at, row) for at, row in offloads if at < end][-1]
        taken = next((row for at, row in resumed if end < at < back[0].time_ns), {})
        size, came = moved["bytes"], decode(EngineReady, back[0].data)
        times = {
            "leave_s": (gone[-1] - begin) / 1e9,
            "restore_s": max(one.metrics.get("restore_s", 0.0) for one in within),
            "offload_s": moved["seconds"],
            "ready_s": (back[0].time_ns - end) / 1e9,
        }
        parts = {f"offload_{name}": moved[name] for name in ("wait_s", "copy_s", "free_s")}
        parts |= {f"back_{name}": taken.get(name, 0.0) for name in ("resume_s", "fetch_s")}
        parts |= {"back_hold_s": came.hold_s, "back_load_s": came.load_s, "returned_s": (end - moved_at) / 1e9}
        sizes = {"offloaded_gb": size / 1e9, "copied_gb": moved["copied"] / 1e9}
        rates = {f"{way}_gb_per_s": size / 1e9 / max(times[f"{way}_s"], 1e-9) for way in ("restore", "offload")}
        memory = {}
        if used:
            memory = {"left_gib": [int(mib) / 1024 for at, mib in used if at < end][-1]}
            memory |= {"learner_left_gib": moved["left"] / (1 << 30)}
        found.append(times | {"switches_s": sum(times.values())} | parts | sizes | rates | memory)
        held = sorted({line for at, line in processes if end - _JUST_BEFORE_NS < at < end})
        report(", ".join(f"{name} {value:.3f}" for name, value in found[-1].items()) + f"; MiB by process: {held}")
    return found


def _rows(log: Path, event: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the lines of an actor's log about an event, with their times."""
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [(_nanoseconds(row["timestamp"]), row) for row in rows if row["event"] == event]


def _nanoseconds(timestamp: str) -> int:
    return int(datetime.fromisoformat(timestamp).timestamp() * 1e9)


@asynccontextmanager
async def _samples(device: str, query: str) -> AsyncIterator[_Samples]:
    """Yield times and lines of the reports of `nvidia-smi` on a GPU, for the length of the block; MiB of memory."""
    found: _Samples = []
    if device == "cpu":
        yield found
        return
    command = ("nvidia-smi", query, "--format=csv,noheader,nounits", "--loop-ms=50")
    number = torch.device(device).index or 0
    seen = os.environ.get(VISIBLE_GPUS, "")
    gpu = ("--id", seen.split(",")[number] if seen else str(number))
    process = await asyncio.create_subprocess_exec(
        *command, *gpu, stdout=asyncio.subprocess.PIPE, preexec_fn=with_parent()
    )
    assert process.stdout is not None

    async def read(lines: asyncio.StreamReader) -> None:
        async for line in lines:
            found.append((time.time_ns(), line.decode().strip()))

    reading = asyncio.create_task(read(process.stdout))
    try:
        yield found
    finally:
        process.terminate()
        await process.wait()
        await reading


def _pinned_rates(device: str) -> dict[str, float]:
    """Return GB/s of one copy of page-locked memory to the device, and back."""
    host = host_memory(_COPY_BYTES, torch.device(device))
    gpu = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    rates = {}
    for way, (to, of) in {"restore": (gpu, host), "offload": (host, gpu)}.items():
        seconds = []
        for _ in range(5):
            began = time.monotonic()
            to.copy_(of, non_blocking=True)
            torch.cuda.synchronize(device)
            seconds.append(time.monotonic() - began)
        rates[way] = _COPY_BYTES / 1e9 / statistics.median(seconds)
    return rates
