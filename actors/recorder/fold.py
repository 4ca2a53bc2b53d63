"""The fold that makes the metrics file and the summary: a pure function of the logs, of constant size."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.live.agreement import Agreement
from asyncrl.state.records import taught_nothing
from asyncrl.telemetry.metric_names import named
from topics.actors import ActorStoppedHeaders, RunOpened
from topics.batches import BatchPacked, BatchTrained
from topics.engines import EngineReady
from topics.evals import EvalScored
from topics.gpu_handoff import CardReturned, CardTaken
from topics.groups import GroupDropped
from topics.ids import stage_of
from topics.topic import Topic
from topics.trajectories import TrajectoryDropped, TrajectoryFailed
from topics.turns import FeedbackGivenHeaders, TurnFinishedHeaders, TurnJudgedHeaders
from topics.weights import TrainingFinished, WeightsPublished
from topics.wire import Headers, Message

_WINDOW = 5  # steps a reward is averaged over
_NEWEST = 128  # updates of engines, and switches of the GPU, for their medians


class StepRow(msgspec.Struct, rename={"reward_mean": "reward/mean", "lag_mean": "lag/mean"}):
    """The part of a metrics row that the summary needs."""

    event: str
    step: int = 0
    stage: str = ""
    time_s: float = 0.0
    reward_mean: float = 0.0
    lag_mean: float = 0.0  # versions


class Packed(msgspec.Struct):
    """The part of a batch row that comes from its packing."""

    time_ns: int
    tokens: int  # trainable, before stale ones are masked
    figures: dict[str, float]
    objective: str = ""  # stage that it follows
    sampled: int = 0  # tokens of RL trajectories that had ended by then, this batch with them


class Score(msgspec.Struct):
    """The part of an evaluation that the summary needs."""

    version: int
    versions: dict[int, int]  # tokens of each version that answered
    accuracy: float


class Start(msgspec.Struct):
    """A time at which the run was begun or resumed, by the server's clock."""

    at_ns: int
    before_ns: int  # newest message before it; 0 for none


class RecorderState(msgspec.Struct):
    """The whole state as plain data. A field whose meaning changes gets another name."""

    scores: dict[str, list[Score]] = {}  # by held-out set: of the lowest version, and of the highest
    evaluated: int = 0  # answers of all evaluations
    lags: dict[int, int] = {}  # trained tokens per lag
    dropped: dict[str, int] = {}  # ends without training, by reason
    failed: dict[str, int] = {}  # failures published by workers, by reason
    figures: dict[str, float] = {}  # of the newest batch of RL
    flat_steps: int = 0  # newest steps in a row whose rewards are all equal, and that had no gradient
    exported: str = ""
    steps_wanted: int = 0  # by the newest `run.opened`
    finished_at: int | None = None
    first_ns: int = 0
    last_ns: int = 0
    starts: list[Start] = []  # of the run, the first one and each time that it was resumed
    rl_first_ns: int = 0
    rl_steps: int = 0
    trajectories_trained: int = 0
    sampled_tokens: int = 0  # of trajectories with an end: packed or dropped
    masked_tokens: int = 0
    train_s: float = 0.0  # of the learner, over all steps of RL
    wait_s: float = 0.0
    warmup_steps: int = 0
    warmup_tokens: int = 0
    update_s: list[float] = []
    trained: int | None = None  # newest step, so that a repeated one counts once
    trained_ns: int = 0
    packed: dict[int, Packed] = {}  # not trained yet
    agreement: Agreement = msgspec.field(default_factory=Agreement)
    answered: dict[str, int] = {}  # turns of live traffic, by how they ended
    answered_tokens: int = 0
    card_turns: int = 0  # of the learner, if it time-shares its GPU
    card_wait_s: list[float] = []  # newest seconds until it had the GPU
    card_taken: dict[str, int] = {}  # by engine that took it: when, until it serves
    card_back_s: list[float] = []  # newest seconds of engines from there on


