"""Which version an engine has that serves the channel `live`."""

from actors.engine.pinned_version import CanaryVersions, FirstVersion, LiveVersions, Versions
from harness.folds import Feed
from topics.promotions import CanaryEnded, WeightsCanaried, WeightsPromoted
from topics.weights import WeightsPublished


class Log:
    """Messages in their order."""

    def __init__(self, versions: Versions | None = None) -> None:
        self.versions = versions or LiveVersions()
        self.fed = Feed(self.versions)

    def publish(self, version: int, base: str = "") -> None:
        self.fed.publish(WeightsPublished(0, version, f"d{version}", "files", "/w", base=base))

    def promote(self, version: int, by: str = "command") -> None:
        self.fed.publish(WeightsPromoted(0, version, f"d{version}", by, 1))

    @property
    def wanted(self) -> int | None:
        found = self.versions.wanted()
        return None if found is None else found.version.version


def test_the_engine_follows_the_channel_and_no_training():
    log = Log()
    log.publish(0)
    assert log.wanted is None
    log.promote(0, "start")
    for version in range(1, 200):
        log.publish(version)
    assert log.wanted == 0

    log.promote(3)
    log.promote(150)
    assert log.wanted == 150
    log.promote(3, "rollback")
    assert log.wanted == 3
    log.promote(0, "rollback")
    assert log.wanted == 0


def test_a_rollback_behind_one_by_live_reward_does_not_come_to_what_that_left():
    log = Log()
    for version in range(3):
        log.publish(version)
        log.promote(version)
    log.promote(1, "reward")
    assert log.wanted == 1
    log.promote(0, "rollback")
    assert log.wanted == 0

    log.promote(2, "reward")  # ahead, where it is not the one before
    assert log.wanted == 2
    log.promote(0, "rollback")
    assert log.wanted == 0


def test_what_is_live_may_be_read_before_its_announcement():
    log = Log()
    log.publish(0)
    log.promote(0)
    log.promote(1)

    assert log.wanted is None  # and not the one before: it would be loaded in between
    log.publish(1)
    assert log.wanted == 1


def test_a_version_whose_bytes_cannot_be_taken_leaves_the_one_before_until_it_is_there_once_more():
    log = Log()
    for version in (0, 1):
        log.publish(version)
        log.promote(version)
    torn = log.versions.wanted()
    log.versions.pass_over(torn)

    assert log.wanted == 0
    log.publish(1)
    assert log.wanted == 1


def test_a_difference_comes_with_what_it_stands_on():
    log = Log()
    log.publish(0)
    log.publish(1, base="0:0:d0")
    log.publish(2, base="0:1:d1")
    log.promote(2)

    assert [one.version for one in log.versions.chain(log.versions.wanted())] == [0, 1, 2]


def test_the_engine_of_a_canary_goes_back_to_what_is_live_when_it_ends_or_its_bytes_cannot_be_taken():
    log = Log(CanaryVersions())
    log.publish(0)
    log.promote(0, "start")
    assert log.wanted == 0

    canary = WeightsCanaried(0, 1, "d1", "0:0:d0", "command", 1, 0.5)
    log.fed.publish(canary)
    assert log.wanted is None  # its announcement is on another log
    log.publish(1)
    assert log.wanted == 1
    log.fed.publish(CanaryEnded(canary.key, "reward", 2, "worse"))
    assert log.wanted == 0

    log.fed.publish(canary)
    log.versions.pass_over(log.versions.wanted())
    assert log.wanted == 0
    log.publish(1)
    log.promote(1, "canary")
    assert log.wanted == 1


def test_the_engine_of_judges_has_the_first_version_for_ever():
    log = Log(FirstVersion())
    for version in (2, 3, 4):
        log.publish(version)
    first = log.versions.wanted()
    assert (first.version.version, first.sequence) == (2, 1)
    log.versions.pass_over(first)
    assert log.wanted is None
    log.publish(2)
    assert log.wanted == 2 and [one.version for one in log.versions.chain(log.versions.wanted())] == [2]
