"""A process in a Python that has verifiers: it loads a taskset, scores replies, and runs episodes.

Each line of standard input is a request as JSON, and each line of standard output is a reply to one. The process ends
with its input. It imports nothing of asyncrl, which that Python does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from typing import Any

_FAULTS = ("EnvError", "InterceptionError", "SandboxError", "ToolsetError", "TunnelError")


class Tasks:
    """A taskset, and the environment in which its episodes run."""

    def __init__(self, options: dict[str, Any]) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._vf = vf
        agent = {"harness": options["harness"], "runtime": {"type": options["runtime"]}}
        self._env = load_environment(resolve_env_config({"taskset": options["taskset"], "agent": agent}))
        self._taskset = self._env.taskset
        self._known: list[Any] = []
        self._rest = iter(self._taskset)
        self._serving = contextlib.AsyncExitStack()
        self._begun: asyncio.Task[None] | None = None

    def about(self) -> dict[str, Any]:
        """Return the number of tasks; None if they have no end."""
        if not self._taskset.bounded:
            return {"count": None}
        self._known += self._rest
        return {"count": len(self._known)}

    def _task(self, number: int) -> Any:
        if (missing := number + 1 - len(self._known)) > 0:
            self._known += itertools.islice(self._rest, missing)
        return self._known[number]

    def row(self, number: int) -> dict[str, Any]:
        """Return the prompt of a task as messages."""
        data = self._task(number).data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return {"messages": [*system, {"role": "user", "content": data.prompt}], "name": data.name or ""}
        messages = [message.model_dump(mode="json", exclude_none=True) for message in data.prompt or []]
        return {"messages": [*system, *messages], "name": data.name or ""}

    async def score(self, number: int, reply: str) -> dict[str, Any]:
        """Return the rewards that a task gives a reply."""
        vf, task = self._vf, self._task(number)
        messages = [*self.row(number)["messages"], {"role": "assistant", "content": reply}]
        nodes = [
            {"parent": place - 1 if place else None, "message": message, "sampled": place == len(messages) - 1}
            for place, message in enumerate(messages)
        ]
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=self._env.config.agent)
        trace = vf.Trace(task=about, agent=agent, nodes=nodes, is_completed=True, ok=True)
        await task.score(trace)
        return _figures(trace)

    async def run(self, number: int, address: str, key: str, name: str) -> dict[str, Any]:
        """Run an episode with a model at an address."""
        vf = self._vf
        if self._begun is None:
            self._begun = asyncio.create_task(self._serve())
        await asyncio.shield(self._begun)
        os.environ[name] = key
        client = vf.EvalClientConfig(base_url=address, api_key_var=name)
        try:
            context = vf.ModelContext(model="policy", client=client, sampling=vf.Sampling(temperature=1.0))
            episode = await self._env.run_episode(self._task(number), context)
        finally:
            del os.environ[name]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        faults = [error for error in errors if error.type in _FAULTS]
        figures = _figures(*episode.traces)
        figures["failure"] = "; ".join(f"{error.type}: {error.message}" for error in errors)[:2000]
        return figures | {"fault": f"{faults[0].type}: {faults[0].message}"[:2000] if faults else ""}

    async def _serve(self) -> None:
        await self._serving.enter_async_context(self._env.serving())


def _figures(*traces: Any) -> dict[str, Any]:
    metrics: dict[str, float] = {}
    for trace in traces:
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    trained = [trace for trace in traces if trace.agent.trainable]
    reply = trained[-1].last_reply if trained else ""
    return {"reward": sum(trace.reward for trace in trained), "metrics": metrics, "reply": reply}


async def _answer(tasks: Tasks, asked: dict[str, Any]) -> Any:
    what, arguments = asked["what"], asked["arguments"]
    found = getattr(tasks, what)(*arguments)
    return await found if asyncio.iscoroutine(found) else found


async def main(replies: Any) -> None:
    """Serve until standard input ends."""
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: dict[int, asyncio.Task[None]] = {}

    def send(number: int, **fields: Any) -> None:
        replies.write(json.dumps({"number": number, **fields}) + "\n")
        replies.flush()

    try:
        tasks = Tasks(json.loads(await reader.readline()))
        send(0, value=tasks.about())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the parent names the fault of a user's taskset
        send(0, fault=f"{type(error).__name__}: {error}")
        return

    async def serve(asked: dict[str, Any]) -> None:
        number = asked["number"]
        try:
            send(number, value=await _answer(tasks, asked))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the parent names the fault of a user's taskset
            send(number, fault=f"{type(error).__name__}: {error}")
        finally:
            running.pop(number, None)

    while line := await reader.readline():
        asked = json.loads(line)
        if asked["what"] == "cancel":
            if asked["number"] in running:
                running[asked["number"]].cancel()
        else:
            running[asked["number"]] = asyncio.create_task(serve(asked))
    for task in [*running.values()]:
        task.cancel()


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of tasksets are no replies
    asyncio.run(main(stdout))
    os._exit(0)  # a server of the environment may hold threads
