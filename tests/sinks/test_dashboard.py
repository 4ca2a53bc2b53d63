"""The dashboard of Grafana: each of its queries finds figures that a run gives to Prometheus."""

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from asyncrl.ports import free_port
from asyncrl.sinks.feed import SinkFeed
from asyncrl.sinks.kinds import KINDS
from asyncrl.sinks.sink import SinkRun
from harness.runs import up

DASHBOARD = Path(__file__).parent.parent.parent / "asyncrl" / "sinks" / "prometheus" / "dashboard.json"
pytestmark = pytest.mark.slow


def scrape(root: Path) -> str:
    """The figures of a run, as Prometheus collects them."""
    settings, metrics = KINDS["prometheus"](port=free_port()), root / "metrics.jsonl"
    feed = SinkFeed("prometheus", settings.sink(SinkRun("short", root, root, 1.8e9, {})), metrics)
    feed.open()
    try:
        while feed.advance(metrics.stat().st_size):
            pass
        with urllib.request.urlopen(f"http://127.0.0.1:{settings.port}/metrics", timeout=60) as answer:
            return answer.read().decode()
    finally:
        feed.close()


async def test_every_query_returns_data_and_promtool_accepts_all_names(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    # Random rewards differ within groups, so that each figure of the loss has a value.
    async with up(tmp_path, "reward.function=random", "eval.prompts=8") as run:
        assert await run.ended() == 0, run.story
    text = scrape(run.root)

    names = {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    wanted = {name for query in queries for name in re.findall(r"asyncrl_\w+", query)}
    assert len(queries) > 15
    assert wanted <= names
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; the package prometheus has it. The queries were checked")
    checked = subprocess.run([promtool, "check", "metrics"], input=text.encode(), capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
