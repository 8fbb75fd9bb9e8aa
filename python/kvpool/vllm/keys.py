"""The keys of a model's KV cache blocks in the pool.

vLLM names a block of tokens by a hash over the block and all tokens before it. A block in the pool is the part
of one rank, for one group of layers. Its key has four parts:

```
vllm:Llama-3.1-8B:5f0c..e1:t0p0:g0:9f86d081884c7d65...
└────────────┬───────────┘ └┬─┘ └┬┘ └──────┬────────
   model and its layout    rank group  vLLM's hash
```

The hash is the last part and always has 64 hex digits: the pool needs the least memory for keys of this form.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

_SHOWN = 40
"""The number of characters of the model's name in its keys. Operators see them when they list keys."""


def layout_prefix(model: str, fields: Mapping[str, str]) -> str:
    """Returns the prefix of a model's keys.

    `fields` has everything on which a block's bytes depend, besides its tokens. Two engines share blocks only
    if all fields are equal.
    """
    digest = hashlib.sha256()
    for text in [model, *(part for item in sorted(fields.items()) for part in item)]:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    shown = re.sub(r"[^A-Za-z0-9._-]", "-", model.rstrip("/").rsplit("/", 1)[-1])[-_SHOWN:]
    return f"vllm:{shown}:{digest.hexdigest()[:32]}"


def block_key(prefix: str, rank: str, group: int, hashed: bytes) -> str:
    """Returns the key of `rank`'s part of a block for a group of layers."""
    digest = hashed if len(hashed) == 32 else hashlib.sha256(hashed).digest()
    return f"{prefix}:{rank}:g{group}:{digest.hex()}"


def rank_name(tensor_rank: int, pipeline_rank: int) -> str:
    """Returns the name of a rank in keys."""
    return f"t{tensor_rank}p{pipeline_rank}"


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of layers that share blocks: its number and the tokens in one of its blocks."""

    number: int
    block_tokens: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model's tokens are divided into blocks, and which ranks hold the blocks.

    A *unit* is the smallest run of tokens that consists of whole blocks in every group. A load consists of
    whole units.
    """

    prefix: str
    ranks: tuple[str, ...]
    groups: tuple[Group, ...]
    unit_tokens: int
    hash_tokens: int
    """The number of tokens that each of vLLM's hashes covers besides the tokens before them."""

    def __post_init__(self) -> None:
        for group in self.groups:
            if self.unit_tokens % group.block_tokens or group.block_tokens % self.hash_tokens:
                raise ValueError(
                    f"blocks of {group.block_tokens} tokens do not fit between hashes of {self.hash_tokens} "
                    f"and units of {self.unit_tokens}"
                )

    @property
    def keys_per_unit(self) -> int:
        """The number of keys in a unit: one for each block of each group on each rank."""
        return len(self.ranks) * sum(self.unit_tokens // group.block_tokens for group in self.groups)

    def units(self, hashes: int, tokens: int) -> int:
        """Returns the number of whole units within the first `tokens` tokens and the first `hashes` hashes."""
        return min(hashes * self.hash_tokens, tokens) // self.unit_tokens

    def blocks(self, group: Group, first: int, last: int) -> range:
        """Returns the numbers of the group's blocks in the units from `first` up to, but not including,
        `last`."""
        per_unit = self.unit_tokens // group.block_tokens
        return range(first * per_unit, last * per_unit)

    def hash_of(self, group: Group, block: int, hashes: Sequence[bytes]) -> bytes:
        """Returns the hash that names a block of the group. It covers all tokens up to the block's last one."""
        return hashes[(block + 1) * group.block_tokens // self.hash_tokens - 1]

    def chain(self, hashes: Sequence[bytes], units: int) -> list[str]:
        """Returns the keys of the first units, unit by unit.

        If the pool has the first `n` keys, `n // keys_per_unit` units can be loaded on all ranks.
        """
        return [
            block_key(self.prefix, rank, group.number, self.hash_of(group, block, hashes))
            for unit in range(units)
            for group in self.groups
            for block in self.blocks(group, unit, unit + 1)
            for rank in self.ranks
        ]
