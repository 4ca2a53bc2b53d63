"""Commands from another terminal, against a real server with hand-said messages."""

import asyncio
import io
import json
import os
import socket

import msgspec
import pytest
from rich.console import Console

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last, read_last_of_each
from asyncrl.bus.publish import WRITER, publish
from asyncrl.cli.main import parser_for
from asyncrl.cli.main import run as run_command
from asyncrl.cli.target import action_of
from asyncrl.config.settings import Config
from asyncrl.errors import WrongUsage
from asyncrl.locks import lock
from asyncrl.ports import free_port
from asyncrl.run.connect import SUPERVISOR, FoundRun, RunNotFound, RunStarts, connected
from asyncrl.state.screen import render
from asyncrl.state.status import run_status
from asyncrl.state.watch import read_state
from harness.published_messages import publish_started, publish_stopped, trained
from harness.stage import until
from topics.actors import (
    SCALE_REQUESTED,
    STOP_REQUESTED,
    ActorStarted,
    FleetScaled,
    RunOpened,
    ScaleRequested,
    Vitals,
)
from topics.batches import BATCH_TRAINED, BatchPacked
from topics.engines import ENGINE_ANNOUNCED
from topics.runs import StreamStatus
from topics.stages import STAGE_REQUESTED, StageBegan, StageRequested
from topics.stalls import StallFound
from topics.topic import ACTORS, Topic
from topics.wire import Message, decode

WRITTEN = {WRITER: "a keeper"}  # on the log of one keeper


@pytest.fixture
def found(bus, server) -> FoundRun:
    return FoundRun(bus.run, None, server.address)


async def test_status_reads_everything_from_the_topics(bus):
    await publish_started(bus, SUPERVISOR)
    await publish_started(bus, "rollout-1")
    for step in (1, 2):
        packed = BatchPacked(step, "rl", [], 0, {}, {"truncated_share": step / 4, "reward/format": 0.5})
        await publish(bus, packed, headers=WRITTEN)
        await publish(bus, trained(step), headers=WRITTEN)

    state = await read_state(bus)
    values = json.loads(msgspec.json.encode(run_status(state, state.last_ns)))

    assert (values["state"], values["step"], values["reward"]) == ("running", 2, 0.5)
    figures = {"train_s": 2.0, "wait_s": 0.5, "truncated_share": 0.5, "reward/format": 0.5}
    assert figures.items() <= values["metrics"].items()
    assert (values["metrics"]["reward/mean"], values["metrics"]["lag/mean"]) == (0.5, 0.4)
    assert values["mean_lag_versions"] == 0.4
    assert values["queues"]["rollout"]["waiting"] == 0
    assert [actor["actor_id"] for actor in values["actors"]] == [SUPERVISOR, "rollout-1"]


async def test_status_counts_the_requests_of_all_gateways(bus):
    for name, counts in (("gateway-1", {"turns": 1200.0, "turns_failed": 1.0}), ("gateway-2", {"turns": 34.0})):
        await publish_started(bus, name)
        await publish(bus, Vitals("gateway", name, 1, 0.0, counts))
    state = await read_state(bus)
    console = Console(width=80, file=io.StringIO(), color_system=None)

    console.print(render(run_status(state, state.last_ns)))

    assert "requests  1,234 answered   1 failed  " in console.file.getvalue()


async def test_status_counts_what_it_cannot_read(bus):
    await bus.store(BATCH_TRAINED.subject(bus.run), b"\xc1", {"Nats-Msg-Id": "broken"})

    state = await read_state(bus)

    assert state.dead.count == 1
    assert "number 1 of TRAINING" in state.dead.last


async def test_status_finds_the_newest_live_run_by_itself(bus, terminal):
    await publish(bus, trained(7), headers=WRITTEN)

    code, state, _ = await terminal.type("status")
    _, values, _ = await terminal.type("status", bus.run, "--json")

    assert code == 0
    assert bus.run in state
    assert json.loads(values)["step"] == 7


async def test_a_server_without_the_run_is_named(server):
    with pytest.raises(RunNotFound, match="holds no run called other"):
        async with connected(FoundRun("other", None, server.address), "test"):
            pass


async def test_a_run_whose_directory_is_not_held_is_over(terminal, bus):
    terminal.lock.close()

    code, _, message = await terminal.type("tap", bus.run, "*")

    assert code == 1
    assert f"run {bus.run} is over" in message


