"""A teacher that is a server, here the embedded engine: its columns, its absence, and what it refuses."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from actors.learner.group import in_process
from actors.learner.teacher import TeacherServer
from actors.runtime.actor import ActorFault
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory, build_rows
from asyncrl.bus.log import read_last
from asyncrl.config.settings import Config
from asyncrl.ports import free_port
from asyncrl.run.directory import RunFiles
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.protocol import RowError
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from benchmarks.engine import served
from harness.learning import Playing, pack
from harness.stage import until
from harness.training import policy_rows, prepared_by
from topics.batches import BATCH_TRAINED, BatchTrained, Distillation, Objective, Penalty
from topics.trajectories import Segment
from topics.wire import decode

ALPHABET = "abcdefghijklmnopqrstuvwxyz="
SHAPE = ModelShape(hidden=32, head_dim=16, ffn=64, context=128)
TOP, SAMPLED = Objective(distillation=Distillation(5)), Objective(penalties=[Penalty("teacher", 1.0)])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A run with its untrained model, and a teacher beside it."""
    root = tmp_path_factory.mktemp("run")
    create_model(root / "model", alphabet=ALPHABET, seed=0, shape=SHAPE)
    create_model(root / "teacher", alphabet=ALPHABET, seed=1, shape=dataclasses.replace(SHAPE, hidden=48))
    create_model(root / "stranger", alphabet=ALPHABET[::-1], seed=1, shape=SHAPE)
    return RunFiles(root, root)


def teacher_at(url, files, context=127, **settings):
    tables = {"learner": {"teacher": {"url": url, **settings}}, "engine": {"context": context}}
    return TeacherServer(msgspec.convert(tables, Config), files)


@asynccontextmanager
async def answering(answer):
    """A server that gives one answer to everything; its address, and the paths that were asked for."""
    asked = []

    async def handle(request):
        asked.append(request.path)
        return await answer()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        yield str(server.make_url("")), asked


def status(code):
    async def answer():
        return web.json_response({"error": f"words of {code}"}, status=code)

    return answer


async def silence():
    await asyncio.Event().wait()


def groups_of(rows):
    """Groups of one member, whose tokens are those of some rows; the last has another segment, with nothing trained."""
    segments = [Segment(row.tokens, row.mask, row.logprobs, row.versions) for row in rows]
    idle = Segment(
        rows[0].tokens, np.zeros_like(rows[0].mask), np.zeros_like(rows[0].logprobs), np.full_like(rows[0].versions, -1)
    )
    members = [GradedTrajectory(row.trajectory_id, [one]) for row, one in zip(rows, segments, strict=True)]
    members[-1] = members[-1]._replace(segments=[segments[-1], idle])
    return [GradedGroup([member]) for member in members]


@pytest.mark.parametrize(("objective", "column"), [(TOP, "teacher_top"), (SAMPLED, "teacher")])
async def test_a_server_fills_the_columns_that_the_same_model_fills_in_the_trainer(files, objective, column):
    rows = [dataclasses.replace(row, temperature=1.0) for row in policy_rows(np.random.default_rng(0), 7)]
    async with served(files.root / "teacher") as url:
        teacher = teacher_at(url, files)
        found = await teacher.fill(objective, groups_of(rows))
        again = await teacher.fill(objective, groups_of(rows[::-1]))
        untouched = await teacher.fill(Objective(), groups_of(rows))
        await teacher.close()

    made, _ = build_rows(found, objective, step=1, min_version=0)
    trainer = TorchTrainer(files.model, TorchSettings(teacher=files.root / "teacher"))
    expected = prepared_by(trainer, rows, objective)
    assert len(made) == 8
    # beside other rows a row has the same bits, so that a step that is made again has them, too
    for one, other in zip(found[:-1], again[:0:-1], strict=True):
        assert np.array_equal(one.members[0].columns[0][column], other.members[0].columns[0][column])
    assert all(not group.members[0].columns for group in untouched)
    for own, row in zip(made[:7], expected, strict=True):
        trained = row.mask == 1
        assert own.columns.keys() == {column}
        if column == "teacher_top":
            assert np.array_equal(own.columns[column][trained][..., 0], row.columns[column][trained][..., 0])
        assert np.allclose(own.columns[column][trained], row.columns[column][trained], atol=1e-4)
    plain = TorchTrainer(files.model)  # which has no teacher of its own
    assert plain.step(made, objective)["teacher_kl"] == pytest.approx(
        trainer.step(rows, objective)["teacher_kl"], rel=1e-3
    )


async def test_a_server_that_is_away_is_waited_for(files):
    port = free_port()
    teacher = teacher_at(f"http://127.0.0.1:{port}", files)
    waiting = asyncio.create_task(teacher.fill(TOP, groups_of(policy_rows(np.random.default_rng(0), 3))))
    async with served(files.root / "teacher", "--port", str(port)):
        async with asyncio.timeout(300):
            found = await waiting
        await teacher.close()

    assert all(group.members[0].columns[0]["teacher_top"].any() for group in found)


