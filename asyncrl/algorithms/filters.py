"""Filters: complete groups that teach nothing, which the buffer drops and the prompter replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.algorithms.named import AlgorithmError, Table, guarded, named, with_call

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_EQUAL = 1e-6  # relative difference of rewards that are equal


class Rewarded(Protocol):
    """A member of a group, as its grade and its batch hold it: the batch is enough to repeat the decision."""

    reward: float
    truncated: bool  # its last generation ended at the length limit
    metrics: dict[str, float]  # of a batch those in `QUALITY` alone

    @property
    def score(self) -> float:
        """The reward before it was shaped."""

    @property
    def tokens(self) -> int:
        """Trainable tokens."""


class Filter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule that drops groups. Its fields are its options, `learner.filter_options.NAME`."""

    def __call__(self, members: Sequence[Rewarded]) -> bool:
        """Return whether a group is dropped."""
        raise NotImplementedError


class ZeroVariance(Filter, frozen=True):
    """Groups of several whose rewards are all equal: no member has an advantage. A group of one is not compared.

    Rewards that differ by rounding, relatively by at most 1e-6, are equal.
    """

    def __call__(self, members: Sequence[Rewarded]) -> bool:
        rewards = [member.reward for member in members]
        least, most = min(rewards), max(rewards)
        return len(rewards) > 1 and most - least <= _EQUAL * max(abs(least), abs(most))


class PassRate(Filter, frozen=True):
    """Groups of several of which too many or too few members pass.

    Source: DAPO's dynamic sampling (arXiv 2503.14476, eq. 11), where the defaults are those of the paper.
    """

    passing: float = 1.0  # Least reward, before it is shaped, with which a member passes.
    above: Annotated[float, Meta(ge=-1, lt=1)] = 0.0  # The share of members that pass is above this; -1 for no bound.
    below: Annotated[float, Meta(gt=0, le=2)] = 1.0  # It is below this; 2 for no bound.

    def __call__(self, members: Sequence[Rewarded]) -> bool:
        return len(members) > 1 and not self.above < fmean(one.score >= self.passing for one in members) < self.below


class Length(Filter, frozen=True):
    """Groups whose trajectories are too short or too long on the mean, or end too often at the length limit."""

    least_tokens: Count = 2  # Least mean number of trainable tokens.
    most_tokens: Count = 0  # Greatest mean number of trainable tokens; 0 for no bound.
    most_truncated: Share = 0.5  # Greatest share of members that the length limit ended.

    def __call__(self, members: Sequence[Rewarded]) -> bool:
        mean = fmean(member.tokens for member in members)
        too_long = bool(self.most_tokens) and mean > self.most_tokens
        return mean < self.least_tokens or too_long or fmean(one.truncated for one in members) > self.most_truncated


class Repetition(Filter, frozen=True):
    """Groups of which too many members repeat themselves, by the metric `repetition` of their grades: the share of
    4-grams of sampled tokens that occurred before.

    Source: rep-n of unlikelihood training (arXiv 1908.04319, section 6.1), n = 4.
    """

    most: Share = 0.5  # Greatest value of the metric that is no repetition.
    most_members: Share = 0.5  # Greatest share of members above it.

    def __call__(self, members: Sequence[Rewarded]) -> bool:
        return _too_many(members, "repetition", self.most, self.most_members)


class Garbage(Filter, frozen=True):
    """Groups of which too many members are no text, by the metric `garbage` of their grades: the share of characters of
    the completion that no writing has (replacement, control, private and unassigned characters).
    """

    most: Share = 0.05  # Greatest value of the metric that is text.
    most_members: Share = 0.5  # Greatest share of members above it.

    def __call__(self, members: Sequence[Rewarded]) -> bool:
        return _too_many(members, "garbage", self.most, self.most_members)


QUALITY = ("repetition", "garbage")
"""Metrics that filters read: the reward worker computes those whose filter is on, and a batch records them."""


def _of_user(found: Any) -> type[Filter]:
    if isinstance(found, type):
        raise TypeError("it is a class, expected a function of the members of a group")

    drops = guarded(found)
    return with_call(Filter, lambda _self, members: drops(members))


_BUILT_IN: dict[str, type[Filter]] = {
    "zero_variance": ZeroVariance,
    "pass_rate": PassRate,
    "length": Length,
    "repetition": Repetition,
    "garbage": Garbage,
}
FILTERS = Table(_BUILT_IN, _of_user)
"""Rules that drop a group, by the name in `learner.filters`."""


def filter_of(name: str, options: Mapping[str, Mapping[str, Any]]) -> Callable[[Sequence[Rewarded]], bool]:
    """A filter with its options, of those of all filters by name.

    Raises:
        AlgorithmError: there is no such filter, or it has no such options.
    """
    rule = named(FILTERS, name, "filter")
    try:
        return msgspec.convert(options.get(name, {}), rule)
    except msgspec.ValidationError as error:
        raise AlgorithmError(f'options {options[name]} of filter "{name}": {error}') from error


def filtered_by(members: Sequence[Rewarded], filters: Iterable[str], options: Mapping[str, Mapping[str, Any]]) -> str:
    """Name of the first filter that drops a group; empty if all keep it.

    Raises:
        AlgorithmError: there is no such filter.
    """
    return next((reason_of(name) for name in filters if filter_of(name, options)(members)), "")


def reason_of(name: str) -> str:
    """Return the reason that messages name for a filter: its name, of a user's own that of the function."""
    return name.rpartition(":")[2]


def _too_many(members: Sequence[Rewarded], metric: str, most: float, most_members: float) -> bool:
    return fmean(member.metrics.get(metric, 0.0) > most for member in members) > most_members
