"""How many tokens of a stream come at a time."""

from asyncrl.engine.request_options import Pace, RequestOptions


def test_events_of_a_fast_server_have_the_tokens_of_a_time_and_those_of_a_slow_one_no_fewer_than_before():
    pace = Pace(RequestOptions(4, event_s=0.01))
    assert pace.tokens(1000) == 4  # nothing is known of the speed
    pace.generated(100, 0.05)
    assert pace.tokens(1000) == 20
    pace.generated(100, 0.1)  # a fifth of the mean
    assert pace.tokens(1000) == 16
    for _ in range(50):
        pace.generated(100, 5.0)
    assert pace.tokens(1000) == 4


def test_a_stream_is_never_silent_for_more_than_64_tokens():
    pace = Pace(RequestOptions(4, event_s=0.01))
    pace.generated(1000, 0.0)
    assert pace.tokens(1000) == 64


def test_short_generations_say_nothing_of_the_speed_and_without_a_time_nothing_does():
    for pace in (Pace(RequestOptions(4, event_s=0.01)), Pace(RequestOptions(4))):
        pace.generated(15, 0.001)
        assert pace.tokens(1000) == 4
    pace.generated(100, 0.001)
    assert pace.tokens(1000) == 4


def test_the_first_token_of_a_short_stream_that_is_read_does_not_wait_for_the_last():
    read, other = Pace(RequestOptions(event_s=0.01)), Pace(RequestOptions(in_place=True))
    assert [read.tokens(most) for most in (1, 2, 16, 17)] == [1, 1, 15, 16] and other.tokens(2) == 16


def test_a_short_answer_to_a_rollout_has_one_event():
    assert Pace(RequestOptions(portion=1024)).tokens(4096) == 64
    assert Pace(RequestOptions(portion=1024, in_place=True)).tokens(4096) == 16
