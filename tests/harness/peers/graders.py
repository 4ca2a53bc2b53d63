"""Verdicts of slime's and verl's graders on the corpus of tests/rewards/peers.json, recorded there.

PYTHONPATH=tests:SLIME python -m harness.peers.graders SLIME VERL, with folders of both checkouts and `pylatexenc`.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

RECORD = Path(__file__).parents[2] / "rewards" / "peers.json"


def load(path: Path) -> ModuleType:
    """A file of a peer, without the package around it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdict(grader: Callable[..., Any], *arguments: Any) -> float | None:
    """Return the number that a grader gives; None if it raises."""
    try:
        found = grader(*arguments)
    except Exception:  # of any kind: the peer's
        return None
    found = found[0] if isinstance(found, tuple) else found
    return float(found["score"] if isinstance(found, dict) else found)


def main(slime: Path, verl: Path) -> None:
    """Record the verdicts of both peers."""
    from slime.rollout.rm_hub import deepscaler, gpqa, math_dapo_utils, math_utils

    scores = verl / "verl" / "utils" / "reward_score"
    of_slime = {
        "math": math_utils.grade_answer_verl,
        "deepscaler": deepscaler.get_deepscaler_rule_based_reward,
        "dapo": math_dapo_utils.compute_score,
        "gpqa": gpqa.compute_gpqa_reward,
    }
    of_verl = {
        "math": load(scores / "math_reward.py").compute_score,
        "dapo": load(scores / "math_dapo.py").compute_score,
    }
    record = json.loads(RECORD.read_text())
    for case in record["cases"]:
        reward, given = case["reward"], (case["completion"], case["label"])
        more = (dict(case["metadata"] or {}),) if reward == "gpqa" else ()
        case["slime"] = verdict(of_slime[reward], *given, *more)
        if reward in of_verl:
            case["verl"] = verdict(of_verl[reward], given[0], str(given[1]))
    for name, folder in (("slime", slime), ("verl", verl)):
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        record["commits"][name] = subprocess.check_output(command, text=True).strip()
    cases = ",\n".join(json.dumps(case, ensure_ascii=False) for case in record["cases"])
    RECORD.write_text(f'{{"commits": {json.dumps(record["commits"])},\n"cases": [\n{cases}\n]}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
