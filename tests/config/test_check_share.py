"""Cards that learner and engines share: what `check` refuses."""

import pytest

from harness.configs import from_settings, problems, the_problem

SGLANG = ("engine.kind=sglang", "learner.device=cuda")
TURNS, MEMORY = "placement.share=turns", "placement.share=memory"


def part(fraction: float, *further: str) -> str:
    words = ["--mem-fraction-static", str(fraction), *further]
    return "engine.arguments=[" + ",".join(f'"{word}"' for word in words) + "]"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([TURNS, "weights.direct=ipc"], "the learner has left the card when engines load"),
        ([TURNS, "engine.router.count=1"], "a router does not follow turns"),
        ([TURNS, "engine.kind=sglang"], 'SGLang frees memory only with "--enable-memory-saver"'),
        ([TURNS, "engine.kind=external", 'engine.addresses=["http://a:1"]'], '"external" servers are not this run'),
        ([TURNS, "learner.trainer=scripted"], "a scripted trainer has nothing on a card"),
        ([TURNS, 'only=["engine"]'], "no learner runs here"),
        ([TURNS, "placement.learner_fraction=0.4"], 'has no effect without placement.share = "memory"'),
        ([MEMORY], 'found "cpu", expected cuda'),
        ([MEMORY, *SGLANG], "state the part of the memory that a server takes"),
        ([MEMORY, *SGLANG, part(1.5)], "state the part of the memory that a server takes"),
        ([MEMORY, *SGLANG, part(0.6)], "take 1.1 of the memory of GPU 0 together"),
        ([MEMORY, *SGLANG, part(0.3), "engine.count=2"], "take 1.1 of the memory of GPU 0 together"),
    ],
)
def test_cards_that_cannot_be_shared_so_are_refused(settings, words):
    assert words in " ".join(problem.message for problem in problems("demo", *settings))


def test_cards_that_can_be_shared_are_not():
    from_settings(TURNS)
    from_settings(TURNS, "engine.kind=sglang", 'engine.arguments=["--enable-memory-saver"]')
    from_settings(MEMORY, *SGLANG, part(0.5))
    # Servers beyond the learner's card have a card of their own.
    from_settings(MEMORY, *SGLANG, part(0.9), "engine.gpus=[1]", "placement.learner_fraction=0.95")
    assert "GPU 1" in the_problem("demo", MEMORY, *SGLANG, part(0.9), "engine.gpus=[1]", "learner.ranks=2").message
