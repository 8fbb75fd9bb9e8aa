"""Transfers in the background."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake import _engine_args as _args
from mooncake._engine_args import TransferNotify, TransferOpcode
from mooncake._engine_base import FAILED, OK, EngineBase, failed


class BackgroundMethods(EngineBase):
    """Reads and writes that a call begins and that the caller asks about later."""

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Begins a write. Returns its number for `transfer_check_status`, or 0 on failure. Keep the memory
        until it ends.

        `transfer_check_status(0)` is -1, like the status of a write to an unreachable peer.
        """
        return self._submit(target_hostname, [buffer], [peer_buffer_address], [length], TransferOpcode.Write)

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begins several writes. Returns the batch's number, or 0 on failure. Keep the memory until they
        end."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begins several reads. Returns the batch's number, or 0 on failure. Keep the memory until they end."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Begins several reads or writes. Returns the batch's number, or 0 on failure. Keep the memory until
        they end."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)

    def transfer_check_status(self, batch_id: int) -> int:
        """The state of a transfer: 1 done, 0 pending, -1 failed or unknown, -2 timed out."""
        _args.check_int("batch_id", batch_id)
        native = self._native
        if native is None or not 0 < batch_id < _args.LARGEST:
            return FAILED
        try:
            status = native.status(batch_id)
        except RuntimeError as error:
            return failed("transfer_check_status", error)
        if status:
            self._log_news(native)
        return FAILED if status is None else status

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits until all these transfers have ended. Returns 0 if all succeeded, else -1."""
        ids = list(batch_ids)
        for batch_id in ids:
            _args.check_int("batch_ids", batch_id)
        native = self._native
        if native is None:
            return failed("get_batch_transfer_status", "the engine is not initialized")
        done = True
        for batch_id in ids:
            if not 0 < batch_id < _args.LARGEST:
                done = False
                continue
            try:
                # Each transfer has a deadline of its own, and none is later than this one.
                if native.wait(batch_id, self._timeout + 15.0) != 1:
                    failed("get_batch_transfer_status", native.failure(batch_id) or f"batch {batch_id}")
                    done = False
            except RuntimeError as error:
                return failed("get_batch_transfer_status", error)
        self._log_news(native)
        return OK if done else FAILED

    def _submit(
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
            failed("transfer", "the engine is not initialized")
            return 0
        try:
            _args.check_values(locals_, remotes, sizes)
            write = _args.is_write(opcode)
            return native.submit(target, write, locals_, remotes, sizes, self._timeout, message)
        except (ValueError, OSError, RuntimeError) as error:
            failed(f"transfer with {target}", error)
            return 0
