"""The fold of the prompter, a pure function of messages: which groups are open, and how many more may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from actors.prompter.sources import SOURCES, TASK_ROWS, Group, PrompterState, PromptSource, mixed
from asyncrl.algorithms.lag import open_groups
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.config.slots import all_held
from asyncrl.config.staged import Schedule
from asyncrl.config.tasks import curricula_of, first_stages, largest_group, mastery_of
from asyncrl.data.curriculum import Climb
from topics.actors import ReissueRequested
from topics.batches import BatchPacked, BatchTrained
from topics.evals import EvalRequested
from topics.groups import GroupDropped
from topics.ids import (
    LIVE,
    REISSUE,
    TASK,
    Stage,
    is_prompt_id,
    letter_of,
    member_of,
    number_of,
    prompt_name,
    prompt_of,
    stage_of,
    trajectory_name,
)
from topics.prompts import PromptIssuedHeaders
from topics.stages import StageBegan, StageBeganHeaders, StageRequested
from topics.streams import AdmissionPaused, AdmissionResumed
from topics.trajectories import TrajectoryDropped
from topics.turns import TurnAdmitted
from topics.weights import TrainingFinished


class Wanted(NamedTuple):
    """A group member to be issued."""

    group: Group
    member: int
    min_version: int
    attempt: int = 0

    @property
    def prompt_id(self) -> str:
        """`p000042`."""
        return self.group.prompt_id

    @property
    def task(self) -> str:
        """Name of the task whose row it has."""
        return self.group.tasks[self.member // self.group.samples if self.group.row_each else 0]

    @property
    def places(self) -> range:
        """The places of the rows that its message carries: its own, or those of its group once."""
        if self.attempt:
            return range(0)
        if self.group.row_each:
            place = self.member // self.group.samples
            return self.group.places[place : place + 1]
        return self.group.places if self.member == 0 else range(0)


class StagePlan(NamedTuple):
    """The batches of a stage."""

    batch_groups: int
    steps: int


def stage_plans(config: Config) -> dict[Stage, StagePlan]:
    """The stages of a run and their sizes."""
    return {
        "warmup": StagePlan(config.warmup.batch_groups, config.warmup.steps),
        "rl": StagePlan(config.buffer.batch_groups, config.learner.steps),
    }


class PrompterFold(Fold):
    """Open groups are those issued, and neither in a distinct trained batch nor dropped; each returns one credit."""

    def __init__(self, config: Config, sources: Sequence[PromptSource] | None = None) -> None:
        made = [make(config) for make in SOURCES.values()] if sources is None else sources
        self.sources = {source.letter: source for source in made}
        self._plans = stage_plans(config)
        self._max_lag = config.buffer.max_lag
        self._publish_every = config.learner.publish_every
        self._trains = config.trains
        # Without a learner no lag bounds the open groups: twice the number that rollout workers hold keeps them busy.
        self._slots = 2 * all_held(config) // largest_group(config) + 1
        self._size = largest_group(config)
        self._begin = {TASK: config.start.prompt}
        self._config, self.mastery = config, mastery_of(config, None)  # its rows are known once the data is open
        self._curricula, self._known_stages = curricula_of(config), [*config.stages]
        self._schedule = Schedule(config)
        self.state = PrompterState(
            first_open=dict(self._begin),
            done={"warmup": 0, "rl": config.start.step},
            trained=config.origin,
            stages=first_stages(config.start),
        )

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """Take note of how many rows some data has; None: they have no end."""
        for source in self.sources.values():
            source.opened(data, rows_per_epoch)
        if data == TASK_ROWS:
            self.mastery = mastery_of(self._config, rows_per_epoch)

    def _on_packed(self, packed: BatchPacked, _record: Record) -> None:
        self.state.ended_of_stages.step = max(self.state.ended_of_stages.step, packed.step)
        for group in packed.new_groups:
            self.count_answers(group.prompt_id, group.task, group.scores)
        groups = [group.prompt_id for group in packed.new_groups]
        if not self._trains:
            self.state.done["rl"] += 1
            self._close(groups)
        elif packed.step in self.state.trained_ahead:
            self.state.trained_ahead.discard(packed.step)
            self._close(groups)
        else:
            self.state.packed[packed.step] = groups

    def _on_trained(self, trained: BatchTrained, _record: Record) -> None:
        if trained.step <= self.state.trained:
            return  # trained again after a rollback: its groups returned their credit already
        self.state.trained = trained.step
        self.state.done[trained.stage] += 1
        groups = self.state.packed.pop(trained.step, None)
        if groups is None:
            self.state.trained_ahead.add(trained.step)
        else:
            self._close(groups)

    def _on_group_dropped(self, dropped: GroupDropped, _record: Record) -> None:
        self.count_answers(dropped.prompt_id, dropped.task, dropped.rewards)
        self._close([dropped.prompt_id])

    def count_answers(self, prompt_id: str, task: str, scores: list[float]) -> None:
        """Count a group of a task for its curriculum, and for the stages that wait.

        A rise holds from the first prompt that cannot have been issued yet, in any order of reading: each prompt has
        one level, which follows from the log of batches alone.
        """
        self._schedule.count(self.state.ended_of_stages, prompt_id, scores)
        if not (self._curricula or self._config.task.mastered.groups) or letter_of(prompt_id) != TASK:
            return
        self.state.ended += 1
        number, open_at_most = number_of(prompt_id), open_groups(self._plans["rl"].batch_groups, self._max_lag)
        most_issued = self._begin[TASK] + self.state.ended + open_at_most
        if task in self._curricula:
            climb = self.state.climbs.setdefault(task, Climb())
            self._curricula[task].record(climb, number, scores, rises_at=most_issued)
        if self._config.task.mastered.groups:
            self.state.graded.append((number, scores, most_issued))

    def record_mastered(self) -> int:
        """Take the graded groups into account once the number of rows is known; returns how many rows are out."""
        rule = self.mastery
        if rule is None:
            return 0
        graded, self.state.graded = self.state.graded, []
        for number, scores, leaves_at in graded:
            rule.record(self.state.mastered, number, scores, leaves_at=leaves_at)
        return rule.out(self.state.mastered, self.state.first(TASK))

    def _on_dropped(self, dropped: TrajectoryDropped, _record: Record) -> None:
        attempt = dropped.attempt + 1
        if dropped.again and self.state.attempts.get(dropped.trajectory_id, 0) < attempt:
            self.state.again[dropped.trajectory_id] = attempt

    def _on_eval_requested(self, request: EvalRequested, _record: Record) -> None:
        number = number_of(request.eval_id)
        if number > self.state.evaluated:  # else it was asked for before
            self.state.evaluated = number
            self.state.requests[number] = request

    def _on_admitted(self, admitted: TurnAdmitted, _record: Record) -> None:
        number = self.state.live_admitted
        self.state.live_admitted += 1
        if number >= self.state.first(LIVE):  # else its issue was read before
            self.state.live[number] = admitted

    def _on_finished(self, finished: TrainingFinished, _record: Record) -> None:
        self.state.finished_at = finished.step

    def _on_paused(self, _paused: AdmissionPaused, _record: Record) -> None:
        self.state.paused = True

    def _on_resumed(self, _resumed: AdmissionResumed, _record: Record) -> None:
        self.state.paused = False

    def wanted(self) -> list[Wanted]:
        """Return the messages of training that may be issued now, in order."""
        if self._finished:
            return []
        again = [self._wanted_again(name, attempt) for name, attempt in self.state.again.items()]
        return again + self._wanted_of(self._stage)

    def wanted_evaluations(self) -> Iterator[Wanted]:
        """Return the messages of evaluations that are still to be issued, in order. They take no credit of training."""
        for group in self._groups("eval"):
            begun = self.state.members.get(group.prompt_id, 0)
            if begun or not self.state.paused or self._finished:
                yield from (Wanted(group, member, group.min_version) for member in range(begun, group.size))

    def coming(self) -> Iterator[Wanted]:
        """First members of all groups that the steps still need, wanted now or later, in the order of their issue."""
        for stage in self._plans:
            needed = self._still_needed(stage) - len(self.state.open[stage])
            fresh = (group for group in self._groups(stage) if group.prompt_id not in self.state.members)
            for group in islice(fresh, max(0, needed)):
                yield Wanted(group, 0, self._min_version)

    @property
    def open_groups(self) -> int:
        """Groups issued and not yet ended."""
        return len(self.state.open["warmup"]) + len(self.state.open["rl"])

    @property
    def at_end(self) -> bool:
        """Return whether every prompt of RL is issued."""
        return not any(True for source in self._of_stage("rl") for _ in source.numbers(self.state))

    @property
    def _stage(self) -> Stage:
        """The stage whose groups are issued.

        RL waits for version 0 in the slots of the rollout workers. Issued before every batch of the warm-up is packed,
        it would keep them from what replaces a failed warm-up trajectory: no version 0 would ever come.
        """
        packed = self.state.done["warmup"] + sum(step <= 0 for step in self.state.packed)
        return "rl" if packed >= self._plans["warmup"].steps else "warmup"

    @property
    def _finished(self) -> bool:
        return self.state.finished_at is not None and self.state.finished_at >= self._plans["rl"].steps

    @property
    def _newest_packed(self) -> int:
        """The newest packed batch."""
        return max(self.state.trained, max(self.state.packed, default=0))

    @property
    def _min_version(self) -> int:
        """The oldest version that may have sampled tokens of the batch after the packed ones."""
        return max(0, self._newest_packed - self._max_lag)

    def _min_version_after(self, ahead: int, plan: StagePlan) -> int:
        """Return the oldest version that may have sampled a group, by the batch that it will be in.

        Args:
            ahead: groups that were issued before it and are in no batch yet.
        """
        batches_ahead = ahead // plan.batch_groups
        published = self.state.trained // self._publish_every * self._publish_every
        # A version that does not exist yet may need this very group.
        return max(self._min_version, min(self._newest_packed + batches_ahead - self._max_lag, published))

    def _groups(self, stage: Stage) -> Iterator[Group]:
        return mixed(self._of_stage(stage), self.state, begin=self._begin)

    def _of_stage(self, stage: Stage) -> list[PromptSource]:
        return [source for source in self.sources.values() if source.stage == stage]

    def _wanted_of(self, stage: Stage) -> list[Wanted]:
        plan = self._plans[stage]
        # While admission is paused, the groups of one batch may be open: with fewer, no batch would ever be trained,
        # and only training makes room.
        limit = plan.batch_groups if self.state.paused else self._most_open(plan)
        room = max(0, min(limit, self._still_needed(stage)) - len(self.state.open[stage]))
        if not (room or self.state.members):
            return []
        found: list[Wanted] = []
        ahead = len(self.state.open[stage]) - sum(map(len, self.state.packed.values()))
        for group in self._groups(stage):
            # A group cut short by a crash is finished first: it is open already and takes no new room.
            begun = self.state.members.get(group.prompt_id, 0)
            if not begun and room <= 0:
                break
            room -= not begun
            # A group that was sampled before has no version to wait for: the buffer drops it if it is too old.
            least = 0 if group.given else self._min_version_after(max(0, ahead), plan)
            ahead += not begun
            found += [Wanted(group, member, least) for member in range(begun, group.size)]
        return found

    def _most_open(self, plan: StagePlan) -> int:
        """Groups of a stage that may be open at once."""
        return open_groups(plan.batch_groups, self._max_lag) if self._trains else plan.batch_groups + self._slots

    def _still_needed(self, stage: Stage) -> int:
        """Groups that the steps to come take, those open among them.

        A packed batch counts with its actual groups: a run may resume with larger batches than it began with.
        """
        packed = [len(groups) for step, groups in self.state.packed.items() if (step > 0) == (stage == "rl")]
        to_pack = self._plans[stage].steps - self.state.done[stage] - len(packed)
        return sum(packed) + to_pack * self._plans[stage].batch_groups

    def _wanted_again(self, name: str, attempt: int) -> Wanted:
        group = self.sources[letter_of(name)].group(self.state, number_of(prompt_of(name)))
        return Wanted(group, member_of(name), self._min_version, attempt)

    def _on_reissue(self, request: ReissueRequested, _record: Record) -> None:
        prompt_id = request.prompt_id
        origin = self.state.origins[number_of(prompt_id)] if letter_of(prompt_id) == REISSUE else prompt_id
        if not is_prompt_id(origin, TASK):
            raise ValueError(f"{origin!r} is no prompt of RL: only those are issued again")
        self.state.origins.append(origin)

    def _on_stage_requested(self, request: StageRequested, record: Record) -> None:
        self._check_stage(request.name)
        self.state.stage_asked = (record.sequence, request.name)

    def _on_stage_began(self, began: StageBeganHeaders, _record: Record) -> None:
        self._check_stage(began.name)
        self.state.stages.append((began.prompt, began.name))
        self.state.stage_answered = max(self.state.stage_answered, began.request)

    def _check_stage(self, name: str) -> None:
        if name not in self._known_stages:
            raise ValueError(f"{name!r} is no stage of the run; its stages: {', '.join(self._known_stages) or 'none'}")

    def stage_begins(self) -> list[StageBegan]:
        """Return the stage that was asked for, or whose condition holds, and that is not recorded yet, from the first
        prompt that is not begun.

        Of several requests the newest counts: the others would hold for no prompt.
        """
        (request, name), after = self.state.stage_asked, None
        if request <= self.state.stage_answered:
            request, after = 0, self.state.ended_of_stages.step
            name = "" if self._finished else self._schedule.due(self.state.ended_of_stages, self.state.stages)
        if not name:
            return []
        first = self.state.first(TASK)
        begun = prompt_name(TASK, first) in self.state.members
        return [StageBegan(name=name, prompt=first + begun, request=request, after=after)]

    def _on_issued(self, headers: PromptIssuedHeaders, _record: Record) -> None:
        name, attempt = headers.trajectory_id, headers.attempt
        prompt_id, stage = prompt_of(name), stage_of(name)
        open_groups = self.state.open.get(stage, set())
        if attempt:
            if prompt_id in open_groups:  # else its end was read before, and nothing is issued again
                self.state.attempts[name] = max(attempt, self.state.attempts.get(name, 0))
            if self.state.again.get(name, 0) <= attempt:
                self.state.again.pop(name, None)
            return
        count = self.state.members.pop(prompt_id, 0) + 1
        if count != headers.group_size:
            self.state.members[prompt_id] = count
        elif stage == "eval":
            self.state.requests.pop(number_of(prompt_id), None)
            self.state.evaluated = max(self.state.evaluated, number_of(prompt_id))
        else:
            letter = letter_of(prompt_id)
            self.state.first_open[letter] = self.state.first(letter) + 1
            if letter == LIVE:
                self.state.live.pop(number_of(prompt_id), None)
        if prompt_id in self.state.closed_early:
            self.state.closed_early.discard(prompt_id)
        elif count == 1:
            open_groups.add(prompt_id)

    def _close(self, prompt_ids: list[str]) -> None:
        for prompt_id in prompt_ids:
            for member in range(self._size):
                name = trajectory_name(prompt_id, member)
                self.state.again.pop(name, None)
                self.state.attempts.pop(name, None)
            open_groups = self.state.open[stage_of(prompt_id)]
            if prompt_id in open_groups:
                open_groups.discard(prompt_id)
            else:
                self.state.closed_early.add(prompt_id)
