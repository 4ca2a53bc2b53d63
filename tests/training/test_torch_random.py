import pytest
import torch

from asyncrl.training.init_model import TorchRandom


@pytest.mark.parametrize("count", [16, 17, 31, 32, 1000])
@pytest.mark.parametrize("seed", [0, 4, 2**31 + 7])
def test_numbers_are_those_of_torch_one_call_after_another(count, seed):
    random = TorchRandom(seed)
    torch.manual_seed(seed)
    for _ in range(2):
        assert random.uniform(count).tolist() == torch.rand(count).tolist()
        assert random.normal(count) == pytest.approx(torch.empty(count).normal_().tolist(), abs=2e-6)


def test_few_numbers_are_drawn_as_a_block_of_them():
    assert TorchRandom(1).normal(3).shape == (3,)
    assert abs(TorchRandom(1).normal(100_000).std() - 1.0) < 0.01
