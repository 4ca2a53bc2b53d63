"""Names that users import from `asyncrl`: every name is there, and none is loaded before it is used."""

import subprocess
import sys

import asyncrl


def test_every_public_name_is_there():
    assert {name: getattr(asyncrl, name).__name__ for name in asyncrl.__all__} == {
        name: name for name in asyncrl.__all__
    }


def test_nothing_is_loaded_before_it_is_used():
    code = (
        "import asyncrl, sys; print([name for name in sys.modules if name.startswith(('asyncrl.', 'topics', 'numpy'))])"
    )

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
