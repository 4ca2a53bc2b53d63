"""Work that was begun elsewhere ends as if nothing had happened: real workers, a real engine, real kill -9."""

import asyncio
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.bus.log import LogReader, read_last
from asyncrl.bus.publish import publish
from asyncrl.config.engine_settings import EngineSettings
from asyncrl.engine.client import EngineClient
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.embedded.control import EmbeddedControl
from asyncrl.rollout.journal import Journal, call_order
from harness.live_runs import TEMPLATE
from harness.models import make_endless_model
from harness.resumption import Scene, assert_same, kill_in_the_middle
from harness.stage import provision_leased, until
from topics.actors import VITALS_TAKEN
from topics.engines import EngineReady, EngineUpdating
from topics.table import BUILT_IN
from topics.topic import GRADES, TRAJECTORIES
from topics.trajectories import PROGRESS_STORED, TRAJECTORY_FAILED, TRAJECTORY_GENERATED, Outcome
from topics.wire import decode

KEY = "0:0:made"
HERE = Path(__file__).parents[2] / "harness"


@pytest.fixture
async def scene(stage, bus, tmp_path):
    opened = []

    async def make(function, lease_s=1.0, **rollout):
        settings = {"temperature": 0.0, "max_new_tokens": 120, "progress_tokens": 4, "slots": 8}
        task = {"rollout": f"{HERE / 'rollouts.py'}:{function}"}
        await provision_leased(bus, lease_s)
        made = stage(task=task, rollout={**settings, **rollout}, workers={"lease_s": lease_s})
        make_endless_model(made.files.model, template=TEMPLATE)
        settings = EngineSettings(max_running=16, arguments=["--weight-version", KEY])
        server = EmbeddedControl(ServerSpec("engine-1", settings, made.files.model, tmp_path / "engine.log", None))
        await server.start()
        address = server.address
        client = EngineClient(address)
        await publish(bus, EngineReady("engine-1", address, 0, 0, "made", 16))
        scene = Scene(made, bus, client, {}, {}, {}, tmp_path)

        recordings, into = {}, {TRAJECTORY_GENERATED: scene.results, TRAJECTORY_FAILED: scene.failures}

        def on_record(record):
            topic = BUILT_IN.topic_of(record.subject)
            message = decode(topic.message, record.data)
            if topic is PROGRESS_STORED:
                for entry in message.entries:  # each holds what is new since the one before
                    journal = recordings.setdefault(entry.trajectory_id, Journal())
                    journal.extend(entry.journal)
                    entry.journal = dict(journal.answers)
                    scene.progress[entry.trajectory_id] = entry
                    for name, is_such, event in scene.awaited:
                        if name == entry.trajectory_id and is_such(entry):
                            event.set()
            elif topic in into:
                into[topic][message.trajectory_id] = message

        readers = [LogReader(bus, stream, on_record) for stream in (TRAJECTORIES, GRADES)]
        for reader in readers:
            await reader.start()
        opened.append((server, client, readers))
        return scene

    yield make
    for server, client, readers in opened:
        for reader in readers:
            await reader.close()
        await client.close()
        await server.close()


async def test_a_worker_killed_in_the_middle_of_turn_three(scene):
    scene = await scene("five_turns")
    first = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0")
    expected = await scene.result("p000001-0")
    assert expected.segments[0].mask.sum() == 5 * 120

    await scene.issue("p000002-0")
    await kill_in_the_middle(
        scene, first, "p000002-0", lambda progress: "4" in progress.journal and not progress.journal["4"].done
    )
    offset = scene.progress["p000002-0"].offset
    await scene.stage.start("rollout", 2)
    found = await scene.result("p000002-0")

    assert_same(found, expected)
    assert found.delivery == 2
    assert offset >= 2 * 120
    assert scene.calls("p000002-0") == ["1", "2", "3", "4", "5"]  # what tools had answered was not asked again


async def test_a_worker_killed_while_a_program_samples_at_its_endpoint(scene):
    pytest.importorskip("openai")
    scene = await scene("black_box")
    first = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0")
    expected = await scene.result("p000001-0")
    assert [int(segment.mask.sum()) for segment in expected.segments] == [5 * 24]

    await scene.issue("p000002-0")
    third = "0.0/2"  # of the endpoint's calls
    await kill_in_the_middle(
        scene, first, "p000002-0", lambda progress: third in progress.journal and not progress.journal[third].done
    )
    await scene.stage.start("rollout", 2)

    assert_same(await scene.result("p000002-0"), expected)
    assert scene.calls("p000002-0") == ["1", "2", "3", "4", "5"]


