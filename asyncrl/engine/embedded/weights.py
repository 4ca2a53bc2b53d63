"""From safetensors on disk to the forward pass: fused copies of small models, views of large ones."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.engine.embedded.matrix import Experts, MappedMatrix, Matrix
from asyncrl.engine.errors import EngineError
from asyncrl.weights.adapters import is_adapter
from asyncrl.weights.merging import merged
from asyncrl.weights.quantised import plain_names, read_plain
from asyncrl.weights.verify import TornVersion

_MAPPED_BYTES = 64 << 20
"""From this size on, copies cost more in each update and each process than they save in each step."""

_PARTED_BYTES = 8 << 20
"""Up to this size of files, weights are read between steps, layer by layer. On a thread each of many short operations
would wait 5 ms for the interpreter's lock, and steps for it to come back: for 0.3 s, where 6 ms are computed.
"""


class Layer(NamedTuple):
    """One decoder layer. Norm gains are folded into the matrices that follow them."""

    qkv: Matrix | MappedMatrix  # [(heads + 2 kv_heads) * head_dim, hidden]; rotated pairs of q and k are adjacent
    qk_gain: torch.Tensor | None  # [heads + kv_heads, head_dim]
    out: Matrix | MappedMatrix  # [hidden, heads * head_dim]
    gate_up: Matrix | MappedMatrix | None  # [2 * intermediate, hidden]
    down: Matrix | MappedMatrix | None  # [hidden, intermediate]
    experts: Experts | None  # instead of the two


class Weights(NamedTuple):
    """Everything that a weight update replaces, at once, by one assignment."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[Layer]
    head: Matrix | MappedMatrix  # [vocab, hidden]


