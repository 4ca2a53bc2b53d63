"""One group compared with itself: ends with issues, its batch with grades, grades with results, drops with causes.

What ends without training has failed, is too old or too late, or teaches nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from asyncrl.algorithms.filters import FILTERS, reason_of
from asyncrl.algorithms.lag import fresh_share
from asyncrl.config.settings import BufferSettings, Config
from asyncrl.config.staged import all_filters
from asyncrl.state.audit.group import Drop, Group, Key, Stored, end_text, versions_text
from asyncrl.state.audit.training import Batch
from asyncrl.state.audit.violations import Violation
from asyncrl.state.records import reward_text
from topics.batches import BatchMember
from topics.evals import EvalRequested, EvalScored
from topics.ids import LIVE, letter_of, trajectory_name
from topics.trajectories import TrajectoryGraded

_SKEW_S = 2.0  # between the clocks that a deadline is measured with
_BEHIND_S = 30.0  # seconds that the buffer may lag the grades
_OLD = "tokens that are older than the next batch may hold"


def group_violations(
    group: Group,
    batches: Mapping[int, Batch],
    stored: Mapping[int, Stored],
    config: Config | None,
    *,
    one_lineage: bool,
) -> Iterator[Violation]:
    """Return what contradicts itself in a group.

    Args:
        stored: results by sequence, this group's and others'.
        config: of the run, if known.
        one_lineage: whether no lineage ended: versions only rise.
    """
    yield from _ends(group)
    yield from _members(group, batches)
    if group.rules and group.packed_rules and group.packed_rules != group.rules:
        yield Violation("wrong rules", group.prompt_id, str(group.packed_rules), f"{group.rules}, as it was issued")
    if isinstance(group.end, EvalScored) and group.issued:
        yield from _score(group, group.end)
        if config is not None and config.eval.engines:
            yield from _exact(group.end)
    yield from _claims(group, stored, one_lineage=one_lineage)
    for sequence in group.results:
        result = stored[sequence]
        if result.fault and result.key in group.issues:
            expected = f"{result.versions}, as in its header"
            yield Violation("damaged payload", str(result.key), result.fault, expected)
    yield from _group_scores(group)
    yield from _rows(group, stored)
    if config is not None:
        yield from _drops(group, config)


def _claims(group: Group, stored: Mapping[int, Stored], *, one_lineage: bool) -> Iterator[Violation]:
    for key, claims in group.claims.items():
        for grade in [claim.grade for claim in claims if claim.grade is not None and key in group.issues]:
            yield from _reference(group, key, grade, stored)
            least = group.issues[key].min_version
            if one_lineage and (old := [count for count in grade.versions if 0 <= count.version < least]):
                found = f"{old[0].tokens} tokens of version {old[0].version}"
                yield Violation("below min_version", str(key), found, f"{least} or newer, as it was issued")


def _ends(group: Group) -> Iterator[Violation]:
    """Ends refer to issued attempts, and an issued attempt has an end once its group was packed."""
    for key, end in group.ends.items():
        # A trajectory dropped for its lag is to be issued again, and may be dropped before it is.
        foreseen = isinstance(end, str) and key in group.again
        if key not in group.issues and not foreseen:
            yield Violation("never issued", str(key), end_text(end), "an issue before its end")
    if isinstance(group.end, str) and not group.issues:
        yield Violation("never issued", group.prompt_id, f"{end_text(group.end)} as a group", "an issue before its end")
    for key in group.issues:
        of_group = group.end_of(key)
        if key not in group.ends and of_group is not None and not isinstance(of_group, str):
            found = f"its group is in {end_text(of_group)} without it"
            yield Violation("no end", str(key), found, "a separate end")


def _members(group: Group, batches: Mapping[int, Batch]) -> Iterator[Violation]:
    """A batch holds the first grade of each of its members, which came before it."""
    for key, member in group.packed.items():
        end = group.ends[key]
        assert not isinstance(end, str)
        where, ended_ns = end_text(end), group.scored_ns if isinstance(end, EvalScored) else batches[end].time_ns
        claims, grade = group.claims.get(key, []), group.used(key, member)
        if grade is None:
            given = " or ".join(_grade_text(claim.grade) for claim in claims if claim.grade is not None)
            yield Violation("not graded", str(key), f"{_grade_text(member)} in {where}", given or "a grade")
            continue
        first = claims[0].grade
        if first is not grade:
            found = f"{_grade_text(member)} in {where}"
            expected = f"{_grade_text(first)}, which came first" if first else "none: a failure came first"
            yield Violation("second grade", str(key), found, expected)
        graded_ns = next(claim.time_ns for claim in claims if claim.grade is grade)
        if graded_ns > ended_ns:
            late_s = (graded_ns - ended_ns) / 1e9
            yield Violation("graded late", str(key), f"graded {late_s:.3f} s after {where}", "a grade before it")
        if member.tokens != (sampled := sum(count.tokens for count in grade.versions)):
            found = f"{member.tokens} tokens in {where}"
            yield Violation("wrong tokens", str(key), found, f"{sampled}, as graded")
        if member.lengths != grade.lengths:
            found = f"segments of {member.lengths} tokens in {where}"
            yield Violation("wrong tokens", str(key), found, f"{grade.lengths}, as graded")


def _group_scores(group: Group) -> Iterator[Violation]:
    """Members that were graded together have the scores of their one call."""
    calls = {together.group_id: together.keys for together in group.completed.values()}
    for name, scores in group.scores.items():
        for key, score in zip(calls.get(name, ()), scores, strict=False):
            for grade in [claim.grade for claim in group.claims.get(key, []) if claim.grade is not None]:
                if grade.score != score:
                    found, expected = _grade_text(grade), f"{score}, as the call for {name} gave"
                    yield Violation("second grade", str(key), found, expected)


def _score(group: Group, score: EvalScored) -> Iterator[Violation]:
    """The figures of an evaluation are those of its members; one without a grade counts as reward 0."""
    if (requested := group.requested) is not None:
        found, wanted = _evaluation_text(score), _evaluation_text(requested)
        if found != wanted:
            yield Violation("wrong evaluation", score.eval_id, found, f"{wanted}, as requested")
    grades = [grade for key, member in group.packed.items() if (grade := group.used(key, member)) is not None]
    versions: Counter[int] = Counter()
    for grade in grades:
        versions.update({count.version: count.tokens for count in grade.versions})
    answers = score.prompts * score.samples
    if (answers, score.failed) != (group.size, group.size - len(group.packed)):
        found = f"{answers} answers, {score.failed} of them without a grade"
        yield Violation("wrong size", score.eval_id, found, f"{group.size} issued, {len(group.packed)} of them graded")
    elif not math.isclose(score.accuracy, mean := sum(grade.reward for grade in grades) / group.size, abs_tol=1e-9):
        yield Violation("wrong rewards", score.eval_id, f"accuracy {score.accuracy:g}", f"{mean:g} of its members")
    if score.versions != versions:
        yield Violation("wrong tokens", score.eval_id, f"{score.versions} by version", f"{dict(versions)}, as graded")


def _evaluation_text(message: EvalRequested | EvalScored) -> str:
    dataset = f" of {message.dataset}" if message.dataset else ""
    return f"version {message.version} on {message.prompts} prompts{dataset}, {message.samples} answers each"


def _exact(score: EvalScored) -> Iterator[Violation]:
    """An evaluation with its own engines has tokens of the requested version only."""
    for version, tokens in score.versions.items():
        if version != score.version and tokens:
            found = f"{tokens} tokens of version {version}"
            yield Violation("wrong version", score.eval_id, found, f"{score.version} alone, by eval.engines")


def _reference(group: Group, key: Key, grade: TrajectoryGraded, stored: Mapping[int, Stored]) -> Iterator[Violation]:
    """Check that the graded tokens are the stored ones, where these are still there."""
    reference, versions = grade.payload, versions_text(grade.versions)
    own, result = group.generated.get(key), stored.get(reference.sequence)
    if result is None:
        if own is not None:
            found = f"message {reference.sequence}"
            yield Violation("wrong reference", str(key), found, f"message {own}, which holds its result")
    elif (result.key, result.versions) != (key, versions):
        found = f"message {reference.sequence}, which holds {result.key} with versions {result.versions}"
        yield Violation("wrong reference", str(key), found, f"a separate result with versions {versions}")
    elif result.digest and (result.digest, result.size) != (reference.digest, reference.size):
        found = f"{result.size} bytes of digest {result.digest} in message {reference.sequence}"
        yield Violation("damaged payload", str(key), found, f"{reference.size} bytes of {reference.digest}")
    elif result.digest and tuple(grade.lengths) != result.lengths:
        found = f"segments of {grade.lengths} tokens in its grade"
        yield Violation("wrong tokens", str(key), found, f"{[*result.lengths]}, as its result has them")
    elif result.digest and (wrong := _not_given(grade, result)):
        yield Violation("wrong rewards", str(key), *wrong)


def _not_given(grade: TrajectoryGraded, result: Stored) -> tuple[str, str] | None:
    """The rewards of a grade, and other ones that its rollout function gave."""
    given = result.reward if grade.stage != "warmup" and result.reward is not None else grade.reward
    if (given, result.turn_rewards) == (grade.reward, tuple(grade.turn_rewards)):
        return None
    expected = f"{reward_text(given, result.turn_rewards)}, as its rollout function gave"
    return reward_text(grade.reward, grade.turn_rewards), expected


def _rows(group: Group, stored: Mapping[int, Stored]) -> Iterator[Violation]:
    """Results are made from the rows that were issued, once for a group; each member of an evaluation has its own."""
    issued = {key: issue.rows for key, issue in group.issues.items()}
    made = {stored[at].key: stored[at].rows for at in group.results}
    for key in group.issues:
        carrier = key if group.stage == "eval" else Key(trajectory_name(group.prompt_id, 0), 0)
        expected = issued.get(carrier)
        if not expected:
            if expected is not None and key == carrier:
                yield Violation("wrong row", str(key), "no row", "the rows of its group")
            continue
        for found in (issued[key], made.get(key)):
            if found and found != expected:
                yield Violation("wrong row", str(key), f"rows of digest {found}", f"{expected}, as {carrier} has them")


def _grade_text(grade: TrajectoryGraded | BatchMember) -> str:
    reward = reward_text(grade.reward, grade.turn_rewards)
    return f"{reward} of message {grade.payload.sequence} (digest {grade.payload.digest})"


def _drops(group: Group, config: Config) -> Iterator[Violation]:
    """Members and groups that were dropped for a reason that the logs do not bear out."""
    for key, drop in group.drops.items():
        if key in group.issues and (expected := _missing_cause(group, key, drop, config)):
            yield Violation("dropped without cause", str(key), end_text(drop.reason), expected)
    if group.dropped is not None and group.issues and (expected := _missing_group_cause(group, group.dropped, config)):
        found = f"{end_text(group.dropped.reason)} as a group"
        yield Violation("dropped without cause", group.prompt_id, found, expected)


def _missing_cause(group: Group, key: Key, drop: Drop, config: Config) -> str:
    """Return the missing cause of a member's drop; "" if it has one."""
    first = group.claims[key][0] if key in group.claims else None
    if drop.reason == "deadline":
        known = first is not None and first.time_ns < _seen_ns(drop)
        return "no grade or failure before its deadline" if known else _before_deadline(group, drop, config)
    if drop.reason == "surplus":
        return _missing_others(group, drop)
    if drop.reason == "lag":
        return "" if first is not None and first.grade and _is_old(first.grade, drop, config.buffer) else _OLD
    if first is None or first.grade is not None or first.reason != drop.reason:
        return f"a failure ({drop.reason}) before any grade"
    return ""


