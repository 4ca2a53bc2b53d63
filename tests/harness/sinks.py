"""Steps in sinks, as readers of each tool find them; and rows to write."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Found = list[tuple[int, float]]  # step and loss, in the order of the tool


def metrics_row(step: int) -> dict[str, object]:
    """A row of a step."""
    figures = {"reward_mean": 0.1 * step, "tokens_by_lag": {"0": 10, "1": step}, "loss": 1 / (step + 3)}
    return {"event": "step", "step": step, "stage": "rl", "time_s": float(step), **figures}


def eval_row(version: int) -> dict[str, object]:
    """A row of an evaluation."""
    return {"event": "eval", "time_s": version + 0.5, "version": version, "accuracy": 0.5, "versions": {"1": 3}}


def _in_file(root: Path) -> Found:
    [path] = root.glob("metrics/*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if row["event"] == "step"]


def _in_tensorboard(root: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(root / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def wandb_rows(root: Path) -> Iterator[dict[str, float]]:
    """Rows of the offline file, by the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = root.glob("wandb/offline-run-*/run-*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                yield {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


def _in_wandb(root: Path) -> Found:
    return [(int(row["step"]), row["train/loss"]) for row in wandb_rows(root) if "train/loss" in row]


def _in_mlflow(root: Path) -> Found:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("asyncrl").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    return sorted((metric.step, metric.value) for metric in history)  # its order is that of the database


def _in_trackio(root: Path) -> Found:
    from trackio import sqlite_storage, utils

    utils.TRACKIO_DIR = sqlite_storage.TRACKIO_DIR = root / "trackio"
    [run] = sqlite_storage.SQLiteStorage.get_runs("asyncrl")
    rows = sqlite_storage.SQLiteStorage.get_logs("asyncrl", run)
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


READERS: dict[str, Callable[[Path], Found]] = {
    "file": _in_file,
    "mlflow": _in_mlflow,
    "tensorboard": _in_tensorboard,
    "trackio": _in_trackio,
    "wandb": _in_wandb,
}
PACKAGES = {name: name for name in READERS if name != "file"}


def installed_kinds() -> list[str]:
    """Names of the kinds whose packages are installed; tests of the others are skipped with the reason."""
    return [name for name in READERS if name not in PACKAGES or _is_installed(PACKAGES[name])]


def need(kind: str) -> None:
    """Skip a test of a kind whose package is not installed."""
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def same(found: Found, expected: Found) -> None:
    """Compare, with the precision of 32-bit numbers."""
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)
