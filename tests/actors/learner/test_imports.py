"""Modules that a process loads at its start: what only some runs need is loaded where it is used."""

import subprocess
import sys

import pytest

COMPUTING = ("torch", "transformers")
HTTP = ("aiohttp",)
TEXTS = ("jinja2", "tokenizers")
COMPILING = ("torch._dynamo", "accelerate")
RAY = ("asyncrl.run.placements.ray.placement",)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("actors.main", (*COMPUTING, *HTTP, *TEXTS, *RAY)),
        ("actors.buffer.actor", (*COMPUTING, *HTTP, *TEXTS, *RAY)),
        ("actors.sessions.actor", (*COMPUTING, *HTTP, *TEXTS, *RAY)),
        ("actors.recorder.actor", (*COMPUTING, *HTTP, *RAY)),
        ("actors.prompter.actor", (*COMPUTING, *HTTP, *RAY)),
        ("actors.supervisor.actor", (*COMPUTING, *HTTP, *RAY)),
        ("actors.learner.actor", (*COMPUTING, *HTTP, *RAY)),
        ("actors.rollout.actor", (*COMPUTING, *RAY)),
        ("actors.engine.actor", (*COMPUTING, *RAY)),
        ("actors.learner.rank_process", (*HTTP, *RAY, *COMPILING, "asyncrl.training.replay_router")),
    ],
)
def test_a_process_does_not_load_what_only_some_runs_need(module: str, unwanted: tuple[str, ...]):
    code = f"import sys, {module}; print(*(name for name in {unwanted!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []


def test_the_compiler_works_in_a_rank_that_has_not_loaded_it():
    code = """
import actors.learner.rank_process, torch
from transformers.modeling_utils import is_accelerate_available
print(torch.compile(lambda values: values + 1, backend="eager")(torch.zeros(())).item(), is_accelerate_available())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["1.0", "False"]
