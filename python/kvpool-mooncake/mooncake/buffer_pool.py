"""Reuse of registered memory: the pool of `mooncake.store` under the original's module name."""

from mooncake._buffer_pool import BufferPool

RegisteredBufferPool = BufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