class RecorderFold(Fold):
    """Rows for the metrics file and the figures of the summary."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []  # not yet written
        self.state = RecorderState()
        self.issued = 0  # RL trajectories; the recorder asks the server, instead of reading every one

    def apply(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        state, time_ns = self.state, record.time_ns
        if time_ns:
            if topic.message is RunOpened:
                state.starts.append(Start(time_ns, state.last_ns if state.last_ns < time_ns else 0))
            for start in state.starts:  # logs are read in parallel: an older message may arrive later
                if time_ns < start.at_ns:
                    start.before_ns = max(start.before_ns, time_ns)
            state.first_ns = min(state.first_ns or time_ns, time_ns)
            state.last_ns = max(state.last_ns, time_ns)
        super().apply(topic, message, record)

    def _stopped_ns(self, since_ns: int, until_ns: int) -> int:
        """Time for which the run lay stopped between two others."""
        starts = [start for start in self.state.starts if since_ns < start.before_ns and start.at_ns <= until_ns]
        return sum(start.at_ns - start.before_ns for start in starts)

    def _seconds(self, until_ns: int) -> float:
        """Return the seconds of the run up to a time, without those for which it lay stopped."""
        return round((until_ns - self.state.first_ns - self._stopped_ns(0, until_ns)) / 1e9, 3)

    def _on_failed(self, failed: TrajectoryFailed, _record: Record) -> None:
        if failed.stage != "eval":  # the score counts it
            self.state.failed[failed.reason] = self.state.failed.get(failed.reason, 0) + 1

    def _on_dropped(self, dropped: TrajectoryDropped, _record: Record) -> None:
        if stage_of(dropped.trajectory_id) != "eval":  # the score counts it
            self._count_dropped(dropped.reason, 1, dropped.tokens)

    def _on_group_dropped(self, dropped: GroupDropped, _record: Record) -> None:
        self._count_dropped(dropped.reason, dropped.members, dropped.tokens)

    def _count_dropped(self, reason: str, members: int, tokens: int) -> None:
        self.state.dropped[reason] = self.state.dropped.get(reason, 0) + members
        self.state.sampled_tokens += tokens

    def _on_ready(self, ready: EngineReady, record: Record) -> None:
        state = self.state
        if ready.update_s:
            state.update_s = [*state.update_s, ready.update_s][-_NEWEST:]
        if taken_ns := state.card_taken.pop(ready.engine_id, 0):
            state.card_back_s = [*state.card_back_s, (record.time_ns - taken_ns) / 1e9][-_NEWEST:]

    def _on_card_taken(self, taken: CardTaken, record: Record) -> None:
        self.state.card_taken[taken.engine_id] = record.time_ns

    def _on_card_returned(self, returned: CardReturned, _record: Record) -> None:
        self.state.card_turns += 1
        self.state.card_wait_s = [*self.state.card_wait_s, returned.waited_s][-_NEWEST:]

    def _on_turn_finished(self, headers: TurnFinishedHeaders, _record: Record) -> None:
        state = self.state
        state.answered[headers.finish] = state.answered.get(headers.finish, 0) + 1
        state.answered_tokens += headers.length

    def _on_finished(self, finished: TrainingFinished, _record: Record) -> None:
        self.state.exported, self.state.finished_at = finished.exported, finished.step

    def _on_stopped(self, stopped: ActorStoppedHeaders, _record: Record) -> None:
        """Only its time counts, that of the end of the run: one that serves may have published nothing for hours."""

    def _on_opened(self, opened: RunOpened, _record: Record) -> None:
        self.state.steps_wanted = opened.steps

    def summary(self, run: str, steps: Sequence[StepRow]) -> dict[str, object]:
        """The figures of a run, named with their units; `steps` are the rows of all steps of RL, in their order."""
        state = self.state
        trained, sampled = sum(state.lags.values()), state.sampled_tokens
        first, last = state.scores.get("", (None, None))
        rewards = [step.reward_mean for step in steps]
        stopped_ns, rl_first_ns, trained_ns = self._stopped_ns(0, state.last_ns), state.rl_first_ns, state.trained_ns
        rl_ns = max(0, trained_ns - rl_first_ns - self._stopped_ns(rl_first_ns, trained_ns)) if rl_first_ns else 0
        rl_wall_ns = state.last_ns - rl_first_ns - self._stopped_ns(rl_first_ns, state.last_ns)
        return {
            "run": run,
            "finished": state.finished_at is not None and state.finished_at >= state.steps_wanted,
            "steps": state.rl_steps,
            "last_step": steps[-1].step if steps else None,
            "warmup_steps": state.warmup_steps,
            "sampled_reward_first_step": _mean(rewards[:1]),
            "sampled_reward_last_5_steps": _mean(rewards[-_WINDOW:]),
            "sampled_reward_best_5_steps": max(
                (_mean(rewards[end - _WINDOW : end]) or 0.0 for end in range(_WINDOW, len(rewards) + 1)), default=None
            ),
            "steps_without_spread": state.flat_steps,
            "greedy_accuracy_before": first.accuracy if first is not None else None,
            "greedy_accuracy_after": last.accuracy if last is not None and last != first else None,
            "evaluated_versions_after": last.versions if last is not None else None,
            **_by_set(state.scores),
            "trajectories_issued": self.issued,
            "trajectories_trained": state.trajectories_trained,
            "trajectories_failed": sum(state.failed.values()),
            "failed_trajectories_by_reason": state.failed,
            "dropped_trajectories_by_reason": state.dropped,
            "sampled_tokens": sampled,
            "trained_tokens": trained,
            "masked_stale_tokens": state.masked_tokens,
            "warmup_tokens": state.warmup_tokens,
            "wasted_token_share": round(1 - trained / sampled, 4) if sampled else None,
            "trained_tokens_by_lag": {str(lag): state.lags[lag] for lag in sorted(state.lags)},
            "weight_update_median_s": _median(state.update_s),
            "card_turns": state.card_turns,
            "card_wait_median_s": _median(state.card_wait_s),
            "card_back_median_s": _median(state.card_back_s),
            "requests_by_finish": state.answered,
            "request_tokens": state.answered_tokens,
            "wall_s": round(self._seconds(state.last_ns), 2),
            "stopped_s": round(stopped_ns / 1e9, 2),
            "rl_wall_s": round(rl_wall_ns / 1e9, 2) if state.rl_first_ns else None,
            "rl_trained_tokens_per_s": round(trained * 1e9 / rl_ns, 1) if rl_ns else None,
            "learner_train_s": round(state.train_s, 2),
            "learner_wait_s": round(state.wait_s, 2),
            "rl_s_to_reward_0.9": self._seconds_to(0.9, steps),
            "first_rl_step_s": round(steps[0].time_s, 2) if steps else None,
            "exported_model": state.exported,
            "last_batch": state.figures,
        }

    def _on_packed(self, message: BatchPacked, record: Record) -> None:
        state = self.state
        tokens = sum(member.tokens for group in message.groups for member in group.members)
        if message.stage == "rl":
            state.sampled_tokens += tokens + int(message.figures.get("discarded_tokens", 0))
        if state.trained is None or message.step > state.trained:
            follows = message.objective.stage or ""
            sampled = state.sampled_tokens
            state.packed[message.step] = Packed(record.time_ns, tokens, message.figures, follows, sampled)

    def _on_trained(self, message: BatchTrained, record: Record) -> None:
        state = self.state
        if state.trained is not None and message.step <= state.trained:
            return  # trained again on a new lineage: the figures are those of the first time
        state.trained = message.step
        row: dict[str, object] = {
            "step": message.step,
            "stage": message.stage,
            "lineage": message.lineage,
            "time_s": self._seconds(record.time_ns),
            "reward/mean": message.rewards[0],
            "reward/std": message.rewards[1],
            "trajectories": message.trajectories,
            "tokens_by_lag": {str(lag): count for lag, count in message.lags.items()},
            "masked_tokens": message.masked,
            **({"skipped": True} if message.skipped else {}),
            **({"anomaly": message.anomaly} if message.anomaly is not None else {}),
            **message.metrics,
        }
        packed = state.packed.pop(message.step, Packed(record.time_ns, 0, {}))
        if state.trained_ns:
            ran_ns = record.time_ns - state.trained_ns - self._stopped_ns(state.trained_ns, record.time_ns)
            row["throughput/tokens_per_s"] = round(packed.tokens * 1e9 / max(1, ran_ns), 1)
        state.trained_ns = record.time_ns
        row |= named(packed.figures)
        if packed.objective:
            row["objective_stage"] = packed.objective
        total = sum(message.lags.values())
        if message.stage == "warmup":
            state.warmup_steps += 1
            state.warmup_tokens += total
            state.rl_first_ns = record.time_ns
        else:
            lag = sum(lag * count for lag, count in message.lags.items()) / total if total else 0.0
            row["lag/mean"] = round(lag, 4)
            state.rl_first_ns = state.rl_first_ns or packed.time_ns
            state.rl_steps += 1
            state.masked_tokens += message.masked
            state.train_s += message.metrics.get("train_s", 0.0)
            state.wait_s += message.metrics.get("wait_s", 0.0)
            state.trajectories_trained += 0 if message.skipped else message.trajectories
            for lag_of, count in message.lags.items():
                state.lags[lag_of] = state.lags.get(lag_of, 0) + count
            if packed.sampled:  # packing and training have separate logs, so both count up to this batch
                row["waste/share"] = round(1 - sum(state.lags.values()) / packed.sampled, 4)
            state.figures = packed.figures
            if (share := state.agreement.share) is not None:
                row |= {"judge_agreement": round(share, 4), "judge_rated": len(state.agreement.against)}
            state.flat_steps = state.flat_steps + 1 if taught_nothing(message) else 0
        self.rows.append({"event": "step", **row})

    def _on_published(self, message: WeightsPublished, record: Record) -> None:
        if message.choice:  # else every version is full
            row = {
                name: getattr(message, name) for name in ("version", "base", "bytes", "encode_s", "write_s", "choice")
            }
            self.rows.append({"event": "weights", "time_s": self._seconds(record.time_ns), **row})

    def _on_judged(self, headers: TurnJudgedHeaders, _record: Record) -> None:
        if headers.reward is not None:
            self.state.agreement.judge(headers.turn_id, headers.reward)

    def _on_feedback(self, headers: FeedbackGivenHeaders, _record: Record) -> None:
        self.state.agreement.user(headers.turn_id, headers.score)

    def _on_scored(self, message: EvalScored, record: Record) -> None:
        state = self.state
        score = Score(message.version, message.versions, message.accuracy)
        first, last = state.scores.get(message.dataset, (score, score))
        state.scores[message.dataset] = [
            score if score.version <= first.version else first,
            score if score.version >= last.version else last,
        ]
        state.evaluated += message.prompts * message.samples
        row = {
            "event": "eval",
            "time_s": self._seconds(record.time_ns),
            "version": message.version,
            "versions": message.versions,
            "accuracy": message.accuracy,
            "prompts": message.prompts,
            "failed": message.failed,
            "seconds": message.seconds,
            **({"set": message.dataset} if message.dataset else {}),
            **({"answers_each": message.samples} if message.samples > 1 else {}),
            **({"reason": message.reason} if message.reason else {}),
            **message.metrics,
        }
        self.rows.append(row)

    def _seconds_to(self, reward: float, steps: Sequence[StepRow]) -> float | None:
        """Seconds of RL until the mean of five steps reached a reward."""
        for end in range(_WINDOW, len(steps) + 1):
            window = steps[end - _WINDOW : end]
            if (_mean([step.reward_mean for step in window]) or 0.0) >= reward:
                return round(window[-1].time_s - self._seconds(self.state.rl_first_ns), 2)
        return None


def _by_set(scores: dict[str, list[Score]]) -> dict[str, object]:
    """Accuracies of the lowest and the highest version on each set, where a run has named ones."""
    found = {name: {str(score.version): score.accuracy for score in both} for name, both in scores.items() if name}
    return {"accuracy_by_set": found} if found else {}


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