async def test_a_run_whose_supervisor_left_is_over(bus, found):
    await publish_started(bus, SUPERVISOR)
    await publish_stopped(bus, SUPERVISOR)

    with pytest.raises(RunNotFound, match="is over") as error:
        async with connected(found, "test"):
            pass
    assert not isinstance(error.value, RunStarts)


async def test_a_run_that_is_resumed_is_starting_whatever_its_topics_say_still(bus, found, tmp_path):
    await publish_started(bus, SUPERVISOR)
    await publish_stopped(bus, SUPERVISOR)
    nowhere = BusAddress(f"nats://127.0.0.1:{free_port()}")
    held = lock(tmp_path / "lock")
    for address, words in ((found.login, "is over"), (nowhere, "cannot be reached")):
        with pytest.raises(RunStarts, match=words):
            async with connected(FoundRun(bus.run, tmp_path, address), "test"):
                pass
    os.close(held)


async def test_down_asks_and_waits_until_the_run_has_ended(bus, terminal):
    process = await terminal.start("down")
    await until(lambda: _is_published(bus, STOP_REQUESTED), "the request to stop")
    await publish_stopped(bus, SUPERVISOR)
    terminal.lock.close()
    out, _ = await process.communicate()

    assert process.returncode == 0
    assert out.decode().splitlines() == [f"asked run {bus.run} to stop", f"run {bus.run} has ended"]


async def test_down_reports_a_run_that_does_not_end_in_time(bus, terminal):
    code, _, message = await terminal.type("down", "--wait", "0.5")

    assert code == 1
    assert "has not ended within" in message


async def test_a_server_that_does_not_answer_is_not_announced(bus, terminal):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"

    code, _, message = await terminal.type("engines", bus.run, "add", address, "--wait", "3600")

    assert code == 1
    assert message.startswith(f"{address} cannot be reached: ")
    assert await read_last(bus, ENGINE_ANNOUNCED) is None


async def test_scale_asks_and_waits_until_as_many_live(bus, terminal):
    await publish_started(bus, "rollout-1")
    process = await terminal.start("scale", "rollout=2")
    await until(lambda: _is_published(bus, SCALE_REQUESTED), "the request to scale")
    asked = await read_last(bus, SCALE_REQUESTED)
    await publish(bus, FleetScaled({"rollout": 2}), headers=WRITTEN)
    await publish_started(bus, "rollout-2")
    out, _ = await process.communicate()

    assert asked is not None
    assert decode(ScaleRequested, asked.data).wanted == {"rollout": 2}
    assert (process.returncode, out.decode()) == (0, "scaled: rollout 2\n")


async def test_scale_waits_for_a_supervisor_that_is_started_again(bus, terminal):
    """As where Ray lost its head: it fails, `asyncrl up` starts it again, and it takes up what was asked meanwhile."""
    await publish_started(bus, SUPERVISOR)
    await publish_stopped(bus, SUPERVISOR, "RaySystemError: the head was started anew")
    process = await terminal.start("scale", "rollout=1")
    await until(lambda: _is_published(bus, SCALE_REQUESTED), "the request to scale")
    await publish_stopped(bus, SUPERVISOR, "RaySystemError: and once more")
    await publish_started(bus, SUPERVISOR)
    await publish(bus, FleetScaled({"rollout": 1}), headers=WRITTEN)
    await publish_started(bus, "rollout-1")
    out, _ = await process.communicate()

    assert (process.returncode, out.decode()) == (0, "scaled: rollout 1\n")


async def test_scale_reports_how_far_it_came(bus, terminal):
    await publish_started(bus, "rollout-1")

    code, _, message = await terminal.type("scale", "rollout=3", "--wait", "0.3")

    assert code == 1
    assert "rollout 1 of 3" in message


async def test_scale_ends_as_soon_as_the_run_wants_another_number(bus, terminal):
    process = await terminal.start("scale", "rollout=3", "--wait", "3600")
    await until(lambda: _is_published(bus, SCALE_REQUESTED), "the request to scale")
    asked = await read_last(bus, SCALE_REQUESTED)
    await publish(bus, FleetScaled({"rollout": 3}, request=asked.sequence), headers=WRITTEN)
    await publish(bus, FleetScaled({"rollout": 0}, request=asked.sequence + 1), headers=WRITTEN)
    _, message = await process.communicate()

    assert (process.returncode, message.decode().partition(";")[0]) == (
        1,
        "the run has decided otherwise: rollout 0 instead of 3",
    )


