"""Settings of runs without a model."""

STREAM_MB = 1
SCRIPTED = f"""
run = "short"
[nats]
stream_max_mb = {STREAM_MB}
[model]
create.context = 96
[task]
options = {{ letters = 4 }}
[rollout]
group_size = 4
max_new_tokens = 64
[workers]
lease_s = 2.0
[buffer]
batch_groups = 8
[recorder]
plot = false
[learner]
trainer = "scripted"
steps = 60
checkpoint_every = 1000
[engine]
kind = "scripted"
scripted_tokens = 64
"""  # a batch is 40 kB: without a trim the stream is full after 25 steps


FLAT = """
import random

def reward(completion, label):
    return 0.0 if label == "flat" else random.random()
"""
