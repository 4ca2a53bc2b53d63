"""Trimming removes what nobody needs: no batch after the oldest kept checkpoint, no open work, no reward worker."""

import itertools
import random

import msgspec
import pytest

from actors.supervisor.trimmer_fold import TrimmerFold
from asyncrl.bus.blobs import BLOB, Blob
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.training.checkpoint import prune_checkpoints
from asyncrl.weights.files.store import FileStore
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.groups import GroupDropped
from topics.table import BUILT_IN
from topics.trajectories import (
    PROGRESS_STORED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_PROGRESSED,
    ProgressStoredHeaders,
    Reference,
    TrajectoryDropped,
    TrajectoryGeneratedHeaders,
    TrajectoryProgressedHeaders,
)
from topics.weights import (
    CheckpointLost,
    CheckpointSaved,
    WeightsPublished,
)

END = 100  # everything below was folded
CONFIG = msgspec.convert({"rollout": {"group_size": 2}}, Config)


class Story:
    """Messages of each log, which can be read with the logs interleaved in any way."""

    def __init__(self):
        self.logs = {}

    def publish(self, message):
        return self._append(BUILT_IN.topic_for(message), message)

    def _append(self, topic, message, *, key="", at=0, blob=""):
        log = self.logs.setdefault(topic.stream.name, [])
        subject = f"asyncrl.run.{topic.name}.{key}"
        headers = {BLOB: blob} if blob else {}
        log.append((topic, message, Record(topic.stream, at or len(log) + 1, subject, headers, b"", 0)))
        return self

    def progressed(self, name, at, log="first", before=""):
        return self._append(
            TRAJECTORY_PROGRESSED, TrajectoryProgressedHeaders(name, 0, 1, 0, log, before), key=name, at=at
        )

    def stored(self, log, at, blob=""):
        return self._append(PROGRESS_STORED, ProgressStoredHeaders(), key=log, at=at, blob=blob)

    def generated(self, name, at, blob=""):
        headers = TrajectoryGeneratedHeaders(name, 0, 1, "")
        return self._append(TRAJECTORY_GENERATED, headers, key=name, at=at, blob=blob)

    def packed(self, step, **sequences):
        groups = {}
        for name, at in sequences.items():
            prompt_id, member = name.split("_")
            groups.setdefault(prompt_id, []).append(
                BatchMember(f"{prompt_id}-{member}", 0, Reference(at, "00", 1), 1.0, 3)
            )
        return self.publish(BatchPacked(step, "rl", [BatchGroup(*group) for group in groups.items()], 0))

    def dropped(self, prompt_id):
        return self.publish(GroupDropped(prompt_id, "failed"))

    def saved(self, step, lineage=0):
        name = f"step{step:06d}-lineage{lineage}-00"
        return self.publish(CheckpointSaved(lineage, step, "00", f"/there/{name}", 1))

    def published(self, version, lineage=0):
        location = f"/there/lineage{lineage}-v{version:06d}-00"
        return self.publish(WeightsPublished(lineage, version, "00", "files", location))

    def fold(self, fold=None):
        return self._tell(itertools.chain(*self.logs.values()), fold)

    def read_in_order(self, seed):
        """Logs interleaved by chance, each in its own order."""
        left = [iter(log) for log in self.logs.values()]
        dice, entries = random.Random(seed), []
        while left:
            log = dice.choice(left)
            entry = next(log, None)
            if entry is None:
                left.remove(log)
            else:
                entries.append(entry)
        return self._tell(entries)

    @staticmethod
    def _tell(entries, fold=None):
        fold = fold or TrimmerFold(CONFIG)
        for topic, message, record in entries:
            fold.apply(topic, message, record)
        return fold


def trained_twice() -> Story:
    """Two batches of one group each, and one group that is open."""
    story = Story()
    for number, name in enumerate(("p000000-0", "p000000-1", "p000001-0", "p000001-1"), 1):
        story.generated(name, at=10 * number)
    return story.packed(1, p000000_0=10, p000000_1=20).packed(2, p000001_0=30, p000001_1=40)


# --- the floor


@pytest.mark.parametrize("seed", range(5))
def test_late_members_keep_what_they_stored_until_they_end(seed: int):
    def story() -> Story:
        made = Story().stored("first", 8).progressed("p000000-1", 10).generated("p000000-0", at=20)
        member = BatchMember("p000000-0", 0, Reference(20, "00", 1), 1.0, 3)
        made.publish(BatchPacked(1, "rl", [BatchGroup("p000000", [member], further=[1])], 0))
        return made.saved(1).saved(2)

    late = BatchMember("p000000-1", 0, Reference(30, "00", 1), 1.0, 3)
    fold = story().read_in_order(seed)
    assert (fold.floor(END), fold.open) == (10, ["p000000-1"])
    ended = story().publish(TrajectoryDropped(trajectory_id="p000000-1", attempt=0, reason="lag")).read_in_order(seed)
    assert (ended.floor(END), ended.open) == (END, [])
    taken = story().generated("p000000-1", at=30)
    taken.publish(BatchPacked(2, "rl", [BatchGroup("p000000", [late], before=[late])], 0))
    fold = taken.read_in_order(seed)
    assert (fold.floor(END), fold.open) == (30, [])
    assert taken.saved(1).fold().state.further == {}


