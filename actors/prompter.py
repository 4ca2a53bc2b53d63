"""The prompter: issues prompts as long as there is credit, in the seeded order of the data."""

from __future__ import annotations

import asyncio

import xxhash

from actors.actor import ActorFault, Context
from actors.keeper import Decision, Input, Keeper
from actors.prompter_fold import PrompterFold, Wanted
from asyncrl.tasks.data import DataError, DataSource, label_reader, open_source
from topics.actors import REISSUE_REQUESTED
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.groups import GROUP_DROPPED
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.streams import ADMISSION_PAUSED, ADMISSION_RESUMED
from topics.topic import ACTORS, BATCHES, FLEET, PROMPTS, TRAINING
from topics.trajectories import TRAJECTORY_DROPPED
from topics.weights import TRAINING_FINISHED

_AT_ONCE = 512  # decisions of one append


async def main(context: Context) -> None:
    """Play the prompter until the run ends."""
    cast = context.cast
    try:
        source = await asyncio.to_thread(
            open_source,
            cast.task.source,
            options=cast.task.options,
            seed=cast.seed,
            base=context.files.base,
            labels_for=label_reader(cast.reward.function, warmup_steps=cast.warmup.steps),
        )
    except DataError as error:
        raise ActorFault(str(error)) from error
    rows = source.rows_per_epoch
    fold = PrompterFold(cast, end=cast.task.epochs * rows if cast.task.epochs and rows else None)
    keeper = Keeper(
        context,
        PROMPTS,
        [
            Input(BATCHES, [BATCH_PACKED, GROUP_DROPPED, TRAJECTORY_DROPPED]),
            Input(TRAINING, [BATCH_TRAINED, TRAINING_FINISHED]),
            Input(ACTORS, [REISSUE_REQUESTED]),
            Input(FLEET, [ADMISSION_PAUSED, ADMISSION_RESUMED]),
        ],
        fold,
        own_headers_only=True,
    )
    await keeper.start()
    while not context.stop.is_set():
        wanted = fold.wanted()
        context.vitals["open_groups"] = fold.open_groups
        context.vitals["no_more_prompts"] = float(fold.at_end)
        if wanted:
            await keeper.append(
                [
                    decide(item, cast.seed, _rows(item, cast.warmup.rows_per_trajectory, source))
                    for item in wanted[:_AT_ONCE]
                ]
            )
        else:
            await keeper.changes()
    await keeper.close()


def _rows(wanted: Wanted, rows_per_trajectory: int, source: DataSource) -> list[PromptRow]:
    return [source.row(number) for number in wanted.rows(rows_per_trajectory)] if wanted.carries_rows else []


def decide(wanted: Wanted, seed: int, rows: list[PromptRow]) -> Decision:
    """The message that issues one trajectory: a pure function of its number, the seed and its rows."""
    name = f"{wanted.prompt_id}-{wanted.member}"
    message = PromptIssued(
        prompt_id=wanted.prompt_id,
        member=wanted.member,
        group_size=wanted.group_size,
        rows=rows,
        stage=wanted.stage,
        attempt=wanted.attempt,
        min_version=wanted.min_version,
        seed=xxhash.xxh3_64_intdigest(f"{seed}:{name}:{wanted.attempt}".encode()) >> 1,
        origin=wanted.origin,
    )
    return Decision(PROMPT_ISSUED, message, key=name, id=f"{name}:{wanted.attempt}")
