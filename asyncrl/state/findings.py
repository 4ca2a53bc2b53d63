"""The causes that keep a run from advancing, and what to do about each."""

from __future__ import annotations

from topics.stalls import Cause, StallFound

ADVICE: dict[Cause, str] = {
    "server unreachable": "check nats.log of the run and the network; the run continues once the server answers",
    "permission missing": "give the role its user of this run (nats.credentials), or grant that user the subject",
    "disk full": "free some space; actors that still run continue, others with `asyncrl up --resume RUN`",
    "stream full": "stop the run; `asyncrl up --resume RUN --set nats.ledger_max_mb=0` (or stream_max_mb, disk_max_mb)",
    "clock off": "set the clock of that machine by NTP; until then deadlines and times are wrong by as much",
    "dead letters": "read them with `asyncrl dead`, fix the cause, then bring them back with `asyncrl dead --reissue`",
    "actor silent": "wait: it is killed after supervision.silence_s and started again; check its machine if it repeats",
    "actor dying": "read its last lines with `asyncrl logs`; after eight quick deaths the run ends by itself",
    "no writer": "read the log of that keeper with `asyncrl logs`; supervision.standbys = 1 shortens such a gap",
    "no worker": "start some with `asyncrl scale NAME=N`; those of placement.lent are given by `asyncrl share`",
    "engine dead": "read the log of the server; an external server must be started again by its owner",
    "engine paused": "send POST /continue_generation to the server, with its key, and find out who paused it",
    "version not loaded": "read the log of the engine with `asyncrl logs`; it must be able to read the weights' folder",
    "mislabelled": "find the client that loads other weights there or restarts the server; it may serve one run only",
    "weights not direct": 'fix the named reason, raise weights.transport_deadline_s, or set weights.transport="never"',
    "weights unchanged": "check rewards and learner.lr: a step below the last bit of learner.dtype changes nothing",
    "weights not finite": "lower learner.lr or learner.max_grad_norm, and resume from the last checkpoint",
    "assertion broken": "compare sampler and trainer in that step with `asyncrl replay`; see docs/guides/replay.md",
    "step anomalous": "see the trajectories by `asyncrl explain`, the batch with `asyncrl dump`; is the reward sound?",
    "learner behind": "read its log with `asyncrl logs`; give it more cores, or make the batches smaller",
    "cards missing": "replace the GPUs: the learner looks for them, and takes them from its next checkpoint on",
    "cluster away": "start Ray again there, on all nodes; where the run has ended by then, `asyncrl up --resume RUN`",
    "teacher away": "check the server at learner.teacher.url, and `asyncrl logs`; the step waits until it answers",
    "card not left": "read the log of that engine; the learner continues without it after its deadline",
    "reward hanging": "check the reward function; reward.time_limit_s ends a call, reward.children runs more at once",
    "reward failing": "read the failure with `asyncrl explain`; fix the reward function, or the service it calls",
    "rollout hanging": "check the rollout function and its tools; after workers.stall_s another worker gets the work",
    "sandbox pool empty": "raise sandbox.ready, or buffer.max_lag where fewer are held than may be, or add workers",
    "sandbox pool throttled": "remove the named reason, or lower sandbox.starts or rollout.slots; workers ask again",
    "sandbox pool leaking": "end them at the service by their owner label; sandbox.ttl_s ends them at the latest",
    "straggler": "wait, or lower buffer.group_deadline_s: the group is then packed without it",
    "groups dropped": "change what drops them: reward, learner.filters, buffer.max_lag, buffer.group_deadline_s",
    "channel behind": "promote a newer version with `asyncrl weights promote`, or fork with a higher buffer.max_lag",
    "live alarm": "look at turns with `asyncrl tap`; live.safety has the bounds, `asyncrl weights rollback` goes back",
    "turns unrecorded": "make room on the disk, or by gateway.spool_mb or turns_mb; see `asyncrl logs gateway-1`",
    "metrics unwritten": "free space on the disk of the run's directory; the logs then restore the missing files",
    "no credit": "raise buffer.max_lag or buffer.batch_groups, or lower buffer.group_deadline_s",
    "end of data": "add epochs with `asyncrl up --resume RUN --set task.epochs=0`; check `asyncrl logs prompter-1`",
    "slow data": "wait, or make task.options easier; task.row_limit_s and task.open_limit_s end the run",
    "unexplained": "run `asyncrl status --json` and `asyncrl logs`, and report their output in an issue",
    "run paused": "look at the metric of the alert; `asyncrl unpause RUN` continues, `asyncrl down RUN` stops",
    "run failed": "fix the named fault (`asyncrl logs` has more), then continue with `asyncrl up --resume RUN`",
    "run killed": "continue with `asyncrl up --resume RUN`; `dmesg` names processes that ran out of memory",
}

BESIDE = ("dead letters", "clock off", "metrics unwritten", "sandbox pool empty", "sandbox pool leaking")
"""Causes for which no process waits."""


def finding(cause: Cause, object: str, evidence: str) -> StallFound:
    """A reason why a run does not advance, or soon will not: of what, and its evidence with numbers."""
    return StallFound(cause, object, evidence, ADVICE[cause])
