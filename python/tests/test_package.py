"""The installed package, as a newcomer finds it."""

import kvpool


def test_the_version_is_a_number() -> None:
    assert kvpool.__version__[0].isdigit()


def test_a_pool_lives_with_the_commands_of_the_wheel(shared_pool) -> None:
    status = shared_pool.kvctl("status")
    assert "node-0" in str(status)
