"""Seeds every test; hypothesis draws the same examples on every run."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
