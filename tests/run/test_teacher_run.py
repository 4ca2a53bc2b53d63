"""On-policy distillation as a user runs it, from a teacher that is a server, which is killed and started again."""

from pathlib import Path

import pytest

from asyncrl.config.settings import CreateModelSettings
from asyncrl.ports import free_port
from asyncrl.training.init_model import create_model
from benchmarks.engine import served
from harness.audited import audited_clean
from harness.runs import two_steps_more, up

pytestmark = pytest.mark.slow
DISTILLATION = ("learner.advantage=zero", "learner.teacher.top_k=4", "learner.teacher.api_key_file=key")


async def test_a_run_waits_for_its_teacher_and_ends_at_once_where_that_refuses_its_key(tmp_path: Path):
    create_model(tmp_path / "teacher", alphabet=CreateModelSettings().alphabet, seed=7)
    (tmp_path / "key").write_text("the teacher's")
    port = free_port()
    server = ("--port", str(port), "--api-key-file", str(tmp_path / "key"))
    settings = (
        *DISTILLATION,
        f"learner.teacher.url=http://127.0.0.1:{port}",
        "learner.steps=10000",
        "engine.context=64",
    )
    async with up(tmp_path, *settings) as run:
        async with served(tmp_path / "teacher", *server):
            await two_steps_more(run, "steps with the teacher")
        waits = "teacher away"
        await run.reaches(lambda: waits in run.log("learner-1"), "the learner notices that it is gone")
        async with served(tmp_path / "teacher", *server):
            await two_steps_more(run, "steps with the teacher, which is back")
        (tmp_path / "key").write_text("another's")
        async with served(tmp_path / "teacher", *server):
            assert await run.ended() == 1, run.story

    losses = [row["teacher_kl"] for row in run.rows() if row["stage"] == "rl"]
    assert min(losses) > 0
    refused = f"the teacher at http://127.0.0.1:{port}: HTTP 401: Unauthorized; name the file with its key in"
    assert run.error.count(f"{refused} learner.teacher.api_key_file") == 1, run.story
    assert "--skip-batch" not in run.error
    await audited_clean(tmp_path)
