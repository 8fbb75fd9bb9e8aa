"""The memory that an engine's peers may access."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from mooncake import _engine_args as _args
from mooncake._engine_base import FAILED, OK, EngineBase, failed


class MemoryMethods(EngineBase):
    """Registered memory, and the engine's own buffers."""

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Lets peers read and write `capacity` bytes at `buffer_addr`. Returns 0, or -1 for a failure.

        It fails if the range is not host memory of this process, or overlaps a registered range. Unregister the
        memory or close the engine before you free the memory: this process computes checksums of it.
        """
        _args.check_int("buffer_addr", buffer_addr)
        _args.check_int("capacity", capacity)
        native = self._native
        if native is None:
            return failed("register_memory", "the engine is not initialized")
        try:
            native.register(_args.address(buffer_addr), _args.length(capacity))
        except (ValueError, OSError, RuntimeError) as error:
            return failed("register_memory", error)
        return OK

    def unregister_memory(self, buffer_addr: int) -> int:
        """Ends a registration once no transfer uses the range. Returns 0, or -1 for a failure.

        It fails if no registration begins at the address, or if a transfer still uses the range at the timeout.
        After the timeout, do not free the memory.
        """
        _args.check_int("buffer_addr", buffer_addr)
        native = self._native
        if native is None:
            return failed("unregister_memory", "the engine is not initialized")
        try:
            if native.unregister(_args.address(buffer_addr)):
                return OK
        except (ValueError, RuntimeError) as error:
            return failed("unregister_memory", error)
        return failed("unregister_memory", f"no registered range begins at {buffer_addr:#x}")

    def batch_register_memory(
        self,
        buffer_addresses: Sequence[int],
        capacities: Sequence[int],
        location: Sequence[str] | str = "*",
    ) -> int:
        """Registers several ranges, all or none. Returns 0 or -1."""
        addresses, lengths = list(buffer_addresses), list(capacities)
        if len(addresses) != len(lengths):
            return failed("batch_register_memory", f"{len(addresses)} addresses, {len(lengths)} lengths")
        for index, (address, length) in enumerate(zip(addresses, lengths, strict=True)):
            if self.register_memory(address, length) != OK:
                for done in addresses[:index]:
                    self.unregister_memory(done)
                return FAILED
        return OK

    def batch_unregister_memory(self, buffer_addrs: Sequence[int]) -> int:
        """Ends several registrations. Returns 0, or -1 if one of them failed."""
        results = [self.unregister_memory(address) for address in buffer_addrs]
        return OK if all(result == OK for result in results) else FAILED

    def allocate_managed_buffer(self, length: int) -> int:
        """Returns the address of `length` new bytes, zeroed and registered; 0 on failure."""
        _args.check_int("length", length)
        if self._native is None or not 0 < length < _args.LARGEST:
            failed("allocate_managed_buffer", f"{length} bytes, or the engine is not initialized")
            return 0
        try:
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            failed("allocate_managed_buffer", error)
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self.register_memory(address, length) != OK:
            memory.close()
            return 0
        with self._lock:
            self._managed[address] = memory
        return address

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Frees memory of `allocate_managed_buffer`. Returns 0, or -1 for any other address."""
        _args.check_int("buffer_addr", buffer_addr)
        _args.check_int("length", length)
        with self._lock:
            memory = self._managed.get(buffer_addr)
            if memory is None or len(memory) != length:
                return failed("free_managed_buffer", f"no buffer of {length} bytes at {buffer_addr:#x}")
            del self._managed[buffer_addr]
        native = self._native
        try:
            # The caller may have ended the registration already.
            if native is not None:
                native.unregister(buffer_addr)
        except RuntimeError as error:
            with self._lock:
                self._managed[buffer_addr] = memory
            return failed("free_managed_buffer", error)
        memory.close()
        return OK

    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes, length: int) -> int:
        """Copies the first `length` bytes of `src_ptr` to an address in this process. Returns 0, or -1 if
        the address is invalid or `src_ptr` is shorter."""
        _args.check_int("dest_address", dest_address)
        _args.check_int("length", length)
        try:
            data = memoryview(src_ptr.encode() if isinstance(src_ptr, str) else src_ptr).cast("B")
        except UnicodeEncodeError as error:
            return failed("write_bytes_to_buffer", error)
        native = self._native
        if native is None or not 0 <= length <= len(data):
            return failed("write_bytes_to_buffer", f"{length} of {len(data)} bytes")
        try:
            native.write_bytes(_args.address(dest_address), bytes(data[:length]))
        except (ValueError, OSError, RuntimeError) as error:
            return failed("write_bytes_to_buffer", error)
        return OK

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Returns `length` bytes from an address in this process. Raises ValueError for an invalid address."""
        _args.check_int("source_address", source_address)
        _args.check_int("length", length)
        native = self._native
        if native is None:
            raise ValueError("the engine is not initialized")
        return native.read_bytes(_args.address(source_address), _args.length(length))

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Returns the address of the memory that a peer registered first. 0 without such memory or without the
        peer."""
        _args.check_str("segment_name", segment_name)
        native = self._native
        if native is None:
            failed("get_first_buffer_address", "the engine is not initialized")
            return 0
        try:
            return native.first_registered(segment_name, self._timeout) or 0
        except (ValueError, OSError, RuntimeError) as error:
            failed("get_first_buffer_address", error)
            return 0
