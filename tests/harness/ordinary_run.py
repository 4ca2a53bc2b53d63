"""A run with a little of everything, in which nothing is wrong."""

from harness.stories import Story
from topics.actors import RunOpened
from topics.groups import GroupDropped
from topics.weights import CheckpointSaved

SETTINGS = {
    "buffer": {"max_lag": 1, "batch_groups": 1},
    "warmup": {"batch_rows": 1, "rows_per_trajectory": 1},
    "workers": {"lease_s": 1},
    "eval": {"prompts": 0},
}


def ordinary_story():
    """Return the messages of the run."""
    story = Story()
    story.publish(RunOpened(9, 1, SETTINGS))
    story.issued("w000000-0")
    story.graded("w000000-0", (-1, -1, -1))
    story.trained(0, story.packed(0, "w000000-0"), 1)
    story.published(0)
    for prompt in range(5):
        story.issued(f"p00000{prompt}-0")
        story.issued(f"p00000{prompt}-1")
    story.graded("p000000-0")
    story.graded("p000000-1")
    sequence = story.packed(1, "p000000-0", "p000000-1")
    story.trained(1, sequence)
    story.published(1)
    story.publish(CheckpointSaved(0, 1, "0-1", "there", sequence))
    story.graded("p000001-0", (0, 0, 1))
    story.graded("p000001-1", (1, 1, 1), 0.0)
    story.trained(2, story.packed(2, "p000001-0", "p000001-1"), lags={0: 4, 1: 2})
    story.published(2)
    story.failed("p000002-0")  # a group that failed
    story.failed("p000002-1")
    story.publish(GroupDropped("p000002", "failed", 2))
    story.failed("p000003-0")  # a batch that waits; one member of its group has a separate end
    story.graded("p000003-1", (1, 1, 2))
    story.dropped("p000003-0")
    story.packed(3, "p000003-1")
    story.generated("p000004-0", (2, 2))  # open: one waits for its grade, one is being sampled
    return story
