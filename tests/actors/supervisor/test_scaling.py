"""Requests to scale: whose counts, in which order, and which are void."""

import itertools

import msgspec

from actors.supervisor.fold import SupervisorFold
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from topics.actors import FLEET_SCALED, RUN_OPENED, SCALE_REQUESTED, FleetScaled, RunOpened, ScaleRequested
from topics.wire import decode, encode

START = FleetScaled({"rollout": 1, "reward": 1}, by="start")


class Logs:
    """A supervisor's fold, fed with requests and decisions whose sequences are those of their own logs."""

    def __init__(self, config: Config | None = None) -> None:
        self.fold = SupervisorFold(config or Config())
        self.asked = self.decided = 0
        self.stored: list[FleetScaled] = []
        self.take(START)

    def ask(self, request: ScaleRequested) -> None:
        self.asked += 1
        self.fold.apply(SCALE_REQUESTED, request, Record(SCALE_REQUESTED.stream, self.asked, "", {}, b"", 0))

    def open(self) -> None:
        self.asked += 1
        opened = RunOpened(1, 0, {})
        self.fold.apply(RUN_OPENED, opened, Record(RUN_OPENED.stream, self.asked, "", {}, b"", 0))

    def take(self, decision: FleetScaled) -> None:
        self.decided += 1
        self.stored.append(decision)
        self.fold.apply(FLEET_SCALED, decision, Record(FLEET_SCALED.stream, self.decided, "", {}, b"", 0))

    def decide(self) -> FleetScaled | None:
        return self.fold.state.scaling.decide(self.fold.state.wanted, lambda pool: 6)

    def settle(self) -> dict[str, int]:
        """Decide until nothing is open; returns the processes of each pool."""
        while (decision := self.decide()) is not None:
            self.take(decision)
        return self.fold.state.wanted

    def restarted(self, requests: list[ScaleRequested]) -> "Logs":
        """Another process, which reads both logs from the beginning, the requests before any decision."""
        other = Logs.__new__(Logs)
        other.fold, other.asked, other.decided, other.stored = SupervisorFold(Config()), 0, 0, []
        for request in requests:
            other.ask(request)
        for decision in self.stored:
            other.take(decision)
        return other


def asked(count: int, *, after: int = 0) -> ScaleRequested:
    return ScaleRequested({"rollout": count}, by="autoscale" if after else "command", reason="why", after=after)


def test_a_request_is_answered_once_with_who_asked_and_why():
    logs = Logs()
    logs.ask(asked(3, after=1))

    decision = logs.decide()

    assert decision == FleetScaled({"rollout": 3}, by="autoscale", reason="why", request=1)
    assert logs.settle() == {"rollout": 3, "reward": 1}
    assert logs.decide() is None


def test_what_the_rule_asked_before_it_read_a_users_request_is_void():
    logs = Logs()
    logs.ask(asked(2))
    logs.ask(asked(5, after=1))  # rests on the start, and hides no request of a user

    assert logs.settle()["rollout"] == 2

    logs.ask(asked(5, after=1))  # published once more
    assert logs.settle()["rollout"] == 2
    logs.ask(asked(5, after=2))
    assert logs.settle()["rollout"] == 5


def test_what_was_asked_by_weight_is_void_behind_a_users_request():
    logs = Logs()
    logs.ask(ScaleRequested({"rollout": 3}, by="share", after=1))
    logs.ask(asked(2))
    assert logs.settle()["rollout"] == 2

    logs.ask(ScaleRequested({"rollout": 3}, by="share", reason="had 0.60 of 0.70", after=2))
    assert logs.decide() == FleetScaled({"rollout": 3}, by="share", reason="had 0.60 of 0.70", request=3)


def test_a_run_that_is_opened_again_has_nothing_that_was_lent():
    logs = Logs(msgspec.convert({"placement": {"lent": ["rollout"]}}, Config))
    logs.open()
    logs.ask(ScaleRequested({"rollout": 3}, by="share", after=2))
    assert logs.settle() == {"rollout": 3, "reward": 1}

    logs.open()
    logs.ask(ScaleRequested({"rollout": 3}, by="share", after=3))  # meant for what it had before
    assert logs.settle() == {"rollout": 0, "reward": 1}
    assert logs.stored[-1].by == "start"


def test_a_user_who_asks_later_has_the_last_word():
    logs = Logs()
    logs.ask(asked(5, after=1))
    logs.ask(asked(2))

    assert logs.settle()["rollout"] == 2


def test_a_restarted_process_repeats_no_request_that_was_answered():
    requests = [asked(4), asked(4), ScaleRequested({"rollout": 9, "nobody": 3, "learner": 2}), asked(3, after=4)]
    logs = Logs()
    for request in requests:
        logs.ask(request)
        logs.settle()
    assert logs.fold.state.wanted["rollout"] == 3  # 9 was cut to the most there may be

    other = logs.restarted(requests)
    assert other.decide() is None
    assert other.fold.state.wanted == logs.fold.state.wanted
    again = decode(type(other.fold.state), encode(other.fold.state))  # by way of a snapshot
    assert again.scaling == other.fold.state.scaling


def test_a_process_that_dies_between_any_two_effects_comes_to_the_same_fleet():
    requests = [asked(2), asked(5, after=2), asked(3), asked(4, after=2)]  # the last rests on an old decision
    whole = Logs()
    for request in requests:
        whole.ask(request)
        whole.settle()
    assert [decision.wanted["rollout"] for decision in whole.stored] == [1, 2, 5, 3]

    # The rule's requests rest on decision 2, so that one is stored wherever they are.
    for read, kept in itertools.product(range(len(requests) + 1), range(2, len(whole.stored) + 1)):
        logs = Logs()  # another process, which finds so many decisions behind so many requests
        for request in requests[:read]:
            logs.ask(request)
        for decision in whole.stored[1:kept]:
            logs.take(decision)
        for request in requests[read:]:
            logs.ask(request)
        assert logs.settle()["rollout"] == 3, (read, kept)
