"""`asyncrl weights list`: the versions that it shows."""

from typing import Any

from asyncrl.cli.weights import of_interest


def row(version: int, location: int, **marks: Any) -> dict[str, Any]:
    none = {"promoted": "", "live": False, "canary": 0.0, "rolled_back": ""}
    return {"version": version, "location": f"weights/v{location}"} | none | marks


def test_versions_with_the_same_bits_are_the_first_the_newest_and_those_that_were_live():
    rows = [row(0, 0), row(1, 0), row(2, 2), row(3, 2, promoted="command"), row(4, 2), row(5, 2), row(6, 0)]

    found = [(one["version"], one["same_as"]) for one in of_interest(rows)]

    assert found == [(0, None), (2, None), (3, 2), (5, 2), (6, 0)]


def test_of_many_versions_the_newest_are_there_and_the_live_one():
    rows = [row(version, version, live=version == 3) for version in range(200)]

    assert [one["version"] for one in of_interest(rows)] == [3, *range(136, 200)]
