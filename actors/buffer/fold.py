"""The fold of the buffer, a pure function of messages: groups, ends, batches, lag."""

from __future__ import annotations

from collections.abc import Iterable

from actors.buffer import groups, lag, late
from actors.buffer.state import LAG, BufferState, Group, Plan
from asyncrl.algorithms.filters import filtered_by
from asyncrl.algorithms.lag import open_groups
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.config.held_out import set_of
from topics.actors import RunOpened
from topics.batches import BatchPacked, BatchTrained, Objective
from topics.evals import EvalScored
from topics.groups import GroupCompleted, GroupDropped
from topics.ids import LIVE, Stage, letter_of, member_of, prompt_of, stage_of
from topics.prompts import ONLY_TASK, PromptIssuedHeaders
from topics.secrets import PurgeRequested
from topics.stages import StageBeganHeaders
from topics.trajectories import TrajectoryDropped, TrajectoryFailed, TrajectoryGraded, TrajectorySubmitted
from topics.turns import TurnOverruled
from topics.wire import Message


class BufferFold(Fold):
    """Groups wait until complete, then in the order of their completion for the batch that takes them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.state = BufferState(plan.origin, plan.origin, stages=[name for _, name in plan.stages])
        # As many failures as groups may be open at once: a service that is back soon ends no run.
        self._most_failed = {stage: open_groups(count, plan.max_lag) for stage, count in plan.batch_groups.items()}

    def _on_graded(self, graded: TrajectoryGraded, record: Record) -> None:
        self._claim(graded, record.time_ns)

    def _on_failed(self, failed: TrajectoryFailed, record: Record) -> None:
        self._claim(failed, record.time_ns)

    def _on_submitted(self, submitted: TrajectorySubmitted, _record: Record) -> None:
        if submitted.prompt_id in self.state.closed:
            self.state.late += 1
            return
        group = self._group_of(submitted)
        if group.is_known(submitted.member):
            self.state.late += 1
            return
        group.submitted[submitted.member] = submitted
        groups.gather(self.state, self._plan, group, submitted.member)

    def _on_completed(self, completed: GroupCompleted, record: Record) -> None:
        prompt_id = prompt_of(completed.group_id)
        if prompt_id not in self.state.closed:  # it may be read before the issue, which is on another log
            group = self._group(prompt_id)
            group.completed[completed.group_id] = [member.member for member in completed.members]
            self.state.grading[completed.group_id] = record.time_ns
            self.state.gathered.pop(completed.group_id, None)

    def _on_opened(self, _opened: RunOpened, record: Record) -> None:
        self.state.opened_ns = record.time_ns
        self.state.dropped = {}  # it may have other settings

    def _on_purge(self, purge: PurgeRequested, _record: Record) -> None:
        groups.erase(self.state, purge.secrets)

    def _on_trained(self, trained: BatchTrained, _record: Record) -> None:
        self.state.trained = max(self.state.trained, trained.step)

    def _on_packed(self, packed: BatchPacked, _record: Record) -> None:
        self.state.packed = max(self.state.packed, packed.step)
        self.state.dropped = {}
        self.state.stages_packed = self._stages_of([group.prompt_id for group in packed.groups])
        for packed_group in packed.groups:
            name = packed_group.prompt_id
            if not packed_group.further or not late.note_taken(self.state, self._group(name), packed_group):
                self._close(name)

    def _on_overruled(self, overruled: TurnOverruled, _record: Record) -> None:
        if overruled.prompt_id not in self.state.closed:
            self.state.wanted.setdefault(overruled.prompt_id, {})[overruled.member] = overruled.reward

    def _on_scored(self, scored: EvalScored, _record: Record) -> None:
        self._close(scored.eval_id)

    def _on_group_dropped(self, dropped: GroupDropped, record: Record) -> None:
        self._close(dropped.prompt_id)
        stage = stage_of(dropped.prompt_id)
        # The records to compare it with are on other logs, and may be read before. Of what waits for a learner that is
        # away everything becomes too old: that ends with its return.
        counts = dropped.reason != LAG and stage != "eval" and letter_of(dropped.prompt_id) != LIVE
        if counts and record.time_ns > max(self.state.opened_ns, self.state.kept_ns):
            self.state.dropped[dropped.reason] = self.state.dropped.get(dropped.reason, 0) + 1
        if dropped.reason == "failed":
            failures = [*self.state.failures[stage], record.time_ns]
            self.state.failures[stage] = failures[-self._most_failed[stage] :]

    def decide(self, now_s: float) -> list[Message]:
        """Return the messages due now, at this moment of the server's clock (seconds since the epoch)."""
        if self.state.purging:
            return groups.ended(self.state)
        decisions = self._expire(now_s) or groups.end_surplus(self.state) or late.ends(self.state, self._plan)
        if self.state.surplus:
            return decisions
        for prompt_id in self.state.waiting_drop:
            decisions += self._end_failed(self.state.groups[prompt_id])
        return decisions or groups.completed(self.state) or self._score(now_s) or self._pack()

    def next_deadline(self) -> float | None:
        """Return the first deadline of an open group, seconds since the epoch; None when nothing is open."""
        deadlines = [
            *map(self._first_deadline, self.state.issued),
            *groups.grading_deadlines(self.state, self._plan).values(),
        ]
        return min(filter(None, deadlines), default=None)

    def _first_deadline(self, stage: Stage) -> float | None:
        for prompt_id, issued_ns in self.state.issued[stage].items():  # in the order of issue
            group = self.state.groups.get(prompt_id)
            if group is None or not (group.known or group.being_issued):
                return groups.deadline_s(self.state, self._plan, stage, issued_ns)
        return None

    def should_give_up(self) -> str:
        """Return why continuing would only issue groups that fail or are dropped; empty while there is hope."""
        since = max(self.state.graded_ns, self.state.opened_ns)
        for stage, failed in self.state.failures.items():
            if len(failed) == self._most_failed[stage] and failed[0] > since:
                of_stage = "groups of the warm-up" if stage == "warmup" else "groups"
                last = self.state.last_failure
                return f"{len(failed)} {of_stage} in a row failed and no grade arrived between them; the last: {last}"
        return groups.dropped_too_many(self.state, self._plan)

    @property
    def ready(self) -> int:
        """Complete groups that wait for a batch."""
        return len(self.state.ready["warmup"]) + len(self.state.ready["rl"])

    @property
    def open(self) -> int:
        """Groups with running members."""
        return len(self.state.groups) - self.ready

    def _on_stage_began(self, headers: StageBeganHeaders, record: Record) -> None:
        self.state.stages.append(headers.name)
        self._hope(record.time_ns)  # it may have other filters, and other rows

    def _on_issued(self, headers: PromptIssuedHeaders, record: Record) -> None:
        prompt_id, member = prompt_of(headers.trajectory_id), member_of(headers.trajectory_id)
        if prompt_id in self.state.closed:
            return
        stage, group = stage_of(prompt_id), self._group(prompt_id)
        group.issued += headers.attempt == 0
        if stage == "eval":  # the deadline counts from the newest issue: all rows of an evaluation are made before
            self.state.issued[stage].pop(prompt_id, None)
        elif prompt_id in self.state.issued[stage]:
            return
        self.state.issued[stage][prompt_id] = record.time_ns
        group.stages = len(self.state.stages)
        group.size, group.stage = headers.group_size, stage  # a failure that was read before may contradict it
        group.task, group.estimator = headers.task, headers.estimator
        if stage == "eval" and group.task != ONLY_TASK:
            group.tasks[member] = group.task
        group.tenant = headers.tenant
        group.temperature, group.min_version = headers.temperature, headers.min_version
        group.secrets, group.wanted, group.keep = headers.secrets, headers.wanted, group.keep or self._plan.keep
        groups.purge_if_gone(self.state, group)
        groups.gather(self.state, self._plan, group, member)
        if group.enough:
            self._settle(group, record.time_ns)

    def _claim(self, message: TrajectoryGraded | TrajectoryFailed, time_ns: int) -> None:
        prompt_id = message.prompt_id
        if isinstance(message, TrajectoryGraded):
            self.state.graded_ns = max(self.state.graded_ns, time_ns)
        else:
            self.state.last_failure = f"{message.trajectory_id}: {message.reason}: {message.detail}"
        if prompt_id in self.state.closed:
            self.state.late += 1
            return
        group, member = self._group_of(message), message.member
        known = group.graded.get(member) or group.failed.get(member)
        repeated = known is not None and known.attempt >= message.attempt
        if repeated or member in group.dropped or message.attempt < group.attempts.get(member, 0):
            self.state.late += 1
            return
        group.graded.pop(member, None)
        group.failed.pop(member, None)
        if isinstance(message, TrajectoryGraded):
            group.graded[member], group.graded_ns[member] = message, time_ns
        else:
            group.failed[member] = message
        groups.gather(self.state, self._plan, group, member)
        # Claims about members that were never issued end nothing.
        if group.enough and prompt_id in self.state.issued[stage_of(prompt_id)]:
            self._settle(group, time_ns)

    def _on_dropped(self, message: TrajectoryDropped, record: Record) -> None:
        prompt_id, member = prompt_of(message.trajectory_id), member_of(message.trajectory_id)
        if prompt_id in self.state.closed:
            return
        group = self._group(prompt_id)  # it may be read before the issue and the grades, which lie on other logs
        if message.again:
            graded = group.graded.get(member)
            if graded is not None and graded.attempt <= message.attempt:
                del group.graded[member]
                self.state.ready[group.stage].pop(prompt_id, None)
            group.attempts[member] = message.attempt + 1
            groups.note_surplus(self.state, group)
        else:
            group.dropped.add(int(member))
            group.expired |= message.reason == "deadline"
            groups.gather(self.state, self._plan, group, int(member))
            if late.note_dropped(group, int(member)):
                self._close(prompt_id)
            elif group.size and group.enough:
                self._settle(group, record.time_ns)
            else:
                self.state.ready[group.stage].pop(prompt_id, None)

    def _group(self, prompt_id: str) -> Group:
        """The open group of a prompt, of which nothing may be known yet."""
        group = self.state.groups.get(prompt_id)
        if group is None:
            group = self.state.groups[prompt_id] = Group(prompt_id, 0, stage_of(prompt_id))
        return group

    def _group_of(self, message: TrajectorySubmitted | TrajectoryGraded | TrajectoryFailed) -> Group:
        """The open group of a member, whose size may be known by no issue yet."""
        group = self._group(message.prompt_id)
        if not group.size:
            group.size, group.stage = message.group_size, message.stage
        if not 0 <= message.member < group.size:
            raise ValueError(f"{message.trajectory_id} is no member of a group of {group.size}")
        return group

    def _settle(self, group: Group, time_ns: int) -> None:
        """A group that a batch may take is ready, unless something has to be published about it first."""
        if group.taken:
            return
        live = len(group.live())
        ends_missing = bool(group.failed.keys() - group.dropped)
        if ends_missing or live < group.least or group.prompt_id in self.state.surplus:
            self.state.waiting_drop[group.prompt_id] = None
        elif self._filter(group):  # an open member may make the difference
            self.state.ready[group.stage].pop(group.prompt_id, None)
            if group.complete:
                self.state.waiting_drop[group.prompt_id] = None
        else:
            self.state.waiting_drop.pop(group.prompt_id, None)
            self.state.ready[group.stage].setdefault(group.prompt_id)
            if group.stage != "eval" and letter_of(group.prompt_id) != LIVE:
                self._hope(time_ns)

    def _hope(self, time_ns: int) -> None:
        """Reset the counts of dropped groups."""
        if time_ns > self.state.kept_ns:
            self.state.kept_ns = time_ns
            self.state.dropped = {}

    def _filter(self, group: Group) -> str:
        """Name of the first filter of the stage's next batch that drops a group; empty if no filter does."""
        if group.stage != "rl":
            return ""
        objective = self._objective(max(1, self.state.packed + 1), group.stages)
        return filtered_by(group.live(), objective.filters, objective.filter_options)

    def _objective(self, step: int, stages: int) -> Objective:
        """The objective of a step; `stages` is the number of stages that have begun."""
        return self._plan.objective(step, self.state.stages[stages - 1] if stages else "")

    def _stages_of(self, prompt_ids: Iterable[str]) -> int:
        """Stages of the run that a batch follows: as many as had begun for the newest group of it or of one before."""
        known = (self.state.groups[name] for name in prompt_ids if name in self.state.groups)
        return max([self.state.stages_packed, *(group.stages for group in known)])

    def _close(self, prompt_id: str) -> None:
        self.state.closed.add(prompt_id)
        self.state.issued[stage_of(prompt_id)].pop(prompt_id, None)
        self.state.waiting_drop.pop(prompt_id, None)
        self.state.purging.pop(prompt_id, None)
        self.state.surplus.pop(prompt_id, None)
        self.state.continued.pop(prompt_id, None)
        self.state.wanted.pop(prompt_id, None)
        self.state.gathered = {name: at for name, at in self.state.gathered.items() if prompt_of(name) != prompt_id}
        self.state.grading = {name: at for name, at in self.state.grading.items() if prompt_of(name) != prompt_id}
        group = self.state.groups.pop(prompt_id, None)
        if group is not None:
            self.state.ready[group.stage].pop(prompt_id, None)

    def _expire(self, now_s: float) -> list[Message]:
        expired = [end for stage in self.state.issued for end in self._expire_of(stage, now_s)]
        return expired or groups.expired_grading(self.state, self._plan, now_s)

    def _expire_of(self, stage: Stage, now_s: float) -> list[Message]:
        decisions: list[Message] = []
        for prompt_id, issued_ns in self.state.issued[stage].items():
            if groups.deadline_s(self.state, self._plan, stage, issued_ns) > now_s:
                break
            group = self.state.groups[prompt_id]
            if group.known or group.being_issued:
                continue
            if len(group.graded.keys() - group.dropped) + len(group.ungraded()) < group.least:
                decisions.append(groups.drop_group(group, "deadline"))
                continue
            missing = [member for member in range(group.size) if not group.is_known(member)]
            decisions += [groups.drop(group, member, "deadline") for member in missing]
        return decisions

    def _end_failed(self, group: Group) -> list[Message]:
        """The ends that a complete group needs before it can be packed, or its own end."""
        if len(group.live()) < group.least:
            purged = any(failed.reason == "purged" for failed in group.failed.values())
            return [groups.drop_group(group, "purged" if purged else "failed")]
        decisions: list[Message] = [
            groups.drop(group, member, failed.reason, detail=failed.detail)
            for member, failed in sorted(group.failed.items())
            if member not in group.dropped
        ]
        if decisions:
            return decisions
        return [groups.drop_filtered(group, self._filter(group))]

    def _score(self, now_s: float) -> list[Message]:
        """The results of evaluations whose every member has a grade or its own end."""
        decisions: list[Message] = []
        for name in self.state.ready["eval"]:
            begun_s = max(self.state.issued["eval"].get(name, 0), self.state.opened_ns) / 1e9
            seconds = max(0.0, now_s - begun_s) if begun_s else 0.0
            group = self.state.groups[name]
            decisions.append(groups.eval_scored(group, set_of(self._plan.held_out, group.task), seconds=seconds))
        return decisions

    def _pack(self) -> list[Message]:
        """The next batch, once enough groups are ready and the learner is near enough."""
        plan, step = self._plan, self.state.packed + 1
        if step > plan.steps or self.state.packed - self.state.trained > plan.ahead:
            return []
        stage: Stage = "warmup" if step <= 0 else "rl"
        count = plan.batch_groups[stage]
        names = groups.in_data_order(self.state, count) if stage == "warmup" else list(self.state.ready["rl"])
        ready = [self.state.groups[name] for name in names]
        if len(ready) < count:
            return []
        min_version = step - 1 - plan.max_lag
        over = groups.crowded(ready, plan.tenant_most)
        beyond = {group.prompt_id for group in over}
        drops: list[Message] = []
        chosen: list[Group] = []
        for group in ready:
            if group.prompt_id in beyond:
                continue
            old = [member for member in group.live() if stage == "rl" and lag.too_old(plan, member, min_version)]
            if old:
                again = plan.reissue and not group.expired and letter_of(group.prompt_id) != LIVE
                drops += lag.drop_old(group, old, step, again=again)
                continue
            chosen.append(group)
            if len(chosen) == count:
                break
        if drops:
            return drops
        if len(chosen) < count:
            under_way = self.state.issued[stage].keys() - self.state.ready[stage].keys() - self.state.continued.keys()
            return groups.make_room(over, count - len(chosen), under_way)
        return self._packed(step, stage, chosen)

    def _packed(self, step: int, stage: Stage, chosen: list[Group]) -> list[Message]:
        """A batch of these groups and of late members, unless some of them end first."""
        plan = self._plan
        objective = plan.objective(step, "")
        if self.state.stages and stage == "rl":
            # A group of an earlier stage passed the filters of that one, not yet those that the batch records.
            objective = self._objective(step, self._stages_of(group.prompt_id for group in chosen))
            rules = objective.filters, objective.filter_options
            named = [(one, name) for one in chosen if (name := filtered_by(one.live(), *rules))]
            if named:
                return [groups.drop_filtered(one, name) for one, name in named]
        figures = {}
        if stage == "rl":
            if drops := late.too_late(self.state, plan, step):
                return drops
            chosen += late.graded(self.state)
            seconds = [seconds for group in chosen for seconds in groups.seconds_to_grade(self.state, group)]
            figures = groups.batch_figures([group.to_train() for group in chosen], seconds)
        wanted, kept = self.state.wanted, objective.reward_weights
        packed = [groups.in_batch(group, wanted.get(group.prompt_id, {}), kept) for group in chosen]
        return [BatchPacked(step, stage, packed, step - 1 - plan.max_lag, objective, figures)]
