"""Rollout functions for tests: they hold where the row's metadata says, until the file it names exists."""

import asyncio
from pathlib import Path


async def look(turn, metadata):
    Path(metadata["calls"]).open("a").write(f"{turn}\n")
    if metadata.get("hold") == turn and not Path(metadata["go"]).exists():
        await asyncio.Event().wait()  # until this process is killed
    return f"{turn}="


async def five_turns(row, context):
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    for turn in range(1, 6):
        answer = await context.generate(tokens)
        tokens += answer.tokens.tolist()
        tokens += context.tokenizer.encode(await context.tool("look", look, turn, row.metadata)).tolist()


async def one_long_turn(row, context):
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))


async def parallel_pair(row, context):
    start = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()

    async def branch(letter):
        tokens = start + context.tokenizer.encode(letter).tolist()
        first = await context.generate(tokens)
        word = await context.tool("look", look, letter, row.metadata)
        tokens += first.tokens.tolist() + context.tokenizer.encode(word).tolist()
        return await context.generate(tokens)

    await asyncio.gather(branch("a"), branch("b"))


async def impatient(row, context):
    """Asks something else each time it is run."""
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))
    calls = Path(row.metadata["calls"])
    await context.tool("look", look, 1, row.metadata)
    await context.generate([5] * len(calls.read_text().splitlines()))
    await context.tool("look", look, 2, row.metadata)


async def broken(row, context):
    raise KeyError("no such letter")
