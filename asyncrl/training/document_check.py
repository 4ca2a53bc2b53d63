"""A test of how a model takes several documents: a packed row must give the logits of separate documents.

The test needs no weights: it is made on a small random model of the same configuration, which has each kind of layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError

from asyncrl.data.model_dir import ModelError
from asyncrl.training.attention import DOCUMENTS, Documents, document_attention
from asyncrl.training.delta_nets import check_kernels, compute_in_torch, find_kernels, has_kernels
from asyncrl.training.document_model import Arrangement, DocumentModel
from asyncrl.training.head import decoder_of, read_head
from asyncrl.training.packing import as_tree, documents_of
from asyncrl.training.prefix_tree import prefix_tree
from asyncrl.training.transformers_parts import ALL_ATTENTION_FUNCTIONS, AutoConfig, AutoModelForCausalLM

_LENGTHS = (13, 22, 9)  # of documents; longer than the windows below
_FORKED = (24, 20)  # lengths of two documents with common first tokens
_COMMON = 17
_TOLERANCE = 1e-4  # of logits, whose size is about 1
_LARGEST = {
    "vocab_size": 128,
    "per_layer_input": 128,
    "intermediate_size": 32,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "index_topk": 8,
}
"""Sizes that are no larger in the small model; also of names that end so."""
_HIDDEN, _OF_HEAD = 64, 16  # channels, and of a head where its size follows from them
_FAULTS = (ValueError, RuntimeError, TypeError, LookupError, AttributeError, StrictDataclassError)


class _Case(NamedTuple):
    """Documents with the logits that the model has for each alone."""

    tokens: torch.Tensor  # [1, T]
    documents: Documents
    expected: torch.Tensor  # [T, V]


def arrangement_of(config: Any) -> Arrangement:
    """Find how a model takes documents; the result is kept for each configuration.

    Args:
        config: of transformers.

    Raises:
        ModelError: documents change one another in every arrangement, transformers cannot compute the model here, or
            flash-linear-attention fails on this GPU.
    """
    text = config.get_text_config()
    return _arrangement(text.model_type, json.dumps(text.to_dict(), sort_keys=True, default=str))


@cache
def _arrangement(kind: str, values: str) -> Arrangement:
    try:
        return _arrangement_on("cpu", kind, values)
    except ModelError:
        if not torch.cuda.is_available():
            raise
    # Some packages replace functions of transformers by kernels that run on GPUs alone.
    return _arrangement_on("cuda", kind, values)


def _arrangement_on(device: str, kind: str, values: str) -> Arrangement:
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.no_grad(), torch.device(device):
        torch.manual_seed(0)
        model, case = _small_model(kind, json.loads(values))
        found = _tested(model, case)
        delta_net = next(filter(has_kernels, model.modules()), None)
    if delta_net is not None and torch.cuda.is_available() and (kernels := find_kernels()) is not None:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()]), torch.device("cuda"):
            check_kernels(delta_net.to("cuda"), kernels)
    return found


def _tested(model: Any, case: _Case) -> Arrangement:
    """Try a packed row, then the layers that leak once per document, then padded rows."""
    apart, leak = set[str](), ""
    while True:
        tried = Arrangement(apart=frozenset(apart))
        fault = _difference(model, case, tried)
        if not fault:
            shares = not apart and not _difference(model, _forked(model), tried)
            return tried._replace(shares=shares, undivided=min(apart, default="") or _unusual(model, case, tried))
        leak = _leaking(model, case, tried) or leak
        if not leak or leak in apart:
            break
        apart.add(leak)
    leak = leak or f"{type(model).__name__} ({fault})"
    padded = Arrangement(packs=False, shares=False, reason=leak, undivided=leak)
    if problem := _difference(model, case, padded):
        raise ModelError(
            f"a row of several documents leaks in {leak}, and padded rows differ from separate documents ({problem}); "
            "asyncrl cannot train this model, name another"
        )
    return padded


def _difference(model: Any, case: _Case, arrangement: Arrangement) -> str:
    """Return how logits differ from those of separate documents; empty if they are equal."""
    documents = DocumentModel(model, arrangement)
    try:
        found = read_head(model).logits(documents.hidden(case.tokens, case.documents)[0])
        largest = float((found - case.expected).abs().max())
    except _FAULTS as error:
        return f"{type(error).__name__}: {error}"
    finally:
        documents.release()
    return "" if largest <= _TOLERANCE * max(1.0, float(case.expected.abs().max())) else f"logits by {largest:.2g}"


def _unusual(model: Any, case: _Case, arrangement: Arrangement) -> str:
    """Return the class of a layer with another attention than full attention; empty if there is none."""
    found = set[str]()

    def recorded(module: Any, *heads: Any, **options: Any) -> tuple[torch.Tensor, None]:
        if options.get("sliding_window"):
            found.add(f"{type(module).__name__} with a sliding window")
        elif options.get("s_aux") is not None or options.get("softcap"):
            found.add(f"{type(module).__name__} with sinks or bounded products")
        return document_attention(module, *heads, **options)

    ALL_ATTENTION_FUNCTIONS.register(DOCUMENTS, recorded)
    try:
        _difference(model, case, arrangement)
    finally:
        ALL_ATTENTION_FUNCTIONS.register(DOCUMENTS, document_attention)
    return min(found, default="")


def _alone(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits of documents, each by transformers' own attention, end to end."""
    model.set_attn_implementation("eager")
    return torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])


