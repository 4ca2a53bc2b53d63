"""Where the weights of a run may lie: in its store, by whatever path that is reached."""

from pathlib import Path

import pytest

from asyncrl.weights.files.store import FileStore
from harness.runs import WITHOUT_MODEL, up
from topics.wire import WireError


def test_versions_are_found_by_every_path_that_leads_to_the_store(tmp_path: Path):
    store = tmp_path / "disk" / "runs" / "demo" / "weights"
    store.mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "disk" / "runs")
    (store / "lineage0-v000001-ab").symlink_to(tmp_path)  # the owner's own
    paths = (store, tmp_path / "linked" / "demo" / "weights", tmp_path / "disk" / ".." / "linked" / "demo" / "weights")

    for path in paths:
        found = FileStore(path)
        for named in paths:
            found.check(str(named / "lineage0-v000001-ab"))
        for wrong in (store / "..", store / ".." / "evil", store / "." / "a" / "b", tmp_path / "linked"):
            with pytest.raises(WireError, match="not in this run's store"):
                found.check(str(wrong))


@pytest.mark.slow
async def test_a_run_trains_in_a_folder_that_is_named_by_a_way_up(tmp_path: Path):
    (tmp_path / "here").mkdir()
    async with up(tmp_path, *WITHOUT_MODEL, "directory=here/../runs", "learner.steps=2") as run:
        await run.reaches(run.steps, "the first step")
        assert await run.ended() == 0, run.story
        assert "rejected" not in run.out
