"""The user's reward in a child process: it is found, its signature read, and it is called with its arguments."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.child_pool.frames import Service, Setup
from asyncrl.errors import FunctionError
from asyncrl.functions import is_async, load_function, load_rollout
from asyncrl.rewards.kinds import reward_of
from asyncrl.rewards.score import GradeRequest, read_score, read_scores
from asyncrl.rewards.tournaments import TournamentReward

_REPLY_BYTES = 1 << 20  # of the result for one completion


def reward_setup(
    spec: str, *, base: Path, time_limit_s: float, memory_mb: int, batch: int = 1, tournament: str = ""
) -> Setup | None:
    """Return the setup by which a child finds the reward of `spec`; None if that is no function.

    Args:
        batch: requests that one call of a user's function takes at most; above 1 the function is given lists.
        tournament: among them, by a name in `TOURNAMENTS`: the function compares two.
    """
    reward = reward_of(spec)
    if reward is None or not reward.spec:
        return None
    spec, arguments, lists = reward.spec, reward.arguments, batch > 1 and reward.lists
    found = {"spec": spec, "base": str(base), "arguments": arguments, "lists": lists, "tournament": tournament}
    reply_bytes = _REPLY_BYTES * (batch if lists else 1)
    service, key = f"{__name__}:serve_reward", "reward.memory_mb"
    return Setup(spec, service, found, time_limit_s, memory_mb, reply_bytes, memory_key=key)


def rollout_setup(spec: str, *, base: Path, time_limit_s: float) -> Setup:
    """Return the setup by which a child loads a rollout function, to see whether it can be."""
    return Setup(spec, f"{__name__}:load_only", {"spec": spec, "base": str(base)}, time_limit_s)


def serve_reward(
    spec: str, base: str, arguments: dict[str, Any] | None, *, lists: bool, tournament: str = ""
) -> Service:
    """Load a reward; with `lists`, one that grades many completions at once.

    Raises:
        FunctionError: it cannot be found or loaded, or asks for what a request does not have.
    """
    function = load_function(spec, base=Path(base))
    if arguments is not None:
        function = function(**arguments)
    if tournament:
        function = _tournament(tournament, function)
    signature = read_signature(function)
    if lists:
        call = functools.partial(signature.call_with_lists, function)
        return Service(call, read_scores, is_async(function), about=lists)
    return Service(functools.partial(signature.call, function), read_score, is_async(function))


def _tournament(name: str, judge: Callable[..., Any]) -> Callable[..., Any]:
    """The reward of a group by a tournament; plain where the judge is.

    A plain judge blocks its process, so that each group has to have the process for itself: its limit counts its own
    comparisons.

    Raises:
        FunctionError: the judge is called otherwise, or is a tournament itself.
    """
    reward = TournamentReward(name, judge)

    def plain(completion: list[str], prompt: list[Any], label: list[Any], trajectory_id: list[str]) -> list[float]:
        return asyncio.run(reward(completion, prompt, label, trajectory_id))

    return reward if is_async(judge) else plain


def load_only(spec: str, base: str) -> Service:
    """Load a rollout function, which runs elsewhere.

    Raises:
        FunctionError: it cannot be found or loaded, or is called otherwise.
    """
    return Service(load_rollout(spec, base=Path(base)))


class Signature(msgspec.Struct):
    """The calling convention of a reward function."""

    keywords: list[str]
    positional: bool  # takes the completion in its place, not by name

    def call(self, function: Callable[..., Any], request: dict[str, Any]) -> Any:
        """Call `function` with the parts of a `GradeRequest` that it names."""
        keywords = {name: request[name] for name in self.keywords}
        return function(request["completion"], **keywords) if self.positional else function(**keywords)

    def call_with_lists(self, function: Callable[..., Any], requests: list[dict[str, Any]]) -> Any:
        """Call `function` with a list of each part that it names, in the order of the requests."""
        return self.call(function, {name: [one[name] for one in requests] for name in GradeRequest.__struct_fields__})


def read_signature(function: Callable[..., Any]) -> Signature:
    """Find out which parts of a request `function` names.

    Raises:
        FunctionError: when it needs an argument that a request does not have.
    """
    known = GradeRequest.__struct_fields__
    signature = Signature([], positional=False)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            signature.keywords += [name for name in known if name not in signature.keywords]
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY and not signature.positional:
            signature.positional = True
        elif parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            signature.keywords.append(parameter.name)
        elif parameter.default is parameter.empty:
            near = difflib.get_close_matches(parameter.name, known, n=1)
            raise FunctionError(
                f"the reward function asks for {parameter.name!r}{f', did you mean {near[0]!r}' if near else ''}; "
                f"it may name {', '.join(known)} (or take the completion alone as its one positional-only argument)"
            )
    if signature.positional and "completion" in signature.keywords:
        signature.keywords.remove("completion")
    return signature
