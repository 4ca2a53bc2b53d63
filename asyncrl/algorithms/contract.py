"""The contract of losses, advantages and filters, tried out on tokens and rewards made at random.

`asyncrl check` runs it on the user's own.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import torch

from asyncrl.algorithms.advantages import Estimator, Values
from asyncrl.algorithms.filters import Rewarded
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.algorithms.own_columns import Column
from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.sums import Sums
from asyncrl.algorithms.token_loss import Loss, Tokens
from asyncrl.errors import AsyncRLError, last_lines

_ROWS = 9
_GROUPS = (4, 1, 2, 8)  # members
_LIMIT_S = 30.0  # for some hundred tokens
_REPEATED = "a step that is made again, a replay and an audit would differ: let it depend on its arguments only"
P = ParamSpec("P")


class ContractError(AsyncRLError):
    """A broken rule."""


class Computed(NamedTuple):
    """The results of a loss on some tokens."""

    loss: torch.Tensor  # scalar
    gradient: torch.Tensor  # [N] with respect to the log-probs
    sums: Sums


def some_tokens(rng: np.random.Generator, loss: Loss, *, rows: int = _ROWS) -> tuple[torch.Tensor, Tokens]:
    """Log-probs and tokens of a few rows, each third without weight, with the columns that a loss needs."""
    owner = np.repeat(np.arange(rows), rng.integers(1, 6, rows))
    size = len(owner)
    weights = np.where(np.arange(size) % 3 == 2, 0.0, rng.uniform(0.01, 0.1, size))
    logprobs, behaviour = -rng.exponential(size=size), -rng.exponential(size=size)
    names = (*loss.needs, "entropy") if loss.uses_entropy else loss.needs
    return _floats(logprobs), Tokens(
        behaviour=_floats(behaviour),
        advantages=_floats(rng.normal(size=size)),
        weights=_floats(weights),
        rows=torch.from_numpy(owner),
        in_queue=torch.from_numpy(owner % 4),
        in_flight=torch.from_numpy(rng.integers(0, 12, size)),
        columns={name: _floats(-rng.exponential(size=size)) for name in names},
    )


def _floats(values: Values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def chosen(tokens: Tokens, where: torch.Tensor) -> Tokens:
    """Some of the tokens, with their rows counted from 0."""
    given = tokens._asdict()
    columns = {name: column[where] for name, column in given.pop("columns").items()}
    some = {name: values[where] for name, values in given.items()}
    return Tokens(**{**some, "rows": torch.unique(some["rows"], return_inverse=True)[1]}, columns=columns)


def computed(loss: Loss, logprobs: torch.Tensor, tokens: Tokens) -> Computed:
    """Call a loss and check its result.

    Raises:
        ContractError: it returned no loss with sums, or changed its arguments.
    """
    logprobs, before = logprobs.clone().requires_grad_(), copy.deepcopy(tokens)
    answer = loss(logprobs, tokens)
    for name, values in {**tokens._asdict(), **tokens.columns}.items():
        if name != "columns" and not torch.equal(values, {**before._asdict(), **before.columns}[name]):
            raise ContractError(f"it changes the {name} that it is given; compute with a copy")
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict):
        raise ContractError(f"it returned {type(answer).__name__}, expected (loss, dict of sums)")
    total, sums = answer
    if not isinstance(total, torch.Tensor) or total.ndim or not torch.isfinite(total):
        raise ContractError(f"it returned the loss {total}, expected a finite tensor without dimensions")
    if total.dtype not in (torch.float32, torch.float64):
        raise ContractError(f"its loss is of {total.dtype}, expected torch.float32; sum in it")
    _check_sums(sums, int((tokens.weights > 0).sum()))
    if not total.requires_grad:
        raise ContractError("its loss has no gradient with respect to the log-probs")
    torch.autograd.backward(total)
    if logprobs.grad is None or not torch.isfinite(logprobs.grad).all():
        raise ContractError(f"the gradient of its loss is {logprobs.grad}, expected finite numbers")
    return Computed(total.detach(), logprobs.grad, sums)


def _check_sums(sums: Mapping[Any, Any], expected: int) -> None:
    if unnamed := [name for name in sums if not isinstance(name, str)]:
        raise ContractError(f"a sum is called {unnamed[0]!r}, expected text")
    for name, value in sums.items():
        number = isinstance(value, torch.Tensor) and not (value.ndim or value.requires_grad or value.is_complex())
        if not number or not torch.isfinite(value):
            raise ContractError(f'its sum "{name}" is {value}, expected a finite tensor without dimensions or gradient')
    named = ", ".join(f'"{name}"' for name in sums) or "none"
    found = f'its sum "tokens" is {sums["tokens"].item():g}' if "tokens" in sums else f"its sums are {named}"
    if "tokens" not in sums or sums["tokens"] != expected:
        raise ContractError(f'{found}; expected "tokens" = (tokens.weights > 0).sum(), which is {expected} here')


def _problem(check: Callable[P, None]) -> Callable[P, str]:
    """Return the rule that a check finds broken; run it in a thread, which is abandoned if a user's function hangs."""

    @functools.wraps(check)
    def problem(*given: P.args, **named: P.kwargs) -> str:
        found = [f"it did not return within {_LIMIT_S:g} s; a step of the learner would wait for it, too"]

        def run() -> None:
            try:
                check(*given, **named)
                found[0] = ""
            except (ContractError, AlgorithmError) as error:
                found[0] = str(error)
            except BaseException as error:  # anything may happen in a user's function, also an exit
                found[0] = f"it raised\n{last_lines(error)}"

        thread = threading.Thread(target=run, name="contract", daemon=True)
        thread.start()
        thread.join(_LIMIT_S)
        return found[0]

    return problem


