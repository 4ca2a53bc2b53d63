"""Files of the host that programs may read."""

from pathlib import Path

from asyncrl.sandboxes.kinds import open_sandbox
from harness.sandboxes import script, settings_of


async def test_files_below_the_temporary_folder_of_the_host_can_be_made_readable(tmp_path: Path):
    folder = tmp_path / "given"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "note").write_text("read me")
    for parent in folder.parents:
        if parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o001)

    async with open_sandbox(settings_of("bubblewrap", readable=[str(folder)])) as sandbox:
        result, output = await script(sandbox, f"cat {folder}/note; ls /tmp; touch {folder}/other")

    assert output.startswith("read me")
    assert result.code != 0
    assert not (folder / "other").exists()
