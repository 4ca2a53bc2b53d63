"""Replay: the same function asks the same again, and is answered the same, whoever was faster the first time."""

import asyncio

import numpy as np
import pytest

from asyncrl.engine.token_buffer import TokenBuffer
from asyncrl.rollout.context import Limits, RolloutContext, ToolFailed
from asyncrl.rollout.journal import Diverged, Journal, branch_tasks
from harness import lives
from topics.trajectories import Answer, Outcome
from topics.wire import WireError


class Host(lives.Host):
    """Samples the number of the call, after as many turns of the loop as it is told."""

    def __init__(self, journal, *turns):
        super().__init__(journal)
        self.turns = list(turns)

    async def sample(self, ids, answer, limits):
        self.sampled += 1
        for _ in range(self.turns.pop(0) if self.turns else 0):
            await asyncio.sleep(0)
        TokenBuffer(answer).extend(ids[-1:] + 1, np.zeros(1, np.float32), 0)
        answer.done, answer.finish = True, "stop"


class Text:
    def decode(self, tokens):
        return " ".join(map(str, tokens.tolist()))


def recorded_in(recordings: list[dict[str, Answer]]) -> Journal:
    journal = Journal()
    for recording in recordings:
        journal.extend(recording)
    return journal


async def play(function, journal, *turns):
    branch_tasks(asyncio.get_running_loop())
    host = Host(journal, *turns)
    context = RolloutContext(Text(), journal, host, seed=1, limits=Limits(4, []), tool_limit_s=9.0)
    token = journal.begin()
    try:
        result = await function(context)
    finally:
        journal.end(token)
    return result, context, host


async def again(function, host):
    """Run the function again from what was kept."""
    return await play(function, recorded_in(host.kept))


async def test_two_random_generators_differ_and_are_the_same_again():
    async def function(context):
        drawn = [context.random().random(), context.random().random()]
        await context.tool("keep", lambda: None)
        return drawn

    first, _, host = await play(function, Journal())
    second, _, _ = await again(function, host)

    assert first[0] != first[1]
    assert second == first


async def test_a_task_keeps_its_branch_however_far_its_parent_has_gone():
    calls = []

    async def child(context):
        await asyncio.sleep(0)
        return await context.tool("child", lambda: calls.append("child") or "answer")

    async def function(context):
        task = asyncio.create_task(child(context))
        for number in range(3):
            await context.generate([number])
        return await task

    _, _, host = await play(function, Journal(), 3, 3, 3)
    await host.checkpoint()
    _, _, second = await again(function, host)

    assert calls == ["child"]
    assert second.sampled == 0


async def test_text_in_the_place_of_token_ids_is_told():
    async def function(context):
        await context.generate("ab=")

    with pytest.raises(TypeError, match="takes token ids, found the text 'ab='; encode it first"):
        await play(function, Journal())


@pytest.mark.parametrize("turns", [(0, 5), (5, 0)])
async def test_segments_come_in_the_order_of_calls_not_of_answers(turns):
    async def function(context):
        async def branch(start):
            found = await context.generate([start])
            await context.generate([start, *found.tokens.tolist(), 7])

        await asyncio.gather(branch(10), branch(20))

    _, context, _ = await play(function, Journal(), *turns)

    assert [segment.tokens.tolist() for segment in context.segments()] == [[10, 11, 7, 8], [20, 21, 7, 8]]
    assert [segment.mask.tolist() for segment in context.segments()] == [[0, 1, 0, 1]] * 2


async def test_a_rewritten_history_begins_a_new_segment():
    async def function(context):
        await context.generate([1, 2])
        await context.generate([1, 2, 3, 9])
        await context.generate([5, 9])

    _, context, _ = await play(function, Journal())

    assert [segment.tokens.tolist() for segment in context.segments()] == [[1, 2, 3, 9, 10], [5, 9, 10]]


async def test_a_tool_that_raised_raises_again_without_being_called_again():
    calls = []

    def fails():
        calls.append(1)
        raise OSError("no such page")

    async def function(context):
        try:
            await context.tool("page", fails)
        except ToolFailed as error:
            return str(error)

    first, _, host = await play(function, Journal())
    second, _, _ = await again(function, host)

    assert first == second == "OSError: no such page"
    assert calls == [1]


async def test_a_tool_marked_rerun_is_called_again():
    calls = []

    async def function(context):
        await context.tool("look", lambda: calls.append(1), replay="rerun")
        await context.tool("keep", lambda: None)

    _, _, host = await play(function, Journal())
    await again(function, host)

    assert calls == [1, 1]


async def test_another_question_at_the_same_place_diverges():
    async def one(context):
        await context.tool("page", lambda number: number, 1)

    async def other(context):
        await context.tool("page", lambda number: number, 2)

    _, _, host = await play(one, Journal())

    with pytest.raises(Diverged, match="call 0 is tool:page"):
        await again(other, host)


async def test_the_clock_is_replayed():
    async def function(context):
        now = context.time()
        await context.tool("keep", lambda: None)
        return now

    first, _, host = await play(function, Journal())

    assert (await again(function, host))[0] == first


def test_tokens_and_log_probs_must_be_as_many():
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        TokenBuffer(Answer("generate", "")).extend(np.zeros(2, np.int32), np.zeros(1, np.float32), 0)


