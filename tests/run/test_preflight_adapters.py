"""Checks of adapters (LoRA) on models with routed experts."""

import msgspec
import pytest

from asyncrl.config.settings import Config
from asyncrl.run.preflight_model import check_adapters
from harness.mixtures import SMALL, write_transformers_model


def test_adapters_beside_routed_experts_alone_are_refused(tmp_path):
    given = {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}
    config = msgspec.convert({"model": {"path": "model"}, "learner": given}, Config)
    for kind in ("glm4-moe", "qwen3-moe"):
        write_transformers_model(tmp_path / kind / "model", *SMALL[kind])

    assert not [*check_adapters(config, tmp_path / "glm4-moe")]  # beside its shared experts, and layers without any
    [found] = check_adapters(config, tmp_path / "qwen3-moe")
    assert "have no down_proj that an adapter can adapt" in found.message
    assert "of experts, k_proj, o_proj, q_proj, v_proj" in found.message


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ({"lora": {"publish": "adapter"}}, "engines add no adapters to routed experts"),
        ({"ranks": 2}, "adapters of experts are on one rank, found learner.ranks = 2"),
    ],
    ids=["published alone", "several ranks"],
)
def test_adapters_of_experts_are_merged_by_one_rank(tmp_path, further, words):
    write_transformers_model(tmp_path / "model", *SMALL["qwen3-moe"])
    lora = {"rank": 4, "targets": ["q_proj", "experts"]}
    config = msgspec.convert({"model": {"path": "model"}, "learner": {"lora": lora}}, Config)
    assert not [*check_adapters(config, tmp_path)]

    given = {**further, "lora": lora | further.get("lora", {})}
    [found] = check_adapters(msgspec.convert({"model": {"path": "model"}, "learner": given}, Config), tmp_path)
    assert words in found.message
