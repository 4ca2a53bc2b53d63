"""The batch on which the peers' functions and ours are compared, and the form of what they gave."""

import torch

GROUPS = [0, 0, 0, 1, 1, 2]  # of the rows: of three, of two, and one alone
LENGTHS = [7, 5, 3, 6, 4, 7]
HOLES = {(3, 2), (5, 3), (5, 4)}  # tokens between others that the policy did not sample
WIDTH, VOCABULARY = 7, 11


def batch():
    """Tensors of six rows, [6, 7] unless said otherwise; log-probs lie around those of one policy."""
    random = torch.Generator().manual_seed(17)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    rows = len(GROUPS)
    sampler = -torch.rand(rows, WIDTH, generator=random) * 3.0 - 0.05
    mask = [[t < LENGTHS[row] and (row, t) not in HOLES for t in range(WIDTH)] for row in range(rows)]
    of_rows = torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9, -0.3])[:, None].expand(rows, WIDTH)
    made = {
        "groups": torch.tensor(GROUPS),  # [6]
        "mask": torch.tensor(mask),
        "sampler": sampler,
        "start": (sampler + 0.35 * normal(rows, WIDTH)).clamp(max=-0.01),  # trainer before the step
        "current": (sampler + 0.45 * normal(rows, WIDTH)).clamp(max=-0.01),  # trainer
        "reference": (sampler + 0.5 * normal(rows, WIDTH)).clamp(max=-0.01),
        "lags": torch.randint(0, 4, (rows, WIDTH), generator=random),
        "row_advantages": of_rows.contiguous(),
        "token_advantages": of_rows + 0.5 * normal(rows, WIDTH),
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0, 0.7]),  # [6]
        "penalties": 0.1 * normal(rows, WIDTH),
        "values": normal(rows, WIDTH),
        "values_before": normal(rows, WIDTH),
        "returns": normal(rows, WIDTH),
        "entropies": torch.rand(rows, WIDTH, generator=random),
        "logits": 2.0 * normal(5, VOCABULARY),  # [5, 11]
        "teacher_logits": 2.0 * normal(5, VOCABULARY),  # [5, 11]
        "targets": torch.tensor([0, 3, 10, 7, 3]),  # [5]
    }
    return {name: _rounded(value) for name, value in made.items()}


def _rounded(value):
    """Numbers that JSON holds as they are."""
    return (value * 1e4).round() / 1e4 if value.is_floating_point() else value


def at_the_end(made):
    """Rewards of tokens, [6, 7], with that of the row at its last trained token."""
    placed = torch.zeros_like(made["values"])
    for row, reward in enumerate(made["rewards"]):
        placed[row, made["mask"][row].nonzero().max()] = reward
    return placed


def graded(compute, made, name="current"):
    """Loss and gradient of a function of one of the tensors, at the trained tokens where it has tokens."""
    leaf = made[name].clone().requires_grad_()
    loss = compute(leaf)
    loss.backward()
    if leaf.shape != made["mask"].shape:
        return {"loss": loss.item(), "gradient": numbers(leaf.grad)}
    assert not leaf.grad[~made["mask"]].any(), "a token outside the mask has a gradient"
    return {"loss": loss.item(), "gradient": numbers(leaf.grad[made["mask"]])}


def numbers(values):
    """A tensor as a list of numbers."""
    return [float(f"{value:.8g}") for value in values.flatten().tolist()]


def kept(function, found):
    """Result of a function of a peer."""
    name = f"{function.__module__}.{function.__qualname__}"
    return {"function": name, **(found if isinstance(found, dict) else {"values": numbers(found)})}
