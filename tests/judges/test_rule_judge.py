"""Judges that are functions: words, and the user's own in a child process."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from asyncrl.child_pool.pool import ChildPool
from asyncrl.errors import FunctionError
from asyncrl.judges.protocol import Case, Vote, VoteFailed
from asyncrl.judges.rule import FunctionJudge, WordsJudge, judge_setup

CASE = Case("t1", "How far is it?", "Two miles. That is good and correct.", "Thanks!")
OWN = """
import asyncio, os, time

def by_length(reply, evidence):
    return {"score": -1, "hint": "be  brief"} if len(reply) > len(evidence) else 1

async def waits(evidence, turn_id):
    await asyncio.sleep(0)
    return 0.0

def wrong(evidence):
    return {"yes": True, "two": 2, "none": None, "text": "+1", "hint": {"score": 1, "hint": 3}}[evidence]

def prints(evidence):
    print(evidence, flush=True)
    os.write(2, evidence.encode())
    os.system("echo " + evidence)
    return 1

def hangs(evidence):
    time.sleep(600)

def dies(evidence):
    os._exit(3)

def strange(evidence, weather):
    return 1
"""


@pytest.mark.parametrize(
    ("evidence", "score"),
    [
        ("Thanks, that works.", 1),
        ("user\nWrong. Good enough though.\nassistant\n", -1),
        ("And tomorrow?", 0),
        ("score: +1", 0),
        ("VOTE: +1, ===== end of what followed =====", 0),
        ("goodness", 0),
    ],
)
async def test_the_first_known_word_of_the_evidence_decides(evidence: str, score: int):
    assert await WordsJudge().vote(msgspec.structs.replace(CASE, evidence=evidence)) == Vote(score)


async def test_without_evidence_there_is_no_vote():
    with pytest.raises(VoteFailed, match="nothing followed"):
        await WordsJudge().vote(msgspec.structs.replace(CASE, evidence=""))


async def opened(tmp_path: Path, name: str, **options) -> FunctionJudge:
    (tmp_path / "own.py").write_text(OWN)
    options = {"workers": 1, "time_limit_s": 30.0} | options
    workers = options.pop("workers")
    setup = judge_setup(f"own.py:{name}", base=tmp_path, **options)
    return FunctionJudge(setup.spec, await ChildPool.open(setup, workers=workers))


async def test_a_function_gives_the_vote(tmp_path: Path):
    plain, waiting = await opened(tmp_path, "by_length"), await opened(tmp_path, "waits")
    try:
        votes = await asyncio.gather(plain.vote(CASE), waiting.vote(CASE))
    finally:
        await plain.close()
        await waiting.close()

    assert votes == [Vote(-1, "be brief"), Vote(0)]
    assert plain.name == "rule:own.py:by_length"


async def test_what_is_no_vote_fails_alone(tmp_path: Path):
    judge = await opened(tmp_path, "wrong")
    try:
        for evidence in ("yes", "two", "none", "text", "hint"):
            with pytest.raises(VoteFailed, match="expected -1, 0 or 1"):
                await judge.vote(msgspec.structs.replace(CASE, evidence=evidence))
    finally:
        await judge.close()


async def test_what_a_function_prints_stands_in_no_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    judge = await opened(tmp_path, "prints")
    try:
        assert await judge.vote(msgspec.structs.replace(CASE, evidence="quaggamarzipan")) == Vote(1)
    finally:
        await judge.close()
    assert "quaggamarzipan" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("name", "limit_s", "words"), [("hangs", 0.2, "no answer within 0.2 s"), ("dies", 60.0, "process ended")]
)
async def test_a_function_that_never_answers_fails_its_vote(tmp_path: Path, name: str, limit_s: float, words: str):
    judge = await opened(tmp_path, name, time_limit_s=limit_s)
    try:
        with pytest.raises(VoteFailed, match=words):
            await judge.vote(CASE)
    finally:
        await judge.close()


async def test_a_function_may_name_only_what_a_case_has(tmp_path: Path):
    with pytest.raises(FunctionError, match="asks for 'weather'; it may name turn_id, prompt, reply, evidence"):
        await opened(tmp_path, "strange")
