"""Attention of ranks that share the tokens of documents, against that of whole documents."""

import json

import pytest

from harness.context_cases import CASES
from harness.ranks import run_group

pytestmark = pytest.mark.slow  # four processes with torch


def test_it_is_that_of_whole_documents_as_one_graph_and_so_are_its_gradients(tmp_path):
    said = run_group(["-m", "tests.harness.context_cases"], 4, tmp_path)

    found = json.loads(said.splitlines()[-1])
    assert found.keys() == {f"{name}, {ranks} ranks" for name in CASES for ranks in (2, 4)}
    assert max(found.values()) < 5e-6, found
