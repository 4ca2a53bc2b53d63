"""The findings of the doctor, and what to do about each."""

from __future__ import annotations

from topics.stalls import Cause, StallFound

ADVICE: dict[Cause, str] = {
    "server unreachable": "look at nats.log of the run and at the network; the run goes on by itself once it answers",
    "permission missing": "give this role its user of the run (nats.user, nats.password_file), or grant the subject",
    "disk full": "free space; all actors continue, or from the last checkpoint with `asyncrl up --resume RUN`",
    "stream full": "stop; `asyncrl up --resume RUN --set nats.ledger_max_mb=0` (stream_max_mb) gives it more room",
    "clock off": "let NTP set the clock of that machine; deadlines and times are wrong until then",
    "dead letters": "read them with `asyncrl dead`, mend the cause, then `asyncrl dead --reissue`",
    "actor silent": "nothing: it is killed after supervision.silence_s; if that repeats, look at its machine",
    "actor dying": "read its last lines with `asyncrl logs`; the run ends by itself after eight quick deaths",
    "no writer": "read that keeper's lines with `asyncrl logs`; supervision.spares = 1 shortens such a gap",
    "no worker": "start some with `asyncrl scale ROLE=N`",
    "engine dead": "read the server's log; an external one must be started again by its owner",
    "engine paused": "send POST /continue_generation to the server with its key, and find out who paused it",
    "version not loaded": "read the engine's lines with `asyncrl logs`; it must be able to read the weights' folder",
    "mislabelled": "find out which other client loads weights there, or restarts the server; it may serve one run only",
    "weights unchanged": "look at rewards and learner.lr: a step below the last bit of learner.dtype changes nothing",
    "weights not finite": "lower learner.lr or learner.max_grad_norm, and resume from the last checkpoint",
    "learner behind": "read its lines with `asyncrl logs`; give it more cores, or make batches smaller",
    "reward hanging": "look at the reward function; reward.time_limit_s ends a call, reward.children runs more at once",
    "rollout hanging": "look at the rollout function and its tools; workers.stall_s passes the work on",
    "straggler": "wait, or lower buffer.group_deadline_s: the group is then packed without it",
    "groups dropped": "change what drops them: reward, learner.filters, buffer.max_lag, buffer.group_deadline_s",
    "no credit": "raise buffer.max_lag or buffer.batch_groups, or lower buffer.group_deadline_s",
    "end of data": "go on with `asyncrl up --resume RUN --set task.epochs=0`; look at `asyncrl logs prompter-1`",
    "slow data": "wait, or make task.options easier; a row that takes longer than task.row_limit_s ends the run",
    "unexplained": "run `asyncrl status` and `asyncrl logs`, and report it in an issue",
}


def finding(cause: Cause, object: str, evidence: str) -> StallFound:
    """A reason why a run does not advance, or soon will not: of what, and its evidence with numbers."""
    return StallFound(cause, object, evidence, ADVICE[cause])