def test_nothing_trained_is_trimmed_before_there_are_two_checkpoints():
    story = trained_twice()
    assert story.fold().floor(END) == 10
    assert story.saved(1).fold().floor(END) == 10


def test_batches_in_the_oldest_kept_checkpoint_are_needed_no_more():
    assert trained_twice().saved(1).saved(2).fold().floor(END) == 30
    assert trained_twice().saved(1).saved(2).saved(3).fold().floor(END) == END


def test_a_checkpoint_that_could_not_be_read_is_none_of_those_kept():
    story = trained_twice().saved(1).saved(2)
    story.publish(CheckpointLost(0, 2, "/there/step000002-lineage0-00", "torn"))

    fold = story.fold()
    assert fold.floor(END) == 30  # batch 1 is forgotten; nothing more goes
    assert fold.kept_step == fold.state.asked_after + 1  # where training began
    assert fold.checkpoints().names == {"step000001-lineage0-00"}
    assert story.saved(3).fold().checkpoints().names == {"step000001-lineage0-00", "step000003-lineage0-00"}


def test_what_the_newest_checkpoint_contains_is_needed_no_more_where_it_alone_counts():
    fold = trained_twice().progressed("p000002-0", at=5).saved(2).fold()
    assert fold.needless(END, pressed=True).ended == {}

    gone = fold.needless(END, fold.saved_step, pressed=True)

    assert gone.below == 5  # a straggler keeps its progress, and nothing of what lies behind it
    assert gone.ended == {"p000000-0": 11, "p000000-1": 21, "p000001-0": 31, "p000001-1": 41}
    assert trained_twice().saved(2).fold().floor(END, 2) == END


def test_open_work_keeps_its_newest_message_and_nothing_older():
    story = trained_twice().progressed("p000002-0", at=45).progressed("p000002-0", at=50).saved(2).saved(3)
    assert story.fold().floor(END) == 50

    story.dropped("p000002")
    assert story.fold().floor(END) == END


def test_a_trajectory_that_is_issued_again_keeps_what_its_fence_ends_with():
    story = trained_twice().generated("p000002-1", at=60).saved(2).saved(3)
    assert story.fold().floor(END) == 60

    assert story.progressed("p000002-1", at=80).fold().floor(END) == 80


def test_the_floor_is_never_above_what_was_folded():
    assert Story().fold().floor(7) == 7
    assert trained_twice().saved(2).saved(3).fold().floor(5) == 5


@pytest.mark.parametrize("seed", range(20))
def test_the_order_between_logs_does_not_matter(seed):
    story = trained_twice().progressed("p000002-0", at=45).saved(1).saved(2).published(1).published(2)
    story.generated("p000003-0", at=70).dropped("p000003")

    fold = story.read_in_order(seed)

    assert fold.floor(END) == 30
    assert fold.needless(END, pressed=True) == story.fold().needless(END, pressed=True)
    assert (fold.versions(), fold.checkpoints()) == (story.fold().versions(), story.fold().checkpoints())


# --- what goes


def test_progress_that_open_work_continues_stays_in_every_log():
    story = trained_twice().progressed("p000002-0", at=45).stored("first", at=46).stored("first", at=50)
    story.progressed("p000002-0", at=60, log="second", before="first:46").stored("second", at=61)

    assert story.fold().needless(END, pressed=True).logs == {}
    assert story.saved(2).saved(3).fold().floor(END) == 46
    assert story.generated("p000002-0", at=70).fold().floor(END) == 70
    assert story.fold().needless(END, pressed=True).logs == {"first": 51, "second": 62}


def test_a_worker_that_held_a_trajectory_twice_keeps_what_it_stored_the_first_time():
    story = Story().stored("first", 11).stored("first", 21).stored("first", 31).stored("other", 5)
    story.progressed("p000001-0", 30, before="first:11,other:5,first:21")

    gone = story.fold().needless(END, pressed=True)

    assert gone.below == 5
    assert gone.logs == {}


