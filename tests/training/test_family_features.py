"""Features of a model that its family does not have, and that would be computed otherwise than by transformers."""

import json

import pytest

from asyncrl.data.model_dir import ModelError
from asyncrl.engine.errors import EngineError
from asyncrl.training.megatron.families import read_family
from asyncrl.training.megatron.parallel_config import Layout
from harness.published import PUBLISHED


def changed(folder, name, changes):
    """A published `config.json` with other fields; what is None is left out."""
    config = {**PUBLISHED[name][0], **changes}
    (folder / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
    return folder


def yarn(**further):
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **further}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Qwen3-4B", {"partial_rotary_factor": 0.5}, "found partial_rotary_factor = 0.5, expected 1"),
        (
            "Llama-3.1-8B",
            {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "found partial_rotary_factor = 0.5",
        ),
        ("Qwen2.5-7B", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": yarn()}, "found rope type 'yarn'"),
        ("Kimi-K2", {"rope_scaling": yarn(attention_factor=1.2)}, "found attention_factor = 1.2 of yarn"),
        ("Kimi-K2", {"rope_scaling": yarn(mscale=0.7)}, "found mscale of yarn alone"),
        ("Kimi-K2", {"rope_scaling": yarn(mscale_all_dim=1.0)}, "found mscale_all_dim of yarn alone"),
    ],
)
def test_a_rotation_that_would_be_another_is_refused(tmp_path, name, changes, words):
    with pytest.raises(ModelError, match=rf"{words}.*set learner.trainer = "):
        read_family(changed(tmp_path, name, changes))


def test_a_part_of_a_head_is_rotated_where_the_family_does(tmp_path):
    assert read_family(changed(tmp_path, "GLM-4-9B-0414", {"partial_rotary_factor": 0.25}))[1].rope.share == 0.25


def test_yarn_without_mscale_has_that_of_its_factor(tmp_path):
    assert read_family(changed(tmp_path, "Kimi-K2", {"rope_scaling": yarn()}))[1].rope.mscale == 1.0


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(context=2), "context = 2 divides documents, along which delta nets carry a state; set it to 1"),
        (Layout(tensor=4), "tensor = 4 does not divide the model's 6 key heads of delta nets; use a divisor of 6"),
    ],
)
def test_delta_nets_that_ranks_cannot_share_are_refused(tmp_path, layout, words):
    shape = read_family(changed(tmp_path, "Qwen3.5-9B", {"linear_num_key_heads": 6}))[1]

    with pytest.raises(ModelError, match=words):
        layout.check(shape, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 400}, "num_experts_per_tok = 400, expected 1 to 256"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0, expected 1 to 256"),
        ({"n_group": 3}, "found n_group = 3 and topk_group = 4 with 256 experts"),
        ({"topk_group": 9, "num_experts_per_tok": 18}, "found n_group = 8 and topk_group = 9 with 256 experts"),
        ({"routed_scaling_factor": None}, "config.json of a DeepseekV3ForCausalLM lacks 'routed_scaling_factor'"),
        ({"n_shared_experts": None}, "config.json of a DeepseekV3ForCausalLM lacks 'n_shared_experts'"),
    ],
)
def test_experts_that_no_router_can_choose_and_fields_that_are_left_out_are_refused(tmp_path, changes, words):
    with pytest.raises((ModelError, EngineError), match=words):
        read_family(changed(tmp_path, "DeepSeek-V3", changes))
