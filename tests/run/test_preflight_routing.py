"""Checks of routing replay before anything is started."""

import json

import pytest

from harness.configs import problems
from harness.models import made_model

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
REPLAY, RECORD = "learner.routing=replay", "learner.routing=trainer"


def words(folder, changed, *settings):
    file = made_model(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return [one.message for one in problems("demo", REPLAY, f"model.path={folder}", *settings, files=True)]


@pytest.mark.parametrize(
    ("changed", "settings", "wanted"),
    [
        ({}, [], "has no experts; name one that has"),
        ({}, [RECORD], 'found "trainer", but the model'),
        (MIXTURE, [RECORD, "learner.loss=reinforce"], "there is no pass before the update"),
        (MIXTURE | {"num_experts_per_tok": 1}, [], "goes to one expert"),
        (MIXTURE, ["engine.kind=sglang"], "returns no experts without --enable-return-routed-experts"),
        (MIXTURE, ["engine.kind=sglang", "engine.router.count=1"], "sglang-router drops the request for experts"),
    ],
)
def test_what_cannot_be_replayed_is_one_clear_error(tmp_path, changed, settings, wanted):
    assert any(wanted in one for one in words(tmp_path, changed, *settings))


def test_a_mixture_on_an_engine_that_tells_its_experts_is_not_refused_for_it(tmp_path):
    record = [RECORD, "engine.kind=sglang", "learner.loss=decoupled", "learner.loss_options.proximal=recomputed"]
    for settings in ([], record):
        found = words(tmp_path / str(len(settings)), MIXTURE, *settings)
        assert not any("expert" in one and "mlp.gate" not in one for one in found)
