"""Casts of tests: written, loaded, and what is wrong with them."""

import pytest

from asyncrl.cast import CastError, LoadedCast, Problem, load_cast

SOUND = "rollout.max_new_tokens = 11\n"


def problems(path: str, *overrides: str, files: bool = False) -> list[Problem]:
    with pytest.raises(CastError) as caught:
        load_cast(path, overrides=overrides, files=files)
    return caught.value.problems


def the_problem(path: str, *overrides: str, files: bool = False) -> Problem:
    (problem,) = problems(path, *overrides, files=files)
    return problem


def from_settings(*overrides: str) -> LoadedCast:
    return load_cast("demo", overrides=overrides)