async def test_a_replay_waits_for_an_absent_server_no_longer_than_it_may(files):
    url = f"http://127.0.0.1:{free_port()}"
    config = msgspec.convert({"learner": {"teacher": {"url": url}}}, Config)
    teacher = TeacherServer(config, files, patience_s=0.3)

    with pytest.raises(ActorFault, match=r"the teacher at http.* gave no answer for 0.3 s: .*; start it"):
        await teacher.fill(TOP, groups_of(policy_rows(np.random.default_rng(0), 2)))
    await teacher.close()


@pytest.mark.parametrize(
    ("code", "remedy"), [(401, "learner.teacher.api_key_file"), (403, "api_key_file"), (404, "in learner.teacher.url")]
)
async def test_a_server_that_takes_no_such_call_is_one_error_at_once(files, code, remedy):
    async with answering(status(code)) as (url, asked):
        teacher = teacher_at(url, files)
        with pytest.raises(ActorFault, match=rf"the teacher at http.*: HTTP {code}: words of {code}; name .*{remedy}"):
            await teacher.fill(TOP, groups_of(policy_rows(np.random.default_rng(0), 3)))
        await teacher.close()

    assert len(asked) == 1


@pytest.mark.parametrize("answer", [status(500), status(503), silence])
async def test_a_server_with_faults_of_its_own_is_asked_again_until_the_deadline(files, answer):
    groups = groups_of(policy_rows(np.random.default_rng(0), 3))
    async with answering(answer) as (url, asked):
        teacher = teacher_at(url, files, timeout_s=0.3)
        waiting = asyncio.create_task(teacher.fill(TOP, groups))
        await until(lambda: len(asked) > 1, "it is asked again")
        assert not waiting.done()
        waiting.cancel()
        await teacher.close()
        teacher = teacher_at(url, files, deadline_s=0.1, timeout_s=0.3)
        with pytest.raises(ActorFault, match=r"gave no answer for 0.1 s: .*; start it, or raise .*teacher.deadline_s"):
            await teacher.fill(TOP, groups)
        await teacher.close()


async def test_a_server_of_another_tokenizer_or_a_shorter_context_is_one_error(files):
    groups = groups_of(policy_rows(np.random.default_rng(0), 3))
    async with served(files.root / "stranger") as url:
        teacher = teacher_at(url, files)
        with pytest.raises(
            ActorFault, match=r"the teacher at http.*stranger: token 3 is '=', of the trained model .* 'a'"
        ):
            await teacher.fill(TOP, groups)
        await teacher.close()
    async with served(files.root / "teacher", "--context-length", "64") as url:
        teacher = teacher_at(url, files, context=64)
        with pytest.raises(ActorFault, match=r"it takes prompts of 63 tokens, and a row of the policy may have 64"):
            await teacher.fill(TOP, groups)
        await teacher.close()
        teacher = teacher_at(url, files, context=63)
        long = policy_rows(np.random.default_rng(0), 1)[0]
        long = dataclasses.replace(
            long, **{name: np.resize(getattr(long, name), 65) for name in ("tokens", "mask", "logprobs", "versions")}
        )
        with pytest.raises(RowError, match=r"trajectory p0: the teacher at .* refuses it: The input \(65 tokens\)"):
            await teacher.fill(TOP, groups_of([long]))
        await teacher.close()


async def test_a_learner_names_its_wait_for_the_teacher_and_goes_on_once_it_is_there(
    files, stage, connect, bus, monkeypatch
):
    monkeypatch.setattr("actors.learner.actor.new_group", in_process)
    port = free_port()
    tables = {"rollout": {"max_new_tokens": 8, "group_size": 2}, "buffer": {"batch_groups": 1, "max_lag": 1}}
    learner = {"teacher": {"url": f"http://127.0.0.1:{port}", "top_k": 4}}
    stand = stage(**tables, learner=learner, engine={"context": 127})
    stand.make_model()
    playing = Playing(stand.context("learner", await connect(bus.run, name="learner-1")))
    try:
        await pack(bus, 1, objective=Objective(learning_rate=1e-4, distillation=Distillation(4)))
        doing = playing.context.take_vitals
        await until(lambda: doing().doing.kind == "awaiting teacher", "the learner waits for the teacher")
        assert await read_last(bus, BATCH_TRAINED) is None
        async with served(stand.files.model, "--port", str(port)):

            async def is_trained():
                return await read_last(bus, BATCH_TRAINED) is not None

            await until(is_trained, "step 1")
        message = decode(BatchTrained, (await read_last(bus, BATCH_TRAINED)).data)
        assert message.metrics["teacher_kl"] == pytest.approx(0.0, abs=1e-4)  # it is its own teacher
        assert message.metrics["rows_skipped"] == 0
    finally:
        await playing.kill()
