"""Settings of cards that learner and engines share, which cannot hold together."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.check import Finding
from asyncrl.config.engine_settings import EngineGroup
from asyncrl.config.pools import own_groups, setting_of
from asyncrl.config.setting_types import SCRIPTED
from asyncrl.config.settings import Config, LearnerSettings

_FRACTION = "--mem-fraction-static"
_SAVER = "--enable-memory-saver"


def share_contradictions(config: Config) -> Iterator[Finding]:
    """Find what keeps learner and engines from one card: by turns, or with a part of its memory each."""
    placement = config.placement
    if placement.share != "memory" and placement.learner_fraction != type(placement)().learner_fraction:
        keys = ("placement.learner_fraction", "placement.share")
        yield Finding(keys, 'has no effect without placement.share = "memory"; set it, or remove the fraction')
    if placement.share != "none" and not config.trains:
        message = 'no learner runs here (only), with which engines could share a card; set placement.share = "none"'
        yield Finding(("placement.share", "only"), message)
    elif placement.share != "none" and placement.kind != "local":
        message = f'learner and engines have cards of their own by placement.kind = "{placement.kind}"; set "none"'
        yield Finding(("placement.share", "placement.kind"), message)
    elif placement.share == "turns":
        yield from _turns(config)
    elif placement.share == "memory":
        yield from _memory(config)


def _turns(config: Config) -> Iterator[Finding]:
    trainer = config.learner.trainer
    if trainer == SCRIPTED:
        message = 'a scripted trainer has nothing on a card; set placement.share = "none"'
        yield Finding(("learner.trainer", "placement.share"), message)
    if config.weights.direct != "never":
        message = 'the learner has left the card when engines load; with placement.share = "turns" set "never"'
        yield Finding(("weights.direct", "placement.share"), message)
    if config.engine.router.count:
        message = 'a router does not follow turns on a card; set it to 0, or placement.share = "none"'
        yield Finding(("engine.router.count", "placement.share"), message)
    for purpose in own_groups(config):
        message = f'engines of {purpose} alone keep their card; let all engines serve them, or set "none"'
        yield Finding((setting_of(purpose), "placement.share"), message)
    for table, group in config.engine.tables.items():
        if group.staged:
            message = 'staged weights stay on the card when engines leave it; set it to false, or "none"'
            yield Finding((f"{table}.staged", "placement.share"), message)
        if group.kind not in ("embedded", "sglang"):
            message = f'"{group.kind}" servers are not this run\'s to empty; expected embedded or sglang for turns'
            yield Finding((f"{table}.kind", "placement.share"), message)
        if group.kind == "sglang" and _SAVER not in group.arguments:
            message = f'SGLang frees memory only with "{_SAVER}"; add it for placement.share = "turns"'
            yield Finding((f"{table}.arguments", "placement.share"), message)


def _memory(config: Config) -> Iterator[Finding]:
    placement, learner = config.placement, config.learner
    if not learner.device.startswith("cuda"):
        message = f'found "{learner.device}", expected cuda: parts of a card\'s memory are shared'
        yield Finding(("learner.device", "placement.share"), message)
        return
    cards = dict.fromkeys(_cards_of(learner), placement.learner_fraction)
    keys = ["placement.learner_fraction"]
    for table, group in config.engine.tables.items():
        if group.kind != "sglang":
            continue
        stated = _fraction(group)
        if stated is None:
            message = f'state the part of the memory that a server takes: "{_FRACTION}", a number between 0 and 1'
            yield Finding((f"{table}.arguments", "placement.share"), message)
            return
        keys.append(f"{table}.arguments")
        servers = 1 if group.gpus else group.count  # without gpus all of them lie on the first cards
        for card in group.gpus or range(group.gpus_needed):
            cards[card] = cards.get(card, 0.0) + servers * stated
    for card, total in sorted(cards.items()):
        if total > 1.0:
            message = f"learner and servers take {total:g} of the memory of GPU {card} together, expected at most 1"
            yield Finding(tuple(keys), message)
            return


def _fraction(group: EngineGroup) -> float | None:
    """The part of a card's memory that a server takes; None where its arguments do not say."""
    try:
        found = float(group.value_of(_FRACTION))
    except ValueError:
        return None
    return found if 0.0 < found < 1.0 else None


def _cards_of(learner: LearnerSettings) -> range:
    """Numbers of the learner's cards."""
    number = learner.device.partition(":")[2]
    return range(int(number), int(number) + 1) if number else range(learner.ranks)