def test_what_was_handed_out_stays_as_it_was_while_tokens_go_on_coming():
    answer = Answer("generate", "", done=False)
    handed_out, expected, dice = [], [], np.random.default_rng(3)
    for sampler in range(3):  # after an abort the next engine goes on
        tape = TokenBuffer(answer)
        for count in dice.integers(0, 40, 50):
            tokens = dice.integers(0, 1000, count).astype(np.int32)
            version = 10 * sampler + len(expected) // 100  # new weights come under a request that runs
            tape.extend(tokens, tokens.astype(np.float32) / 7, version)
            expected += [(token, np.float32(token) / np.float32(7), version) for token in tokens.tolist()]
            handed_out.append((answer.tokens, answer.logprobs, answer.versions))

    for parts in handed_out:
        assert list(zip(*(part.tolist() for part in parts), strict=True)) == expected[: len(parts[0])]
    assert len(answer.tokens) == len(expected)


def recorded(*versions, logprobs=3):
    """Three tokens that these versions sampled, as they are told."""
    tokens = np.arange(3, dtype=np.int32)
    return Answer(
        "generate", "", False, tokens=tokens, logprobs=np.zeros(logprobs, np.float32), versions=np.int32(versions)
    )


def test_one_version_stands_for_all_tokens_of_a_message():
    journal = Journal()
    answer = journal.answers["0"] = Answer("generate", "", done=False)
    published = []
    for version in (7, 8):
        TokenBuffer(answer).extend(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), version)
        published.append(journal.news())
        journal.published(published[-1])
    assert [news["0"].versions.tolist() for news in published] == [[7], [8]]

    assert recorded_in(published).answers["0"].versions.tolist() == [7, 7, 7, 8, 8, 8]
    assert recorded_in([{"0": recorded(7, 7, 8)}]).news() == {}
    assert recorded_in([{"0": recorded(7, 7, 8)}]).answers["0"].versions.tolist() == [7, 7, 8]


@pytest.mark.parametrize("damaged", [recorded(7, 8), recorded(), recorded(7, logprobs=2)])
def test_progress_with_other_numbers_of_versions_or_log_probs_is_refused(damaged):
    with pytest.raises(WireError, match="call 0: 3 tokens"):
        recorded_in([{"0": damaged}])


async def test_outcomes_add_up_and_a_replay_keeps_the_values_that_were_recorded():
    runs = []

    async def scored(context):
        runs.append(1)
        await context.generate([1])
        context.outcome(
            len(runs), metrics={"turns": len(runs), "first": 0.5}, artefacts={"board": "x.o", "raw": b"\xff"}
        )
        await context.tool("look", lambda: 1)
        context.outcome(metrics={"turns": 2.5})
        return context.outcome_given()

    given, _, host = await play(scored, Journal())
    replayed, _, _ = await again(scored, host)

    assert given == Outcome(1.0, {"turns": 2.5, "first": 0.5}, {"board": b"x.o", "raw": b"\xff"})
    assert replayed == given
    assert len(runs) == 2


async def test_branches_that_give_outcomes_add_up_by_their_places_whoever_was_faster():
    async def pair(context):
        async def branch(number):
            await context.generate([number])
            context.outcome(number)

        await asyncio.gather(branch(1), branch(2))
        return context.outcome_given()

    assert [(await play(pair, Journal(), *turns))[0].reward for turns in ((5, 0), (0, 5))] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reward": float("nan")}, "the reward is nan; expected a number"),
        ({"metrics": {"steps": None}}, "'steps' is None; expected a number"),
        ({"metrics": {"x" * 65: 1.0}}, "has 65 characters, expected 1 to 64"),
        ({"metrics": {str(number): 1.0 for number in range(33)}}, "found 33 metrics, expected at most 32"),
        ({"metrics": {str(number): 1.0 for number in range(20)}, "twice": True}, "found 40 metrics"),
        ({"artefacts": {"board": 7}}, "the artefact 'board' is a int; expected text or bytes"),
        (
            {"artefacts": {"board": "x" * 70_000}},
            "found 1 artefacts of 70,000 bytes in all, expected at most 16",
        ),
    ],
)
async def test_an_outcome_that_may_not_be_kept_is_an_error_of_the_function(given, words):
    twice = given.pop("twice", False)

    async def scored(context):
        context.outcome(**given)
        if twice:
            context.outcome(metrics={f"more {name}": value for name, value in given["metrics"].items()})

    with pytest.raises(ValueError, match=words):
        await play(scored, Journal())


async def test_rewards_of_turns_are_those_of_the_first_run_and_name_the_tokens_of_each_turn():
    given = []

    async def function(context):
        first = await context.generate(np.array([1, 2], np.int32))
        await context.generate(np.concatenate([np.array([1, 2], np.int32), first.tokens, np.array([7], np.int32)]))
        await context.generate(np.array([9], np.int32))  # a rewritten history
        given.append(0.25 * (1 + len(given)))
        context.outcome(turn_rewards=[0.0, given[-1], 1.0], metrics={"tests": 3})
        context.outcome(metrics={"more": 1})
        await context.tool("keep", lambda: None)

    _, context, host = await play(function, Journal())
    _, resumed, _ = await again(function, host)

    assert given == [0.25, 0.5]
    outcome = context.outcome_given()
    assert (outcome.turn_rewards, outcome.reward) == ([0.0, 0.25, 1.0], 1.25)
    assert resumed.outcome_given() == outcome
    assert [segment.turns for segment in context.segments()] == [[(0, 1), (1, 1)], [(2, 1)]]
    assert [segment.turns for segment in resumed.segments()] == [[(0, 1), (1, 1)], [(2, 1)]]


async def test_rewards_of_turns_are_as_many_as_turns():
    async def function(context):
        await context.generate(np.array([1], np.int32))
        with pytest.raises(ValueError, match="513 turn rewards, expected at most 512"):
            context.outcome(turn_rewards=[0.0] * 513)
        context.outcome(1.0, turn_rewards=[0.5, 0.5])

    _, context, _ = await play(function, Journal())

    with pytest.raises(ValueError, match="found 2 turn rewards, expected one for each of 1 calls"):
        context.outcome_given()
