"""A run whose rollout workers are killed, and what it published."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from asyncrl.bus.publish import publish
from asyncrl.engine.client import EngineClient
from harness.stage import LONGEST_S, until
from topics.prompts import PromptIssued, PromptRow


@dataclass
class Scene:
    """A run with an engine and whatever was said of its trajectories."""

    stage: object
    bus: object
    client: EngineClient
    results: dict
    progress: dict
    failures: dict
    tmp: Path
    awaited: list = field(default_factory=list)  # progress: of whom, what it is like, and the event that it has come

    async def issue(self, name, **metadata):
        metadata |= {"calls": str(self.tmp / f"{name}.calls"), "go": str(self.tmp / "go")}
        prompt_id, member = name.rsplit("-", 1)
        row = PromptRow("^abcdef=", "fedcba", metadata)
        message = PromptIssued(prompt_id, int(member), 1, rows=[row], temperature=0.0)
        await publish(self.bus, message)

    async def result(self, name):
        await until(lambda: name in self.results, f"result of {name}; failures {self.failures}")
        return self.results[name]

    def calls(self, name):
        return (self.tmp / f"{name}.calls").read_text().split()


def assert_same(found, expected):
    assert len(found.segments) == len(expected.segments)
    for mine, theirs in zip(found.segments, expected.segments, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.mask.tolist() == theirs.mask.tolist()
        assert mine.versions.tolist() == theirs.versions.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
    assert found.completion == expected.completion


async def kill_in_the_middle(scene, worker, name, is_middle):
    """Freeze the engine once the recorded progress is in the middle, then kill the worker."""
    in_the_middle = asyncio.Event()  # of any message, however many come at once
    scene.awaited.append((name, is_middle, in_the_middle))
    async with asyncio.timeout(LONGEST_S):
        await in_the_middle.wait()
    await scene.client.pause("in_place")
    assert name not in scene.results
    worker.kill()
    await worker.wait()
    await scene.client.abort_all()
    await scene.client.continue_generation()
