"""The page is bundled from its sources by a script, and is one small file that runs only its own scripts."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from asyncrl.page.html import page_html, report_html

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "asyncrl" / "page" / "page.html"
SOURCES = sorted((ROOT / "asyncrl" / "page" / "source").rglob("*.js"))
LIMIT_S = 120.0


def test_the_bundled_page_is_what_the_script_makes(tmp_path: Path):
    if not (npm := shutil.which("npm")):
        pytest.skip("npm is not here")
    folder = tmp_path / "probe"
    folder.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "asyncrl" / "page" / "source" / name, folder)
    try:
        install = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm does not install the libraries of the page within {LIMIT_S:.0f} s")
    if done.returncode:
        pytest.skip(f"npm cannot install the libraries of the page: {done.stderr.strip()[-300:]}")

    output = tmp_path / "page.html"
    subprocess.run([str(ROOT / "scripts" / "page"), str(output)], check=True, timeout=LIMIT_S, capture_output=True)

    assert output.read_bytes() == PAGE.read_bytes(), "run scripts/page, and commit asyncrl/page/page.html"


def test_the_page_is_small_and_has_the_licences_of_its_libraries():
    text = PAGE.read_text()

    assert len(text.encode()) < 450_000
    for words in ("Apache License", "Permission is hereby granted", "@nats-io/nats-core 3.4.0", "uplot 1.6.32"):
        assert words in text


def test_sources_of_the_page_are_short_and_write_data_as_text_alone():
    for path in SOURCES:
        text = path.read_text()
        assert len(text.splitlines()) < 400, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )


def test_the_page_runs_its_own_script_alone_and_connects_to_its_servers_alone():
    policy = _policy(page_html("ws://127.0.0.1:1,ws://127.0.0.1:2"))

    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[^' ]+'", policy["script-src"])
    assert re.fullmatch(r"'sha256-[^' ]+'", policy["style-src"])
    assert policy["connect-src"] == "'self' ws://127.0.0.1:1 ws://127.0.0.1:2"
    assert 'ws://x"' not in page_html('ws://x"><b>').decode()
    assert _policy(report_html(b"data"))["connect-src"] == "'none'"


def _policy(page: bytes) -> dict[str, str]:
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page.decode())
    assert found is not None
    return dict(part.strip().split(" ", 1) for part in found[1].split(";"))