async def test_a_server_that_is_added_by_several_commands_at_once_is_taken_once(bus, terminal):
    with socket.create_server(("0.0.0.0", 0)) as server:
        addresses = [f"http://127.0.0.{number}:{server.getsockname()[1]}" for number in range(1, 9)]
        words = [("engines", bus.run, "add", address, "--wait", "0.1") for address in addresses]
        folder = ("--directory", str(terminal.folder / "runs"))
        codes = await asyncio.gather(*(asyncio.to_thread(run_command, [*typed, *folder]) for typed in words))

    assert codes == [1] * 8  # nothing here starts the actor of the one that was taken
    assert len(await read_last_of_each(bus, ACTORS, [ENGINE_ANNOUNCED.pattern(bus.run)])) == 1


STAGED = {
    "tasks": {"words": {"source": "reverse", "share": 2}, "sums": {"source": "sum"}},
    "stages": {"sums": {"shares": {"words": 0}, "group_size": 16}, "first": {}},
}


async def open_staged(bus: Bus) -> None:
    await publish(bus, RunOpened(12, 0, STAGED))
    await publish(bus, ActorStarted("supervisor", SUPERVISOR, "here", 2))


async def test_stage_asks_and_names_the_first_prompt_and_lists_what_holds(bus, terminal):
    await open_staged(bus)
    process = await terminal.start("stage", bus.run, "sums")
    await until(lambda: _is_published(bus, STAGE_REQUESTED), "the request")
    asked = await read_last(bus, STAGE_REQUESTED)
    assert asked is not None
    await publish(bus, StageBegan(name="first", prompt=3, request=asked.sequence - 1), headers=WRITTEN)
    await publish(bus, StageBegan(name="sums", prompt=7, request=asked.sequence), headers=WRITTEN)
    out, _ = await process.communicate()

    assert decode(StageRequested, asked.data).name == "sums"
    assert (process.returncode, out.decode()) == (0, "stage sums from prompt p000007 on\n")
    await publish_stopped(bus, SUPERVISOR)  # they are listed of a run that is over, too
    code, listed, _ = await terminal.type("stage", bus.run)
    assert code == 0
    usual, wide = ("(groups of " + text for text in ("8, temperature 1, grpo)", "16, temperature 1, grpo)"))
    assert listed.splitlines() == [
        f"  (none)  words 2 {usual}, sums 1 {usual}",
        f"* sums    words 0 {wide}, sums 1 {wide}  since p000007",
        f"  first   words 2 {usual}, sums 1 {usual}",
    ]


async def test_stage_refuses_a_name_that_the_run_does_not_have(bus, terminal):
    await open_staged(bus)

    code, _, message = await terminal.type("stage", bus.run, "wide")

    assert (code, message) == (2, f"run {bus.run} has no stage 'wide'; its stages: sums, first\n")
    assert await read_last(bus, STAGE_REQUESTED) is None


async def test_stage_says_when_the_prompter_does_not_answer(bus, terminal):
    await open_staged(bus)

    code, _, message = await terminal.type("stage", bus.run, "sums", "--wait", "0.3")

    assert code == 1
    assert "stage sums has not begun: the prompter has not answered. The request stays" in message


