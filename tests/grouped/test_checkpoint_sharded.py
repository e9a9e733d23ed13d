"""``grouped.checkpoint.load`` into sharded modules, in two processes; see ``two_ranks``."""

import pytest

pytest.importorskip("safetensors")

from .two_ranks.runner import assert_passed, launch, load_checks

SUBJECTS = ("checkpoints",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return launch(SUBJECTS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", load_checks(SUBJECTS))
def test_on_two_ranks(folder, name):
    assert_passed(folder, name)
