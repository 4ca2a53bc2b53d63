"""Forward passes over a key-value store: one token for each running row, and parts of prompts along with them."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from asyncrl.engine.embedded.budget import token_bytes
from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.engine.embedded.matrix import Experts
from asyncrl.engine.embedded.paged import Paged
from asyncrl.engine.embedded.weights import Layer, Weights
from asyncrl.engine.errors import LOGITS_NOT_FINITE, EngineError

ATTENTION_STEP = 16
"""Attention reads the used prefix of the store, rounded up to this many tokens."""

SPAN_ROWS = 32
"""Rows that attend together, as far as the longest of them reaches; it pays to keep rows of like length together."""

_TURN_S = 0.02
"""Seconds of computation after which other work of the process gets a turn, at the end of a layer."""

_SLACK_BYTES = 1 << 20
"""Memory that a slot may keep beyond its tokens: giving it back and taking it again costs a system call a page."""

Computation = Generator[None, None, torch.Tensor]
"""Stops where other work of the process may be done; returns a result."""


class Block(NamedTuple):
    """Prompt tokens for some slots. Padding has the position `Model.waste`."""

    tokens: torch.Tensor  # [R, S] int64
    positions: torch.Tensor  # [R, S] int64
    slots: torch.Tensor  # [R] int64


class _Span(NamedTuple):
    """Rows that attend together while decoding."""

    start: int
    end: int
    used: int  # tokens of the store that are read
    bias: torch.Tensor  # [rows * kv_heads, 1, used] 0 or -inf


class _Pass(NamedTuple):
    """The inputs that all layers of one forward pass share. N tokens: decoding rows, then the block's."""

    rotation: torch.Tensor  # [N, 1, head_dim / 2] complex64
    cells: torch.Tensor  # [N, 2 * kv_heads] rows of the flat store to write
    spans: list[_Span]
    block: Block | None
    used: int  # tokens of the store that the block reads
    mask: torch.Tensor  # [R, 1, S, used] bool, of the block


