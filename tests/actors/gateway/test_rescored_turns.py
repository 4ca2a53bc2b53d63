"""Stored log-probs of live turns, against one forward pass of the same weights at the temperature of each turn."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.bus.connection import Bus
from asyncrl.live.stored import TurnReader
from harness.gateways import Embedded, gateway
from harness.sdks import sdks
from harness.stage import Stage
from topics.trajectories import Segment

TOLERANCE = 1e-4  # nats


def difference(model: torch.nn.Module, row: Segment, temperature: float) -> float:
    """Return the greatest difference of the log-probs of a row's reply from those of the model."""
    tokens = torch.tensor(row.tokens, dtype=torch.long)
    with torch.no_grad():
        logprobs = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
    rescored = logprobs.gather(1, tokens[1:, None])[:, 0].numpy()
    sampled = row.mask[1:] != 0
    return float(np.abs(rescored - row.logprobs[1:])[sampled].max())


async def test_log_probs_are_those_of_the_weights_behind_all_that_was_said_before(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    messages, turns = list[dict[str, str]](), dict[str, float]()
    async with (
        gateway(bus, stage, tmp_path / "model", Embedded()) as served,
        sdks(served.address, served.key) as (first, second),
    ):
        for temperature in (1.0, 0.5, 1.0, 0.25):
            messages.append({"role": "user", "content": "abc"})
            ask = {"model": "any", "messages": messages, "max_tokens": 24}
            if len(messages) % 4 == 1:
                whole = await first.chat.completions.create(**ask, temperature=temperature)
                name, text = whole.id.removeprefix("chatcmpl-"), whole.choices[0].message.content
            else:
                whole = await second.messages.create(**ask, extra_body={"temperature": temperature})
                name, text = whole.id.removeprefix("msg_"), "".join(block.text for block in whole.content)
            turns[name] = temperature
            messages.append({"role": "assistant", "content": text})
        reader = TurnReader(bus)
        stored = {name: await reader.read(name) for name in turns}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert [bool(turn.started.parent) for turn in stored.values()] == [False, True, True, True]
    for name, turn in stored.items():
        assert turn.started.temperature == turns[name]
        assert difference(model, turn.segment(), turns[name]) < TOLERANCE
    name = next(name for name in turns if turns[name] == 0.25)
    assert difference(model, stored[name].segment(), 1.0) > 100 * TOLERANCE  # at another temperature
