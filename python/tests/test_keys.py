"""Keys of chains, and namespaces."""

from __future__ import annotations

import array
import hashlib
import struct

import kvpool
import pytest

LLAMA = kvpool.Namespace("tenant", model="llama", dtype="bf16", parallel_rank="0/1", salt="s")


def by_hand(namespace: kvpool.Namespace, block_tokens: int, tokens: list[int]) -> list[bytes]:
    """The documented rule for keys, in Python."""
    fields = (namespace.model, namespace.dtype, namespace.parallel_rank, namespace.salt)
    seed = b"".join(struct.pack("<I", len(field)) + field.encode() for field in fields)
    digest, keys = hashlib.sha256(seed).digest(), []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = struct.pack(f"<{block_tokens}I", *tokens[at : at + block_tokens])
        digest = hashlib.sha256(digest + block).digest()
        keys.append(digest)
    return keys


def test_chain_keys_are_the_documented_digests() -> None:
    tokens = [n * 7919 % 2**32 for n in range(1003)]
    for block_tokens in (1, 16, 1003, 1004):
        assert kvpool.chain_keys(LLAMA, block_tokens, tokens) == by_hand(LLAMA, block_tokens, tokens)
    assert LLAMA.seed == hashlib.sha256(
        b"\5\0\0\0llama\4\0\0\0bf16\3\0\0\0000/1\1\0\0\0s"
    ).digest()


def test_tokens_come_as_sequences_and_integer_buffers() -> None:
    numpy = pytest.importorskip("numpy")
    tokens = list(range(100))
    keys = kvpool.chain_keys(LLAMA, 16, tokens)
    assert len(keys) == 6
    for kind in ("uint32", "int32", "int64", "uint64"):
        assert kvpool.chain_keys(LLAMA, 16, numpy.array(tokens, kind)) == keys
    for same in (tuple(tokens), range(100), array.array("I", tokens), array.array("q", tokens)):
        assert kvpool.chain_keys(LLAMA, 16, same) == keys
    strided = numpy.arange(200, dtype="uint32")[::2]
    assert kvpool.chain_keys(LLAMA, 16, strided) == kvpool.chain_keys(LLAMA, 16, strided.tolist())


def test_an_invalid_token_is_refused() -> None:
    numpy = pytest.importorskip("numpy")
    for wrong in ([-1], [2**32], [2**70], [0, -(2**70)], numpy.array([-1])):
        with pytest.raises(kvpool.InvalidArgumentError, match="token"):
            kvpool.chain_keys(LLAMA, 1, wrong)
    with pytest.raises(ValueError, match="dimension"):
        kvpool.chain_keys(LLAMA, 1, numpy.zeros((2, 2), "uint32"))
    for wrong in (b"1234", "1234", [1.5], ["1"], None, 7):
        with pytest.raises(TypeError):
            kvpool.chain_keys(LLAMA, 1, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one token"):
        kvpool.chain_keys(LLAMA, 0, [1])
    for wrong in (-1, 2**64):
        with pytest.raises(kvpool.InvalidArgumentError, match="block_tokens"):
            kvpool.chain_keys(LLAMA, wrong, [1])


def test_a_namespace_is_a_checked_value() -> None:
    same = kvpool.Namespace("tenant", model="llama", dtype="bf16", parallel_rank="0/1", salt="s")
    assert (same, hash(same)) == (LLAMA, hash(LLAMA))
    assert same != kvpool.Namespace("tenant")
    assert (LLAMA.name, LLAMA.model, LLAMA.parallel_rank) == ("tenant", "llama", "0/1")
    assert "llama" in repr(LLAMA)
    for wrong in ("with space", "x" * 256):
        with pytest.raises(kvpool.InvalidArgumentError):
            kvpool.Namespace(wrong)
    with pytest.raises(ValueError, match="model"):
        kvpool.Namespace(model="x" * 1025)