class Model:
    """A decoder with its key-value store [layer, key or value, slot, kv_head, position, head_dim].

    Tokens of slot b at positions 0..p-1 are valid when p tokens were fed; later positions are overwritten before they
    are read. Without `torch.compile`; made for one thread, where the number of operations is what costs.
    """

    def __init__(self, config: ModelConfig, weights: Weights, slots: int, positions: int) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.positions = -(-(positions + 1) // ATTENTION_STEP) * ATTENTION_STEP
        self.waste = self.positions - 1  # no token ever has this position
        shape = (config.layers, 2, slots, config.kv_heads, self.positions, config.head_dim)
        self._paged = [Paged(shape, self.dtype)]
        self.store = self._paged[0].tensor
        experts = config.experts
        # What the router chose where a token was fed, in the form of the store: [layer, 1, slot, 1, position, chosen].
        self.routes: torch.Tensor | None = None
        if experts is not None:
            wide = torch.uint8 if experts.count <= 256 else torch.int16
            self._paged.append(Paged((config.layers, 1, slots, 1, self.positions, experts.chosen), wide))
            self.routes = self._paged[1].tensor
        self._written = [0] * slots  # tokens of each slot that occupy memory
        self._slack = _SLACK_BYTES // token_bytes(config, self.dtype.itemsize)
        self._slots = [store.unbind(2) for store in self.stores]  # made once: a view costs as much as a short copy
        angles = torch.outer(torch.arange(self.positions).float(), config.rope.inverse_frequencies(config.head_dim))
        self._rotations = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        self._flat = [layer.view(-1, config.head_dim) for layer in self.store]
        heads = torch.arange(2)[:, None] * slots * config.kv_heads + torch.arange(config.kv_heads)
        slot_cells = heads.view(1, -1) + torch.arange(slots)[:, None] * config.kv_heads
        self._cells = slot_cells * self.positions  # [slots, 2 * kv_heads] row of position 0
        self._steps = torch.arange(self.positions)

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one slot to another."""
        for slots in self._slots:
            slots[target].narrow(3, 0, tokens).copy_(slots[source].narrow(3, 0, tokens))

    @property
    def stores(self) -> list[torch.Tensor]:
        """Return all that is kept of the tokens of a slot."""
        return [paged.tensor for paged in self._paged]

    def free_all(self) -> None:
        """Give back the memory of all tokens."""
        for paged in self._paged:
            paged.free(0, paged.tensor.numel())
        self._written = [0] * len(self._written)

    def free(self, slot: int, kept: int, written: int) -> None:
        """Give back the memory of a slot's tokens but the first `kept`.

        Args:
            written: tokens that the slot held last.
        """
        self._written[slot] = written = max(written, self._written[slot])
        if written - kept <= self._slack:
            return
        self._written[slot] = kept
        for paged in self._paged:
            layers, kinds, slots, heads, positions, width = paged.tensor.shape
            for part in range(layers * kinds):
                first = (part * slots + slot) * heads
                for head in range(first, first + heads):
                    paged.free((head * positions + kept) * width, (written - kept) * width)

    def check_finite(self, probs: torch.Tensor, positions: torch.Tensor, version: str) -> None:
        """Check that the logits were finite; one that is not makes every probability of its row NaN.

        Args:
            probs: [R, vocab] softmax of the logits.
            positions: [R] int64 of the tokens that gave them, in the slots 0..R-1.
            version: name of the weights, for the error.

        Raises:
            EngineError: a logit was NaN or infinite; it names the first layer that stored such keys or values.
        """
        if not bool(probs[:, 0].isnan().any()):
            return
        newest = self.store[:, :, torch.arange(len(positions)), :, positions]  # [R, layers, 2, kv_heads, head_dim]
        layers = (index for index, layer in enumerate(newest.unbind(1)) if not bool(torch.isfinite(layer).all()))
        first = f"layer {next(layers, self.config.layers - 1)} of {self.config.layers}"
        found = f"weights {version}: {LOGITS_NOT_FINITE}, from {first} on; expected finite numbers"
        raise EngineError(f"{found}; lower learner.lr, and resume from an earlier checkpoint")

    def routed(self, slot: int, tokens: int) -> npt.NDArray[np.int32]:
        """Return the experts of the first tokens of a slot, [T, layers, K]; without experts [T, 0, 0]."""
        if self.routes is None:
            return np.zeros((tokens, 0, 0), np.int32)
        return self.routes[:, 0, slot, 0, :tokens].permute(1, 0, 2).numpy().astype(np.int32)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, block: Block | None = None) -> Computation:
        """One token for each of the slots 0..B-1, and on the way the keys and values of a block of prompts.

        A row may follow the block's tokens in its slot: every layer writes before it reads.

        Args:
            tokens: [B] int64, the newest token of each row.
            positions: [B] int64, of the fed tokens.
            block: prompt tokens to compute along with them.

        Returns:
            [B, vocab] float32 logits of the next token.
        """
        x = yield from self._forward(tokens, positions, block)
        return self.weights.head(self._normed(x)).float()

    def read(self, block: Block) -> Computation:
        """Logits after each token of a block, [R * S, vocab] float32; its keys and values are stored."""
        nothing = torch.empty(0, dtype=torch.int64)
        x = yield from self._forward(nothing, nothing, block, whole=True)
        return self.weights.head(self._normed(x)).float()

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, block: Block | None, *, whole: bool = False
    ) -> Computation:
        """[B, hidden] of the decoding rows; with `whole` of the block's tokens, too."""
        rows, turn_s = len(tokens), time.perf_counter() + _TURN_S
        shared = self._prepare(positions, block)
        if block is not None:
            tokens = torch.cat([tokens, block.tokens.reshape(-1)])
        x = F.embedding(tokens, self.weights.embedding)
        # Of the last layer's block, only keys and values are wanted; what its router chooses is, too.
        last = len(self.weights.layers) - (0 if whole or self.routes is not None else 1)
        for index, layer in enumerate(self.weights.layers):
            if time.perf_counter() > turn_s:
                yield
                turn_s = time.perf_counter() + _TURN_S
            qkv = self._project(x, layer, index, shared)
            if index == last and block is not None:
                x, qkv = x[:rows], qkv[:rows]
            attended = [self._attend_rows(qkv, index, span) for span in shared.spans]
            if index < last and block is not None:
                attended.append(self._attend_block(qkv[rows:], index, shared, block))
            if attended:
                x = self._finish_layer(x, torch.cat(attended) if len(attended) > 1 else attended[0], layer)
                if layer.experts is not None:
                    x = self._mix(x, layer.experts, index, shared)
        return x if whole or block is None else x[:rows]

    def _prepare(self, positions: torch.Tensor, block: Block | None) -> _Pass:
        rows = len(positions)
        cells = self._cells[:rows] + positions.unsqueeze(1)
        spans = self._spans(positions) if rows else []
        if block is None:
            return _Pass(self._rotations[positions], cells, spans, None, 0, positions)
        real = block.positions[block.positions != self.waste]
        used = int(real.max()) + 1
        mask = (self._steps[:used] <= block.positions.unsqueeze(2)).unsqueeze(1)
        block_cells = self._cells[block.slots].unsqueeze(1) + block.positions.unsqueeze(2)
        padding = (block.positions == self.waste).unsqueeze(2)  # all of it in one cell, which takes less memory
        block_cells = torch.where(padding, self._cells[0] + self.waste, block_cells).view(-1, cells.shape[1])
        every = torch.cat([positions, block.positions.reshape(-1)])
        return _Pass(self._rotations[every], torch.cat([cells, block_cells]), spans, block, used, mask)

    def _spans(self, positions: torch.Tensor) -> list[_Span]:
        starts = np.arange(0, len(positions), SPAN_ROWS)
        kv_heads = self.config.kv_heads
        spans = []
        for start, longest in zip(
            starts.tolist(), np.maximum.reduceat(positions.numpy(), starts).tolist(), strict=True
        ):
            used = -(-(longest + 1) // ATTENTION_STEP) * ATTENTION_STEP
            part = positions[start : start + SPAN_ROWS]
            bias = torch.where(self._steps[:used] > part.unsqueeze(1), -torch.inf, 0.0).to(self.dtype)
            bias = bias.unsqueeze(1).expand(-1, kv_heads, -1).reshape(len(part) * kv_heads, 1, used)
            spans.append(_Span(start, start + len(part), used, bias))
        return spans

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden,), None, self.config.norm_eps)

    def _project(self, x: torch.Tensor, layer: Layer, index: int, shared: _Pass) -> torch.Tensor:
        """Rotated queries and keys, and values: [N, heads + 2 kv_heads, head_dim]; keys and values are stored."""
        config = self.config
        qkv = layer.qkv(self._normed(x)).view(len(x), -1, config.head_dim)
        qk = raw = qkv[:, : config.heads + config.kv_heads]
        if layer.qk_gain is not None:
            qk = F.rms_norm(qk.float(), (config.head_dim,), None, config.norm_eps).mul_(layer.qk_gain)
        pairs = torch.view_as_complex(qk.float().view(*qk.shape[:2], -1, 2))
        if self.dtype == torch.float32:
            torch.mul(pairs, shared.rotation, out=torch.view_as_complex(raw.view(*raw.shape[:2], -1, 2)))
        else:
            raw.copy_(torch.view_as_real(pairs * shared.rotation).flatten(-2))
        self._flat[index].index_put_((shared.cells,), qkv[:, config.heads :])
        return qkv

    def _attend_rows(self, qkv: torch.Tensor, index: int, span: _Span) -> torch.Tensor:
        """One query token per row. Heads that share keys are rows of one small product; keys are never expanded."""
        config, batch = self.config, (span.end - span.start) * self.config.kv_heads
        part = self.store[index, :, span.start : span.end]
        keys, values = part.view(2, batch, -1, config.head_dim)[:, :, : span.used]
        queries = qkv[span.start : span.end, : config.heads].reshape(batch, -1, config.head_dim)
        scores = torch.baddbmm(span.bias, queries, keys.transpose(1, 2))
        return torch.bmm(torch.softmax(scores, -1), values).view(span.end - span.start, -1)

    def _attend_block(self, qkv: torch.Tensor, index: int, shared: _Pass, block: Block) -> torch.Tensor:
        """S query tokens for each of R rows, over what the store holds of these rows."""
        rows, config = len(block.tokens), self.config
        keys, values = self.store[index].narrow(3, 0, shared.used)[:, block.slots]
        queries = qkv[:, : config.heads].view(rows, -1, config.heads, config.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, shared.mask, scale=1.0, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(len(qkv), -1)

    def _finish_layer(self, x: torch.Tensor, attended: torch.Tensor, layer: Layer) -> torch.Tensor:
        x = layer.out(attended).add_(x)
        if layer.gate_up is None or layer.down is None:
            return x
        gate, up = layer.gate_up(self._normed(x)).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up)).add_(x)

    def _mix(self, x: torch.Tensor, experts: Experts, index: int, shared: _Pass) -> torch.Tensor:
        found, chosen = experts(self._normed(x))
        if self.routes is not None:
            cells, per_slot = shared.cells[:, 0], self.config.kv_heads * self.positions
            places = cells // per_slot * self.positions + cells % self.positions
            self.routes[index].view(-1, chosen.shape[1])[places] = chosen.to(self.routes.dtype)
        return found.add_(x)