def load_weights(source: Path | Mapping[str, torch.Tensor], config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Read `*.safetensors`, or take tensors by name, and fuse; a large model of the engine's dtype is mapped unchanged.

    Quantised matrices are computed with in the engine's type: the values are those that their bits and scales name.

    Folding the gain of an RMS norm into the next matrix, and the attention scale into the queries, changes results
    by one rounding of a weight. Query and key rows are reordered so that a rotated pair is one complex number.

    Raises:
        EngineError: no file, a torn file, a missing tensor, a shape that differs from the config; for copies also a
            value that is not finite (mapped tensors are checked at publication, because here each process would have to
            read all of them).
    """
    weights = list(_loading(source, config, dtype))[-1]
    assert weights is not None
    return weights


def _loading(
    source: Path | Mapping[str, torch.Tensor], config: ModelConfig, dtype: torch.dtype
) -> Iterator[Weights | None]:
    """Load weights as `load_weights` does, with a stop before each layer and at the end."""
    given, directory = (_read_tensors(source), source) if isinstance(source, Path) else (source, "received")
    named = {name: read_plain(name, given, given.__getitem__) for name in plain_names(given)}
    hidden, head_dim = config.hidden, config.head_dim
    size = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
    mapped = size >= _MAPPED_BYTES and all(tensor.dtype == dtype for tensor in named.values())
    take = _Taker(directory, named, copies=not mapped)
    embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
    head = embedding if config.tied else take("lm_head.weight", config.vocab_size, hidden)
    names = [f"model.layers.{index}." for index in range(config.layers)]
    layers = []
    for name in names:
        yield None
        layers.append(_map_layer(take, name, config) if mapped else _fuse_layer(take, name, config, dtype))
    yield None
    gain = take("model.norm.weight", hidden)
    extra = next((name for name in named if name.startswith(f"model.layers.{config.layers}.")), None)
    if extra is not None:
        raise EngineError(f"weights {directory}: {extra} is beyond the {config.layers} layers of the served model")
    if head_dim % 2:
        raise EngineError(f"weights {directory}: head_dim {head_dim} is odd; rotary embeddings need pairs")
    yield Weights(embedding.to(dtype), layers, MappedMatrix([head], gain) if mapped else Matrix(head * gain, dtype))


class ReadAhead:
    """Weights that are read while requests run: the update that asks for them has them at once."""

    def __init__(self, model: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        self.model = model  # directory that adapters are added to
        self._config, self._dtype = config, dtype
        self._found: tuple[Path, Weights] | None = None

    async def read(self, directory: Path) -> None:
        """Read a directory; the update reports its faults."""
        self._found = None
        with contextlib.suppress(EngineError, OSError, ValueError):
            if not await asyncio.to_thread(_is_small, directory):
                self._found = (directory, await asyncio.to_thread(self._load, directory))
                return
            for weights in _loading(directory, self._config, self._dtype):
                if weights is not None:
                    self._found = (directory, weights)
                await asyncio.sleep(0)  # the engine makes a step

    def take(self, source: Path | Mapping[str, torch.Tensor]) -> Weights:
        """Return the weights of an update, and forget those that were read; raises as `load_weights`."""
        found, self._found = self._found, None
        if found is not None and isinstance(source, Path) and found[0] == source:
            return found[1]
        return self._load(source)

    def _load(self, source: Path | Mapping[str, torch.Tensor]) -> Weights:
        if isinstance(source, Path) and is_adapter(source):
            try:
                source = merged(_read_tensors(self.model), source)
            except TornVersion as fault:
                raise EngineError(f"weights {source}: {fault}") from fault
        return load_weights(source, self._config, self._dtype)


def _is_small(directory: Path) -> bool:
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return size <= _PARTED_BYTES and not is_adapter(directory)


class _Taker:
    """Hands out checked tensors by name: in float32, or as views."""

    def __init__(self, directory: Path | str, named: Mapping[str, torch.Tensor], *, copies: bool) -> None:
        self.directory = directory
        self.named = named
        self._copies = copies

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.named.get(name)
        if tensor is None:
            raise EngineError(f"weights {self.directory}: tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            raise EngineError(
                f"weights {self.directory}: {name} has shape {list(tensor.shape)}, the served model has {list(shape)}"
            )
        if not self._copies:
            return tensor
        tensor = tensor.float()
        if not bool(torch.isfinite(tensor).all()):
            raise EngineError(f"weights {self.directory}: {name} holds values that are not finite")
        return tensor


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineError(f"weights {directory}: no *.safetensors file there")
    named: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the handle is not iterable
                    named[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as fault:
            raise EngineError(f"weights {directory}: {path.name} is torn or unreadable ({fault})") from fault
    return named


def _fuse_layer(take: _Taker, prefix: str, config: ModelConfig, dtype: torch.dtype) -> Layer:
    attention, head_dim, hidden = prefix + "self_attn.", config.head_dim, config.hidden
    scale = 1.0 / math.sqrt(head_dim)
    q_scale = 1.0 if config.has_qk_norm else scale
    sizes = (("q", config.heads, q_scale), ("k", config.kv_heads, 1.0), ("v", config.kv_heads, 1.0))
    blocks, biases = [], []
    for kind, count, factor in sizes:
        rows = take(f"{attention}{kind}_proj.weight", count * head_dim, hidden) * factor
        blocks.append(rows if kind == "v" else _pair_rows(rows, head_dim))
        if config.has_qkv_bias:
            bias = take(f"{attention}{kind}_proj.bias", count * head_dim) * factor
            biases.append(bias if kind == "v" else _pair_rows(bias, head_dim))
    qk_gain = None
    if config.has_qk_norm:
        gains = [_pair_rows(take(f"{attention}{kind}_norm.weight", head_dim), head_dim) for kind in "qk"]
        qk_gain = torch.cat([(gains[0] * scale).expand(config.heads, -1), gains[1].expand(config.kv_heads, -1)])
    out = take(attention + "o_proj.weight", hidden, config.heads * head_dim)
    gain = take(prefix + "post_attention_layernorm.weight", hidden)

    def product(parts: list[torch.Tensor], gain: torch.Tensor | None) -> Matrix:
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        return Matrix(joined if gain is None else joined * gain, dtype)

    return Layer(
        qkv=Matrix(
            torch.cat(blocks) * take(prefix + "input_layernorm.weight", hidden),
            dtype,
            torch.cat(biases) if biases else None,
        ),
        qk_gain=qk_gain,
        out=Matrix(out, dtype),
        **_feed_forward(take, prefix + "mlp.", config, gain, product),
    )


def _feed_forward(
    take: _Taker, prefix: str, config: ModelConfig, gain: torch.Tensor, product: Callable[..., Matrix | MappedMatrix]
) -> dict[str, Any]:
    """Return the fields of a `Layer` after its attention.

    Args:
        gain: [hidden] of the norm before.
        product: makes a matrix of parts, whose outputs follow one another, and the gain before it or none.
    """
    hidden, experts = config.hidden, config.experts

    def gated(prefix: str, ffn: int) -> tuple[Matrix | MappedMatrix, Matrix | MappedMatrix]:
        gate_up = [take(f"{prefix}{kind}_proj.weight", ffn, hidden) for kind in ("gate", "up")]
        return product(gate_up, gain), product([take(prefix + "down_proj.weight", hidden, ffn)], None)

    if experts is None:
        gate_up, down = gated(prefix, config.intermediate)
        return {"gate_up": gate_up, "down": down, "experts": None}
    of_each = [gated(f"{prefix}experts.{number}.", experts.intermediate) for number in range(experts.count)]
    router = product([take(prefix + "gate.weight", experts.count, hidden)], gain)
    return {"gate_up": None, "down": None, "experts": Experts(experts, router, of_each)}


def _map_layer(take: _Taker, prefix: str, config: ModelConfig) -> Layer:
    attention, head_dim, hidden = prefix + "self_attn.", config.head_dim, config.hidden
    scale = 1.0 / math.sqrt(head_dim)
    counts = {"q": config.heads * head_dim, "k": config.kv_heads * head_dim, "v": config.kv_heads * head_dim}
    parts = [take(f"{attention}{kind}_proj.weight", count, hidden) for kind, count in counts.items()]
    numbers = torch.arange(sum(counts.values()))
    places = torch.tensor_split(numbers, (counts["q"], counts["q"] + counts["k"]))
    order = torch.cat([*(_pair_rows(rows, head_dim) for rows in places[:2]), places[2]])
    bias = qk_gain = scales = None
    if config.has_qkv_bias:
        bias = torch.cat([take(f"{attention}{kind}_proj.bias", count) for kind, count in counts.items()])[order]
    if config.has_qk_norm:
        gains = [_pair_rows(take(f"{attention}{kind}_norm.weight", head_dim).float(), head_dim) for kind in "qk"]
        qk_gain = torch.cat([(gains[0] * scale).expand(config.heads, -1), gains[1].expand(config.kv_heads, -1)])
    else:
        scales = torch.ones(len(order), dtype=parts[0].dtype)
        scales[: counts["q"]] = scale
        bias = None if bias is None else bias * scales
    gain = take(prefix + "post_attention_layernorm.weight", hidden)
    return Layer(
        qkv=MappedMatrix(parts, take(prefix + "input_layernorm.weight", hidden), order=order, scale=scales, bias=bias),
        qk_gain=qk_gain,
        out=MappedMatrix([take(attention + "o_proj.weight", hidden, config.heads * head_dim)]),
        **_feed_forward(take, prefix + "mlp.", config, gain, MappedMatrix),
    )


def _pair_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[count * head_dim, ...] with (i, i + head_dim / 2), which rotate together, put side by side."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