def _missing_others(group: Group, drop: Drop) -> str:
    """Return why a group could not do without a member; "" if it could."""
    ended = {key.member for key, other in group.drops.items() if other.reason == "surplus"}
    graded = {
        key.member for key, claims in group.claims.items() if claims[0].grade and claims[0].time_ns < drop.time_ns
    }
    others = (graded | {key.member for key in group.submitted}) - ended
    return "" if 0 < group.wanted <= len(others) else f"{group.wanted or 'all'} graded members without it"


def _missing_group_cause(group: Group, drop: Drop, config: Config) -> str:
    """As `_missing_cause`, for a group as a whole."""
    live, least = group.live(), min(2, group.size)
    if drop.reason == "deadline":
        known = len(group.live(_seen_ns(drop))) >= least
        return f"fewer than {least} graded members at its deadline" if known else _before_deadline(group, drop, config)
    if drop.reason == "purged":
        claimed = any(claim.reason == "purged" for claims in group.claims.values() for claim in claims)
        return "" if group.purged or claimed else "a purge of a data key of it"
    if drop.reason == "failed":
        return f"fewer than {least} members that are graded, found {len(live)}" if len(live) >= least else ""
    if drop.reason == "lag":
        fresh = [grade for grade in live.values() if not _is_old(grade, drop, config.buffer)]
        return _OLD if len(fresh) >= least or len(fresh) == len(live) else ""
    if drop.reason == "tenant" and config.live.safety.tenant_share < 1:
        return "" if letter_of(group.prompt_id) == LIVE else "a live turn"
    return _missing_filter(list(live.values()), drop, config)


