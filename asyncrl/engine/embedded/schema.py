"""Bodies and headers of the HTTP API, typed; one decoding pass checks shapes, ranges and unknown sampling keys."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from asyncrl.engine.embedded.request import Sampling
from asyncrl.engine.errors import EngineRefused
from topics.engines import version_of

_NEUTRAL = {
    "n": 1,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop_regex": None,
    "logit_bias": None,
    "custom_params": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}
"""Options of SGLang that this engine lacks: accepted only with values that change nothing."""

_LEAST_TEMPERATURE = 1e-4  # below, logits divided by it overflow

Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Body = TypeVar("Body", bound=msgspec.Struct)


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`sampling_params` of a request; null and absent both mean the default of `Sampling`."""

    max_new_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    min_new_tokens: Count | None = None
    stop: Name | Annotated[list[Name], Meta(max_length=64)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    sampling_seed: int | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_regex: Any = None
    logit_bias: Any = None
    custom_params: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    def resolve(self) -> Sampling:
        """The sampling asked for.

        Raises:
            EngineRefused: it needs something that only SGLang does.
        """
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        for name, neutral in _NEUTRAL.items():
            value = given.pop(name, neutral)
            if value != neutral:
                raise EngineRefused(
                    f"sampling_params.{name} = {value!r}: not served by the embedded engine; use sglang"
                )
        for name in ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
            given.pop(name, None)  # they shape text, and answers here are token ids
        stop = given.pop("stop", ())
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(text for text in stop if text)
        given["stop_token_ids"] = tuple(given.pop("stop_token_ids", ()))
        if given.get("top_k") == 0:
            raise EngineRefused("sampling_params.top_k = 0: expected -1 (all) or at least 1")
        if 0.0 < given.get("temperature", 1.0) < _LEAST_TEMPERATURE:
            raise EngineRefused(
                f"sampling_params.temperature = {given['temperature']!r}: expected 0 (the likeliest token) or at least "
                f"{_LEAST_TEMPERATURE}"
            )
        sampling = Sampling(**given)
        if sampling.max_new_tokens is not None and sampling.min_new_tokens > sampling.max_new_tokens:
            raise EngineRefused(
                f"sampling_params.min_new_tokens = {sampling.min_new_tokens} is above "
                f"max_new_tokens = {sampling.max_new_tokens}"
            )
        return sampling


class GenerateBody(msgspec.Struct):
    """POST /generate. One prompt, or a list of prompts with `rid` and `sampling_params` given once or per prompt."""

    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: Name | list[Name] | None = None
    extra_key: Name | list[Name] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # a larger one comes first; absent: 0
    stream: bool = False
    return_logprob: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: Count = 0  # tokens whose experts are left out
    logprob_start_len: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_logprobs_num: Count | None = None
    token_ids_logprob: list[int] | None = None
    text: Any = None

    @property
    def scores_prompts(self) -> bool:
        """Return whether log-probs of the prompts are asked for."""
        return self.return_logprob and self.logprob_start_len not in (None, -1)


class Asked(msgspec.Struct):
    """One generation out of a body."""

    rid: str
    prompt: list[int]
    sampling: Sampling
    extra_key: str | None


class PauseBody(msgspec.Struct):
    """POST /pause_generation."""

    mode: str = "abort"


class AbortBody(msgspec.Struct):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class MemoryBody(msgspec.Struct):
    """POST /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Name] | None = None  # None: all


class UpdateOptions(msgspec.Struct, kw_only=True):
    """Fields of all updates; those that concern only a GPU are ignored."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class PathBody(msgspec.Struct):
    """POST /read_weights_ahead."""

    model_path: str


class UpdateBody(UpdateOptions):
    """POST /update_weights_from_disk."""

    model_path: str


class FromMemoryBody(UpdateOptions, kw_only=True):
    """POST /update_weights_from_tensor."""

    serialized_named_tensors: list[bytes]  # Base64 of one pickled list of names and tensors for each rank
    load_format: str | None = None


class FromGroupBody(UpdateOptions, kw_only=True):
    """POST /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None


class GroupBody(msgspec.Struct):
    """POST /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveBody(msgspec.Struct):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


def decode(raw: bytes, kind: type[Body]) -> Body:
    """A body of the given type; an empty one has the defaults.

    Raises:
        EngineRefused: not JSON, a wrong type, a value out of range, an unknown sampling key.
    """
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise EngineRefused(str(fault)) from fault


_GENERATE = msgspec.json.Decoder(GenerateBody)


def decode_generate(raw: bytes) -> tuple[GenerateBody, list[Asked], bool]:
    """A /generate body, its generations, and whether it was a batch (which is answered by a list).

    Raises:
        EngineRefused: as `decode`, or an option this engine does not serve, or lists of different lengths.
    """
    try:
        body = _GENERATE.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise EngineRefused(str(fault)) from fault
    for name, unserved in (("text", body.text is not None), ("token_ids_logprob", bool(body.token_ids_logprob))):
        if unserved:
            raise EngineRefused(f"{name} is not served by the embedded engine; send input_ids, take log-probs")
    if body.top_logprobs_num and not body.return_logprob:
        raise EngineRefused("top_logprobs_num without return_logprob: send both")
    if not body.input_ids:
        raise EngineRefused("input_ids is missing or empty; give at least one token")
    batch = isinstance(body.input_ids[0], list)
    prompts: list[Any] = body.input_ids if batch else [body.input_ids]
    if any(isinstance(token, list) != batch for token in body.input_ids):
        raise EngineRefused("input_ids mixes token ids and lists; give one list of ids, or a list of such lists")
    if body.return_routed_experts and (first := body.routed_experts_start_len) > (least := min(map(len, prompts))):
        raise EngineRefused(f"routed_experts_start_len = {first}, expected at most the tokens of the prompt, {least}")
    rids = _spread("rid", body.rid, len(prompts)) if isinstance(body.rid, list) else _new_rids(body.rid, len(prompts))
    keys = _spread("extra_key", body.extra_key, len(prompts))
    if isinstance(body.sampling_params, list):
        samplings = [one.resolve() for one in _spread("sampling_params", body.sampling_params, len(prompts))]
    else:
        samplings = [body.sampling_params.resolve() if body.sampling_params else Sampling()] * len(prompts)
    asked = [Asked(*parts) for parts in zip(rids, prompts, samplings, keys, strict=True)]
    return body, asked, batch


def _new_rids(given: str | None, count: int) -> list[str]:
    if given is None:
        return [secrets.token_hex(16) for _ in range(count)]
    return [given] if count == 1 else [f"{given}_{index}" for index in range(count)]


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """A list with one value per prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise EngineRefused(f"{name} has {len(value)} entries for {count} prompts; give one, or one per prompt")
    return value


LEAST, EXACT = "X-Weight-Version-Min", "X-Weight-Version-Exact"
"""Headers of a request: the least version that may answer it, or the only one."""


class Absent(NamedTuple):
    """The version that a request asks for is not here; asked again, here or elsewhere, it may be."""

    status: int  # 503 if this engine may still load it, 409 if this engine has passed it
    message: str


def absent(label: str, headers: Mapping[str, str]) -> Absent | None:
    """Compare the requested version with the served weights; None if they match.

    Args:
        label: of the weights, `lineage:version:digest`; any other text is no version.

    Raises:
        EngineRefused: a header names no version.
    """
    least, exact = (_wanted(headers, name) for name in (LEAST, EXACT))
    if least is None and exact is None:
        return None
    try:
        version = version_of(label)[1]
    except ValueError:
        return Absent(503, f"the weights are {label!r}, of no version yet")
    for wanted, text in ((least, f"{least} or newer"), (exact, f"{exact} alone")):
        if wanted is not None and version < wanted:
            return Absent(503, f"the weights have version {version}, the request asks for {text}")
    if exact is not None and version > exact:
        return Absent(409, f"the weights have version {version}, the request asks for {exact} alone")
    return None


def _wanted(headers: Mapping[str, str], name: str) -> int | None:
    given = headers.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise EngineRefused(f"{name}: {given[:80]!r}: expected the number of a version, 0 or more")
    return int(given)
