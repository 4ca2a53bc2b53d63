"""Errors about rows that are far longer than a terminal is wide."""

import json
from pathlib import Path

from harness.configs import SOUND, the_problem


def test_a_prompt_of_millions_of_characters_is_shown_by_its_first_ones(written, tmp_path: Path):
    row = {"prompt": "ab" * 2_000_000, "label": "a"}
    (tmp_path / "long.jsonl").write_text(json.dumps(row))
    source = 'task.source = "long.jsonl"\nmodel.create.alphabet = '

    for alphabet, what in (("ab", "which takes 4,000,"), ("a", 'lacks "b"')):
        problem = the_problem(written(SOUND + f'{source}"{alphabet}"\n'), files=True)
        assert what in problem.message and len(problem.message) < 300
