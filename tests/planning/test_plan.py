"""A plan of a config, measured with its own engine and trainer."""

import json
import subprocess
import sys


def test_a_plan_of_the_demo_measures_both_rates_and_proposes_slots_within_the_lag_bound():
    words = [sys.executable, "-m", "asyncrl.cli.main", "plan", "demo", "--seconds", "6", "--json"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=200).stdout)

    assert all(rate > 0 for rate in found["measured"]["engine"].values())
    assert found["measured"]["trainer"] > 0
    assert 0 < found["settings"]["rollout.slots"] <= 256  # a busy machine gains little from more
    assert 0 < found["proposal"]["tokens_per_s"] <= found["proposal"]["best_tokens_per_s"]
