"""Rows of the summary that actors of the user's own leave as files."""

from pathlib import Path

from actors.recorder.actor import _reports


def test_reports_are_rows_and_what_is_no_report_says_so(tmp_path: Path):
    assert _reports(tmp_path / "reports") == {}
    (tmp_path / "a.json").write_text('{"remarks": "all fine"}')
    (tmp_path / "b.json").write_text('{"number": 1}')
    (tmp_path / "c.json").write_bytes(b'{"number": "\xff"}')

    found = _reports(tmp_path)

    assert found["remarks"] == "all fine"
    assert found["b"].startswith("not read: Expected `str`")
    assert found["c"].startswith("not read: 'utf-8' codec")
