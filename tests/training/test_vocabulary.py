import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.training.vocabulary import Kernels, Top, chosen_logprobs, most_probable

N, HIDDEN, VOCABULARY = 37, 8, 50


def inputs(bias):
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    hidden = torch.randn(N, HIDDEN, requires_grad=True)
    return hidden, head, torch.randint(VOCABULARY, (N,)), torch.rand(N) + 0.5


def unfused(hidden, head, targets, temperatures):
    logprobs = (head(hidden) / temperatures[:, None]).log_softmax(-1)
    return logprobs[torch.arange(N), targets], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("elements", [20, 500, 50000])  # blocks of 1, 1 and 6 rows of the head, the first of 20 tokens
def test_chunks_give_the_values_and_gradients_of_the_whole(bias, elements):
    hidden, head, targets, temperatures = inputs(bias)
    kernels = Kernels(compiled=False, chunk_elements=elements)
    upstream = torch.randn(2, N)
    leaves = [hidden, *head.parameters()]

    logprobs, entropy = chosen_logprobs(hidden, head, (targets, temperatures), kernels)
    expected, entropies = unfused(hidden, head, targets, temperatures)

    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, entropies, rtol=1e-6, atol=1e-6)
    for weights in (upstream[0], None), (None, upstream[1]), upstream:
        values, references = (
            sum(column @ weight for column, weight in zip(pair, weights, strict=True) if weight is not None)
            for pair in ((logprobs, entropy), (expected, entropies))
        )
        found = torch.autograd.grad(values, leaves, retain_graph=True)
        for gradient, reference in zip(found, torch.autograd.grad(references, leaves, retain_graph=True), strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("elements", [20, 50000])
def test_bounded_logits_have_the_values_and_gradients_of_the_formula(elements):
    hidden, head, targets, temperatures = inputs(bias=True)
    kernels = Kernels(compiled=False, chunk_elements=elements, bound=1.5)
    logprobs, entropy = chosen_logprobs(hidden, head, (targets, temperatures), kernels)

    expected, entropies = unfused(hidden, lambda one: 1.5 * torch.tanh(head(one) / 1.5), targets, temperatures)

    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
    leaves, upstream = [hidden, *head.parameters()], torch.randn(2, N)
    found = torch.autograd.grad(logprobs @ upstream[0] + entropy @ upstream[1], leaves)
    wanted = torch.autograd.grad(expected @ upstream[0] + entropies @ upstream[1], leaves)
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=4e-6)


def test_a_head_in_float32_has_no_rounded_logits():
    hidden, head, targets, temperatures = inputs(bias=True)
    hidden, head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()
    expected, _ = unfused(
        hidden.float(), lambda one: one @ head.weight.float().T + head.bias.float(), targets, temperatures
    )
    off = []
    for exact in (True, False):
        kernels = Kernels(compiled=False)
        kernels.exact = exact
        logprobs, _ = chosen_logprobs(hidden, head, (targets, temperatures), kernels)
        off.append(float((logprobs - expected).abs().max()))
        [gradient] = torch.autograd.grad(logprobs.sum(), hidden)
        assert gradient.dtype == torch.bfloat16

    assert off[0] < 1e-5 < 1e-3 < off[1]


class Largest(TorchDispatchMode):
    """The largest number of elements of a result."""

    elements = 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return result


def test_no_tensor_of_tokens_times_vocabulary_is_made_forward_or_backward():
    hidden, head, targets, temperatures = inputs(False)
    with Largest() as largest:
        logprobs, _ = chosen_logprobs(
            hidden, head, (targets, temperatures), Kernels(compiled=False, chunk_elements=100)
        )
        logprobs.sum().backward()
        *_, outcomes = chosen_logprobs(
            hidden, head, (targets, temperatures), Kernels(compiled=False, chunk_elements=100), ids_of(3)
        )
        outcomes.sum().backward()
        most_probable(
            hidden.detach(), head, temperatures, Kernels(compiled=False, chunk_elements=100), Top(3, VOCABULARY)
        )
    assert largest.elements == HIDDEN * VOCABULARY  # the gradient of the head; logits of two tokens are 100
    with Largest() as whole:
        unfused(hidden, head, targets, temperatures)[0].sum().backward()
    assert whole.elements == N * VOCABULARY


def ids_of(count):
    return torch.stack([torch.randperm(VOCABULARY)[:count] for _ in range(N)])


def outcomes_unfused(hidden, head, ids, temperatures):
    """Log-probs of the ids and of the sum of all others."""
    probabilities = (head(hidden) / temperatures[:, None]).softmax(-1)
    named = probabilities.gather(-1, ids)
    rest = probabilities.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([named, rest] if ids.shape[-1] < VOCABULARY else [named], -1).log()


@pytest.mark.parametrize("elements", [20, 500, 50000])
@pytest.mark.parametrize("count", [1, 7, VOCABULARY - 1, VOCABULARY])
def test_outcomes_have_the_values_and_gradients_of_the_whole(count, elements):
    hidden, head, targets, temperatures = inputs(True)
    kernels, ids = Kernels(compiled=False, chunk_elements=elements), ids_of(count)
    leaves = [hidden, *head.parameters()]

    logprobs, entropy, found = chosen_logprobs(hidden, head, (targets, temperatures), kernels, ids)
    expected = outcomes_unfused(hidden, head, ids, temperatures)
    alone, entropies = unfused(hidden, head, targets, temperatures)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(found.shape)
    for values, references in (
        ((found * upstream).sum(), (expected * upstream).sum()),
        (
            (found * upstream).sum() + logprobs.sum() - entropy.sum(),
            (expected * upstream).sum() + alone.sum() - entropies.sum(),
        ),
    ):
        gradients = torch.autograd.grad(values, leaves, retain_graph=True)
        wanted = torch.autograd.grad(references, leaves, retain_graph=True)
        for one, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_a_small_rest_keeps_its_value_and_gradient():
    head = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.eye_(head.weight)
    hidden = torch.tensor([[30.0, 1.0, 0.0]], requires_grad=True)  # the rest has about 3.5e-13
    columns = torch.tensor([0]), torch.ones(1)

    *_, found = chosen_logprobs(hidden, head, columns, Kernels(compiled=False), torch.tensor([[0]]))
    found[0, 1].backward()

    # log((e^1 + e^0) / (e^30 + ...)) = log(3.7182818) - 30; its gradient is -1, e / (1 + e), 1 / (1 + e)
    assert found[0, 1].item() == pytest.approx(1.3132617 - 30)
    assert hidden.grad[0].tolist() == pytest.approx([-1.0, 0.7310586, 0.2689414])


@pytest.mark.parametrize("tokens_at_once", [1, 10, 1000])
def test_the_most_probable_tokens_are_those_of_a_sort(tokens_at_once):
    hidden, head, _, temperatures = inputs(True)
    kernels = Kernels(compiled=False, chunk_elements=tokens_at_once * VOCABULARY)

    found = most_probable(hidden, head, temperatures, kernels, Top(5, VOCABULARY - 3))

    logprobs = (head(hidden) / temperatures[:, None]).log_softmax(-1)[:, :-3]
    values, ids = logprobs.sort(-1, descending=True)
    assert torch.equal(found[..., 0].long(), ids[:, :5])
    torch.testing.assert_close(found[..., 1], values[:, :5])
