"""Rollout functions for tests: they hold where the row's metadata says, until the file it names exists."""

import asyncio
from pathlib import Path

from asyncrl.errors import EnvironmentFault


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
        tokens += context.tokenizer.encode_plain(await context.tool("look", look, turn, row.metadata)).tolist()


async def expire(metadata):
    """The first call gives up when the test says so; a later one waits for as long as it takes."""
    calls, go = Path(metadata["calls"]), Path(metadata["go"])
    first = not calls.exists()
    calls.open("a").write("call\n")
    while not go.exists():
        if first and go.with_name("expired").exists():
            raise TimeoutError("no answer")
        await asyncio.sleep(0.01)
    return "="


async def one_call(row, context):
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))
    await context.tool("expire", expire, row.metadata)


async def short_turns(row, context):
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    for _ in range(40):
        tokens += (await context.generate(tokens, max_new_tokens=3)).tokens.tolist()


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


async def scored(row, context):
    """Gives an outcome that no second run would give, and goes on."""
    file = Path(f"{row.metadata['calls']}.runs")
    file.open("a").write("run\n")
    runs = len(file.read_text().splitlines())
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))
    context.outcome(runs / 4, metrics={"runs": runs}, artefacts={"note": f"run {runs}"})
    await context.tool("look", look, 1, row.metadata)
    await context.tool("look", look, 2, row.metadata)
    context.outcome(metrics={"runs at the end": runs})


async def no_text(row, context):
    """A rollout whose completion is what no message can hold."""
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None), max_new_tokens=2)
    context.completion = {"number": 5, "half": "\ud800"}[row.metadata["gives"]]


async def black_box(row, context):
    """A program that knows only an address: five turns by OpenAI's client."""
    import openai

    messages = [{"role": "user", "content": row.prompt}]
    async with context.endpoint() as endpoint:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        for turn in range(1, 6):
            reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=24)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": await context.tool("look", look, turn, row.metadata)})
        await client.close()


async def without_place(row, context):
    """A rollout whose environment fails in each run."""
    file = Path(row.metadata["runs"])
    with file.open("a") as runs:
        runs.write("run\n")
    raise EnvironmentFault(f"no place in run {len(file.read_text().splitlines())}")
