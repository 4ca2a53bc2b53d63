"""Names of prompts and trajectories, and of actors in their pools."""

import pytest

from topics.ids import (
    LETTERS,
    TASK,
    is_prompt_id,
    letter_of,
    member_of,
    number_of,
    prompt_name,
    prompt_of,
    trajectory_name,
)
from topics.roles import number_in_pool, pool_of, role_of


@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize("number", [0, 42, 1_000_000])
def test_a_name_is_taken_apart_as_it_was_put_together(letter: str, number: int):
    prompt_id = prompt_name(letter, number)
    name = trajectory_name(prompt_id, 3)

    assert (letter_of(name), number_of(prompt_of(name)), member_of(name)) == (letter, number, 3)
    assert prompt_of(prompt_id) == prompt_id
    assert is_prompt_id(prompt_id)
    assert is_prompt_id(prompt_id, TASK) == (letter == TASK)


@pytest.mark.parametrize("name", ["", "p", "p42", "x000042", "p000042-3", "p000042 ", "p00004２"])
def test_what_is_no_prompt_is_told(name: str):
    assert not is_prompt_id(name)


def test_an_actor_has_a_role_a_pool_and_a_number_in_it():
    name = "engine-large-2"

    assert (role_of(name), pool_of(name), number_in_pool(name)) == ("engine", "engine-large", 2)
