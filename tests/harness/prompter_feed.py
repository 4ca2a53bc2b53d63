"""A prompter's fold that is fed by hand."""

import msgspec

from actors.prompter.fold import PrompterFold
from asyncrl.config.settings import Config
from harness.folds import Feed


def config(**tables):
    base = {
        "rollout": {"group_size": 2},
        "buffer": {"batch_groups": 2, "max_lag": 1},
        "learner": {"steps": 5},
        "eval": {"prompts": 4},
    }
    return msgspec.convert({**base, **tables}, Config)


def feed(**tables):
    return Feed(PrompterFold(config(**tables)))


def issue(fed, count=None):
    wanted = fed.fold.wanted()
    for item in wanted if count is None else wanted[:count]:
        fed.issued(f"{item.prompt_id}-{item.member}", size=item.group.size, stage=item.group.stage)
    return [f"{item.prompt_id}-{item.member}" for item in wanted]
