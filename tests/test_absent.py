import importlib
import sys

import pytest

from asyncrl.imports import absent


def test_what_is_absent_cannot_be_imported_within_and_can_be_afterwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with absent("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    assert importlib.import_module("this") is sys.modules["this"]


def test_what_is_loaded_already_stays():
    with absent("pytest"):
        assert importlib.import_module("pytest") is pytest
    assert sys.modules["pytest"] is pytest
