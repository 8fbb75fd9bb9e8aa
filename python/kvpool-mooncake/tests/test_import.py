"""The package can be imported under the name that deployments use."""

import mooncake


def test_it_says_what_it_is() -> None:
    assert "kvpool" in (mooncake.__doc__ or "")
