"""The user's function that decides how many processes run: in a child process, with a limit."""

from pathlib import Path

import pytest

from asyncrl.child_pool.frames import CallFailed
from asyncrl.child_pool.pool import ChildPool
from asyncrl.errors import FunctionError
from asyncrl.run.autoscale_function import autoscale_setup
from asyncrl.state.loads import PoolLoad
from harness.configs import problems, the_problem

LOADS = {"rollout": PoolLoad("rollout", 2, 2, 10, 30, 20).plain()}
CODE = """
import os, time
def scale(pools):
    load = pools["rollout"]
    assert load["idle_share"] == 0.0
    return {"rollout": load["wanted"] + load["waiting"] // load["places"]}
def raises(pools): raise ValueError("no idea")
def hangs(pools): time.sleep(600)
def leaves(pools): os._exit(3)
def hoards(pools): return bytearray(8 << 30)
def text(pools): return {"rollout": "5"}
def typo(pools): return {"rolout": 5}
async def waits(pools): return {}
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


async def answer(folder: Path, name: str) -> dict[str, int]:
    setup = autoscale_setup(f"mine.py:{name}", base=folder, limit_s=0.5 if name == "hangs" else 30.0)
    pool = await ChildPool.open(setup, workers=1)
    try:
        return await pool.call(LOADS)
    finally:
        await pool.close()


async def test_it_is_given_the_loads_and_answers_numbers(code: Path):
    assert await answer(code, "scale") == {"rollout": 5}


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("raises", "raised", "no idea"),
        ("hangs", "time_limit", "no answer within 0.5 s"),
        ("leaves", "exited", ""),
        ("hoards", "memory", "it needed more than 4,096 MB"),
        ("text", "value", "expected whole numbers from 0 to 1024 by pool, of rollout"),
        ("typo", "value", "{'rolout': 5}"),
    ],
)
async def test_one_that_fails_ends_no_actor(code: Path, name: str, reason: str, detail: str):
    with pytest.raises(CallFailed) as caught:
        await answer(code, name)

    assert caught.value.reason == reason
    assert detail in str(caught.value)


async def test_an_async_function_is_refused(code: Path):
    with pytest.raises(FunctionError, match=r"write def waits\(pools\)"):
        await answer(code, "waits")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["autoscale.pools.learner={}"], 'found "learner", expected one of rollout, reward, engine'),
        (["autoscale.pools.judge={}"], 'found "judge", expected one of rollout, reward, engine'),
        (["autoscale.pools.rollout={ min = 3, max = 2 }"], "expected min to be at most max"),
        (["autoscale.cool_s=9"], "has no effect: autoscale.pools names no pool"),
        (["autoscale.pools.rollout={}", "autoscale.function='mine'"], "expected path/to/file.py:function"),
        (
            ["autoscale.pools.rollout={}", "autoscale.function='mine.py:scale'", "autoscale.window_s=9"],
            "autoscale.function decides instead of the rule",
        ),
        (
            ["engine.kind='sglang'", "engine.gpus=[0, 1]", "engine.count=1", "autoscale.pools.engine={ most = 2 }"],
            "but there are GPUs for 1",
        ),
    ],
)
def test_bounds_that_cannot_hold_are_refused(overrides: list[str], message: str):
    assert message in " ".join(problem.message for problem in problems("demo", *overrides))


def test_a_function_that_is_not_there_is_refused_before_a_start():
    overrides = ("autoscale.pools.rollout={}", "autoscale.function='nowhere.py:scale'")
    assert "no file" in the_problem("demo", *overrides, files=True).message
