"""The estimate of the torch trainer's memory."""

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.trainers import trainer_kind
from asyncrl.engine.embedded import budget
from asyncrl.engine.embedded.config import ModelConfig, RopeConfig, read_shape
from asyncrl.run.preflight_memory import memory_lines
from asyncrl.training import vocabulary
from asyncrl.training.torch import memory
from asyncrl.training.torch.memory import Learning, torch_memory
from harness.models import made_model

GIB = 2**30


def qwen3(hidden, ffn, layers, heads):
    rest = {"norm_eps": 1e-6, "tied": True, "max_positions": 40960, "rope": RopeConfig(), "has_qk_norm": True}
    sizes = {"hidden": hidden, "intermediate": ffn, "layers": layers, "heads": heads, "kv_heads": 8, "head_dim": 128}
    return ModelConfig("Qwen3ForCausalLM", 151936, **sizes, **rest)


def test_the_estimate_is_near_the_peaks_that_were_measured_on_a_card():
    small, large = (qwen3(1024, 3072, 28, 16), 596_049_920), (qwen3(2560, 9728, 36, 32), 4_022_468_096)

    found = []
    for (shape, parameters), tokens in ((small, 16384), (large, 8192)):
        then = 2 * parameters + 4 * shape.vocab_size * shape.hidden  # whole masters, the head's gradient in float32
        found.append((sum(torch_memory(shape, parameters, Learning(1, tokens, 8, 1.0, False))) + then) / GIB)

    assert found == [pytest.approx(31, rel=0.06), pytest.approx(103, rel=0.03)]


def test_the_estimate_of_a_long_row_is_near_its_peaks_on_one_and_on_two_gpus():
    """A row of 131,072 tokens with recomputation, then with its activations in host memory, on one GPU and on two."""
    shape, parameters = qwen3(1024, 3072, 28, 16), 596_049_920

    found = [
        sum(torch_memory(shape, parameters, Learning(ranks, 131072 // ranks, 8, 0.99, True, offloads, once=ranks > 1)))
        for ranks in (1, 2)
        for offloads in (False, True)
    ]

    assert [one / GIB for one in found] == pytest.approx([21.4, 16.2, 13.7, 10.4], rel=0.06)


def test_each_setting_takes_what_it_says():
    shape, parameters = qwen3(2560, 9728, 36, 32), 4_022_468_096
    plain = Learning(1, 8192, 8, 1.0, False)
    found = torch_memory(shape, parameters, plain)

    rounded = torch_memory(shape, parameters, plain._replace(moments=4))
    sparing = torch_memory(shape, parameters, plain._replace(moments=4, activations=0.9))
    divided = torch_memory(shape, parameters, plain._replace(ranks=2))

    assert found.optimizer - rounded.optimizer == 4 * parameters
    assert sum(sparing) < 75 * GIB < sum(rounded)
    assert divided.gradients == found.gradients // 2
    once = torch_memory(shape, parameters, plain._replace(ranks=2, once=True))
    assert once.gradients == found.gradients
    assert once.weights == 4 * (parameters // 2) + 2 * parameters
    assert memory.CHUNK_ELEMENTS == vocabulary.CHUNK_ELEMENTS
    assert memory._LARGE_CHUNK == vocabulary._COMPILED


def test_a_run_on_a_gpu_is_told_its_estimate(tmp_path):
    made_model(tmp_path)
    gpu = [f"model.path={tmp_path}", "learner.device=cuda", "learner.dtype=bfloat16"]

    loaded, others, two = (
        load_config("custom", overrides=given) for given in (gpu, gpu[:1], [*gpu, "learner.ranks=2"])
    )

    [line] = trainer_kind("torch").memory_lines(loaded.config, loaded.base)
    assert line.startswith("memory of a rank of the learner, estimated: ")
    assert list(trainer_kind("torch").memory_lines(others.config, others.base)) == []
    assert list(trainer_kind("torch").memory_lines(two.config, two.base))[1].startswith(
        "0.0 GiB more where its GPU has room"
    )


def test_check_tells_how_many_requests_of_full_length_the_embedded_engine_holds(tmp_path, monkeypatch):
    made_model(tmp_path)
    monkeypatch.setattr(budget, "free_memory", lambda: 1 << 20)
    given = [f"model.path={tmp_path}", "engine.count=2"]
    loaded, narrow = (load_config("custom", overrides=[*given, *more]) for more in ((), ("engine.context=1000000",)))
    shape = read_shape(tmp_path)
    tokens = (1 << 20) // 8 // budget.token_bytes(shape, 4) // 16 * 16  # an eighth of the memory for each of two

    [line] = memory_lines(loaded.config, loaded.base)
    assert f"{tokens:,} tokens, {tokens // shape.max_positions} requests of full length" in line
    assert list(memory_lines(narrow.config, narrow.base))[1].startswith(
        f"engine: a request ends with reason length at {tokens:,} tokens"
    )