def _missing_filter(members: list[TrajectoryGraded], drop: Drop, config: Config) -> str:
    """As `_missing_cause`, for a group that a filter dropped."""
    named = [name for name in all_filters(config) if reason_of(name) == drop.reason]
    if not named:
        return "a reason that is known, or a filter of learner.filters"
    kinds = {name: kind for name in named if (kind := FILTERS.loaded(name)) is not None}
    rules = [getattr(config.learner.filter_options, name, kind()) for name, kind in kinds.items()]
    if sorted(drop.scores) != sorted(scores := [member.score for member in members]):
        return f"the rewards {scores} of its grades"
    return "a group that this filter drops" if rules and not any(rule(members) for rule in rules) else ""


def _is_old(grade: TrajectoryGraded, drop: Drop, buffer: BufferSettings) -> bool:
    """Return whether the batch that was next could not take it."""
    least = buffer.min_fresh if buffer.stale == "mask" else 1.0
    return fresh_share(grade.versions, min_version=drop.step - 1 - buffer.max_lag) < least


def _seen_ns(drop: Drop) -> float:
    """Server's clock before which the buffer must have seen all grades."""
    return drop.time_ns - _BEHIND_S * 1e9


def deadline_s(config: Config, group: Group) -> float:
    """Seconds after its issue when a group has an end, unless it is complete."""
    return config.eval.deadline_s if group.stage == "eval" else config.buffer.group_deadline_s


def _before_deadline(group: Group, drop: Drop, config: Config) -> str:
    early_s = deadline_s(config, group) - (drop.time_ns - group.issued_ns) / 1e9
    return f"its deadline, {early_s:,.1f} s later" if early_s > _SKEW_S else ""
