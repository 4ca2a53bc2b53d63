"""A batch in plain files: what was trained is found again in them, and no step is needed for that."""

import json
import re
import runpy

import numpy as np
import pytest
from safetensors.numpy import load_file

from asyncrl import load_dump
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory, build_rows
from asyncrl.state.samples import Sample
from asyncrl.training.dump import DumpError, write_dump
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.weights.directories import CheckpointError
from harness.pages import written
from topics.batches import BatchGroup, BatchMember, BatchPacked, BatchTrained, Objective
from topics.trajectories import Reference, Segment

REWARDS = {"p000000-0": 1.0, "p000000-1": 0.0}


def segment(size: int, version: int) -> Segment:
    mask = (np.arange(size) >= 2).astype(np.uint8)
    logprobs = np.where(mask, -0.5 * np.arange(size), 0.0).astype(np.float32)
    return Segment(np.arange(size, dtype=np.int32), mask, logprobs, np.where(mask, version, -1).astype(np.int32))


GROUPS = [
    GradedGroup(
        [
            GradedTrajectory("p000000-0", [segment(5, 3), segment(4, 1)], 1.0),
            GradedTrajectory("p000000-1", [segment(6, 3)], 0.0),
        ],
        "grpo",
        0.7,
    )
]
MEMBERS = [
    BatchMember(name, 0, Reference(at + 1, "00", 9), reward, 4) for at, (name, reward) in enumerate(REWARDS.items())
]
PACKED = BatchPacked(
    4, "rl", [BatchGroup("p000000", MEMBERS, "ONLY", 0.7, "grpo")], 2, Objective(aggregation="trajectory"), {"x": 1.5}
)


def test_a_dump_has_the_rows_the_objective_and_the_texts(tmp_path):
    trained = BatchTrained(4, 0, "rl", {"loss": 0.5}, {0: 7}, 2, [0.5, 0.5], 2, 9)
    write_dump(tmp_path / "dump", "demo", (PACKED, trained), GROUPS, [Sample("p000000-0", 1.0, "ab=", "ba", "ba")])

    dump = load_dump(tmp_path / "dump")

    assert (dump.run, dump.batch, dump.trained, dump.objective) == ("demo", PACKED, trained, PACKED.objective)
    made, stats = build_rows(GROUPS, PACKED.objective, step=4, min_version=2)
    assert stats.tokens_stale == 2 and len(dump.rows) == 3
    for found, row in zip(dump.rows, made, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions", "advantages", "weights"):
            assert getattr(found, name).dtype == getattr(row, name).dtype
            assert np.array_equal(getattr(found, name), getattr(row, name)), name
        assert (found.trajectory_id, found.temperature, found.step) == (row.trajectory_id, 0.7, 4)
        assert found.estimator == "grpo"


def test_a_dump_is_read_without_asyncrl(tmp_path):
    write_dump(tmp_path / "dump", "demo", (PACKED, None), GROUPS, [Sample("p000000-1", 0.0, "ab=", "ab", "ba")])

    batch = json.loads((tmp_path / "dump" / "batch.json").read_bytes())
    arrays = load_file(tmp_path / "dump" / "rows.safetensors")
    assert [(row["trajectory_id"], row["segment"], row["reward"]) for row in batch["rows"]] == [
        ("p000000-0", 0, 1.0),
        ("p000000-0", 1, 1.0),
        ("p000000-1", 0, 0.0),
    ]
    assert [(row["start"], row["stop"]) for row in batch["rows"]] == [(0, 5), (5, 9), (9, 15)]
    assert arrays["tokens"].tolist() == [*range(5), *range(4), *range(6)]
    assert (arrays["sampled"].sum(), arrays["mask"].sum()) == (9, 7)  # two tokens of version 1 are too old
    assert batch["batch"]["objective"]["aggregation"] == "trajectory"
    assert batch["batch"]["figures"] == {"x": 1.5}
    (sample,) = (tmp_path / "dump" / "samples.jsonl").read_text().splitlines()
    assert json.loads(sample)["completion"] == "ab"


def test_the_programs_of_the_page_read_it_and_train_on_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written("replay.md", tmp_path)
    trained = BatchTrained(4, 0, "rl", {"loss": 0.5}, {0: 7}, 2, [0.5, 0.5], 2, 9)
    write_dump(tmp_path / "step41", "demo", (PACKED, trained), GROUPS, [])
    create_model(tmp_path / "step40" / "model", alphabet="abcdef", seed=0, shape=ModelShape(16, head_dim=8, ffn=16))

    found = runpy.run_path("read.py")
    runpy.run_path("train.py")

    assert found["tokens"].tolist() == list(range(5))
    assert re.match(r"\{'loss': .*'grad_norm': 0\.\d+.*\} \{'loss': 0\.5\}\n", capsys.readouterr().out)


def test_a_batch_of_no_group_is_a_dump_of_no_row(tmp_path):
    write_dump(tmp_path / "dump", "demo", (BatchPacked(4, "rl", [], 2), None), [], [])

    assert load_dump(tmp_path / "dump").rows == []


def test_nothing_is_overwritten_and_a_folder_that_is_no_dump_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="exists; it is never overwritten"):
        write_dump(tmp_path, "demo", (PACKED, None), GROUPS, [])
    with pytest.raises(DumpError, match=r"batch\.json.*expected a folder that `asyncrl dump` wrote"):
        load_dump(tmp_path)
    write_dump(tmp_path / "dump", "demo", (PACKED, None), GROUPS, [])
    (tmp_path / "dump" / "rows.safetensors").write_bytes(b"torn")
    with pytest.raises(DumpError, match="expected a folder"):
        load_dump(tmp_path / "dump")
    write_dump(tmp_path / "other", "demo", (PACKED, None), GROUPS, [])
    batch = tmp_path / "other" / "batch.json"
    batch.write_bytes(batch.read_bytes().replace(b"demo", b"dem\xff"))
    with pytest.raises(DumpError, match=r"utf-8.*expected a folder"):
        load_dump(tmp_path / "other")
