"""What a run amounts to: a pure function of its logs."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncrl.bus.log import Record
from topics.actors import RUN_OPENED
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.engines import ENGINE_READY
from topics.evals import EVAL_SCORED
from topics.groups import GROUP_DROPPED
from topics.topic import Topic
from topics.trajectories import TRAJECTORY_DROPPED, TRAJECTORY_FAILED
from topics.weights import TRAINING_FINISHED

_WINDOW = 5  # steps a reward is averaged over


class _Packed(NamedTuple):
    """What a batch row takes from its packing."""

    time_ns: int
    tokens: int  # trainable, before stale ones are masked
    figures: dict[str, float]


class RecorderFold:
    """Rows for the metrics file and the figures of the summary."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []  # not yet written
        self.steps: list[dict[str, Any]] = []  # RL steps: step, time_s, reward, lag
        self.evals: dict[int, dict[str, Any]] = {}
        self.lags: dict[int, int] = {}  # trained tokens per lag
        self.dropped: dict[str, int] = {}  # ends without training, by reason
        self.failed: dict[str, int] = {}  # what workers claimed, by reason
        self.figures: dict[str, float] = {}  # of the newest batch of RL
        self.flat_steps = 0  # the newest in a row whose rewards are all equal
        self.exported = ""
        self.steps_wanted = 0  # by who opened the run last
        self.finished_at: int | None = None
        self.issued = 0  # RL trajectories; the recorder asks the server, instead of reading every one
        self._first_ns = 0
        self._last_ns = 0
        self._rl_first_ns = 0
        self._counts = {"trajectories_trained": 0, "trajectories_failed": 0}
        self._sampled_tokens = 0  # of trajectories with an end: packed or dropped
        self._masked_tokens = 0
        self._warmup_steps = 0
        self._warmup_tokens = 0
        self._update_s: list[float] = []
        self._newest: dict[str, int] = {}  # trained step -> line, so that a repeated line counts once
        self._packed: dict[int, _Packed] = {}  # not trained yet
        self._trained_ns = 0

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in."""
        if record.time_ns:
            self._first_ns = min(self._first_ns or record.time_ns, record.time_ns)
            self._last_ns = max(self._last_ns, record.time_ns)
        if topic is TRAJECTORY_FAILED:
            self._counts["trajectories_failed"] += 1
            self.failed[message.reason] = self.failed.get(message.reason, 0) + 1
        elif topic is TRAJECTORY_DROPPED or topic is GROUP_DROPPED:
            members = 1 if topic is TRAJECTORY_DROPPED else message.members
            self.dropped[message.reason] = self.dropped.get(message.reason, 0) + members
            self._sampled_tokens += message.tokens
        elif topic is BATCH_PACKED:
            tokens = sum(member.tokens for group in message.groups for member in group.members)
            self._packed[message.step] = _Packed(record.time_ns, tokens, message.figures)
            if message.stage == "rl":
                self._sampled_tokens += tokens + int(message.figures.get("discarded_tokens", 0))
        elif topic is BATCH_TRAINED:
            self._on_trained(message, record)
        elif topic is ENGINE_READY:
            self._update_s.append(message.update_s)
        elif topic is EVAL_SCORED:
            self._on_scored(message, record)
        elif topic is TRAINING_FINISHED:
            self.exported, self.finished_at = message.exported, message.step
        elif topic is RUN_OPENED:
            self.steps_wanted = message.steps

    def summary(self, run: str) -> dict[str, Any]:
        """The figures of a run, named with their units."""
        trained = sum(self.lags.values())
        first, last = min(self.evals, default=None), max(self.evals, default=None)
        rewards = [step["reward"] for step in self.steps]
        return {
            "run": run,
            "finished": self.finished_at is not None and self.finished_at >= self.steps_wanted,
            "steps": len(self.steps),
            "warmup_steps": self._warmup_steps,
            "sampled_reward_first_step": _mean(rewards[:1]),
            "sampled_reward_last_5_steps": _mean(rewards[-_WINDOW:]),
            "sampled_reward_best_5_steps": max(
                (_mean(rewards[end - _WINDOW : end]) or 0.0 for end in range(_WINDOW, len(rewards) + 1)), default=None
            ),
            "steps_without_spread": self.flat_steps,
            "greedy_accuracy_before": self.evals[first]["accuracy"] if first is not None else None,
            "greedy_accuracy_after": self.evals[last]["accuracy"] if last is not None and last != first else None,
            "evaluated_versions_after": self.evals[last]["versions"] if last is not None else None,
            "trajectories_issued": self.issued,
            **self._counts,
            "failed_trajectories_by_reason": self.failed,
            "dropped_trajectories_by_reason": self.dropped,
            "sampled_tokens": self._sampled_tokens,
            "trained_tokens": trained,
            "masked_stale_tokens": self._masked_tokens,
            "warmup_tokens": self._warmup_tokens,
            "wasted_token_share": round(1 - trained / self._sampled_tokens, 4) if self._sampled_tokens else None,
            "trained_tokens_by_lag": {str(lag): self.lags[lag] for lag in sorted(self.lags)},
            "weight_update_median_s": sorted(self._update_s)[len(self._update_s) // 2] if self._update_s else None,
            "wall_s": round((self._last_ns - self._first_ns) / 1e9, 2),
            "rl_wall_s": round((self._last_ns - self._rl_first_ns) / 1e9, 2) if self._rl_first_ns else None,
            "rl_s_to_reward_0.9": self._seconds_to(0.9),
            "first_rl_step_s": round((self.steps[0]["time_ns"] - self._first_ns) / 1e9, 2) if self.steps else None,
            "exported_model": self.exported,
            "last_batch": self.figures,
        }

    def _on_trained(self, message: Any, record: Record) -> None:
        if str(message.step) in self._newest:
            return  # trained again on a new line: the figures are those of the first time
        self._newest[str(message.step)] = message.line
        row = {
            "step": message.step,
            "stage": message.stage,
            "line": message.line,
            "time_s": round((record.time_ns - self._first_ns) / 1e9, 3),
            "reward_mean": message.rewards[0],
            "reward_std": message.rewards[1],
            "trajectories": message.trajectories,
            "tokens_by_lag": {str(lag): count for lag, count in message.lags.items()},
            "masked_tokens": message.masked,
            **({"skipped": True} if message.skipped else {}),
            **message.metrics,
        }
        packed = self._packed.pop(message.step, _Packed(record.time_ns, 0, {}))
        if self._trained_ns:
            row["tokens_per_s"] = round(packed.tokens * 1e9 / max(1, record.time_ns - self._trained_ns), 1)
        self._trained_ns = record.time_ns
        row |= packed.figures
        if message.stage == "warmup":
            self._warmup_steps += 1
            self._warmup_tokens += sum(message.lags.values())
            self._rl_first_ns = record.time_ns
        else:
            total = sum(message.lags.values())
            lag = sum(lag * count for lag, count in message.lags.items()) / total if total else 0.0
            row["lag_mean_versions"] = round(lag, 4)
            self._rl_first_ns = self._rl_first_ns or packed.time_ns
            self._masked_tokens += message.masked
            self._counts["trajectories_trained"] += 0 if message.skipped else message.trajectories
            for lag_of, count in message.lags.items():
                self.lags[lag_of] = self.lags.get(lag_of, 0) + count
            self.figures = packed.figures
            self.flat_steps = 0 if message.rewards[1] else self.flat_steps + 1
            self.steps.append(
                {"step": message.step, "time_ns": record.time_ns, "reward": message.rewards[0], "lag": lag}
            )
        self.rows.append({"event": "step", **row})

    def _on_scored(self, message: Any, record: Record) -> None:
        found = {
            "version": message.version,
            "versions": {str(version): count for version, count in message.versions.items()},
            "accuracy": message.accuracy,
            "prompts": message.prompts,
            "failed": message.failed,
            "seconds": message.seconds,
        }
        self.evals[message.version] = found
        self.rows.append({"event": "eval", "time_s": round((record.time_ns - self._first_ns) / 1e9, 3), **found})

    def _seconds_to(self, reward: float) -> float | None:
        """Seconds of RL until the mean of five steps reached a reward."""
        for end in range(_WINDOW, len(self.steps) + 1):
            window = self.steps[end - _WINDOW : end]
            if (_mean([step["reward"] for step in window]) or 0.0) >= reward:
                return float(round((window[-1]["time_ns"] - self._rl_first_ns) / 1e9, 2))
        return None


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
