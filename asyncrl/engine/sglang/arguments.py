"""SGLang's command line, as far as the run depends on what it says."""

from __future__ import annotations

from asyncrl.config.engine_settings import EngineGroup

DETERMINISTIC = "--enable-deterministic-inference"
FRONTS = "--tokenizer-worker-num"
MEMORY_SAVER = "--enable-memory-saver"
MEMORY_SHARE = "--mem-fraction-static"
RETURN_EXPERTS = "--enable-return-routed-experts"
SPECULATIVE = "--speculative-algorithm"


def bootstrap_port(group: EngineGroup) -> int:
    """Port at which the first prefill server of a group meets decode servers; the next has the next one."""
    return group.number_of("--disaggregation-bootstrap-port", otherwise=8998)


def fronts(group: EngineGroup) -> int:
    """Processes of one server that take requests and hand out tokens."""
    return group.number_of(FRONTS)


def tensor_ranks(group: EngineGroup) -> int:
    """Processes among which one server divides its tensors."""
    return group.number_of("--tp-size", "--tp", "--tensor-parallel-size")


def copies(group: EngineGroup) -> int:
    """Stages of a server's pipeline, times copies of its model."""
    data = () if "--enable-dp-attention" in group.arguments else ("--dp-size", "--dp", "--data-parallel-size")
    stages = group.number_of("--pp-size", "--pp", "--pipeline-parallel-size")
    return stages * group.number_of(*data)