async def to_version_1(scene, weights):
    """Act as the engine actor when weights are published."""
    await publish(scene.bus, EngineUpdating("engine-1", 0, 1))
    async with asyncio.timeout(300):
        await scene.client.empty()  # a worker that has not received of it yet sends its request once more
    await scene.client.update_weights(weights, "0:1:other", False)
    ready = EngineReady("engine-1", scene.client.address, 0, 1, "other", 16)
    await publish(scene.bus, ready)


async def test_a_generation_that_has_ended_publishes_its_result_alone(scene):
    scene = await scene("one_long_turn", max_new_tokens=128, progress_tokens=128)
    await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0")

    assert (await scene.result("p000001-0")).segments[0].mask.sum() == 128
    assert not scene.progress


def rescored(model, tokens):
    """[T] log-probs of tokens at temperature 1 in one forward pass; the first has none."""
    logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor(tokens)[None]).logits[0, :-1]
    found = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None].long())[:, 0]
    return np.concatenate([[np.nan], found.detach().numpy()])


async def test_a_worker_killed_at_token_700_of_1000_after_a_weight_update(scene):
    each = 64
    scene = await scene("one_long_turn", max_new_tokens=1000, progress_tokens=each)
    versions = [scene.stage.files.model, scene.tmp / "version1"]
    make_endless_model(versions[1], seed=2)
    first = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0")
    name = "p000001-0"
    await until(lambda: name in scene.progress and scene.progress[name].offset >= 300, "300 tokens are told")
    await to_version_1(scene, versions[1])
    await until(lambda: scene.progress[name].offset >= 700 - each, "700 tokens are near")
    first.kill()
    await first.wait()
    progress = scene.progress[name]
    await scene.stage.start("rollout", 2)
    found = (await scene.result(name)).segments[0]

    sampled = found.mask != 0
    assert sampled.sum() == 1000
    assert progress.delivery == 1
    assert 700 - each <= progress.offset < 1000
    kept = progress.journal["0"].tokens
    assert found.tokens[sampled][: len(kept)].tolist() == kept.tolist()
    assert (np.diff(found.versions[sampled]) >= 0).all()
    assert set(found.versions[sampled].tolist()) == {0, 1}
    expected = np.where(found.versions == 1, *(rescored(model, found.tokens) for model in reversed(versions)))
    np.testing.assert_allclose(found.logprobs[sampled], expected[sampled], atol=1e-4)


async def test_a_frozen_worker_that_wakes_up_is_refused(scene):
    scene = await scene("one_long_turn", max_new_tokens=600, progress_tokens=64)
    first = await scene.stage.start("rollout", 1)
    name = "p000001-0"
    await scene.issue(name)
    await until(lambda: name in scene.progress and scene.progress[name].offset >= 100, "100 tokens are told")
    first.send_signal(signal.SIGSTOP)
    await scene.stage.start("rollout", 2)
    found = await scene.result(name)
    last = await scene.bus.api(f"STREAM.INFO.{TRAJECTORIES.full_name(scene.bus.run)}")
    first.send_signal(signal.SIGCONT)

    async def refused():
        return await fenced_by(scene, "rollout-1") > 0

    await until(refused, "the first worker is refused")

    assert found.delivery > 1  # the frozen one still had room, and was handed it again
    assert scene.results[name] is found
    newest = await scene.bus.api(f"STREAM.INFO.{TRAJECTORIES.full_name(scene.bus.run)}")
    assert newest["state"]["last_seq"] == last["state"]["last_seq"]


async def test_what_fails_in_a_worker_because_it_was_frozen_ends_nothing(scene):
    scene = await scene("one_call")
    first = await scene.stage.start("rollout", 1)
    name = "p000001-0"
    await scene.issue(name)
    calls = scene.tmp / f"{name}.calls"
    await until(lambda: calls.exists() and calls.read_text() != "", "the tool is called")
    first.send_signal(signal.SIGSTOP)
    await scene.stage.start("rollout", 2)
    await until(lambda: len(scene.calls(name)) >= 2, "the other worker calls it, too")
    (scene.tmp / "expired").touch()
    first.send_signal(signal.SIGCONT)

    async def refused():
        return await fenced_by(scene, "rollout-1") > 0

    await until(refused, "its tool has failed, and nobody takes its word")
    (scene.tmp / "go").touch()

    assert (await scene.result(name)).delivery > 1
    assert not scene.failures


async def test_a_worker_killed_between_many_short_turns(scene):
    scene = await scene("short_turns", progress_tokens=8)
    first = await scene.stage.start("rollout", 1)
    name = "p000001-0"
    await scene.issue(name)
    await until(lambda: name in scene.progress and scene.progress[name].offset >= 60, "60 tokens are told")
    first.kill()
    await first.wait()
    progress = scene.progress[name]
    kept = np.concatenate([progress.journal[path].tokens for path in sorted(progress.journal, key=call_order)])
    await scene.stage.start("rollout", 2)

    found = await scene.result(name)

    sampled = found.segments[0].tokens[found.segments[0].mask != 0]
    assert (found.delivery, len(sampled), len(kept)) == (2, 120, progress.offset)
    assert sampled[: len(kept)].tolist() == kept.tolist()


