"""`asyncrl bench`: its options, its two forms of output, and a real run beside its ideal schedule."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import stream_states
from asyncrl.cli.main import parser_for, run
from benchmarks import bus as bus_bench
from benchmarks import command as bench
from benchmarks import cost as cost_bench
from benchmarks import fleet as fleet_bench
from benchmarks import sinks as sinks_bench
from benchmarks.bus import Sizes, bench_bus
from benchmarks.cost import bench_cost
from benchmarks.goals import goals_of
from benchmarks.history import bench_history
from benchmarks.learner import bench_learner, mixed_lengths
from benchmarks.load import BEGAN, PROBES, Events, Update, silence, transition
from benchmarks.megatron import bench_megatron
from benchmarks.pipeline import bench_pipeline
from benchmarks.recovery import of_long_logs
from benchmarks.rescoring import bench_rescoring
from benchmarks.rollouts import bench_rollouts
from benchmarks.schedule import Cell, Script, bench_schedule, cell_config, parallel_for
from benchmarks.stage import BenchError
from benchmarks.turns import bench_turns
from benchmarks.weights import bench_weights


def parse(*words: str) -> argparse.Namespace:
    return parser_for(["bench", *words]).parse_args(["bench", *words])


def test_the_schedule_takes_lists_of_means_lags_and_seeds():
    arguments = parse("schedule", "--means", "0.02,1", "--lags", "4", "--seeds", "7,8", "--steps", "5")

    assert (arguments.means_s, arguments.lags, arguments.seeds, arguments.steps) == ([0.02, 1.0], [4], [7, 8], 5)


@pytest.mark.parametrize(("mean_s", "together"), [(10.0, 15), (1.0, 5), (0.1, 1), (0.01, 1)])
def test_long_means_run_side_by_side(mean_s: float, together: int):
    assert parallel_for(mean_s) == together


def test_the_recovery_takes_how_long_the_logs_are_and_how_often_to_kill():
    arguments = parse("recovery", "--messages", "5000", "--kills", "7")

    assert (arguments.messages, arguments.kills) == (5000, 7)


@pytest.mark.slow
@pytest.mark.nightly
async def test_killed_keepers_of_a_real_run_decide_again(tmp_path: Path):
    times = await of_long_logs(tmp_path, 600, 1)

    assert times.keys() == {"prompter_s", "buffer_s"}
    assert all(seconds > 0 for [seconds] in times.values())


@pytest.mark.slow
@pytest.mark.nightly
async def test_the_logs_of_a_long_run_are_clean_and_its_keepers_start_from_snapshots(tmp_path: Path):
    figures = await bench_history(trajectories=600, directory=str(tmp_path), snapshots=True)

    assert {
        "write_s",
        "prompts_log_bytes_a_trajectory",
        "audit_s",
        "audit_memory_mb",
        "learner_start_s",
    } <= figures.keys()
    assert all(value > 0 for value in figures.values())
    logs = tmp_path / "history" / "logs"
    assert all((logs / f"{role}-1.log").exists() for role in ("prompter", "buffer", "learner", "supervisor"))


@pytest.mark.slow
@pytest.mark.nightly
async def test_progress_is_stored_in_one_of_the_two_runs_that_its_cost_is_measured_with(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(cost_bench, "_MEAN_S", 0.5)
    monkeypatch.setattr(cost_bench, "_WARM_S", 0.1)

    figures = await bench_cost(pairs=1, seconds=0.1, tokens=1000)

    assert figures["progress_tokens"] == 250
    assert figures["with_progress_cpu_us_per_trajectory"] > 0
    assert figures["without_progress_cpu_us_per_trajectory"] > 0


@pytest.mark.slow
@pytest.mark.nightly
async def test_runs_with_all_installed_sinks_are_compared_with_runs_without(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(cost_bench, "_MEAN_S", 0.5)
    monkeypatch.setattr(cost_bench, "_WARM_S", 0.1)

    figures = await sinks_bench.bench_sinks(pairs=2, seconds=0.1)

    assert figures.keys() >= goals_of("sinks").keys()
    assert figures["sinks"] >= 2 and figures["scrape_bytes"] > 1000


@pytest.mark.slow
@pytest.mark.nightly
async def test_engines_that_join_and_leave_lose_and_double_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet_bench, "_MEAN_S", 0.1)

    figures = await fleet_bench.bench_fleet(seconds=1.0)

    assert figures.keys() >= goals_of("fleet").keys()
    assert (figures["failed"], figures["doubled"]) == (0, 0)
    assert figures["trajectories"] > 0 and figures["joined_first_token_after_up_s"] > 0


@pytest.mark.slow
@pytest.mark.nightly
async def test_rollouts_are_compared_with_a_bare_client_of_the_same_server():
    server = {"kind": "embedded", "shape": "tiny-moe", "layers": 1, "arguments": "", "pythonpath": ""}
    windows = {"seconds": 1.0, "rounds": 2, "routing": True}

    figures = await bench_rollouts(concurrent=[4], workers=2, tokens=10, turns=2, tool_s=0.01, **windows, **server)

    rates = {"routed_4_tokens_per_s", "asyncrl_4_tokens_per_s", "bare_4_tokens_per_s"}
    assert figures.keys() == rates | {"share_4_of_bare", "routed_4_of_unrouted"}
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
@pytest.mark.nightly
async def test_answers_that_crossed_updates_are_rescored_under_the_versions_that_their_tokens_name():
    server = {"kind": "embedded", "shape": "tiny", "arguments": "", "pythonpath": "", "gpus": []}

    figures = await bench_rescoring(tokens=3000, crossed=3, running=2, device="cpu", size=(2, 16), lr=1e-3, **server)

    assert figures["crossed_answers"] >= 1
    assert figures["crossed_mean_abs_nats"] < 1e-5 < 1e-3 < figures["neighbour_mean_abs_nats"]


@pytest.mark.slow
@pytest.mark.nightly
async def test_a_turn_of_a_shared_card_is_told_by_its_parts():
    server = {"kind": "embedded", "shape": "tiny", "arguments": "", "pythonpath": ""}

    figures = await bench_turns(rounds=1, size=[16, 8], device="cpu", **server)

    parts = ("leave_s", "restore_s", "offload_s", "ready_s")
    assert all(figures[part] > 0 for part in parts) and figures["offloaded_gb"] > 0
    assert figures["switches_s"] == pytest.approx(sum(figures[part] for part in parts))
    offload_s = sum(figures[f"offload_{part}"] for part in ("wait_s", "copy_s", "free_s"))
    assert 0 < figures["offload_copy_s"] < offload_s <= figures["offload_s"]
    assert 0 < figures["copied_gb"] <= figures["offloaded_gb"]
    onload_s = max(figures["back_resume_s"], figures["back_fetch_s"]) + figures["back_hold_s"] + figures["back_load_s"]
    assert min(figures["back_fetch_s"], figures["back_load_s"]) > 0 and onload_s <= figures["ready_s"]


# Three requests that tell of every token, one that tells of some, and one that waits, when the update begins at 10.2.
# It is over at 10.6; meanwhile request 2 ends, and the next one in its place begins; a token of before comes late.
SEEN = [(9.9, 3, BEGAN), (10.0, 0, 0), (10.0, 2, 0), (10.1, 1, 0), (10.1, PROBES, 0), (10.4, 2, BEGAN)]
SEEN += [(10.65, 1, 0), (10.7, 0, 1), (10.7, 2, 1), (10.8, 1, 1), (10.9, 3, 1), (11.9, PROBES, 1)]
UPDATE = Update(version=1, stepped=9.0, updating=10.2, ready=10.6)


def events_of(seen: list[tuple[float, int, int]]) -> Events:
    return Events(*map(list, zip(*seen, strict=True)))


def test_the_standstill_of_an_update_is_that_of_the_requests_whose_every_token_is_seen():
    still = silence(events_of(SEEN), 9.5, 13.0)

    assert still["silence_s"] == pytest.approx(1.0)
    assert still["request_silence_s"] == pytest.approx(0.625)


def test_requests_that_had_tokens_when_an_update_began_and_went_on_have_one_again():
    resumed, in_place = (transition(events_of(SEEN), UPDATE, in_place=way) for way in (False, True))

    moved = {"new_90_s": pytest.approx(2.9)}
    assert resumed == {"generating": 3, "waiting": 1, "waited": 1, "again_s": pytest.approx(1.7)} | moved
    assert in_place == {"generating": 3, "waiting": 1, "waited": 0, "again_s": pytest.approx(0.5)} | moved
    early = transition(events_of(SEEN[:-1]), UPDATE, in_place=False)
    assert early == {"generating": 3, "waiting": 1, "waited": 1}  # two of the three have a token


def test_requests_are_told_when_as_many_were_sent_again_as_had_been_under_way():
    events = events_of(SEEN)
    events.sent = [9.9, 10.3, 10.61, 10.62]  # before the update, and after

    assert transition(events, UPDATE, in_place=False)["sent_s"] == pytest.approx(0.42)
    events.sent.pop()
    assert "sent_s" not in transition(events, UPDATE, in_place=False)


def test_mixed_lengths_fill_a_step():
    lengths = mixed_lengths(32_768, 8192)
    assert sum(lengths) >= 32_768 and min(lengths) >= 64 and max(lengths) <= 8192


@pytest.mark.slow
@pytest.mark.nightly
def test_the_trainer_is_compared_with_a_bare_loop_and_a_failure_costs_its_own_figures(
    capfd: pytest.CaptureFixture[str],
):
    sizes = {"tokens": 128, "micro_batch_tokens": 64, "rounds": 1, "ranks": 2}
    how = {"shape": "tiny", "device": "cpu", "rows": ["mixed"], "kinds": ["bare", "masters", "asyncrl"]}

    figures = bench_learner(**sizes, **how, options=[])
    failed = bench_learner(**sizes | {"ranks": 1}, **how | {"kinds": ["bare", "asyncrl"]}, options=["moments=no_such"])

    assert {"tiny_asyncrl_mixed_mfu", "tiny_bare_mixed_first_step_s", "tiny_mixed_share_of_bare"} <= figures.keys()
    assert {"tiny_mixed_share_of_masters", "tiny_mixed_2_ranks_over_one"} <= figures.keys()
    equal = [figures.pop(f"tiny_2_ranks_{name}_relative_difference") for name in ("loss", "grad_norm")]
    assert max(equal) < 1e-5
    assert all(value > 0 for value in figures.values())
    assert failed.keys() == {name for name in figures if name.startswith("tiny_bare")}
    assert "no attribute 'no_such'" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
def test_the_megatron_trainer_is_compared_with_a_bare_loop_of_its_modules_and_with_experts_on_two_ranks(
    capfd: pytest.CaptureFixture[str],
):
    sizes = {"layers": 1, "tokens": 128, "micro_batch_tokens": 64, "rounds": 1, "rows": ["even"]}

    figures = bench_megatron(
        shape="tiny-moe", device="cpu", cases=["one", "bare", "replayed", "expert"], options=[], **sizes
    )

    compared = {"even_one_over_bare", "even_replayed_over_one", "even_expert_over_one", "expert_export_gb_per_s"}
    assert {f"tiny_moe_{name}" for name in compared} <= figures.keys(), capfd.readouterr().err
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
@pytest.mark.nightly
async def test_short_trajectories_of_the_embedded_engine_go_through_all_actors():
    figures = await bench_pipeline(short=True, seconds=2.0)

    assert 0 < figures["tokens_per_trajectory"] <= 16
    assert all(figures[f"{name}_cpu_us_per_trajectory"] > 0 for name in ("engine-1", "rollout-1", "learner-1"))


@pytest.mark.slow
@pytest.mark.nightly
async def test_weights_reach_an_engine_and_publication_and_load_are_apart():
    figures = await bench_weights(store="stream", mib=8, engines=1, rounds=1)

    assert figures["engines"] == 1
    assert 0 < figures["stream_loaded_s"] < figures["stream_first_token_s"]
    assert figures["stream_published_s"] > 0
    assert figures["stream_eight_readers_mb_per_s"] > 0
    assert figures["stream_one_reader_mb_per_cpu_s"] > 0


@pytest.mark.slow
@pytest.mark.nightly
async def test_versions_as_differences_are_measured_with_their_encoding_and_their_share_of_the_bytes():
    figures = await bench_weights(store="files", mib=8, engines=1, rounds=1, changed=0.01)

    assert 0 < figures["files_share_of_bytes"] < 0.1
    assert 0 < figures["files_encoded_s"] < figures["files_published_s"]
    assert 0 < figures["files_fetched_s"] < figures["files_loaded_s"]


def test_a_table_marks_which_goals_are_met():
    text = bench.table({"encode_trajectory_us": 12.0, "stored_1_kib_per_s": 20_000.0, "other": 1.0}, goals_of("bus"))

    first, second, third = text.splitlines()
    assert first.split() == ["encode_trajectory_us", "12.000", "goal", "<=", "10", "MISSED"]
    assert second.split() == ["stored_1_kib_per_s", "20,000", "goal", ">=", "15000", "met"]
    assert third.split() == ["other", "1.000"]


def test_json_is_one_object_of_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    async def small(*, rounds: int) -> dict[str, float]:
        return await bench_bus(rounds=rounds, sizes=Sizes(50, 10, 50, 10, 10))

    monkeypatch.setattr(bus_bench, "bench_bus", small)

    assert run(["bench", "bus", "--json", "--rounds", "1"]) == 0

    figures = msgspec.json.decode(capsys.readouterr().out, type=dict[str, float])
    assert figures.keys() >= goals_of("bus").keys()
    assert all(value > 0 for value in figures.values())


def test_what_cannot_be_measured_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def broken(*, rounds: int) -> dict[str, float]:
        raise BenchError("run bench-bus: buffer-1 ended with code 1: no word")

    monkeypatch.setattr(bus_bench, "bench_bus", broken)

    assert run(["bench", "bus"]) == 1
    assert capsys.readouterr().err == "run bench-bus: buffer-1 ended with code 1: no word\n"


def test_a_benchmark_whose_cases_all_failed_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def failed(*, rounds: int) -> dict[str, float]:
        return {}

    monkeypatch.setattr(bus_bench, "bench_bus", failed)

    assert run(["bench", "bus"]) == 1
    assert "bench bus: every case failed; the reasons are above" in capsys.readouterr().err


async def test_every_measured_publish_is_in_the_stream(monkeypatch: pytest.MonkeyPatch):
    stored: dict[str, int] = {}
    close = Bus.close

    async def count_and_close(self: Bus) -> None:
        stored.update({name: state["messages"] for name, state in (await stream_states(self)).items()})
        await close(self)

    monkeypatch.setattr(Bus, "close", count_and_close)

    await bench_bus(rounds=2, sizes=Sizes(50, 10, 300, 20, 10))

    assert (stored["PROMPTS"], stored["TRAJECTORIES"]) == (600, 40)


def test_a_share_of_another_runs_ideal_is_refused():
    config = cell_config(Cell(0.1, 2, seed=1), Path("model"), steps=4)
    script, other = Script(config), Script(msgspec.structs.replace(config, seed=2))

    script.check([script.prompt(number) for number in range(3)])
    with pytest.raises(BenchError, match=r"prompt 0 is p000000 with seed .* the program has changed"):
        script.check([other.prompt(0)])


@pytest.mark.slow
async def test_a_real_run_is_compared_with_its_ideal_schedule():
    figures = await bench_schedule(means_s=[0.02], lags=[2], seeds=[1], steps=4)

    assert 0 < figures["mean_20_ms_share_of_bound"] <= 1
    assert figures["mean_20_ms_share_of_bound"] <= figures["mean_20_ms_share_of_ideal"]
