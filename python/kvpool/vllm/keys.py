"""How blocks of a model's KV cache are named in the pool.

vLLM names a block of tokens by a hash over it and all before it. A block in the pool is what one rank
holds of one such block for one group of layers, so its key is made of four parts:

```
vllm:Llama-3.1-8B:5f0c..e1:t0p0:g0:9f86d081884c7d65...
└────────────┬───────────┘ └┬─┘ └┬┘ └──────┬────────
   model and its layout    rank group  vLLM's hash
```

The hash is the last part and has 64 hex digits whatever vLLM hashes with, the form that the pool keeps
in the least memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

_SHOWN = 40
"""How much of a model's name stands in its keys, for those who list them."""


def layout_prefix(model: str, fields: Mapping[str, str]) -> str:
    """What the keys of a model begin with.

    `fields` is everything on which the bytes of a block depend besides its tokens: two engines share
    blocks only where all of it is alike.
    """
    digest = hashlib.sha256()
    for text in [model, *(part for item in sorted(fields.items()) for part in item)]:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    shown = re.sub(r"[^A-Za-z0-9._-]", "-", model.rstrip("/").rsplit("/", 1)[-1])[-_SHOWN:]
    return f"vllm:{shown}:{digest.hexdigest()[:32]}"


def block_key(prefix: str, rank: str, group: int, hashed: bytes) -> str:
    """The key of what `rank` holds of a block for a group of layers."""
    digest = hashed if len(hashed) == 32 else hashlib.sha256(hashed).digest()
    return f"{prefix}:{rank}:g{group}:{digest.hex()}"


def rank_name(tensor_rank: int, pipeline_rank: int) -> str:
    """How a rank is named in keys."""
    return f"t{tensor_rank}p{pipeline_rank}"


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that share their blocks: the group's number and how many tokens a block of it has."""

    number: int
    block_tokens: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model's tokens are divided into blocks, and who holds them.

    A *unit* is the smallest run of tokens that is whole blocks in every group: what can be loaded.
    """

    prefix: str
    ranks: tuple[str, ...]
    groups: tuple[Group, ...]
    unit_tokens: int
    hash_tokens: int
    """How many tokens one of vLLM's hashes adds."""

    def __post_init__(self) -> None:
        for group in self.groups:
            if self.unit_tokens % group.block_tokens or group.block_tokens % self.hash_tokens:
                raise ValueError(
                    f"blocks of {group.block_tokens} tokens do not fit between hashes of {self.hash_tokens} "
                    f"and units of {self.unit_tokens}"
                )

    @property
    def keys_per_unit(self) -> int:
        """How many keys a unit has: one for each block of each group on each rank."""
        return len(self.ranks) * sum(self.unit_tokens // group.block_tokens for group in self.groups)

    def units(self, hashes: int, tokens: int) -> int:
        """How many units lie whole within the first `tokens` and have hashes, of which there are
        `hashes`."""
        return min(hashes * self.hash_tokens, tokens) // self.unit_tokens

    def blocks(self, group: Group, first: int, last: int) -> range:
        """The numbers of the group's blocks in the units from `first` to before `last`."""
        per_unit = self.unit_tokens // group.block_tokens
        return range(first * per_unit, last * per_unit)

    def hash_of(self, group: Group, block: int, hashes: Sequence[bytes]) -> bytes:
        """What names the group's block of that number: the hash up to its last token."""
        return hashes[(block + 1) * group.block_tokens // self.hash_tokens - 1]

    def chain(self, hashes: Sequence[bytes], units: int) -> list[str]:
        """The keys of the first units, unit by unit: as many of them as the pool has from the start,
        divided by `keys_per_unit`, are loadable on all ranks."""
        return [
            block_key(self.prefix, rank, group.number, self.hash_of(group, block, hashes))
            for unit in range(units)
            for group in self.groups
            for block in self.blocks(group, unit, unit + 1)
            for rank in self.ranks
        ]
