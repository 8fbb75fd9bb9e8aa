"""The package can be imported under the name that deployments use."""

import mooncake


def test_the_package_describes_itself() -> None:
    assert "kvpool" in (mooncake.__doc__ or "")
