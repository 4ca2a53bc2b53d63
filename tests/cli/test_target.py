"""The words of a command that may be a run, or something of a run."""

import json

from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish
from asyncrl.run.connect import SUPERVISOR
from harness.stage import until
from topics.actors import ActorStarted, RunOpened
from topics.stages import STAGE_REQUESTED

STAGES = {"stages": {"hard": {}, "easy": {}}}


async def test_one_word_is_the_stage_or_the_run_that_it_names_and_is_refused_where_it_is_both_or_neither(bus, terminal):
    await publish(bus, RunOpened(12, 0, STAGES))
    await publish(bus, ActorStarted("supervisor", SUPERVISOR, "here", 2))
    (terminal.logs.parent / "config.json").write_text(json.dumps({"run": bus.run, **STAGES}))

    waiting = await terminal.start("stage", "hard")
    try:

        async def requested() -> bool:
            return await read_last(bus, STAGE_REQUESTED) is not None

        await until(requested, "the request")
    finally:
        waiting.kill()
        await waiting.wait()
    code, listed, _ = await terminal.type("stage", bus.run)
    assert (code, "hard" in listed) == (0, True)

    code, _, message = await terminal.type("stage", "hrd")
    assert (code, message.endswith(f"and no stage of run {bus.run}; known: easy, hard\n")) == (2, True), message
    (terminal.folder / "runs" / "hard").mkdir()
    (terminal.folder / "runs" / "hard" / "config.json").write_text("{}")
    code, _, message = await terminal.type("stage", "hard")
    assert (code, message) == (
        2,
        f"'hard' is a run, and a stage of run {bus.run}; write `asyncrl stage {bus.run} hard` for the stage, "
        "`asyncrl stage runs/hard` for the run\n",
    )


async def test_a_word_that_no_run_has_is_named_with_what_is_missing(terminal):
    code, _, message = await terminal.type("logs", "rolout-1")
    assert code == 2
    assert "'rolout-1' is no run under" in message and "and no actor of run" in message
    terminal.lock.close()
    code, _, message = await terminal.type("stage", "hard")
    assert code == 1
    assert "'hard' is no run under" in message and "for a run's stage: no live run under" in message
    code, _, message = await terminal.type("weights", "promot", "40")
    assert (code, message.endswith("`asyncrl weights [RUN] rollback`; found 'promot 40'\n")) == (2, True), message
