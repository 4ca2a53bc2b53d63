import importlib
import ssl
import sys

import certifi
import pytest

from asyncrl.imports import absent, late_certificates


def test_what_is_absent_cannot_be_imported_within_and_can_be_afterwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with absent("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    assert importlib.import_module("this") is sys.modules["this"]


def test_what_is_loaded_already_stays():
    with absent("pytest"):
        assert importlib.import_module("pytest") is pytest
    assert sys.modules["pytest"] is pytest


def test_a_tls_context_reads_the_certificates_when_a_connection_opens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    with late_certificates():
        late = ssl.create_default_context()
    assert late.cert_store_stats()["x509_ca"] == 0
    assert (late.verify_mode, late.check_hostname) == (ssl.CERT_REQUIRED, True)

    late.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost")
    usual = ssl.create_default_context()
    assert type(late) is type(usual) is ssl.SSLContext
    assert late.cert_store_stats() == usual.cert_store_stats() != {"x509": 0, "crl": 0, "x509_ca": 0}
