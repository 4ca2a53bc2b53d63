"""A whole run that learns from live traffic: planted strings stand in none of its files, before or after a purge that
is killed on its way, and the run goes on."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.tenant_keys import tenant_digest
from asyncrl.process import python
from harness.audited import messages_on
from harness.live_runs import new_key, with_gateway
from harness.runs import PACED, Run, address_of, command, topics_left_in, up
from harness.sdks import sdks
from harness.stage import until
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.ids import LIVE
from topics.prompts import PROMPT_ISSUED
from topics.secrets import SecretMade
from topics.topic import BATCHES, PROMPTS, SECRETS, SESSIONS, TRAINING
from topics.turns import TURN_SKIPPED
from topics.wire import decode

pytestmark = pytest.mark.slow

PLANTED, USER = "quaggamarzipan", "mallory-quux-4711"
PAUSE_S = 0.3  # between conversations, of which a batch takes few


class Client:
    """Says the same again and again, and judges each first reply by what it says next."""

    def __init__(self, address: str, key: str, words: str, user: str) -> None:
        self._address, self._key, self._words, self._user = address, key, words, user
        self._conversations = 0
        self._stop = asyncio.Event()

    async def talk(self) -> None:
        async with sdks(self._address, self._key) as (client, _):
            while not self._stop.is_set():
                self._conversations += 1
                messages: list[dict[str, str]] = [{"role": "user", "content": self._words}]
                reply = await self.ask(client, messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                messages.append({"role": "user", "content": "good"})
                last = await self.ask(client, messages)
                told = {"turn": last.id, "number": 0.5, "text": self._words}
                await client.with_options(max_retries=5).post("/feedback", cast_to=object, body=told)
                await asyncio.sleep(PAUSE_S)

    async def ask(self, client: Any, messages: list[dict[str, str]]) -> Any:
        asked = {"model": "any", "messages": messages, "max_tokens": 8, "user": self._user}
        session = {"x-asyncrl-session": f"{self._words}-{self._conversations}"}
        return await client.chat.completions.create(**asked, extra_headers=session)

    async def ask_once(self) -> str:
        """Ask in a session that nothing ends; returns the turn's id."""
        async with sdks(self._address, self._key) as (client, _):
            reply = await self.ask(client, [{"role": "user", "content": self._words}])
            return reply.id.removeprefix("chatcmpl-")

    def stop(self) -> None:
        self._stop.set()


def files_with(root: Path, needles: dict[str, bytes]) -> dict[str, list[str]]:
    """Return the files of a run that have something, by its name."""
    found: dict[str, list[str]] = {name: [] for name in needles}
    # The run goes on: folders and files go while they are looked for, which walk() passes over.
    for path in [Path(folder, name) for folder, _, names in os.walk(root) for name in names]:
        try:
            content = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue
        for name, needle in needles.items():
            if needle in content:
                found[name].append(str(path.relative_to(root)))
    return found


async def data_keys(bus: Bus) -> dict[str, bytes]:
    found: dict[str, bytes] = {}

    def take(record: Record) -> None:
        found[record.key] = decode(SecretMade, record.data).key

    reader = LogReader(bus, SECRETS, take)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), 120)
    await reader.close()
    return found


async def have_keys(bus: Bus, count: int) -> bool:
    return len(await data_keys(bus)) >= count


async def trained_turns(bus: Bus, tenant: str) -> set[str]:
    """The prompts of a tenant's turns in batches that are trained."""
    owner = tenant_digest(tenant)
    issued = (await messages_on(bus, PROMPTS)).on(PROMPT_ISSUED)
    own = {one.prompt_id for one in issued if one.prompt_id.startswith(LIVE) and owner in one.secrets}
    trained = {one.step for one in (await messages_on(bus, TRAINING)).on(BATCH_TRAINED)}
    packed = [one for one in (await messages_on(bus, BATCHES)).on(BATCH_PACKED) if one.step in trained]
    return own & {group.prompt_id for batch in packed for group in batch.groups}


async def more_trained(run: Run, bus: Bus, tenant: str, what: str) -> None:
    before = await trained_turns(bus, tenant)

    async def more() -> bool:
        assert run.process.returncode is None, run.story
        return len(await trained_turns(bus, tenant)) > len(before)

    await until(more, what, 180)


