"""Engines of both kinds for the same tests: the embedded one, and a real SGLang where there is one.

`ASYNCRL_SGLANG` is the PYTHONPATH with which this Python imports SGLang 0.5.17; `scripts/sglang-cpu` makes a folder for
a machine without a GPU and runs these tests. `ASYNCRL_SGLANG_ARGUMENTS` replaces the arguments for such a machine.
"""

import contextlib
import json
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.config.settings import EngineSettings
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.embedded.control import EmbeddedControl
from asyncrl.engine.sglang.control import SGLangControl

FOUND = os.environ.get("ASYNCRL_SGLANG", "")
ABSENT = "ASYNCRL_SGLANG names no folder with SGLang; scripts/sglang-cpu makes one (2.7 GB) and runs this test"
ON_CPU = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
    "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled --max-total-tokens 16384 "
    "--dtype float32 --skip-server-warmup"
)
STREAMED = "--incremental-streaming-output"
EXACT = "float32" in os.environ.get("ASYNCRL_SGLANG_ARGUMENTS", ON_CPU)
"""False for kernels of GPUs, which ask for bfloat16 and heads of at least 64."""


def arguments() -> list[str]:
    """Arguments of SGLang that this machine needs."""
    return shlex.split(os.environ.get("ASYNCRL_SGLANG_ARGUMENTS", ON_CPU))


GRAMMARS = "llguidance" if "cpu" in arguments() else "xgrammar"
"""What makes grammars: SGLang's own choice runs on GPUs alone."""


def environment() -> dict[str, str]:
    """Variables with which a process imports SGLang."""
    return {"PYTHONPATH": FOUND, "OMP_NUM_THREADS": "1"}


class _Embedded(EmbeddedControl):
    incremental = True

    def arguments(self) -> list[str]:
        """As the product starts it, or with cumulative events, which are SGLang's default."""
        return [word for word in super().arguments() if self.incremental or word != STREAMED]


class _SGLang(_Embedded, SGLangControl):
    module = SGLangControl.module


@asynccontextmanager
async def engine(
    kind: str, model: Path, folder: Path, *, incremental: bool, grammars: str = "", more: Sequence[str] = ()
) -> AsyncIterator[str]:
    """The address of a server that the product's own control has started, for the length of the block.

    Args:
        kind: "embedded" or "sglang".
        folder: for its log and key; the key is "secret".
        grammars: what makes grammars, which needs a tokenizer; "" for none.
        more: arguments of SGLang.
    """
    folder.mkdir()
    (folder / "key").write_text("secret\n")
    # A random model would fill an answer with blanks, which JSON takes between any two of its words.
    formed = ["--grammar-backend", grammars, "--constrained-json-disable-any-whitespace"]
    words = formed if grammars else ["--skip-tokenizer-init"]
    extra = [*arguments(), *words, *more] if kind == "sglang" else []
    settings = EngineSettings(max_running=8, arguments=extra, environment=environment() if kind == "sglang" else {})
    home = ServerSpec("engine-1", settings, model, folder / "log", folder / "key")
    control = {"embedded": _Embedded, "sglang": _SGLang}[kind](home)
    control.incremental = incremental
    try:
        await control.start()
        yield control.address
    finally:
        await control.close()


async def post(served: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and body of an answer, as JSON where it is that."""
    async with served.session() as session, session.post(path, json=body) as response:
        raw = await response.read()
        with contextlib.suppress(ValueError):
            return response.status, json.loads(raw) if raw else None
        return response.status, raw.decode()


async def get(served: Any, path: str) -> tuple[int, Any]:
    """As `post`."""
    async with served.session() as session, session.get(path) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if raw.startswith(b"{") else raw.decode()


def ask(**changes: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}, "return_logprob": True, **changes}


def events_in(raw: str) -> list[dict[str, Any]]:
    """Events of a stream."""
    return [json.loads(event.removeprefix("data: ")) for event in raw.split("\n\n") if event.startswith("data: {")]


def scores(model: Path, prompt: list[int], tokens: list[int]) -> Any:
    """[T] log-probs of tokens by the training forward."""
    import torch
    from transformers import AutoModelForCausalLM

    forward = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = forward(ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1).numpy()
