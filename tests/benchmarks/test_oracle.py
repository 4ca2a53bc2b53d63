"""Asynchronous runs beside the synchronous loop."""

import json
import math
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from benchmarks.oracle import bench_oracle, settings_of
from benchmarks.oracle_results import Curve, Results, figures, markdown, median_interval, reached
from benchmarks.stage import BenchError

CONFIG = """
run = "oracle"
seed = 4
[task]
options = { letters = 3 }
[warmup]
steps = 60
batch_rows = 64
rows_per_trajectory = 32
lr = 4e-3
[rollout]
max_new_tokens = 8
[buffer]
batch_groups = 8
[learner]
steps = 8
lr = 8e-4
schedule = "cosine"
"""


def test_the_goal_is_reached_where_the_mean_of_five_steps_is_at_it():
    assert reached([1.0] * 4) is None
    assert reached([1.0] * 5) == 5
    assert reached([0.5, 0.9, 0.9, 0.9, 0.9, 0.9]) == 6
    assert reached([0.0, *[1.0] * 4, 0.4, 1.0]) is None


def test_figures_are_medians_of_ratios_to_the_loop_of_the_same_seed():
    curves = []
    for seed, loop, lagged in ((1, 10, 15), (2, 20, 20), (3, 10, None)):
        curves.append(Curve(seed, "synchronous", 0, rising(loop), [0.0] * 40))
        curves.append(Curve(seed, "lag 2", 2, rising(lagged), [1.8] * 40))

    found = figures(curves)

    assert found["lag_2_steps_ratio"] == 1.5
    assert (found["lag_2_steps_ratio_least"], found["lag_2_steps_ratio_most"]) == (1.0, math.inf)
    assert found["lag_2_realised_share"] == 0.9
    assert found["synchronous_steps"] == 10


@pytest.mark.parametrize(
    ("count", "places"), [(1, (1, 1)), (5, (1, 5)), (6, (1, 6)), (9, (2, 8)), (10, (2, 9)), (20, (6, 15))]
)
def test_the_interval_of_a_median_is_that_of_the_binomial_distribution(count: int, places: tuple[int, int]):
    # The order statistics of the tables for 95 %; with five values or fewer no interval covers as much.
    assert median_interval([*map(float, range(count, 0, -1))]) == places


def test_what_was_measured_is_kept_by_settings(tmp_path: Path):
    path = tmp_path / "new" / "oracle.jsonl"
    curve = Curve(1, "lag 2", 2, rising(12), [1.5] * 40)
    Results(path, {"settings": ["seed=1"]}).add(curve)

    again = Results(path, {"settings": ["seed=1"]})

    assert again.curves == [curve]
    assert not again.lacks(1, "lag 2")
    assert again.lacks(2, "lag 2")
    assert again.lacks(1, "lag 4")
    with pytest.raises(BenchError, match="give another folder"):
        Results(path, {"settings": ["seed=2"]})


def test_the_table_shows_runs_that_never_reached_the_goal_as_such():
    curves = [Curve(1, "lag 2", 2, rising(None), [1.5] * 40), Curve(1, "synchronous", 0, rising(10), [0.0] * 40)]

    _, _, loop, lagged = markdown(curves).splitlines()

    assert loop == "| synchronous | 1 | 0.00 | 10 | 1.00 | 1 |  |"
    assert lagged == f"| lag 2 | 1 | 1.50 |{3 * ' not reached |'} not reached to not reached |"


def rising(reaches: int | None) -> list[float]:
    """Rewards whose mean of five steps is at the goal at this step."""
    return [0.9 if reaches is not None and step > reaches - 5 else 0.0 for step in range(1, 41)]


@pytest.mark.parametrize("lag", [0, 1, 8])
def test_settings_of_a_run_with_lag_are_accepted(lag: int):
    settings = settings_of(load_config("demo").config, lag, "own.py:rollout")

    loaded = load_config("demo", overrides=[*settings, "eval.prompts=0"])

    assert (loaded.config.buffer.max_lag, loaded.config.ahead) == (lag, min(lag, 1))


@pytest.mark.slow
@pytest.mark.nightly
async def test_without_lag_the_system_follows_the_synchronous_loop_step_by_step(tmp_path: Path):
    (tmp_path / "oracle.toml").write_text(CONFIG)

    async def measure() -> dict[str, float]:
        return await bench_oracle(
            config=str(tmp_path / "oracle.toml"),
            lags=[0, 1],
            uncorrected=[],
            seeds=[4],
            settings=[],
            jobs=3,  # all begin from the base at once
            output=str(tmp_path / "out"),
            limit_s=0.0,
        )

    found = await measure()

    # A draw within the rounding of two orders of summation may take another token: one trajectory of 64.
    assert found["lag_0_reward_difference_max"] <= 1 / 64
    assert 0.5 <= found["lag_1_realised_share"] <= 1.0  # of few steps, whose first has no lag
    kept = (tmp_path / "out" / "oracle.jsonl").read_text()
    curves = [Curve(**json.loads(line)) for line in kept.splitlines()[1:]]
    # There is a curve to follow: to the goal, where a run ends, or to the last step.
    assert all(curve.reached or len(curve.rewards) == 8 for curve in curves)
    assert (tmp_path / "out" / "oracle.png").stat().st_size > 0
    # Of what is kept; a ratio of steps to a goal that no curve reached is no number.
    assert await measure() == pytest.approx(found, rel=0, abs=0, nan_ok=True)
    assert (tmp_path / "out" / "oracle.jsonl").read_text() == kept
