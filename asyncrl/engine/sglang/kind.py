"""The kind of the SGLang servers that the run starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

from asyncrl.config.engine_settings import Capability, EngineGroup, EngineKind
from asyncrl.config.finding import Finding
from asyncrl.engine.sglang import arguments
from asyncrl.torch_gpus import gpus_of_torch, last_line_of

_FIND = "import importlib.util; print(importlib.util.find_spec('sglang') is not None)"


class SGLang(EngineKind):
    """SGLang 0.5.17."""

    title = "SGLang"
    architectures = "sglang/srt/models"
    capabilities = frozenset(Capability) - {Capability.ADDRESSES, Capability.GLOO}
    switches: ClassVar = {
        Capability.SLEEP: arguments.MEMORY_SAVER,
        Capability.SEEDS: arguments.DETERMINISTIC,
        Capability.EXPERTS: arguments.RETURN_EXPERTS,
    }
    memory_option = arguments.MEMORY_SHARE
    size_options = "--tp-size, --pp-size, --dp-size"
    control = "asyncrl.engine.sglang.control:SGLangControl"
    profiler = "asyncrl.engine.sglang.profile:record_server"

    def on_gpus(self, group: EngineGroup) -> bool:
        return group.value_of("--device") in ("", "cuda")

    def role(self, group: EngineGroup) -> str:
        return group.value_of("--disaggregation-mode") or "regular"

    def ranks(self, group: EngineGroup) -> int:
        return arguments.tensor_ranks(group)

    def copies(self, group: EngineGroup) -> int:
        return arguments.copies(group)

    def checks(self, groups: Mapping[str, EngineGroup], update: str) -> Iterator[Finding]:
        for table, group in groups.items():
            if (fronts := arguments.fronts(group)) > 1:
                message = f"found {arguments.FRONTS} {fronts}: only one of these processes learns the name of new "
                message += "weights, and the others answer under the old one; remove it"
                yield Finding((f"{table}.arguments",), message)
        prefill = {table: group for table, group in groups.items() if group.role == "prefill"}
        yield from _bootstrap_ports(prefill)
        if prefill and update == "in_place":
            message = "tokens name the weights of a decode server, and a prefill server may have newer ones under "
            message += 'requests that stay; set weights.update = "resume"'
            yield Finding((*(f"{table}.arguments" for table in prefill), "weights.update"), message)

    def transport_checks(self, table: str, group: EngineGroup, transport: str) -> Iterator[Finding]:
        keys = (f"{table}.arguments", "weights.transport")
        if group.copies > 1:
            message = f"weights reach only the ranks of one tensor-parallel model, found {group.copies} of them by "
            message += '--pp-size and --dp-size; set --enable-dp-attention, or weights.transport = "never"'
            yield Finding(keys, message)
        if transport == "nccl" and any(word.partition("=")[0] == arguments.SPECULATIVE for word in group.arguments):
            message = "SGLang gives weights that come over NCCL only to the model, and would draft with those of its "
            message += f'start; set weights.transport = "never", or leave {arguments.SPECULATIVE} out'
            yield Finding(keys, message)

    def hints(self, table: str, group: EngineGroup, model: str) -> Iterator[str]:
        """Find servers whose own warm-up, a sentence of English, a made model's tokenizer refuses."""
        if not model and not {"--skip-server-warmup", "--skip-tokenizer-init"} & {*group.arguments}:
            yield (
                f"{table}.arguments: SGLang warms up with a text that the tokenizer of model.create has no tokens for, "
                "and ends; add --skip-server-warmup"
            )

    def adapter_problem(self, group: EngineGroup, targets: Collection[str]) -> str:
        if problem := unfused(targets):
            return problem
        if group.copies > 1 or group.role != "regular":
            return "servers with --pp-size, --dp-size or --disaggregation-mode do not"
        return "servers that draft tokens do not" if group.value_of(arguments.SPECULATIVE) else ""

    def form_problem(self, form: str) -> str:
        if form != "int4-groups":
            return ""
        return "SGLang changes the layout of INT4 matrices when it starts, and takes no second version"

    def key_problem(self, key: str) -> str:
        if not key.startswith("-"):
            return ""
        return "SGLang reads its key as an argument, which may not begin with '-'; give the server another key"

    def machine_checks(self, table: str, group: EngineGroup) -> Iterator[Finding]:
        if last_line_of(_FIND, group.environment) != "True":
            message = f'{table}.kind = "{group.kind}", but there is no package sglang here; install it: pip install -e'
            message += f' ".[sglang]", or name its folder in {table}.environment.PYTHONPATH'
            yield Finding((f"{table}.kind",), message)
        if group.gpus:
            count, version = gpus_of_torch(group.environment)
            if missing := [number for number in group.gpus if number >= (count or 0)]:
                found = f"torch {version} finds {count}" if count is not None else f"torch cannot be asked: {version}"
                message = f"found {missing}, expected numbers of GPUs that are here, from 0 up; {found}"
                yield Finding((f"{table}.gpus",), message)


def unfused(targets: Collection[str]) -> str:
    """Return why SGLang 0.5.17 cannot add adapters of these projections; empty if it can.

    It fuses some projections into one matrix, and fails or skips one without its q or gate partner.
    """
    attention = {"q_proj", "k_proj", "v_proj"}.intersection(targets)
    if attention and not attention >= {"q_proj", "v_proj"}:
        return "learner.lora.targets has some of q_proj, k_proj, v_proj, and not q_proj and v_proj"
    if "up_proj" in targets and "gate_proj" not in targets:
        return "learner.lora.targets has up_proj without gate_proj"
    return ""


def _bootstrap_ports(groups: Mapping[str, EngineGroup]) -> Iterator[Finding]:
    taken: dict[int, str] = {}
    for table, group in groups.items():
        servers, first = max(group.count, group.most if group.gpus else 0), arguments.bootstrap_port(group)
        for port in range(first, first + servers):
            if other := taken.get(port):
                message = f"prefill servers of both groups would listen at port {port}; set another "
                keys = (f"{other}.arguments", f"{table}.arguments")
                yield Finding(keys, message + f"--disaggregation-bootstrap-port in {table}.arguments")
                break
            taken[port] = table


KIND = SGLang()