KILLED = """
import os, signal, sys
from asyncrl.bus.connection import Bus
from asyncrl.cli.main import run

erased, most, ask = 0, int(sys.argv[1]), Bus.api

async def api(bus, call, *body):
    global erased
    if call.startswith("STREAM.MSG.DELETE"):
        if erased == most:
            os.kill(os.getpid(), signal.SIGKILL)
        erased += 1
    return await ask(bus, call, *body)

Bus.api = api
run(["purge", *sys.argv[2:]])
"""


async def killed_purge(folder: Path, erased: int, *words: str) -> None:
    """Run `asyncrl purge`, and let it die by SIGKILL once it has erased so many keys."""
    process = await asyncio.create_subprocess_exec(*python("-c", KILLED, str(erased), *words), cwd=folder)
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL


async def test_what_is_planted_stands_in_no_file_and_a_purge_leaves_nothing_that_decrypts_to_it(tmp_path: Path):
    settings, address = with_gateway(tmp_path)
    more = ["live.fraction=0.5", "live.judge.kind=rule", "gateway.queue_timeout_s=300"]
    more += [PACED, "learner.steps=100000", "nats.keep=run"]
    planted = TaskTokenizer.load(tmp_path / "conversing").encode(PLANTED).tobytes()
    needles = {"text": PLANTED.encode(), "tokens": planted, "user": USER.encode()}
    async with up(tmp_path, *settings, *more) as run:
        keys = [await new_key(tmp_path, address), await new_key(tmp_path, address, "ben")]
        bus = await Bus.connect(address_of(run), "short")
        clients = [Client(address, keys[0], PLANTED, user) for user in (USER, f"{USER}-2")]
        clients.append(Client(address, keys[1], "abc", USER))
        async with asyncio.TaskGroup() as talks:
            talking = [talks.create_task(client.talk()) for client in clients]
            await until(lambda: have_keys(bus, len(clients)), "all three users have said something")
            await more_trained(run, bus, "anna", "turns are trained")
            waiting = await clients[0].ask_once()
            for client in clients[:2]:
                client.stop()
            await asyncio.wait(talking[:2], timeout=120)  # a purged reply takes no feedback
            before = await data_keys(bus)
            own = {name: key for name, key in before.items() if name.startswith(tenant_digest("anna"))}
            assert len(own) == 2 and len(before) == 3
            there = files_with(run.root, needles | {"tenant": b"anna"} | own)
            assert (there["text"], there["tokens"], there["user"]) == ([], [], [])
            assert there["tenant"] and all(there[name] for name in own), "what lies open is found"
            await killed_purge(tmp_path, 0, "short", "--tenant", "anna")
            assert (await data_keys(bus)).keys() == before.keys()
            await killed_purge(tmp_path, 1, "short", "--tenant", "anna")
            assert len((await data_keys(bus)).keys() & own.keys()) == 1
            code, output = await command(tmp_path, "purge", "short", "--tenant", "ana")
            assert code != 0 and "its tenants: anna, ben" in output, output
            code, output = await command(tmp_path, "purge", "short", "--tenant", "anna")
            assert code == 0 and "version" in output, output
            assert re.search(r"trained: [1-9]\d* turns?, in steps", output), output
            assert (await data_keys(bus)).keys() == before.keys() - own.keys()
            assert not any(files_with(run.root, needles | own).values())

            async def ended() -> bool:
                skipped = (await messages_on(bus, SESSIONS)).on(TURN_SKIPPED)
                return {one.turn_id: one.reason for one in skipped}.get(waiting) == "purged"

            await until(ended, "the turn that waited ends as purged")
            await more_trained(run, bus, "ben", "turns of others are trained")
            clients[2].stop()
        purged = sorted(await trained_turns(bus, "anna"))
        await bus.close()
        code, _ = await command(tmp_path, "down")
        assert (code, await run.ended()) == (0, 0), run.story
    assert not any(files_with(run.root, needles | own).values())
    code, output = await command(tmp_path, "audit", "--deep")
    assert code == 0 and re.search(r"purged +[1-9]", output), output
    code, output = await command(tmp_path, "explain", f"{purged[-1]}-0")
    assert code == 0 and "nothing can be read" in output, output
    code, output = await command(tmp_path, "replay", "short", limit_s=600)
    assert code == 0 and re.search(r"[1-9]\d* trajectories were purged", output), output
    async with topics_left_in(run.root) as left:
        assert (await data_keys(left)).keys() == before.keys() - own.keys()
