"""Our rewards against what the graders of slime and verl gave for the same answers.

peers.json holds the answers and the peers' verdicts; `harness.peers.graders` records them. Where a case has `expected`,
slime's verdict is another one, and `why` gives the reason.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.rewards import answers, scorers

CASES = json.loads(Path(__file__).with_name("peers.json").read_text())["cases"]


@pytest.fixture(scope="module")
def rewards() -> dict[str, Any]:
    return {"math": scorers.make_math(), "deepscaler": answers.make_deepscaler(), "dapo": answers.dapo}


def ours(rewards: dict[str, Any], case: dict[str, Any]) -> float:
    completion, label = case["completion"], case["label"]
    if case["reward"] == "gpqa":
        return answers.gpqa(completion, label, case["metadata"])
    found = rewards[case["reward"]](completion, label)
    return float(found["reward"] if isinstance(found, dict) else found)


@pytest.mark.parametrize("reward", ["math", "deepscaler", "dapo", "gpqa"])
def test_verdicts_are_those_of_slime_but_for_reasons_that_the_record_names(rewards: dict[str, Any], reward: str):
    cases = [case for case in CASES if case["reward"] == reward]

    wrong = [
        f"{case['completion']!r} for {case['label']!r}: {found}, expected {expected}"
        for case in cases
        if (found := ours(rewards, case)) != (expected := case.get("expected", case["slime"]))
    ]

    assert cases and not wrong, "\n".join(wrong)


def test_each_verdict_that_is_not_that_of_slime_has_a_reason():
    assert all(case["why"] and case["expected"] != case["slime"] for case in CASES if "expected" in case)
