"""Rows of different lengths as the tensors of one forward pass: packed end to end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.algorithms.lag import split_lags
from asyncrl.algorithms.packing import MULTIPLE
from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.token_loss import Tokens
from asyncrl.training.attention import Documents, VisibleKeys
from asyncrl.training.prefix_tree import PrefixTree, prefix_tree
from asyncrl.training.run_attention import Runs

_CPU = torch.device("cpu")
LONG = 2048  # tokens of several rows of one length from which on a kernel for them pays for its compilation


class Inputs(NamedTuple):
    """Arguments of `Policy.forward`: a sequence of T tokens, of which N are scored."""

    tokens: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [N] indices into [T] of the tokens before the scored ones
    targets: torch.Tensor  # [N] scored tokens
    temperatures: torch.Tensor  # [N] sampling temperature of each
    documents: Documents  # the rows


class MicroBatch(NamedTuple):
    """Rows of one forward pass, and the N of their tokens that are trained on."""

    inputs: Inputs
    tokens: Tokens  # [N] each
    places: npt.NDArray[np.int64]  # indices into [T] of the tokens that the rows feed, row after row


def micro_batch(
    rows: Sequence[TrainRow], device: torch.device, columns: Sequence[str] = (), *, shared: bool = False
) -> MicroBatch:
    """Lay rows out; the last token of a row predicts nothing and is only a target.

    Args:
        rows: at least one, each with at least two tokens, and with these columns.
        device: where the tensors are put.
        columns: that the loss reads.
        shared: compute tokens that rows have in common once.
    """
    flat, lengths = trained_places(rows), np.array([len(row.tokens) for row in rows])
    versions, steps = np.concatenate([row.versions for row in rows]), np.array([row.step for row in rows])
    in_queue, in_flight = split_lags(versions, lengths, steps=steps)

    def of_tokens(values: Sequence[npt.NDArray[np.float32]]) -> torch.Tensor:
        return put(np.concatenate(values)[flat], device)

    places, documents = laid_out(rows, device, shared=shared)
    return MicroBatch(
        _inputs(rows, places, documents),
        Tokens(
            behaviour=of_tokens([row.logprobs for row in rows]),
            advantages=of_tokens([row.advantages for row in rows]),
            weights=of_tokens([row.weights for row in rows]),
            rows=put(np.repeat(np.arange(len(rows)), lengths)[flat], device),
            in_queue=put(in_queue[flat], device),
            in_flight=put(in_flight[flat], device),
            columns={name: of_tokens([row.columns[name] for row in rows]) for name in columns},
        ),
        places,
    )


def trained_places(rows: Sequence[TrainRow]) -> npt.NDArray[np.bool_]:
    """Mask of the tokens that are trained on, of all rows end to end; never the first of a row."""
    flat: npt.NDArray[np.bool_] = np.concatenate([row.mask for row in rows]) != 0
    flat[np.cumsum([0, *(len(row.mask) for row in rows[:-1])])] = False
    return flat


def by_row(values: torch.Tensor, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
    """Values of the trained tokens of a micro-batch, [N, ...], as one array [T, ...] for each row, 0 elsewhere."""
    flat = trained_places(rows)
    column = np.zeros((len(flat), *values.shape[1:]), np.float32)
    column[flat] = values.float().cpu().numpy()
    return np.split(column, np.cumsum([len(row.mask) for row in rows[:-1]]))


def packed(rows: Sequence[TrainRow], device: torch.device, *, shared: bool = False) -> Inputs:
    """One sequence of all rows, each without its last token; see `laid_out`."""
    return _inputs(rows, *laid_out(rows, device, shared=shared))


def _inputs(rows: Sequence[TrainRow], places: npt.NDArray[np.int64], documents: Documents) -> Inputs:
    flat, given = trained_places(rows), np.concatenate([row.tokens for row in rows])
    kept = np.ones(len(flat), np.bool_)
    kept[np.cumsum([len(row.tokens) for row in rows]) - 1] = False  # the last token of each row
    device, size = documents.positions.device, documents.positions.shape[1]
    tokens = np.zeros(size, np.int64)
    tokens[places] = given[kept]
    temperatures = np.repeat([row.temperature for row in rows], [len(row.tokens) for row in rows])[flat]
    return Inputs(
        put(tokens[None], device),
        put(places[np.append(flat[1:], False)[kept]], device),
        put(given[flat].astype(np.int64), device),
        put(temperatures.astype(np.float32), device),
        documents._replace(routing=_routing(rows, places, size, device)),
    )


def laid_out(
    rows: Sequence[TrainRow], device: torch.device, *, shared: bool = False
) -> tuple[npt.NDArray[np.int64], Documents]:
    """The place of each token that rows feed, and the documents of the sequence; on GPUs padding is a separate one.

    Rows of equal length are padded one by one, each as one document: no token sees later tokens.

    Args:
        shared: have prefixes that rows share in the sequence once: several scored tokens may follow one place.
    """
    tree = prefix_tree(fed(rows)) if shared and len(rows) > 1 else None
    if tree is None or not any(tree.joined):
        return _end_to_end(rows, device)
    return as_tree(tree, device)


def fed(rows: Sequence[TrainRow]) -> list[npt.NDArray[Any]]:
    """Input of rows: all tokens but the last, [T - 1] each; [T - 1, 4 + B] bytes where experts are recorded."""
    width = routing_width(rows)
    if not width:
        return [row.tokens[:-1] for row in rows]
    found = []
    for row in rows:
        routing = np.zeros((len(row.tokens), width), np.uint8) if row.routing is None else row.routing
        tokens = np.ascontiguousarray(row.tokens, np.int32)[:, None].view(np.uint8)
        found.append(np.concatenate((tokens, routing), axis=1)[:-1])
    return found


def routing_width(rows: Sequence[TrainRow]) -> int:
    """Number of bytes that name the experts of a token; 0 if no row has recorded ones."""
    return next((row.routing.shape[1] for row in rows if row.routing is not None), 0)


def _end_to_end(rows: Sequence[TrainRow], device: torch.device) -> tuple[npt.NDArray[np.int64], Documents]:
    """The place of each token that rows feed, and the rows as documents."""
    lengths = [len(row.tokens) - 1 for row in rows]
    multiple = MULTIPLE if device.type == "cuda" else 1
    alike = len(rows) if len(rows) == 1 or min(lengths) == max(lengths) >= LONG else 0
    if alike:
        documents = [length + -length % multiple for length in lengths]
    else:
        documents = lengths + [-sum(lengths) % multiple] * (multiple > 1)
    laid = documents_of(documents, device)._replace(alike=alike)
    bounds = np.cumsum([0, *documents], dtype=np.int32)
    return np.arange(sum(lengths)) + np.repeat(bounds[: len(rows)] - np.cumsum([0, *lengths[:-1]]), lengths), laid


def documents_of(lengths: Sequence[int], device: torch.device = _CPU) -> Documents:
    """Documents of these lengths, which follow one another."""
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    return Documents(
        positions=put(positions[None], device),
        bounds=put(bounds, device),
        longest=_power_of_two(max(lengths)),
        groups=tuple((len(list(same)), length) for length, same in groupby(lengths) if length),
    )


def as_tree(tree: PrefixTree, device: torch.device) -> tuple[npt.NDArray[np.int64], Documents]:
    """As `_end_to_end`, with shared prefixes once."""
    at, depths = np.concatenate(tree.places), np.zeros(tree.size, np.int64)
    depths[at] = np.concatenate([np.arange(len(places)) for places in tree.places])
    groups, seen = tree.groups, tree.seen
    if device.type == "cuda" and (filling := -tree.size % MULTIPLE):
        depths, groups, seen = np.append(depths, np.arange(filling)), (*groups, (1, filling)), (*seen, ())
    lengths = [length for count, length in groups for _ in range(count)]
    laid = Documents(
        positions=put(depths[None], device),
        bounds=put(np.cumsum([0, *lengths], dtype=np.int32), device),
        longest=_power_of_two(max(lengths)),
        groups=groups,
        seen=seen,
        visible=visible_keys(groups, seen, device) if device.type == "cuda" else None,
    )
    return at, laid


def visible_keys(groups: Sequence[tuple[int, int]], seen: Sequence[Sequence[int]], device: torch.device) -> VisibleKeys:
    """The keys of each document: those of the groups that it sees, and its own; see `Documents`."""
    starts = np.cumsum([0, *(count * length for count, length in groups)])
    runs = []
    for number, ((count, length), before) in enumerate(zip(groups, seen, strict=True)):
        earlier = [np.arange(starts[one], starts[one + 1]) for one in before]
        for first in starts[number] + length * np.arange(count):
            runs.append(np.concatenate([*earlier, np.arange(first, first + length)]))
    places = np.concatenate(runs)
    lengths = [len(run) for run in runs]
    return VisibleKeys(
        put(places, device),
        put(np.argsort(places, kind="stable"), device),
        put(np.bincount(places, minlength=starts[-1]), device),
        Runs(put(np.cumsum([0, *lengths], dtype=np.int32), device), _power_of_two(max(lengths))),
    )


def _power_of_two(length: int) -> int:
    """The least one that is not below a length: kernels are compiled for few of them."""
    return 1 << (length - 1).bit_length()


def _routing(
    rows: Sequence[TrainRow], places: npt.NDArray[np.int64], size: int, device: torch.device
) -> torch.Tensor | None:
    width = routing_width(rows)
    if not width:
        return None
    found = np.zeros((size, width), np.uint8)
    start = 0
    for row in rows:
        end = start + len(row.tokens) - 1
        if row.routing is not None:
            found[places[start:end]] = row.routing[:-1]
        start = end
    return put(found, device)


def put(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device, without waiting for what the device does."""
    return torch.from_numpy(array).to(device, non_blocking=True)
