"""The kind of vLLM servers, which the run starts, or finds at the addresses of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from asyncrl.config.engine_settings import Capability, EngineGroup, EngineKind
from asyncrl.config.finding import Finding
from asyncrl.engine.vllm import api, arguments
from asyncrl.torch_gpus import last_line_of

_OWN = frozenset(Capability) - {
    Capability.ADDRESSES,
    Capability.EXPERTS,
    Capability.GRAMMARS,
    Capability.PROFILES,
}
_OF_STARTED = {Capability.PROCESSES, Capability.STAGED, Capability.SLEEP}
_OF_STARTED |= {Capability.IPC, Capability.NCCL, Capability.GLOO}
_SET = (arguments.LOGPROBS, "--weight-transfer-config", "--worker-extension-cls", "--stream-interval")


class VLLM(EngineKind):
    """vLLM 0.32."""

    title = "vLLM"
    architectures = "vllm/model_executor/models"
    capabilities = _OWN
    whole = False
    switches: ClassVar = {Capability.SLEEP: arguments.SLEEP}
    memory_option = arguments.MEMORY_SHARE
    size_options = "--tensor-parallel-size, --pipeline-parallel-size, --data-parallel-size"
    control = "asyncrl.engine.vllm.control:VLLMControl"
    client = "asyncrl.engine.vllm.client:open_client"

    def capabilities_of(self, group: EngineGroup) -> frozenset[Capability]:
        return _OWN - _OF_STARTED | {Capability.ADDRESSES} if group.addresses else _OWN

    def control_of(self, group: EngineGroup) -> str:
        return "asyncrl.engine.vllm.control:ExternalVLLM" if group.addresses else self.control

    def on_gpus(self, group: EngineGroup) -> bool:
        return not group.addresses and arguments.CPU_MEMORY not in group.environment

    def ranks(self, group: EngineGroup) -> int:
        return arguments.tensor_ranks(group)

    def copies(self, group: EngineGroup) -> int:
        return arguments.copies(group)

    def checks(self, groups: Mapping[str, EngineGroup], update: str) -> Iterator[Finding]:
        for table, group in groups.items():
            if group.number_of(arguments.FRONTS) > 1:
                message = f"found {arguments.FRONTS} above 1: an abort reaches the requests of one of these processes; "
                yield Finding((f"{table}.arguments",), message + "remove it")
            if taken := [word for word in group.arguments if word.partition("=")[0] in _SET]:
                yield Finding((f"{table}.arguments",), f"found {taken[0]}, which the run itself sets; remove it")

    def transport_checks(self, table: str, group: EngineGroup, transport: str) -> Iterator[Finding]:
        if group.copies > 1:
            message = f"weights reach only the ranks of one tensor-parallel model, found {group.copies} of them by "
            message += '--pipeline-parallel-size and --data-parallel-size; set weights.transport = "never"'
            yield Finding((f"{table}.arguments", "weights.transport"), message)

    def form_problem(self, form: str) -> str:
        return "" if form in ("model", "plain") else "vLLM has not been run with versions in a quantised form"

    def machine_checks(self, table: str, group: EngineGroup) -> Iterator[Finding]:
        if group.addresses:
            return
        needed = {**api.ALWAYS, **api.DIRECT, **(api.ADAPTERS if group.adapters == "served" else {})}
        needed |= api.SLEEP if arguments.SLEEP in group.arguments else {}
        found, *calls = last_line_of(api.program(needed), group.environment).split()
        if found != "found":
            message = f'{table}.kind = "vllm", but there is no package vllm here; name its folder in '
            yield Finding((f"{table}.kind",), f"{message}{table}.environment.PYTHONPATH")
        elif missing := api.lacking(calls, needed):
            message = f"the vLLM here lacks {missing}; install vLLM 0.32"
            yield Finding((f"{table}.kind",), message)


KIND = VLLM()
