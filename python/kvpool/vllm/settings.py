"""What `kv_connector_extra_config` may hold."""

from __future__ import annotations

import dataclasses

from kvpool._engines.settings import PoolSettings, choices


@dataclasses.dataclass(frozen=True)
class Settings(PoolSettings):
    """The connector's settings, besides those of every plugin. Sizes are in bytes."""

    model: str = ""
    """The model's name in keys, where hosts have the same model under different names or paths."""
    salt: str = ""
    """Keeps apart what the model's name and configuration do not, such as two sets of weights."""
    save_decoded: bool = True
    """Whether blocks of generated tokens are saved too."""
    save_backlog: int = 1 << 30
    """At most so much waits to be saved; what comes beyond that is not saved."""
    lookup_patience: float = 0.005
    """How long the lookups of one step may hold up the scheduler, all together. One that takes longer goes on
    beside it, and the request waits for the next step."""
    staging: str = dataclasses.field(default="auto", metadata=choices("auto", "always"))
    """Whether blocks move through host memory of the connector's own: "auto" for memory of a device
    only, "always" for any."""
    staging_bytes: int = 256 << 20
    """How much host memory a worker keeps for that, registered once; more is made and given back as it is
    needed."""
