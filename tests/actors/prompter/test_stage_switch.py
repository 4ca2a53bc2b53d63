"""A stage that an operator asks for begins at the first prompt not issued yet, once, whoever is killed meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.prompter.actor import decide, sampling_seed
from actors.prompter.data_order import DataOrder
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import publish
from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.state.audit.ledger import Ledger
from harness.folds import Feed
from harness.prompter_feed import config, feed, issue
from harness.stage import Stage, until
from topics.actors import ReissueRequested
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.stages import STAGE_BEGAN, STAGE_REQUESTED, StageBegan, StageRequested
from topics.topic import PROMPTS
from topics.wire import decode, encode, headers_of

TASKS = {"words": {"source": "reverse", "options": {"letters": 3}, "share": 2}, "sums": {"source": "sum"}}
STAGES = {"sums": {"shares": {"words": 0}, "group_size": 3}, "first": {}}
# Batches of 2 groups with L = 1: at most 4 groups are open.


def staged():
    return feed(tasks=TASKS, stages=STAGES)


def ask(fed, name):
    fed.publish(StageRequested(name=name))
    return fed.sequence


def groups(fed, count=8):
    source = fed.fold.sources["p"]
    found = [source.group(fed.fold.state, number) for number in range(count)]
    return [(group.tasks[0], group.size, group.places.start) for group in found]


def test_a_stage_begins_behind_all_that_was_begun():
    fed = staged()
    issue(fed, count=5)  # two groups of two, and one member of the third
    before = groups(fed)
    request = ask(fed, "sums")

    [began] = fed.read_back(fed.fold.stage_begins())

    assert (began.name, began.prompt, began.request) == ("sums", 3, request)
    assert fed.fold.stage_begins() == []
    assert groups(fed) == before[:3] + [("sums", 3, place) for place in (5, 8, 11, 14, 17)]  # p000002 had sums' first
    assert issue(fed) == ["p000002-1", "p000003-0", "p000003-1", "p000003-2"]


def test_of_several_requests_the_newest_holds_and_each_is_answered_once():
    fed = staged()
    ask(fed, "sums")
    request = ask(fed, "first")
    [began] = fed.read_back(fed.fold.stage_begins())

    assert (began.name, began.prompt, began.request) == ("first", 0, request)
    assert fed.fold.stage_begins() == []
    ask(fed, "sums")
    fed.read_back(fed.fold.stage_begins())
    assert fed.fold.state.stages == [(0, "first"), (0, "sums")]
    assert {task for task, *_ in groups(fed)} == {"sums"}


def test_a_record_that_is_read_before_its_request_answers_it():
    fed, other = staged(), staged()
    issue(fed)
    began = StageBegan(name="sums", prompt=4, request=1)
    fed.publish(began)
    other.publish(StageRequested(name="sums"))  # message 1
    issue(other)
    other.publish(began)
    fed.sequence = 0
    fed.publish(StageRequested(name="sums"))

    assert fed.fold.stage_begins() == other.fold.stage_begins() == []
    assert fed.fold.state == other.fold.state
    again = Feed(type(fed.fold)(config(tasks=TASKS, stages=STAGES)))
    again.fold.state = decode(type(fed.fold.state), encode(fed.fold.state))  # as a snapshot has it
    assert groups(again) == groups(fed)


def test_a_prompt_that_is_issued_again_keeps_the_rules_of_its_stage():
    fed = staged()
    issue(fed)
    ask(fed, "sums")
    fed.read_back(fed.fold.stage_begins())
    fed.publish(ReissueRequested(prompt_id="p000001"))
    again = fed.fold.sources["r"].group(fed.fold.state, 0)

    assert (again.tasks, again.size, again.places.start) == (["words"], 2, 1)


@pytest.mark.parametrize("message", [StageRequested(name="none"), StageBegan(name="none", prompt=0, request=1)])
def test_a_stage_that_the_run_does_not_have_is_refused(message):
    fed = staged()

    with pytest.raises(ValueError, match="'none' is no stage of the run; its stages: sums, first"):
        fed.publish(message)
    assert fed.fold.stage_begins() == fed.fold.state.stages == []


def test_a_fork_begins_in_the_stage_of_its_first_prompt():
    whole, start = staged(), {"prompt": 6, "stages": {"0": "first", "4": "sums"}}
    whole.fold.state.stages = [(0, "first"), (4, "sums")]

    forked = feed(tasks=TASKS, stages=STAGES, start=start)

    assert groups(forked)[6:] == groups(whole)[6:]
    assert issue(forked)[0] == "p000006-0"


# --- audited


def audited(*, request=1, prompt=2, size=3, sampled=0.9):
    """Two prompts, a request (message 1 of ACTORS), its record, and a prompt of the stage, as an audit reads them."""
    settings = config(tasks=TASKS, stages={"sums": {"shares": {"words": 0}, "group_size": 3, "temperature": 0.9}})
    ledger = Ledger()
    ledger.opening.config = settings
    ledger.writers._claimed[PROMPTS.name] = ""  # records below name no writer
    order = DataOrder(ledger, settings, Path())
    prompter = feed(tasks=TASKS, stages=STAGES).fold
    messages = [decide(item, settings.seed, [PromptRow("x")]) for item in prompter.wanted()[:4:2]]
    messages += [StageBegan(name="sums", prompt=prompt, request=request)]
    last = messages[1]
    messages += [
        PromptIssued(
            prompt_id="p000002",
            member=0,
            group_size=size,
            rows=last.rows,
            seed=sampling_seed(settings.seed, "p000002-0", 0),
            task="sums",
            temperature=sampled,
            estimator="grpo",
        )
    ]
    ledger.stages.apply(STAGE_REQUESTED, StageRequested(name="sums"), Record(STAGE_REQUESTED.stream, 1, "", {}, b"", 0))
    for number, message in enumerate(messages, 1):
        topic = STAGE_BEGAN if isinstance(message, StageBegan) else PROMPT_ISSUED
        record = Record(PROMPTS, number, "", headers_of(message), b"", 0)
        ledger.stages.apply(topic, message, record)
        ledger.groups.apply(topic, message, record)
    return [(found.kind, found.id) for found in ledger.violations], list(order.carried("task"))


def test_the_audit_follows_stages_and_finds_those_that_nobody_asked_for():
    clean, carried = audited()

    assert clean == []
    assert [one.first for one in carried] == [0, 1, 2]  # the first row of sums is at place 2
    assert audited(request=2)[0] == [("unasked stage", "stage sums")]
    assert ("unasked stage", "stage sums") in audited(prompt=1)[0]
    assert ("wrong rules", "p000002") in audited(size=2)[0]
    assert ("wrong rules", "p000002") in audited(sampled=1.0)[0]


# --- on a server


@pytest.mark.parametrize("dies", ["before the request is read", "once it is recorded"])
async def test_a_killed_prompter_leaves_a_switch_that_holds_once(
    stage: Callable[..., Stage], bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str
):
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "points"))
    log: list[Record] = []
    reader = LogReader(bus, PROMPTS, log.append)
    await reader.start()

    def names(topic):
        return [record.headers for record in log if record.subject.startswith(topic.subject(bus.run, "x")[:-1])]

    def issued():
        prefix = PROMPT_ISSUED.subject(bus.run, "p0")[:-2]
        return [record for record in log if record.subject.startswith(prefix)]

    def began():
        return [decode(StageBegan, record.data) for record in log if record.subject == STAGE_BEGAN.subject(bus.run)]

    made = stage(tasks=TASKS, stages=STAGES, rollout={"group_size": 2}, buffer={"batch_groups": 2, "max_lag": 1})
    first = await made.start("prompter")
    await until(lambda: len(issued()) == 8, "all groups that may be open are issued")
    if dies == "once it is recorded":
        arm(tmp_path / "points", "keeper.appended", "prompter")
    else:
        first.kill()
        await first.wait()
    request = await publish(bus, StageRequested(name="sums"))
    await first.wait()

    await made.start("prompter")
    await until(lambda: len(began()) >= 1, "the stage has begun")
    marker = await publish(bus, ReissueRequested(prompt_id="p000000"))
    assert marker > request
    again = await publish(bus, StageRequested(name="first"))
    await until(lambda: any(one.request == again for one in began()), "the next stage has begun")

    assert [(one.name, one.prompt, one.request) for one in began()] == [("sums", 4, request), ("first", 4, again)]
    await reader.close()
