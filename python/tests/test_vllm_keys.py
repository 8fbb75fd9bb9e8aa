"""The names of the vLLM connector's blocks, the places of their bytes, and its settings: the part without
vLLM."""

from __future__ import annotations

import hashlib
import random
import re

import numpy
import pytest
from kvpool.vllm.keys import Group, Layout, block_key, layout_prefix
from kvpool.vllm.segments import BlockMap, Segment, joined, runs
from kvpool.vllm.settings import Settings


def hashes(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}{number}".encode()).digest() for number in range(count)]


def test_different_layouts_have_different_keys() -> None:
    prefixes = {
        layout_prefix("model", {}),
        layout_prefix("model", {"dtype": "half"}),
        layout_prefix("model", {"dtype": "float"}),
        layout_prefix("model", {"dtypeh": "alf"}),
        layout_prefix("other/model", {}),
        layout_prefix("mode", {"l": ""}),
    }
    assert len(prefixes) == 6


def test_a_key_ends_with_exactly_64_hex_digits_for_every_hash() -> None:
    prefix = layout_prefix("f" * 200, {})
    for hashed in [b"x" * 32, b"x" * 8, b"x" * 16, b"x" * 64]:
        key = block_key(prefix, "t0p0", 3, hashed)
        assert re.findall("[0-9a-f]{41,}", key) == [key[-64:]]
        assert len(key) < 256
    assert block_key(prefix, "t0p0", 0, b"x" * 32).endswith((b"x" * 32).hex())


def test_a_chain_goes_unit_by_unit_through_all_groups_and_ranks() -> None:
    layout = Layout("p", ("t0p0", "t1p0"), (Group(0, 32), Group(2, 16)), 32, 16)
    chained = layout.chain(hashes(6), 2)
    per_unit = layout.keys_per_unit
    assert per_unit == 6
    assert len(chained) == len(set(chained)) == 2 * per_unit
    # The first unit has a block of two hashes in group 0, and two blocks of one hash in group 2.
    ends = [(":".join(key.split(":")[1:3]), key[-64:]) for key in chained[:per_unit]]
    first, second = (hashed.hex() for hashed in hashes(2))
    assert ends == [
        ("t0p0:g0", second),
        ("t1p0:g0", second),
        ("t0p0:g2", first),
        ("t1p0:g2", first),
        ("t0p0:g2", second),
        ("t1p0:g2", second),
    ]


def test_units_are_counted_by_hashes_and_tokens_whichever_is_less() -> None:
    layout = Layout("p", ("t0p0",), (Group(0, 32),), 32, 16)
    assert layout.units(hashes=5, tokens=1000) == 2
    assert layout.units(hashes=100, tokens=95) == 2
    assert layout.units(hashes=0, tokens=95) == 0


def test_blocks_that_do_not_fit_between_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="48 tokens"):
        Layout("p", ("t0p0",), (Group(0, 48),), 96, 32)
    with pytest.raises(ValueError, match="64 tokens"):
        Layout("p", ("t0p0",), (Group(0, 64),), 96, 32)


@pytest.mark.parametrize("seed", range(30))
def test_runs_are_the_bytes_of_an_array_and_as_few_as_can_be(seed: int) -> None:
    chance = random.Random(seed)
    whole = [chance.randint(1, 4) for _ in range(4)]
    memory = numpy.arange(4 * numpy.prod(whole), dtype=numpy.uint8).view(numpy.uint32).reshape(whole)
    # A part of each axis, in another order of the axes: holes and strides of all kinds.
    part = memory[tuple(slice(0, chance.randint(1, size)) for size in whole)]
    part = part.transpose(chance.sample(range(4), 4))
    found = runs(part.shape, [stride // 4 for stride in part.strides], 4)
    raw = memory.tobytes()
    taken = sorted(raw[at : at + 4] for offset, length in found for at in range(offset, offset + length, 4))
    assert taken == sorted(number.tobytes() for number in part.flatten())
    ends = {offset + length for offset, length in found}
    assert not ends & {offset for offset, _ in found}
    assert found == sorted(found)


def test_an_array_that_overlaps_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        runs([4, 4], [2, 1], 2)


def test_pieces_that_lie_side_by_side_in_every_block_are_one() -> None:
    layers = [Segment(1000, 300, 100), Segment(1100, 300, 100), Segment(1250, 300, 50)]
    blocks = BlockMap(tuple(joined(layers)))
    assert blocks.pieces(2) == [(1600, 200), (1850, 50)]
    assert blocks.block_bytes == 250
    other_stride = [Segment(1000, 300, 100), Segment(1100, 200, 100)]
    assert joined(other_stride) == other_stride


def test_unknown_or_invalid_settings_are_named() -> None:
    assert Settings.read({"master": ["http://a:1", "http://b:1"], "get_timeout": 2}).get_timeout == 2
    for given, named in [
        ({"mastr": "x"}, "mastr"),
        ({"master": []}, "master"),
        ({"transport": "pigeon"}, "transport"),
        ({"staging": 1}, "staging"),
        ({"get_timeout": 0}, "get_timeout"),
        ({"get_timeout": float("nan")}, "get_timeout"),
        ({"get_timeout": True}, "get_timeout"),
        ({"save_decoded": 1}, "save_decoded"),
        ({"token": 7}, "token"),
    ]:
        with pytest.raises(ValueError, match=named):
            Settings.read(given)
