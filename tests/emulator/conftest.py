"""The built engine of the emulator, cleared before and after each test."""

import pytest

import ptx_emulator as emulator


@pytest.fixture(scope="session")
def engine():
    try:
        return emulator.build()
    except emulator.BuildError as e:
        pytest.skip(str(e))


@pytest.fixture(autouse=True)
def clean_emulator(engine):
    """Forget watched memory and counts of other tests."""
    emulator.unwatch()
    emulator.reset_stats()
    yield
    emulator.unwatch()
