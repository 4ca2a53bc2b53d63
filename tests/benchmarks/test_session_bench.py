"""`asyncrl bench session`."""

from benchmarks.goals import goals_of
from benchmarks.session import bench_session


async def test_calls_of_a_program_and_idle_sessions_have_a_cost():
    figures = await bench_session(tokens=[300, 600], calls=2, idle=3, seconds=0.1)

    assert figures["idle_sessions"] == 3
    assert 0 < figures["call_of_300_tokens_cpu_ms"] < 1000
    assert set(figures) - set(goals_of("session")) == {
        "idle_sessions",
        "call_of_300_tokens_cpu_ms",
        "call_of_600_tokens_cpu_ms",
    }
