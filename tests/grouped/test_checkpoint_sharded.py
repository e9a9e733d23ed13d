"""Checkpoints loaded into sharded modules by two processes; the checks are in
``two_ranks_checkpoint``.
"""

import json

import pytest

pytest.importorskip("safetensors")

from .two_ranks import launch
from .two_ranks_checkpoint import CHECKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return launch("tests.grouped.two_ranks_checkpoint", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", list(CHECKS))
def test_on_two_ranks(folder, name):
    for rank in range(2):
        error = json.loads((folder / f"{rank}.json").read_text())[name]
        assert not error, error
