"""The contract of all kinds of sinks: each row once, wherever the process was killed."""

import hashlib
import json
import urllib.request
from pathlib import Path

import pytest

from asyncrl.ports import free_port
from asyncrl.sinks.feed import SinkFeed
from asyncrl.sinks.figures import point_of
from asyncrl.sinks.kinds import KINDS
from asyncrl.sinks.sink import SinkError, SinkRun
from harness.sinks import READERS, eval_row, metrics_row, need, same, wandb_rows

BEGAN_S = 1_800_000_000.0


@pytest.fixture(params=READERS)
def kind(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return request.param


def feed_of(kind: str, root: Path) -> SinkFeed:
    run = SinkRun("demo", root, root, BEGAN_S, {"seed": 1})
    settings = KINDS[kind]()
    assert settings.problem() == ""
    return SinkFeed(kind, settings.sink(run), root / "metrics.jsonl")


def write(root: Path, first: int, last: int) -> int:
    rows = [row for step in range(first, last + 1) for row in (metrics_row(step), eval_row(step))]
    with (root / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        return file.tell()


def give(feed: SinkFeed, end: int) -> None:
    feed.open()
    while feed.advance(end):
        pass


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "demo").mkdir()
    return tmp_path / "demo"


def expected(last: int) -> list[tuple[int, float]]:
    return [(step, 1 / (step + 3)) for step in range(last + 1)]


def test_every_kind_has_a_reader_in_the_contract_test():
    assert set(READERS) == {name for name, kind in KINDS.items() if kind.stores}


def test_rows_are_once_in_a_sink_that_was_killed_before_its_position_was_stored(kind: str, root: Path):
    end = write(root, 0, 5)
    give(feed_of(kind, root), end)
    stored = (root / "sinks" / f"{kind}.json").read_bytes()
    end = write(root, 6, 400)
    give(feed_of(kind, root), end)
    (root / "sinks" / f"{kind}.json").write_bytes(stored)

    feed = feed_of(kind, root)
    give(feed, end)
    feed.close()

    same(READERS[kind](root), expected(400))


def test_rows_are_once_in_a_sink_although_the_metrics_were_made_again_in_another_order(kind: str, root: Path):
    give(feed_of(kind, root), write(root, 0, 5))
    lines = (root / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (root / "metrics.jsonl").write_bytes(b"".join(lines[::2] + lines[1::2]))

    give(feed_of(kind, root), write(root, 6, 9))

    same(READERS[kind](root), expected(9))


def test_a_sink_that_ended_continues_when_its_run_is_resumed(kind: str, root: Path):
    feed = feed_of(kind, root)
    give(feed, write(root, 0, 5))
    feed.close()

    give(feed_of(kind, root), write(root, 6, 9))

    same(READERS[kind](root), expected(9))


def test_a_sink_takes_no_rows_beyond_those_that_are_final(kind: str, root: Path):
    end = write(root, 0, 3)
    write(root, 4, 9)

    give(feed_of(kind, root), end)

    same(READERS[kind](root), expected(3))


def test_the_file_of_another_run_is_not_overwritten(root: Path):
    (root / "metrics").mkdir()
    (root / "metrics" / "demo.jsonl").write_text("of another run\n")
    write(root, 0, 3)

    with pytest.raises(SinkError, match="exists and has no rows of this run"):
        feed_of("file", root).open()


@pytest.mark.parametrize("name", ["response_tokens_mean", "response_length/mean"])
def test_figures_have_one_name_in_all_sinks(name: str):
    row = metrics_row(3) | {name: 7.0, "reward/length": 2.0, "anomaly": {"found": "x"}, "wait_s": 1.5}

    assert point_of(row).figures == {
        "reward/mean": pytest.approx(0.3),
        "tokens_by_lag/0": 10.0,
        "tokens_by_lag/1": 3.0,
        "train/loss": pytest.approx(1 / 6),
        "train/wait_s": 1.5,
        "response_length/mean": 7.0,
        "reward/length": 2.0,
    }
    assert point_of(eval_row(4) | {"set": "hard"}).figures == {"eval/hard/accuracy": 0.5}


def test_wandb_shows_steps_on_their_axis(root: Path):
    need("wandb")
    give(feed_of("wandb", root), write(root, 0, 2))

    rows = [(row["_step"], row["step"], row["_timestamp"]) for row in wandb_rows(root)]

    assert rows[:3] == [(0, 0, BEGAN_S), (1, 0, BEGAN_S + 0.5), (2, 1, BEGAN_S + 1.0)]


def samples(root: Path, first: int, last: int) -> None:
    """Samples of steps and evaluations, as a recorder writes them."""
    with (root / "samples.jsonl").open("a") as file:
        for step in range(first, last + 1):
            texts = {"prompt": [{"role": "user", "content": "?"}], "completion": f"answer {step}", "label": "7"}
            one = {"name": f"p{step:06d}-0", "reward": 0.5, "tokens": 3, "truncated": False, **texts}
            secret = one | {"name": "live", "sealed": "c2VjcmV0"}
            for event in ("step", "eval"):
                row = {"event": event, "step": step, "sequence": step + 1, "samples": [one, secret]}
                file.write(json.dumps(row) + "\n")


def test_wandb_has_each_table_of_samples_once_after_kills_and_after_the_file_was_thinned(root: Path):
    need("wandb")
    samples(root, 0, 2)
    give(feed_of("wandb", root), write(root, 0, 2))
    stored = (root / "sinks" / "wandb.json").read_bytes()
    samples(root, 3, 4)
    end = write(root, 3, 4)
    give(feed_of("wandb", root), end)
    (root / "sinks" / "wandb.json").write_bytes(stored)  # as if it was killed before its position was stored
    lines = (root / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (root / "samples.jsonl").unlink()
    (root / "samples.jsonl").write_bytes(b"".join(lines[4:]))

    feed = feed_of("wandb", root)
    give(feed, end)
    samples(root, 5, 5)
    while feed.advance(end):
        pass
    feed.close()

    rows = list(wandb_rows(root))
    assert [row["_step"] for row in rows] == [*range(len(rows))]
    same(READERS["wandb"](root), expected(4))
    [folder] = root.glob("wandb/offline-run-*/files")
    for name in ("samples", "eval/samples"):
        tables = [(row["step"], row[name]) for row in rows if name in row]
        assert [step for step, _ in tables] == [*range(6)]
        for step, table in tables:
            content = (folder / table["path"]).read_bytes()
            assert table["sha256"] == hashlib.sha256(content).hexdigest()
            read = json.loads(content)
            [cells] = read["data"]
            assert dict(zip(read["columns"], cells, strict=True))["completion"] == f"answer {step}"
            assert (table["nrows"], table["ncols"]) == (1, len(cells))


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KINDS["wandb"], "package", "not_installed_here")

    assert KINDS["wandb"]().problem() == (
        'kind = "wandb" needs the Python package not_installed_here, which is not installed; '
        "run `pip install 'asyncrl[wandb]'`"
    )


def test_prometheus_collects_the_newest_figures_also_after_a_restart(root: Path):
    parser = pytest.importorskip("prometheus_client.parser")
    end, settings = write(root, 0, 300), KINDS["prometheus"](port=free_port())
    for _ in range(2):
        feed = SinkFeed("prometheus", settings.sink(SinkRun("demo", root, root, BEGAN_S, {})), root / "metrics.jsonl")
        give(feed, end)
        with urllib.request.urlopen(f"http://127.0.0.1:{settings.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        feed.close()

        families = parser.text_string_to_metric_families(text)
        found = {one.name: one.value for family in families for one in family.samples if one.labels == {"run": "demo"}}
        assert found["asyncrl_step"] == 300
        assert found["asyncrl_train_loss"] == pytest.approx(1 / 303)
        assert found["asyncrl_eval_accuracy"] == 0.5


def test_a_damaged_position_stops_the_sink_and_no_row_is_written_twice(root: Path):
    end = write(root, 0, 3)
    give(feed_of("file", root), end)
    (root / "sinks" / "file.json").write_text("{")

    with pytest.raises(SinkError, match="holds no position"):
        give(feed_of("file", root), end)

    assert len(READERS["file"](root)) == 4
