"""Pictures of a run name what they show."""

from asyncrl.telemetry.plot import draw_comparison, draw_reward


def test_pictures_carry_their_title(tmp_path):
    for number, title in enumerate(("run demo", "run other")):
        draw_reward(tmp_path / f"reward-{number}.png", title, [1.0, 2.0], rewards=[0.1, 0.2], lags=[0.0, 1.0])
        draw_comparison(tmp_path / f"comparison-{number}.png", title, {"loss": [(1, 0.5, 0.5)]})

    for kind in ("reward", "comparison"):
        first, second = ((tmp_path / f"{kind}-{number}.png").read_bytes() for number in range(2))
        assert first != second