async def fenced_by(scene, actor_id):
    """Return how often a worker lost a trajectory to another, by its own count."""
    vitals = await read_last(scene.bus, VITALS_TAKEN, actor_id)
    return msgspec.json.decode(vitals.data)["values"].get("fenced", 0)


async def test_a_worker_killed_during_a_tool_call(scene):
    scene = await scene("five_turns")
    first = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0")
    expected = await scene.result("p000001-0")

    await scene.issue("p000002-0", hold=3)
    calls = scene.tmp / "p000002-0.calls"
    await until(lambda: calls.exists() and "3" in calls.read_text().split(), "the tool of turn 3 is called")
    first.kill()
    await first.wait()
    (scene.tmp / "go").touch()
    await scene.stage.start("rollout", 2)
    found = await scene.result("p000002-0")

    assert_same(found, expected)
    assert scene.calls("p000002-0") == ["1", "2", "3", "3", "4", "5"]  # only the call without an answer was repeated


async def test_a_worker_killed_inside_a_parallel_pair_of_generates(scene):
    scene = await scene("parallel_pair")
    first = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0")
    expected = await scene.result("p000001-0")
    assert len(expected.segments) == 2

    def both_open(progress):
        answers = [answer for answer in progress.journal.values() if answer.call == "generate"]
        return len(answers) == 2 and all(len(answer.tokens) and not answer.done for answer in answers)

    await scene.issue("p000002-0")
    await kill_in_the_middle(scene, first, "p000002-0", both_open)
    await scene.stage.start("rollout", 2)
    found = await scene.result("p000002-0")

    assert_same(found, expected)


async def test_a_worker_asked_to_leave_hands_its_work_on_at_once(scene):
    scene = await scene("five_turns", lease_s=600.0)
    first = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0", hold=2)
    calls = scene.tmp / "p000001-0.calls"
    await until(lambda: calls.exists() and "2" in calls.read_text().split(), "the tool of turn 2 is called")
    first.terminate()
    assert await asyncio.wait_for(first.wait(), 120) == 0
    (scene.tmp / "go").touch()
    await scene.stage.start("rollout", 2)

    assert (await scene.result("p000001-0")).delivery == 2


async def test_a_function_that_asks_something_else_when_replayed_fails_as_diverged(scene):
    scene = await scene("impatient")
    first = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0", hold=2)
    calls = scene.tmp / "p000001-0.calls"
    await until(lambda: calls.exists() and "2" in calls.read_text().split(), "the second tool is called")
    first.kill()
    await first.wait()
    await scene.stage.start("rollout", 2)
    await until(lambda: "p000001-0" in scene.failures, "the claim of failure")

    assert scene.failures["p000001-0"].reason == "diverged"
    assert "replay='journal'" in scene.failures["p000001-0"].detail


async def test_an_outcome_given_before_a_kill_counts_once_and_as_it_was_given(scene):
    scene = await scene("scored")
    first = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0", hold=2)
    calls = scene.tmp / "p000001-0.calls"
    await until(lambda: calls.exists() and "2" in calls.read_text().split(), "the second tool is called")
    first.kill()
    await first.wait()
    (scene.tmp / "go").touch()
    await scene.stage.start("rollout", 2)
    found = await scene.result("p000001-0")

    assert found.delivery == 2
    assert found.outcome == Outcome(0.25, {"runs": 1.0, "runs at the end": 2.0}, {"note": b"run 1"})


async def test_a_rollout_function_that_raises_is_data_not_a_crash(scene):
    scene = await scene("broken")
    worker = await scene.stage.start("rollout", 1)
    await scene.issue("p000001-0")
    await until(lambda: "p000001-0" in scene.failures, "the claim of failure")

    assert scene.failures["p000001-0"].reason == "rollout"
    assert "no such letter" in scene.failures["p000001-0"].detail
    assert worker.returncode is None


async def test_a_completion_that_is_no_text_fails_its_trajectory_and_is_not_stored(scene):
    scene = await scene("no_text")
    worker = await scene.stage.start("rollout", 1)
    for name, gives in (("p000001-0", "number"), ("p000002-0", "half")):
        await scene.issue(name, gives=gives)
    await until(lambda: len(scene.failures) + len(scene.results) == 2, "the ends of both")

    assert {failed.reason for failed in scene.failures.values()} == {"rollout"}, scene.results
    assert "context.completion is int 5; expected text" in scene.failures["p000001-0"].detail
    assert "surrogates not allowed" in scene.failures["p000002-0"].detail
    assert worker.returncode is None