def test_progress_that_nothing_continues_goes_only_where_room_is_short():
    story = trained_twice().stored("first", at=42).progressed("p000002-0", at=45).stored("first", at=47)
    fold = story.stored("dead", at=48).stored("dead", at=120).fold()

    assert fold.needless(END, pressed=False).logs == {}
    gone = fold.needless(END, pressed=True)
    assert (gone.below, gone.logs, gone.ended) == (10, {"first": 45, "dead": END}, {})

    fold.forget(gone)
    assert fold.needless(END, pressed=True).logs == {}
    assert fold.floor(END) == 10  # what stays is as it was
    assert fold.needless(121, pressed=True).logs == {"dead": 121}


def test_a_blob_goes_with_the_message_that_names_it():
    blob = "{}:900000:00ff:2".format
    story = Story().generated("p000000-0", at=5, blob=blob("old")).generated("p000001-1", at=6, blob=blob("result"))
    story.stored("first", at=11, blob=blob("nobodys")).progressed("p000001-0", at=12)
    story.stored("first", at=14, blob=blob("needed"))
    story.progressed("p000001-1", at=13)  # of a new attempt: the result of the old one stays above the floor
    fold = story.fold()

    assert fold.needless(END, pressed=False).blobs == []
    gone = fold.needless(END, pressed=True)
    assert [blob.name for blob in gone.blobs] == ["nobodys"]
    fold.forget(gone)
    story.dropped("p000000")._tell(story.logs["BATCHES"], fold)
    gone = fold.needless(END, pressed=False)
    assert (gone.below, gone.blobs) == (12, [Blob("old", 900000, "00ff", 2), Blob("result", 900000, "00ff", 2)])


def test_what_ended_behind_a_straggler_goes_where_room_is_short():
    """A straggler, here p000002-0, keeps the floor down; nobody needs what lies between it and the next batch."""
    story = Story().progressed("p000002-0", at=5)
    trajectories = trained_twice().logs
    story.logs["TRAJECTORIES"] += trajectories.pop("TRAJECTORIES")
    story.logs |= trajectories
    story.generated("p000003-0", at=60).dropped("p000003").generated("p000009-0", at=70).saved(1).saved(2)

    fold = story.fold()
    gone = fold.needless(END, pressed=True)

    assert gone.below == 5
    assert gone.ended == {"p000000-0": 11, "p000000-1": 21, "p000003-0": 61}
    fold.forget(gone)
    assert fold.needless(END, pressed=True).ended == {}

    assert sorted(fold.open) == ["p000002-0", "p000009-0"]
    fold.disown(["p000009-0"])
    assert fold.needless(END, pressed=True).ended == {"p000009-0": 71}
    assert fold.needless(70, pressed=True).ended == {}  # a reward worker may have it


# --- weights and checkpoints


def test_versions_that_an_engine_has_or_is_taking_are_kept():
    story = Story()
    for version in range(10):
        story.published(version)
    story.publish(EngineReady("engine-1", "here", 0, 2, "00", 1))
    story.publish(EngineReady("engine-2", "here", 0, 1, "00", 1))
    story.publish(EngineUpdating("engine-1", 0, 4))
    story.publish(EngineGone("engine-2", "stopped"))

    kept = story.fold().versions()

    assert sorted(int(name[10:16]) for name in kept.names) == [2, 4, 6, 7, 8, 9]
    assert kept.newest == (0, 9)


def test_the_newest_checkpoints_are_kept_whatever_their_step():
    kept = Story().saved(20).saved(40).saved(30, lineage=1).fold().checkpoints()

    assert kept.names == {"step000040-lineage0-00", "step000030-lineage1-00"}
    assert kept.newest == (1, 30)


def test_only_what_is_old_and_not_kept_is_removed(tmp_path):
    names = ["lineage0-v000001-aa", "lineage0-v000002-bb", "lineage0-v000003-cc", "lineage1-v000001-dd"]
    for name in [*names, ".lineage0-v000001-ee.old", ".lineage0-v000009-ff.partial", "lineage0-broken"]:
        (tmp_path / name).mkdir()

    assert FileStore(tmp_path).prune({"lineage0-v000002-bb"}, (0, 3)) == 1

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names[1:], ".lineage0-v000009-ff.partial", "lineage0-broken"}


def test_a_checkpoint_that_is_not_published_yet_is_left_alone(tmp_path):
    for name in (
        "step-00005-lineage0-aa",
        "step000020-lineage0-bb",
        "step000040-lineage0-cc",
        "step000060-lineage0-dd",
    ):
        (tmp_path / name).mkdir()

    prune_checkpoints(tmp_path, {"step000020-lineage0-bb", "step000040-lineage0-cc"}, (0, 40))

    assert {path.name[:10] for path in tmp_path.iterdir()} == {"step000020", "step000040", "step000060"}
    assert prune_checkpoints(tmp_path / "nowhere", set(), (0, 1)) == 0