@_problem
def loss_problem(loss: Loss) -> None:
    """Return the rule that a loss breaks; empty if it is valid.

    Every loss is one number with a finite gradient and with sums, the same whenever it is asked; a token without weight
    has no effect on any of them; those of micro-batches add up to those of the batch.
    """
    logprobs, tokens = some_tokens(np.random.default_rng(0), loss)
    whole, again = (computed(loss, logprobs, tokens) for _ in range(2))
    if not _close(whole.loss, again.loss) or not _close(whole.gradient, again.gradient):
        raise ContractError(f"it gives {whole.loss:g} and then {again.loss:g} for the same tokens; {_REPEATED}")
    without = tokens.weights == 0
    moved = [torch.where(without, torch.full_like(values, -3.0), values) for values in (logprobs, *tokens[:2])]
    other = computed(loss, moved[0], tokens._replace(behaviour=moved[1], advantages=moved[2]))
    if whole.gradient[without].any() or not _close(whole.loss, other.loss) or not _alike(whole.sums, other.sums):
        raise ContractError(
            "its loss, gradient or sums depend on tokens of weight 0; multiply by tokens.weights, count where it is > 0"
        )
    _check_parts(loss, logprobs, tokens, whole)


def _check_parts(loss: Loss, logprobs: torch.Tensor, tokens: Tokens, whole: Computed) -> None:
    """Check that micro-batches add up to the whole batch."""
    parts = [torch.isin(tokens.rows, torch.tensor(rows)) for rows in ([7, 2], [8, 0, 1, 3, 4], [5, 6])]
    found = [computed(loss, logprobs[part], chosen(tokens, part)) for part in parts]
    if not _close(torch.stack([part.loss for part in found]).sum(), whole.loss):
        raise ContractError(
            "the losses of three micro-batches do not add up to that of all their rows; sum over the tokens, and "
            "divide by nothing that depends on the micro-batch: tokens.weights are shares of the whole batch"
        )
    for where, part in zip(parts, found, strict=True):
        if not _close(part.gradient, whole.gradient[where]):
            raise ContractError("the gradient of a row depends on the other rows of its micro-batch")
    for name in [name for name in whole.sums if not name.endswith("_max")]:
        if any(name not in part.sums for part in found):
            raise ContractError(f'its sum "{name}" is missing in some micro-batches; return the same names always')
        if not _close(torch.stack([part.sums[name].float() for part in found]).sum(), whole.sums[name].float()):
            raise ContractError(f'its sums "{name}" of three micro-batches do not add up; a mean is made of them later')


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def _alike(found: Sums, expected: Sums) -> bool:
    return found.keys() == expected.keys() and all(_close(found[name], expected[name]) for name in found)


@_problem
def advantage_problem(estimator: Estimator) -> None:
    """Return the rule that an estimator breaks; empty if it is valid.

    An estimator gives one finite number for each member of each group, is repeatable, and accepts any group sizes and
    equal rewards.
    """
    rng = np.random.default_rng(0)
    groups = [rng.normal(size=size) for size in _GROUPS] + [np.full(3, 0.1)]
    for given in (groups, groups[:1], groups[1:2], groups[4:]):
        before = [group.copy() for group in given]
        found = estimator.of_groups(given)
        shapes, sizes = [np.shape(group) for group in found], [group.size for group in given]
        if shapes != [(size,) for size in sizes]:
            raise ContractError(f"advantages of shapes {shapes} for groups of {sizes} members")
        if not all(np.isfinite(group).all() for group in found):
            raise ContractError(f"not all advantages are finite: {[group.tolist() for group in found]}")
        if any((group != was).any() for group, was in zip(given, before, strict=True)):
            raise ContractError("it changes the rewards that it is given")
        for one, other in zip(found, estimator.of_groups(given), strict=True):
            if (one != other).any():
                raise ContractError(f"it gives {one.tolist()} and then {other.tolist()} to one group; {_REPEATED}")


@_problem
def column_problem(column: Column) -> None:
    """Return the rule that a column of rows breaks; empty if it is valid.

    A column gives one finite number for each token of a row of any length, is repeatable, and does not change the row.
    """
    for size in (2, 5, 64):
        mask, half = np.minimum(np.arange(size), 1).astype(np.uint8), np.full(size, 0.5, np.float32)
        ids = np.arange(size, dtype=np.int32)
        row = TrainRow("p000000-0", ids.copy(), mask, -half, np.zeros(size, np.int32), half + half, half)
        if (column(row) != column(row)).any():
            raise ContractError(f"it gives a row other numbers when it is asked again; {_REPEATED}")
        if (row.tokens != ids).any() or (row.logprobs != -0.5).any() or (row.advantages != 1.0).any():
            raise ContractError("it changes the row that it is given")


@_problem
def filter_problem(drops: Callable[[Sequence[Rewarded]], bool], groups: Sequence[Sequence[Rewarded]]) -> None:
    """Return the rule that a filter breaks; empty if it is valid.

    A filter gives a repeatable answer for a group and does not change the members.

    Args:
        groups: members as the buffer hands them over.
    """
    for members in groups:
        before = copy.deepcopy(members)
        first, second = (drops(members) for _ in range(2))
        if not isinstance(first, bool | np.bool_):
            raise ContractError(f"it answers {first!r} about a group, expected True or False")
        if first != second:
            raise ContractError(f"it answers {first} and then {second} about one group; {_REPEATED}")
        if members != before:
            raise ContractError("it changes the members that it is given")
