"""The methods that need the original's own library or a GPU. kvpool's engine has neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


def _refuse(what: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{what}: {why}")


_NO_STREAM = "kvpool's engine moves host memory only, in no order with a CUDA stream; copy the bytes to the host first"


class CudaMethods:
    """Transfers on a CUDA stream, and the original's own library: all raise NotImplementedError."""

    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Not supported: raises NotImplementedError."""
        _refuse("transfer_write_on_cuda", _NO_STREAM)

    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Not supported: raises NotImplementedError."""
        _refuse("transfer_read_on_cuda", _NO_STREAM)

    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Not supported: raises NotImplementedError."""
        _refuse("batch_transfer_write_on_cuda", _NO_STREAM)

    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Not supported: raises NotImplementedError."""
        _refuse("batch_transfer_read_on_cuda", _NO_STREAM)

    def get_engine_ptr(self) -> int:
        """Not supported: raises NotImplementedError."""
        _refuse("get_engine_ptr", "kvpool's engine is no C++ object, so other libraries cannot call it by an address")

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Not supported: raises NotImplementedError."""
        _refuse("warmup_efa_segment", "kvpool has no EFA transport, and no connection that must be warmed up")
