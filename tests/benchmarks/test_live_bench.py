"""`asyncrl bench gateway` and `asyncrl bench live`: real gateways and engines, small."""

import pytest

from benchmarks import live as live_bench
from benchmarks.gateway import bench_gateway
from benchmarks.goals import goals_of
from benchmarks.live import bench_live, summed, together
from benchmarks.sessions import bench_sessions, silences
from benchmarks.sessions import summed as summed_sessions
from benchmarks.talks import Reply, percentile

pytestmark = pytest.mark.slow


@pytest.mark.nightly
async def test_a_turn_is_compared_with_its_ids_at_the_engine():
    figures = await bench_gateway(turns=6, tokens=8)

    assert figures.keys() >= goals_of("gateway").keys()
    assert figures["turns"] == 6
    assert 0 < figures["engine_first_token_p50_ms"] <= figures["engine_whole_p50_ms"]
    assert figures["gateway_cpu_us_per_turn_of_128_tokens"] > 0


@pytest.mark.nightly
async def test_clients_of_all_apis_are_served_while_the_model_learns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_bench, "_WARM_S", 1.0)
    monkeypatch.setattr(live_bench, "_BATCH", 4)

    figures = await bench_live(rate=6.0, seconds=5.0, kinds=["trained"])

    assert (figures["trained_not_2xx"], figures["trained_broken_streams"]) == (0, 0)
    assert figures["trained_characters_per_reply"] == 128
    assert figures["trained_first_token_p99_ms"] <= figures["trained_whole_p99_ms"] < float("inf")


@pytest.mark.nightly
async def test_sessions_go_on_through_the_gateway_and_straight_while_versions_come():
    served = {"kind": "embedded", "shape": "tiny", "arguments": "", "pythonpath": "", "device": "cpu", "gpus": []}
    traffic = {"sessions": 4, "gateways": 1, "clients": 2, "tokens": 16, "versions": 2, "every_s": 1.0}

    figures = await bench_sessions(still=True, way="files", updates=["resume"], size=(4, 64), **served, **traffic)

    assert (figures["resume_gateway_failed"], figures["resume_gateway_updates"]) == (0, 2)
    assert figures["resume_gateway_tokens_per_s"] > 0
    assert figures["resume_straight_tokens_per_s"] > 0


def test_tokens_count_where_they_came_and_silence_between_them():
    whole = Reply(0.0, 4.1, [(1.0, 8), (1.5, 8), (4.0, 8)], 200, broken=False)
    cut, late = Reply(0.5, 1.0, [(1.2, 8)], 200, broken=True), Reply(5.0, 1.5, [(6.0, 8)], 200, broken=False)

    figures = summed_sessions([whole, cut, late], 0.0, 2.0)

    assert (figures["tokens_per_s"], figures["requests"], figures["failed"]) == (12.0, 2.0, 1.0)
    assert (figures["first_token_p50_ms"], figures["longest_silence_s"]) == (1000.0, 2.5)
    assert figures["last_to_end_p50_ms"] == pytest.approx(100.0)


def test_silences_are_told_apart_by_what_they_touch():
    gaps = Reply(0.0, 9.0, [(at, 8) for at in (0.0, 0.5, 1.5, 3.5, 3.8, 4.7, 5.0)], 200, broken=False)
    failed = Reply(0.0, 9.0, [(0.0, 8), (9.0, 8)], 200, broken=True)

    figures = silences([gaps, failed], updates=[(1.0, 1.2), (3.9, 4.0)], steps=[(1.1, 2.0), (4.6, 4.9)])

    assert figures["silence_at_update_s"] == 1.0
    assert figures["silence_at_step_s"] == 2.0
    assert figures["silence_besides_s"] == 0.5


def test_what_fails_is_counted_and_not_timed():
    good = Reply(0.0, 1.0, [(0.1, 2), (0.3, 1)], 200, broken=False, events=3, text="abc")
    refused, cut = good._replace(status=503, broken=True), good._replace(broken=True, whole_s=9.0)

    figures = summed([good, good, refused, cut], 2.0)

    assert (figures["requests_per_s"], figures["not_2xx"], figures["broken_streams"]) == (2.0, 1.0, 1.0)
    assert (figures["whole_p99_ms"], figures["longest_silence_ms"]) == (1000.0, pytest.approx(200.0))


def test_rounds_count_by_their_medians_and_by_their_worst_failures():
    rounds = [
        {"still_whole_p99_ms": p99, "still_not_2xx": failed, "updates_cost_longest_silence_ms": 1.0} | cores
        for p99, failed, cores in ((50.0, 0.0, {}), (90.0, 2.0, {"still_judge_cores": 0.02}), (60.0, 0.0, {}))
    ]

    assert together(rounds) == {
        "still_whole_p99_ms": 60.0,
        "still_not_2xx": 2.0,
        "updates_cost_longest_silence_ms": 1.0,
        "still_judge_cores": 0.0,
    }


def test_a_percentile_is_a_value_that_was_met():
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 100.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
