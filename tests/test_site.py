"""The docs site builds, and its search index holds every page."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_site_builds_and_its_search_finds_every_page(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    assert built.returncode == 0, built.stdout + built.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    assert found >= {"" if str(page) == "index" else f"{page}/" for page in pages}
