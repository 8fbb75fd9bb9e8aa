"""The settings in `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses

from kvpool._engines.settings import PoolSettings, choices


@dataclasses.dataclass(frozen=True)
class Settings(PoolSettings):
    """The settings of this connector, besides `PoolSettings`. Sizes are in bytes, times in seconds."""

    model: str = ""
    """The model's name in keys. Set it if hosts have the model under different names or paths."""
    salt: str = ""
    """Separates models with the same name and configuration, such as two sets of weights."""
    save_decoded: bool = True
    """Whether blocks of generated tokens are also saved."""
    save_backlog: int = 1 << 30
    """The most data that may wait to be saved. The worker drops further data."""
    lookup_patience: float = 0.005
    """How long all lookups of one step together may delay the scheduler. A slower lookup continues beside
    the scheduler, and its request waits for the next step."""
    staging: str = dataclasses.field(default="auto", metadata=choices("auto", "always"))
    """Whether blocks move through a copy in host memory: "auto" for device memory only, "always" for
    all memory."""
    staging_bytes: int = 256 << 20
    """The host memory of a worker for these copies, registered once. Beyond it the worker allocates
    memory for each copy."""
    handoff: str = dataclasses.field(default="off", metadata=choices("off", "push", "pull", "delayed"))
    """Whether prompts also go straight from prefill to decode. With "push" prefill sends blocks while it computes
    them. With "pull" and "delayed" decode asks for computed blocks. Prefill's value decides; decode needs any
    value but "off"."""
    handoff_host: str = "127.0.0.1"
    """The address on which this engine's ranks listen, as the other engine reaches it."""
    handoff_port: int = 0
    """The port of the first rank. The other ranks have the next ports. 0: any free ports."""
    handoff_secret_file: str = ""
    """A file with the secret that both engines share."""
    handoff_timeout: float = 300.0
    """How long a hand-off may take, with the time that decode waits for prefill's computation."""
    handoff_decode_ranks: int = 0
    """Decode's tensor parallel ranks. 0: as many as prefill's."""
    handoff_pin_limit: int = 0
    """The blocks that prompts on offer may pin on a rank of prefill. 0: no limit. The next prompt is offered
    when the pinned blocks are within the limit. A push never waits."""