def _packed(model: Any) -> _Case:
    rows = [torch.randint(3, model.config.vocab_size, (length,)) for length in _LENGTHS]
    return _Case(torch.cat(rows)[None], documents_of(_LENGTHS, model.device), _alone(model, rows))


def _forked(model: Any) -> _Case:
    """Two documents with common first tokens, which the sequence has once."""
    first, second = (np.random.default_rng(0).integers(3, model.config.vocab_size, length) for length in _FORKED)
    second[:_COMMON] = first[:_COMMON]
    tree = prefix_tree([first, second])
    _, documents = as_tree(tree, model.device)
    tokens, expected = torch.zeros(tree.size, dtype=torch.int64), torch.zeros(tree.size, model.config.vocab_size)
    for row, places in zip((first, second), tree.places, strict=True):
        given = torch.from_numpy(row).to(model.device)
        tokens[places], expected[places] = given, _alone(model, [given])
    return _Case(tokens[None], documents, expected)


def _leaking(model: Any, case: _Case, arrangement: Arrangement) -> str:
    """Return the class of the first part of a layer whose output differs on equal inputs; empty if none is found."""
    bounds = [0, *accumulate(_LENGTHS)]
    rows = [case.tokens[0, start:end] for start, end in pairwise(bounds)]
    with _Recording(model) as alone:
        _alone(model, rows)
    documents = DocumentModel(model, arrangement)
    try:
        with _Recording(model) as packed:
            documents.hidden(case.tokens, case.documents)
    except _FAULTS:
        pass  # the parts before the failing one are recorded
    finally:
        documents.release()
    for module, passes in packed.passes.items():
        (given, made), others = passes[0], alone.passes.get(module, [])
        before, after = (torch.cat([one[number] for one in others], 1) for number in (0, 1)) if others else (None, None)
        if before is None or after is None or before.shape != given.shape or after.shape != made.shape:
            continue
        if torch.allclose(given, before, 0, _TOLERANCE) and not torch.allclose(made, after, 0, _TOLERANCE):
            return type(module).__name__
    failed = next((module for module in alone.passes if module not in packed.passes), None)
    return "" if failed is None else type(failed).__name__


class _Recording:
    """Inputs and outputs of the parts of all layers, in the order in which the parts run."""

    def __init__(self, model: Any) -> None:
        self.passes: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        parts = [part for layer in decoder_of(model).layers for part in layer.children()]
        self._hooks = [part.register_forward_hook(self._keep, with_kwargs=True) for part in parts]

    def _keep(self, module: Any, arguments: Any, options: Any, output: Any) -> None:
        given = [one for one in (*arguments, *options.values()) if isinstance(one, torch.Tensor) and one.ndim == 3]
        made = output[0] if isinstance(output, tuple) else output
        if given and isinstance(made, torch.Tensor) and made.ndim == 3:
            self.passes.setdefault(module, []).append((given[0], made))

    def __enter__(self) -> _Recording:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _small_model(kind: str, values: dict[str, Any]) -> tuple[Any, _Case]:
    """Make a small model with documents; of the full width where the configuration allows no smaller one."""
    build: Any = AutoModelForCausalLM  # its call has no types
    fault: Exception = ValueError("no sizes")
    for sizes in _sizes(values):
        try:
            config = AutoConfig.for_model(kind, **sizes)
            model = build.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
            compute_in_torch(model)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            return model, _packed(model)
        except _FAULTS as error:
            fault = error
    raise ModelError(
        f"transformers cannot compute a small model of type {kind} here ({type(fault).__name__}: {fault}); "
        "asyncrl cannot test whether documents leak, name another model"
    ) from fault


def _sizes(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield smaller configurations, the smallest first."""
    layers = _kinds_of_layers(values)
    small = {name: _smaller(name, value, values.get("num_hidden_layers"), layers) for name, value in values.items()}
    for name in ("architectures", "quantization_config", "torch_dtype", "dtype", "model_type", "transformers_version"):
        small.pop(name, None)
    small |= {name: None if "pad" in name else 0 for name in small if name.endswith("_token_id")}
    small |= {"num_hidden_layers": layers, "attention_dropout": 0.0}
    heads = int(values.get("num_attention_heads") or 1)
    apart = values.get("head_dim") or values.get("v_head_dim")
    hidden = min(int(values.get("hidden_size") or _HIDDEN), _HIDDEN if apart else heads * _OF_HEAD)
    yield small | {"hidden_size": hidden}
    yield small
    yield small | {"num_hidden_layers": values.get("num_hidden_layers")} | _per_layer(values)


def _smaller(name: str, value: Any, layers: Any, kept: int) -> Any:
    if isinstance(value, list | str) and isinstance(layers, int) and len(value) == layers > 1:
        return value[:kept]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name == "first_k_dense_replace":
        return min(value, 1)
    return next((min(value, most) for ending, most in _LARGEST.items() if name.endswith(ending)), value)


def _per_layer(values: dict[str, Any]) -> dict[str, Any]:
    layers = values.get("num_hidden_layers")
    return {name: one for name, one in values.items() if isinstance(one, list | str) and len(one) == layers}


def _kinds_of_layers(values: dict[str, Any]) -> int:
    """Return the number of first layers that have each kind, at least two."""
    kinds = list(zip(*(map(str, one) for one in _per_layer(values).values()), strict=True))
    first = [kinds.index(kind) for kind in kinds]
    least = min(2, int(values.get("num_hidden_layers") or 2))
    return max([least, *(number + 1 for number in first)])
