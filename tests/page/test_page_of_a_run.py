"""A run has a page while it lives, and a report at its end."""

import asyncio
import re
import sys
from pathlib import Path
from urllib.parse import parse_qs

from aiohttp import ClientSession

from harness.runs import LIMIT_S, command, up


async def test_a_run_has_a_page_while_it_lives_and_a_report_at_its_end(tmp_path: Path):
    async with up(tmp_path, "learner.steps=2000", arguments=["--web"]) as run:
        await run.reaches(run.steps, "the first step")
        web = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl.cli.main", "web", "--role", "observer"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert web.stdout is not None
            line = (await asyncio.wait_for(web.stdout.readline(), LIMIT_S)).decode()
            address, fragment = line.split(": ", 1)[1].strip().split("#")
            login = {name: values[0] for name, values in parse_qs(fragment).items()}
            assert login["user"] == f"{run.root.name}-observer"
            async with ClientSession() as client:
                async with client.get(address) as answer:
                    assert f"connect-src 'self' {login['ws']};" in await answer.text()
                async with client.get(f"{address}pieces.json") as answer:
                    assert "a" in (await answer.json()).values()
                async with client.ws_connect(login["ws"]) as connection:
                    assert (await connection.receive_bytes(timeout=LIMIT_S)).startswith(b"INFO")
            run.interrupt()
            assert await run.ended() == 0, run.story
            assert await asyncio.wait_for(web.wait(), LIMIT_S) == 0  # it ends with the run
        finally:
            if web.returncode is None:
                web.kill()
                await web.wait()

    assert re.search(r"^page http://127\.0\.0\.1:\d+/#run=", run.out, re.MULTILINE)
    report = run.root / "report.html"
    assert str(report) in run.out
    assert b'id="data">H4sI' in report.read_bytes()  # gzip
    code, output = await command(tmp_path, "report", run.root.name, "-o", "again.html")
    assert code == 0, output
    assert b'id="data">H4sI' in (tmp_path / "again.html").read_bytes()
    code, output = await command(tmp_path, "web", run.root.name)
    assert code == 1
    assert "is over" in output
