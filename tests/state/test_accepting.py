"""When a run tells that its gateway accepts requests."""

import msgspec

from asyncrl.bus.log import Record
from asyncrl.state.headline import headline
from asyncrl.state.run_state import RunState
from harness.configs import from_settings
from topics.actors import ActorStarted, RunOpened, Vitals
from topics.table import BUILT_IN
from topics.wire import Message


def test_that_requests_are_accepted_is_told_once_at_each_start_of_a_run():
    state = RunState("demo", 0)
    settings = msgspec.to_builtins(from_settings("gateway.count=1", 'only=["gateway", "engine"]').config)

    def publish(at_s: float, message: Message) -> list[str]:
        topic = BUILT_IN.topic_for(message)
        state.apply(topic, message, Record(topic.stream, 1, "", {}, b"", int(at_s * 1e9)))
        return [event.text for event in state.take_events()]

    def vitals(at_s: float, **values: float) -> list[str]:
        return publish(at_s, Vitals("gateway", "gateway-1", 1, at_s, values))

    for opened_s in (100.0, 200.0):
        publish(opened_s, RunOpened(0, 0, settings))
        publish(opened_s + 1, ActorStarted("gateway", "gateway-1", "here", 1))
        assert (vitals(opened_s + 2), headline(state)) == ([], "starting: no gateway accepts requests yet")
        assert vitals(opened_s + 3, listens=1.0) == ["the gateway accepts requests"]
        assert vitals(opened_s + 4, listens=1.0) == []
        assert headline(state).startswith("serving: 0 of ")


def test_a_run_without_its_gateway_is_not_waited_for():
    state = RunState("demo", 0)
    settings = msgspec.to_builtins(from_settings("gateway.count=1", 'only=["engine"]').config)
    opened = RunOpened(0, 0, settings)
    state.apply(BUILT_IN.topic_for(opened), opened, Record(BUILT_IN.topic_for(opened).stream, 1, "", {}, b"", int(1e9)))

    assert headline(state).startswith("serving: 0 of ")