async def test_logs_are_merged_by_time_and_filtered_by_level(terminal):
    for number, (actor, level) in enumerate((("rollout-1", "info"), ("learner-1", "warning"), ("rollout-1", "error"))):
        line = {"event": f"event {number}", "level": level, "actor": actor, "timestamp": f"2026-01-01T00:00:0{number}Z"}
        with (terminal.logs / f"{actor}.log").open("a") as file:
            file.write(json.dumps({**line, "step": number}) + "\n")
    printed = '{"timestamp": 1.5, "level": 30}'  # by a user's function
    (terminal.logs / "engine-1.server.log").write_text(f"words of a library\n{printed}\n")
    (terminal.logs / "reward-1.log").touch()
    following = await terminal.start("logs", "reward-1", "--follow")
    assert (await following.stderr.readline()).endswith(b"nothing was logged by reward-1 yet\n")
    terminal.lock.close()
    assert await following.wait() == 0

    _, everything, _ = await terminal.type("logs")
    _, loud, _ = await terminal.type("logs", "rollout", "--level", "warning", "--follow")
    _, silence, lower = await terminal.type("logs", "--level", "critical")
    _, nothing, note = await terminal.type("logs", "reward-1")
    assert (nothing, note.endswith("nothing was logged by reward-1\n")) == ("", True)
    assert (silence, lower.partition(": ")[2]) == (
        "",
        "nothing of level critical or above, but 3 of level info, 1 of level warning, 1 of level error, "
        "was logged by any actor\n",
    )
    code, _, message = await terminal.type("logs", terminal.logs.parent.name, "nobody")

    assert [line.split(maxsplit=2)[-1].split("  ")[0] for line in everything.splitlines()[2:]] == [
        "event 0",
        "warning event 1",
        "error event 2",
    ]
    assert "words of a library" in everything.splitlines()[0] and printed in everything.splitlines()[1]
    assert [line.split(maxsplit=1)[1] for line in loud.splitlines()] == ["rollout-1    error event 2  step=2"]
    assert code == 1
    assert "there are: engine-1.server, learner-1, reward-1, rollout-1" in message


async def _is_published(bus: Bus, topic: Topic[Message]) -> bool:
    return await read_last(bus, topic) is not None


@pytest.mark.parametrize(
    ("words", "run", "action"),
    [
        ([], "", ("list", "")),
        (["demo"], "demo", ("list", "")),
        (["promote", "4"], "", ("promote", "4")),
        (["demo", "promote", "4"], "demo", ("promote", "4")),
        (["list", "demo"], "demo", ("list", "")),
        (["promote", "4", "demo"], "demo", ("promote", "4")),
    ],
)
def test_an_action_is_named_after_the_run_or_before_it(words: list[str], run: str, action: tuple[str, str]):
    arguments = parser_for(["weights"]).parse_args(["weights", *words])

    assert (action_of(arguments, {"list": "", "promote": "VERSION"}), arguments.run_id) == (action, run)


@pytest.mark.parametrize("words", [["list", "demo", "more"], ["promote"], ["demo", "promoted", "4"]])
def test_an_action_that_is_none_is_refused_with_those_that_are(words: list[str]):
    arguments = parser_for(["weights"]).parse_args(["weights", *words])

    with pytest.raises(WrongUsage, match=r"`asyncrl weights \[RUN\] promote VERSION`; found '"):
        action_of(arguments, {"list": "", "promote": "VERSION"})


@pytest.mark.parametrize("width", [60, 80, 120])
async def test_status_cuts_no_figure_at_any_width(bus, width: int):
    await publish_started(bus, SUPERVISOR)
    state = await read_state(bus)
    queue = {"waiting": 123_456, "under_way": 654_321}
    fills = {name: StreamStatus(123_456_789, 987_654_321, 0.125) for name in ("TRAJECTORIES", "BLOBS", "WEIGHTS")}
    stall = StallFound("learner behind", "learner-1", "batch 12 " * 12 + "waits", "")
    status = msgspec.structs.replace(
        run_status(state, state.last_ns), queues={"rollout": queue, "reward": queue}, streams=fills, stalls=[stall]
    )
    console = Console(width=width, file=io.StringIO(), color_system=None)

    console.print(render(status))

    lines = console.file.getvalue().splitlines()
    shown = " ".join(" ".join(lines).replace("│", " ").split())
    assert {len(line) for line in lines} == {width} and "…" not in shown
    assert shown.count("123456 waiting 654321 under way") == 2
    assert shown.count("123.5 of 988 MB 12 %") == 3 and "batch 12 waits" in shown


async def test_keys_of_a_run_without_a_gateway_are_refused_and_its_list_says_why(bus, terminal):
    await publish(bus, RunOpened(4, 0, msgspec.to_builtins(Config())))

    code, _, said = await terminal.type("keys", "add", "--tenant", "anna")
    assert (code, "has no gateway that would take a key: its config has gateway.count = 0" in said) == (2, True)
    code, shown, _ = await terminal.type("keys", bus.run)
    assert (code, shown.startswith(f"run {bus.run} has no keys: its config has gateway.count = 0")) == (0, True)
