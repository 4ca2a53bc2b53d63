"""The tokens of each document that a rank has, of the C ranks that share them.

A document is filled up to 2 C chunks of one length. Rank r has the chunks r and 2 C - 1 - r, so that all ranks attend
to as many tokens (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrl.training.context_parallel.allgather_attention import Segments
from asyncrl.training.context_parallel.exchange import count, place
from asyncrl.training.context_parallel.ring_attention import chunks_on
from asyncrl.training.packing import Inputs, put
from asyncrl.training.run_attention import Runs


class Part(NamedTuple):
    """The T tokens of a sequence that one rank has; M of them come before a scored token."""

    inputs: Inputs  # of the T and the M
    scored: torch.Tensor  # [M] places among those of all ranks
    whole: int  # number of them on all ranks
    sources: torch.Tensor  # [T] places of the tokens among those of all ranks; -1 of filling


def part_of(inputs: Inputs, multiple: int = 1) -> Part:
    """Return what this rank has of a sequence that all ranks know.

    Args:
        multiple: of the number of tokens of a rank, T.
    """
    ranks = count()
    lengths = np.concatenate([np.full(number, length) for number, length in inputs.documents.groups])
    filled = -(-lengths // (2 * ranks)) * 2 * ranks
    rest = -filled.sum() % (multiple * ranks)
    return _Zigzag(np.append(lengths, 0), np.append(filled, rest), ranks).part(inputs)


class _Zigzag:
    """The places of the tokens of D documents on C ranks."""

    def __init__(self, lengths: np.ndarray[Any, Any], filled: np.ndarray[Any, Any], ranks: int) -> None:
        """
        Args:
            lengths: [D] of the documents.
            filled: [D] the same, filled up.
        """
        self._lengths, self._filled, self._ranks = lengths, filled, ranks
        self._rank = place()
        self._chunk = filled // (2 * ranks)
        self._starts = np.cumsum(2 * self._chunk) - 2 * self._chunk  # of each document on a rank
        self._held = int(2 * self._chunk.sum())  # tokens of a rank

    def part(self, inputs: Inputs) -> Part:
        """Return what this rank has."""
        device, documents = inputs.tokens.device, inputs.documents
        document = np.repeat(np.arange(len(self._filled)), 2 * self._chunk)
        local = np.arange(self._held) - self._starts[document]
        chunk = self._chunk[document]
        second = (2 * self._ranks - 1 - self._rank) * chunk + local - chunk
        within = np.where(local < chunk, self._rank * chunk + local, second)
        there = within < self._lengths[document]
        source = np.where(there, (np.cumsum(self._lengths) - self._lengths)[document] + within, -1)
        of_source = np.full(inputs.tokens.shape[1], -1)
        of_source[source[there]] = np.flatnonzero(there)
        sources = put(source, device)
        alike = documents.alike if self._filled[-1] == 0 and chunks_on(device) else 0
        held = documents._replace(
            bounds=put(np.cumsum([0, *self._filled], dtype=np.int32), device),
            positions=put(within[None], device),
            groups=tuple((1, int(length)) for length in self._filled if length),
            alike=0,
            segments=self._segments(device)._replace(alike=alike),
        )
        if held.routing is not None:
            held = held._replace(routing=torch.where((sources >= 0)[:, None], held.routing[sources], 0))
        tokens = torch.where(sources >= 0, inputs.tokens[0, sources], 0)
        of_rank = put(of_source, device)[inputs.positions]
        scored = torch.nonzero(of_rank >= 0).squeeze(1)  # waits for the GPU, which by now has nothing to wait for
        own = Inputs(tokens[None], of_rank[scored], inputs.targets[scored], inputs.temperatures[scored], held)
        return Part(own, scored, len(inputs.positions), sources)

    def _segments(self, device: torch.device) -> Segments:
        keys, queries, seen = [], [], []
        for start, chunk in zip(self._starts, self._chunk, strict=True):
            if not chunk:
                continue
            within = np.arange(2 * self._ranks * chunk)
            number = within // chunk
            late = number >= self._ranks
            rank = np.where(late, 2 * self._ranks - 1 - number, number)
            among = rank * self._held + start + within % chunk + late * chunk
            for own in (self._rank, 2 * self._ranks - 1 - self._rank):
                keys.append(among[: (own + 1) * chunk])
                queries.append(int(chunk))
                seen.append(len(keys[-1]))
        total = sum(seen)
        uses, run = np.full((2, self._ranks * self._held), total), np.repeat(np.arange(len(seen)), seen)
        uses[run % 2, np.concatenate(keys)] = np.arange(total)
        runs = _runs(queries, device), _runs(seen, device)
        return Segments(put(np.concatenate(keys), device), put(uses, device), tuple(queries), tuple(seen), runs)


def _runs(lengths: list[int], device: torch.device) -> Runs:
    longest = 1 << (max(lengths) - 1).bit_length()  # as of `Documents`
    return Runs(put(np.cumsum([0, *lengths], dtype=np.int32), device), longest)
