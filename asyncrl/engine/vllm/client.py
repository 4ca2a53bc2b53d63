"""The client of vLLM 0.32: SGLang's calls of a client and a control, in the words of vLLM's HTTP API."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.engine_settings import EngineSettings
from asyncrl.engine.answer import Generation, OnTokens
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import read_key
from asyncrl.engine.errors import EngineRefused
from asyncrl.engine.fleet import Sampler
from asyncrl.engine.server_load import EngineLoad
from asyncrl.engine.vllm.answers import server_id
from asyncrl.engine.vllm.streams import StreamBatcher
from asyncrl.weights.transfer_manifest import Described, GroupPlace
from topics.engines import check_address
from topics.wire import Int32Array

_MODES = {"abort": "abort", "in_place": "keep"}
_REQUESTS = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
_TOKENS = ("vllm:generation_tokens_total{", "vllm:prompt_tokens_total{")


class VLLMClient(EngineClient):
    """Samples from one vLLM server and controls it; raises as `EngineClient`."""

    batcher = StreamBatcher
    _batcher: StreamBatcher
    extended = False  # the server's workers have the extension of `asyncrl.engine.vllm.transfer`
    tracked = False  # the server counts its requests at its front
    _updates = False  # the server is between the first and the last tensors of a version

    async def generate(
        self,
        input_ids: Sequence[int] | Int32Array,
        sampling: SamplingParams,
        *,
        extra_key: str | None = None,
        on_tokens: OnTokens | None = None,
        stream_interval: int = 16,
        alone: bool = True,
    ) -> Generation:
        """Continue a token sequence in a separate request; the server has its own stream interval."""
        self._batcher.ask = self.label
        options: dict[str, Any] = {"extra_key": extra_key, "on_tokens": on_tokens, "stream_interval": stream_interval}
        return await super().generate(input_ids, sampling, **options, alone=True)

    def announced(self, key: str) -> None:
        """Take note of the weights that new requests are for."""
        self._batcher.announced = key

    async def abort(self, rid: str) -> None:
        await self._call("POST", "/abort_requests", {"request_ids": [server_id(rid)]})

    async def abort_all(self) -> None:
        await self._call("POST", "/abort_requests", {})

    async def pass_scheduler(self) -> None:
        """Return at once: a call that ends requests returns when the scheduler has obeyed."""

    async def halt(self) -> None:
        await self.pause("abort")

    async def pause(self, mode: Literal["abort", "in_place", "retract"]) -> None:
        if mode not in _MODES:
            raise EngineRefused(f'vLLM has no pause "{mode}"; expected {" or ".join(_MODES)}')
        await self._call("POST", f"/pause?mode={_MODES[mode]}")

    async def continue_generation(self) -> None:
        await self._call("POST", "/resume")

    async def update_weights(self, path: str | Path, version: str, flush_cache: bool) -> None:
        """Load weights from a directory, and call them `version`; a pause before has dropped the cached prefixes."""
        name = "path" if self.extended else "weights_path"
        body = {"method": "load_version" if self.extended else "reload_weights", "kwargs": {name: str(path)}}
        await self._call("POST", "/collective_rpc", body)
        if flush_cache:
            await self._call("POST", "/reset_prefix_cache")
        await self.name_weights(version)

    async def load_adapter(self, name: str, path: Path) -> list[str]:
        await self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        models = self._decode(await self._call("GET", "/v1/models"), dict[str, Any])["data"]
        return [str(model["id"]) for model in models if model.get("parent")]

    async def unload_adapter(self, name: str) -> None:
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def name_weights(self, version: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def release_memory(self) -> None:
        """Give the memory of weights and caches back; the server continues with the next weights that it loads.

        vLLM samples again when it wakes up. Until the next update no token may have the name of a version.
        """
        await self.name_weights("none")
        await self._call("POST", "/sleep?level=2")

    async def resume_memory(self) -> None:
        await self._call("POST", "/wake_up")
        await self.pause("abort")

    async def update_from_memory(self, tensors: bytes, version: str | None, ranks: int = 1) -> None:
        await self._update({"packed": base64.b64encode(tensors).decode()}, version)

    async def join_group(self, place: GroupPlace) -> None:
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": {"join": [*place]}})

    async def leave_group(self, name: str) -> None:
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": {"leave": name}})

    async def update_from_group(self, name: str, tensors: Sequence[Described], version: str | None) -> None:
        described = [[one.name, one.dtype, one.shape] for one in tensors]
        await self._update({"group": name, "tensors": described}, version)

    async def _update(self, info: dict[str, Any], version: str | None) -> None:
        """Load some tensors; those with a version are the last ones."""
        if not self._updates:
            await self._call("POST", "/start_weight_update")
        self._updates = False  # after a fault the server has forgotten the tensors before
        await self._call("POST", "/update_weights", {"update_info": info})
        if version is None:
            self._updates = True
        else:
            await self._call("POST", "/finish_weight_update", {"weight_version": version})

    async def _load(self, query: str, extra_s: float = 0.0) -> EngineLoad:
        """Read the load from the server's metrics; its tokens are all that it has computed.

        Requests that were aborted stay in the metrics until the next step, which an idle server does not make.
        """
        requests = tokens = hits = asked = 0.0
        used: list[float] = []  # share of the cache of each scheduler
        for line in (await self._call("GET", "/metrics")).decode().splitlines():
            if line.startswith(_REQUESTS):
                requests += float(line.rpartition(" ")[2])
            elif line.startswith(_TOKENS):
                tokens += float(line.rpartition(" ")[2])
            elif line.startswith("vllm:kv_cache_usage_perc{"):
                used.append(float(line.rpartition(" ")[2]))
            elif line.startswith("vllm:prefix_cache_hits_total{"):
                hits += float(line.rpartition(" ")[2])
            elif line.startswith("vllm:prefix_cache_queries_total{"):
                asked += float(line.rpartition(" ")[2])
        if self.tracked:
            requests = self._decode(await self._call("GET", "/load"), dict[str, int])["server_load"]
        cached = sum(used) / len(used) if used else None
        return EngineLoad(int(requests), int(tokens), cached, hits / asked if asked else None)

    async def model_info(self) -> dict[str, Any]:
        """Return the name of the weights: vLLM does not tell the path that it has loaded."""
        return self._decode(await self._call("GET", "/weight_info"), dict[str, Any])

    async def server_info(self) -> dict[str, Any]:
        """Return the settings of the server."""
        raw = await self._call("GET", "/server_info?config_format=json")
        return dict(self._decode(raw, dict[str, Any]).get("vllm_config") or {})

    async def paths(self) -> set[str]:
        """Return the paths that the server has."""
        return {*self._decode(await self._call("GET", "/openapi.json"), dict[str, Any]).get("paths", {})}


def open_client(_settings: EngineSettings, address: str, key_file: Path | None) -> Sampler:
    """A client of a vLLM server."""
    check_address(address)
    return VLLMClient(address, api_key=read_key(key_file))
