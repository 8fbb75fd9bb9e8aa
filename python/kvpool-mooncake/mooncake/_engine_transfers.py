"""Transfers that a call waits for. `transport_hint` has no effect: each peer is reached by its best
transport."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake import _engine_args as _args
from mooncake._engine_args import TransferNotify, TransferOpcode
from mooncake._engine_base import OK, EngineBase, failed


class TransferMethods(EngineBase):
    """Reads and writes that end before their call returns."""

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Writes `length` bytes at `buffer` to the peer's `peer_buffer_address`. Returns 0, or -1 for a
        failure."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Write)

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Reads `length` bytes from the peer's `peer_buffer_address` to `buffer`. Returns 0, or -1 for a
        failure."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Read)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Reads or writes, then sends `notify` to the peer, if given. Returns 0, or -1 for a failure."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Writes several ranges. Ranges adjacent at the peer are joined. Returns 0, or -1 for a failure."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Reads several ranges. Returns 0, or -1 for a failure."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Reads or writes several ranges, then sends `notify` to the peer, if given. Returns 0, or -1 for a
        failure."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)

    def _sync(
        self,
        target: str,
        buffers: Sequence[int],
        peer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> int:
        locals_, remotes, sizes = _args.ranges(target, buffers, peer_addresses, lengths)
        _args.check_int("opcode", opcode)
        message = _args.encoded(notify)
        native = self._native
        if native is None:
            return failed("transfer", "the engine is not initialized")
        try:
            _args.check_values(locals_, remotes, sizes)
            native.transfer(target, _args.is_write(opcode), locals_, remotes, sizes, self._timeout, message)
            self._log_news(native)
        except (ValueError, OSError, RuntimeError) as error:
            return failed(f"transfer with {target}", error)
        return OK
