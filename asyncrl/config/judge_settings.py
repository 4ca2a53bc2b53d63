"""Settings of the judges of live turns: the table `[live.judge]`."""

from __future__ import annotations

from typing import Literal

from asyncrl.config.setting_types import NonNegative, Positive, Seconds, Settings


class JudgeSettings(Settings):
    """Judges: what followed a reply says how good it was (docs/judges.md)."""

    # `rule`: a function; `endpoint`: an OpenAI-compatible chat endpoint; `engine`: the run's own model; empty: none.
    kind: Literal["", "rule", "endpoint", "engine"] = ""
    workers: Positive = 1  # Judge processes at start.
    in_flight: Positive = 32  # Turns that one process holds at once.
    votes: Positive = 1  # Votes on each turn; their majority is its reward.
    # Seconds that one vote may take, with all tries; one that takes longer does not count.
    deadline_s: Seconds = 60.0
    history_tokens: Positive = 4096  # Tokens that a judge sees of the prompt, its last, and of reply and evidence each.
    # With `rule`: your function, `path/file.py:function` or `package.module:function`; empty looks for words such as
    # `good` and `wrong` in what followed.
    function: str = ""
    children: Positive = 1  # With `rule`: child processes that one judge process runs your function in.
    url: str = ""  # With `endpoint`: its address up to and with `/v1`.
    model: str = ""  # With `endpoint`: name of the model.
    api_key_file: str = ""  # With `endpoint`: file that holds its API key, where it needs one.
    temperature: NonNegative = 0.6  # With `endpoint` and `engine`: temperature of a vote.
    max_new_tokens: Positive = 1024  # With `endpoint` and `engine`: tokens of a vote, its reasoning included.
