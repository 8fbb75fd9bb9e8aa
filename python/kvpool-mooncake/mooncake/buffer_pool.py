"""Reuse of registered memory: the pool of `mooncake.store`, where programs of the original import it."""

from mooncake._buffer_pool import BufferPool

RegisteredBufferPool = BufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
