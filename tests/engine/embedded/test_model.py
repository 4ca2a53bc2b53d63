import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.engine.embedded import weights
from asyncrl.engine.embedded.config import read_config, read_eos_ids
from asyncrl.engine.embedded.matrix import MappedMatrix
from asyncrl.engine.embedded.request import Request, Sampling
from asyncrl.engine.embedded.scheduler import Engine
from asyncrl.engine.errors import EngineError

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **MIXTURE, head_dim=32, tie_word_embeddings=False, norm_topk_prob=True)
    ),
    "shares-of-all": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **MIXTURE, norm_topk_prob=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    ),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture
def copied(tmp_path):
    torch.manual_seed(0)
    MODELS["qwen3"]().save_pretrained(tmp_path)
    return tmp_path


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    while engine.runnable:
        engine.step()


def logprobs_of(model, request):
    ids = torch.tensor([request.prompt + request.tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(request.prompt) :, None]).squeeze(1)


@pytest.mark.parametrize("mapped", [False, True])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(saved, mapped, monkeypatch):
    monkeypatch.setattr(weights, "_MAPPED_BYTES", 0 if mapped else 1 << 40)
    model, directory = saved
    prompts = [torch.randint(0, 97, (length,)).tolist() for length in (1, 2, 17, 40)]
    requests = [Request(str(i), prompt, Sampling(24, temperature=0.0)) for i, prompt in enumerate(prompts)]

    engine = Engine(directory, max_running=3, context_length=80)
    run(engine, *requests)

    assert isinstance(engine.model.weights.head, MappedMatrix) is mapped
    for request in requests:
        ids = torch.tensor([request.prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert request.tokens == expected[0, len(request.prompt) :].tolist()
        torch.testing.assert_close(torch.tensor(request.logprobs), logprobs_of(model, request), atol=1e-4, rtol=0)


def test_sampled_logprobs_are_those_of_the_training_forward_in_a_changing_batch(saved):
    model, directory = saved
    engine = Engine(directory, max_running=5, context_length=96)
    requests = [
        Request(str(i), torch.randint(0, 97, (1 + 3 * i,)).tolist(), Sampling(5 + i % 7 * 6)) for i in range(16)
    ]

    run(engine, *requests)

    for request in requests:
        assert len(request.tokens) == request.sampling.max_new_tokens
        torch.testing.assert_close(torch.tensor(request.logprobs), logprobs_of(model, request), atol=1e-4, rtol=0)


def test_the_experts_of_each_token_are_those_of_transformers_also_where_its_prefix_was_known(tmp_path):
    torch.manual_seed(0)
    model = MODELS["qwen3-moe"]().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    engine, prompt = Engine(tmp_path, max_running=2, context_length=96), torch.randint(0, 97, (40,)).tolist()
    for index, length in enumerate((40, 33)):
        request = Request(str(index), prompt[:length], Sampling(12))
        request.routed = np.zeros((0, 0, 0), np.int32)
        run(engine, request)
        chosen: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, __, found, chosen=chosen: chosen.append(found[2]))
        logprobs_of(model, request)

        assert request.cached_tokens == (32 if index else 0)
        expected = torch.stack(chosen[:2], 1)[:-1].sort(-1).values
        assert torch.equal(torch.from_numpy(request.routed).sort(-1).values.long(), expected)


def test_a_prompt_longer_than_one_pass_gives_the_same_logprobs(tmp_path):
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "max_position_embeddings": 2048}, head_dim=16)).eval()
    model.save_pretrained(tmp_path)
    lengths = (1300, 600, 40)
    requests = [Request(str(n), torch.randint(0, 97, (n,)).tolist(), Sampling(4)) for n in lengths]

    run(Engine(tmp_path, max_running=4), *requests)

    for request in requests:
        torch.testing.assert_close(torch.tensor(request.logprobs), logprobs_of(model, request), atol=1e-4, rtol=0)


def test_hundreds_of_rows_stay_apart_while_they_are_moved_about(tmp_path):
    torch.manual_seed(2)
    model = MODELS["qwen3"]().eval()
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path, max_running=150, context_length=64)
    requests = [Request(str(i), [i % 97, 5], Sampling(1 + i * 7 % 50)) for i in range(300)]

    run(engine, *requests)

    for request in requests[::9]:
        torch.testing.assert_close(torch.tensor(request.logprobs), logprobs_of(model, request), atol=1e-4, rtol=0)


def test_bfloat16_is_served_within_its_own_precision(saved):
    model, directory = saved
    request = Request("a", [1, 2, 3], Sampling(8))

    run(Engine(directory, max_running=2, context_length=32, dtype=torch.bfloat16), request)

    torch.testing.assert_close(torch.tensor(request.logprobs), logprobs_of(model, request), atol=0.3, rtol=0)


def test_weights_in_several_files_are_read(copied):
    shutil.rmtree(copied)
    MODELS["qwen3"]().save_pretrained(copied, max_shard_size="20KB")

    assert len(list(copied.glob("*.safetensors"))) > 1
    Engine(copied, max_running=1, context_length=16)


def edit(directory: Path, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope type 'linear'"),  # beside rope_parameters
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"num_hidden_layers": 3}, "model.layers.2.* is missing"),
        ({"num_hidden_layers": 1}, "beyond the 1 layers"),
        ({"vocab_size": 98}, r"model.embed_tokens.weight has shape \[97, 64\], the served model has \[98, 64\]"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name(copied, changes, message):
    edit(copied, **changes)

    with pytest.raises(EngineError, match=message):
        Engine(copied, max_running=1, context_length=16)


def test_a_missing_or_torn_directory_is_one_clear_error(copied):
    with pytest.raises(EngineError, match=r"cannot read config.json.*Hugging Face format"):
        Engine(copied / "absent")

    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(EngineError, match=r"model.safetensors is torn"):
        Engine(copied)

    weights.unlink()
    with pytest.raises(EngineError, match=r"no \*.safetensors"):
        Engine(copied)

    (copied / "config.json").write_text('{"architectures": [')
    with pytest.raises(EngineError, match=r"config\.json is not a JSON object"):
        Engine(copied)


def test_older_config_files_give_the_same_rotation(copied):
    new = read_config(copied)
    edit(copied, rope_parameters=None, rope_theta=new.rope.theta, rope_scaling=None)

    assert read_config(copied) == new


def test_end_tokens_come_from_generation_config_then_config_then_tokenizer(copied):
    (copied / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert read_eos_ids(copied) == {3, 4}

    (copied / "generation_config.json").unlink()
    edit(copied, eos_token_id=5)
    assert read_eos_ids(copied) == {5}

    edit(copied, eos_token_id=None)
    (copied / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (copied / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "<end>"}]}')
    assert read_eos_ids(copied) == {7}
