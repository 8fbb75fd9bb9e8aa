"""The modules of Mooncake Store, implemented over kvpool."""

from pkgutil import extend_path as _extend_path

from mooncake.buffer_pool import BufferPool, RegisteredBufferPool

# Other wheels may add modules of their own to the package, as with the original.
__path__ = _extend_path(__path__, __name__)

__all__ = ["BufferPool", "RegisteredBufferPool"]
