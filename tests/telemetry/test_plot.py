"""Pictures of a run name what they show, and fit on a screen."""

import struct

from asyncrl.telemetry.plot import draw_comparison, draw_reward


def test_pictures_carry_their_title(tmp_path):
    for number, title in enumerate(("run demo", "run other")):
        draw_reward(tmp_path / f"reward-{number}.png", title, [1.0, 2.0], rewards=[0.1, 0.2], lags=[0.0, 1.0])
        draw_comparison(tmp_path / f"comparison-{number}.png", title, {"loss": [(1, 0.5, 0.5)]})

    for kind in ("reward", "comparison"):
        first, second = ((tmp_path / f"{kind}-{number}.png").read_bytes() for number in range(2))
        assert first != second


def test_a_comparison_of_many_metrics_is_wider_than_it_is_high_and_shows_those_that_differ(tmp_path):
    def size(columns: int, differ: int) -> tuple[int, int]:
        values = {f"m{number}": [(1, 0.5, 0.5 + (number < differ))] for number in range(columns)}
        draw_comparison(tmp_path / "comparison.png", "run demo", values)
        return struct.unpack(">II", (tmp_path / "comparison.png").read_bytes()[16:24])

    width, height = size(24, 0)
    assert width > height
    assert size(24, 3) == size(3, 3) < (width, height)
