"""Files with keys of servers: what no header can carry is refused before anything starts."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.cli.engines import _key
from asyncrl.engine.client import EngineClient
from asyncrl.engine.control import read_key
from asyncrl.errors import WrongUsage
from asyncrl.files import secret_fault
from harness.configs import the_problem
from harness.sglang_like import like_sglang

NONE = [
    (b"one\ntwo\n", "several lines, or control characters"),
    (b"one\r\nX-Other: two", "several lines, or control characters"),
    (b"a\0b", "several lines, or control characters"),
    (b" \n", "nothing"),
    (b"\x80\xff", "codec can't decode byte"),
]


@pytest.mark.parametrize(("content", "words"), NONE)
def test_a_file_that_holds_no_key_is_refused_by_check_and_by_engines_add(content: bytes, words: str, tmp_path: Path):
    path = tmp_path / "key"
    path.write_bytes(content)
    run: Any = SimpleNamespace(root=tmp_path)

    settings = ['engine.kind="external"', "engine.addresses=['http://gpu:1']", f'engine.api_key_file="{path}"']
    assert words in the_problem("demo", *settings, files=True).message
    with pytest.raises(WrongUsage, match=words):
        _key(run, path)
    assert words in secret_fault(path)


@pytest.mark.parametrize("content", [b"secret\n", b"with spaces", "ä€".encode()])
async def test_a_key_that_is_accepted_is_sent(content: bytes, tmp_path: Path):
    path = tmp_path / "key"
    path.write_bytes(content)
    assert not secret_fault(path)
    async with like_sglang() as server:
        client = EngineClient(server.address, api_key=read_key(path))
        assert await client.label() == "default"
        await client.close()


def test_a_password_of_the_nats_server_travels_in_no_header(tmp_path: Path):
    path = tmp_path / "password"
    path.write_bytes(b"a\tb")
    assert secret_fault(path)
    assert not secret_fault(path, header=False)


def test_a_key_may_come_out_of_a_pipe(tmp_path: Path):
    run: Any = SimpleNamespace(root=tmp_path)
    reading, writing = os.pipe()
    os.write(writing, b"secret\n")
    os.close(writing)
    try:
        assert _key(run, Path(f"/dev/fd/{reading}")) == b"secret\n"
    finally:
        os.close(reading)


def test_a_key_file_that_is_not_there_is_refused(tmp_path: Path):
    run: Any = SimpleNamespace(root=tmp_path)
    with pytest.raises(WrongUsage, match="found no such file or directory"):
        _key(run, tmp_path / "none")
