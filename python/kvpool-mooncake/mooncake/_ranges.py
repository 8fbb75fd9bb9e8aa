"""Parts of objects, and sessions that read or write objects part by part."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake import _codes
from mooncake._base import BAD_CONFIG, LENGTHS_DIFFER, StoreBase
from mooncake._types import ReplicateConfig, same_length

# One fragment for the native store: a key, an address, a length, and an offset in the object.
_Flat = tuple[list[str], list[int], list[int], list[int]]


class RangeMethods(StoreBase):
    """The range and session methods of a store."""

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Reads fragments of objects into buffers.

        Fragment `k` of key `j` of buffer `i` has `all_sizes[i][j][k]` bytes. It is read from offset
        `all_src_offsets[i][j][k]` of the object to offset `all_dst_offsets[i][j][k]` of the buffer. The result
        has the same shape: bytes read, or a negative code. If the lists of a key differ in length, its result
        is `[-600]`; for the lists of a buffer it is `[[-600]]`. A fragment beyond the end of its buffer's
        registered range gives -600.
        """
        shapes = (all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        if not same_length(buffer_ptrs, *shapes):
            return [[[code]] for code in self._refused("get_into_ranges", buffer_ptrs, LENGTHS_DIFFER)]
        flat: _Flat = ([], [], [], [])
        # For each buffer and key, the number of its fragments; -1 where its lists do not match.
        counts: list[list[int]] = []
        for start, keys, targets, sources, sizes in zip(buffer_ptrs, *shapes):
            if not same_length(keys, targets, sources, sizes):
                counts.append([-1])
                continue
            counts.append([])
            room = self._room_at(start)
            for key, to, source, size in zip(keys, targets, sources, sizes):
                alike = same_length(to, source, size)
                counts[-1].append(len(to) if alike else -1)
                if alike:
                    flat[0].extend([key] * len(to))
                    # A place before the start of the buffer is refused.
                    flat[1].extend(
                        start + offset if start > 0 and _fits(offset, length, room) else -1
                        for offset, length in zip(to, size)
                    )
                    flat[2].extend(size)
                    flat[3].extend(source)
        answers = iter(self._all_said("get_into_ranges", self._native.get_ranges(*flat)))
        wrong = [count for of_keys in counts for count in of_keys if count < 0]
        self._refused("get_into_ranges", wrong, LENGTHS_DIFFER)
        return [
            [[_codes.PARAMETERS] if count < 0 else [next(answers) for _ in range(count)] for count in of_keys]
            for of_keys in counts
        ]

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Begins a get session for each key. Returns 0, or -704 for an absent key.

        The key's lease is renewed until the session ends or the store is closed. A key may be in several
        sessions, and each session has its own end.
        """
        return self._all_said("batch_get_session_start", self._native.get_session_start(keys))

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Reads ranges of objects, each into a buffer. Returns the number of bytes, or a code, for each key.

        A key without a session is leased only for the read.
        """
        shapes = (all_buffer_ptrs, all_sizes, all_src_offsets)
        if not same_length(keys, *shapes):
            return self._refused("batch_get_into_multi_buffer_ranges", keys, LENGTHS_DIFFER)
        flat: _Flat = ([], [], [], [])
        counts: list[int] = []
        for key, ptrs, sizes, sources in zip(keys, *shapes):
            alike = bool(ptrs) and same_length(ptrs, sizes, sources)
            counts.append(len(ptrs) if alike else -1)
            if alike:
                flat[0].extend([key] * len(ptrs))
                flat[1].extend(ptrs)
                flat[2].extend(sizes)
                flat[3].extend(sources)
        answers = self._native.get_ranges(*flat)
        totals: list[int] = []
        at = 0
        for count in counts:
            own = answers[at : at + max(count, 0)]
            at += len(own)
            totals.append(min(own) if own and min(own) < 0 else sum(own) if own else _codes.PARAMETERS)
        return self._all_said("batch_get_into_multi_buffer_ranges", totals)

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Ends the get session of each key. Returns 0, or the first code: -704 for a key without one."""
        answers = self._all_said("batch_get_session_end", self._native.get_session_end(keys))
        return next((code for code in answers if code != _codes.OK), _codes.OK)

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Begins a put session for each key. Returns 0, or a code; -714 if the key has one.

        This process keeps the written data, `sizes` bytes for each key. It puts the data when the session ends.
        The key is not visible before.
        """
        how = self._how(config)
        if how is None:
            return self._refused("batch_put_session_start", keys, BAD_CONFIG)
        return self._all_said("batch_put_session_start", self._native.put_session_start(keys, sizes, how))

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Writes ranges of objects with open put sessions. Returns the number of bytes, or a code, for each
        key.

        -704: the key has no session. -600: a range is outside the object; nothing is written.
        """
        answers = self._native.put_session_write(keys, all_buffer_ptrs, all_sizes, all_dst_offsets)
        return self._all_said("batch_put_from_multi_buffer_ranges", answers)

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Puts the data of the sessions and ends them. Returns 0, or a code.

        -704: the key has no session. -700: the object was not written completely; it is dropped.
        """
        return self._all_said("batch_put_session_end", self._native.put_session_end(keys))

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Drops put sessions. Returns 0, or -704 for a key without one."""
        return self._all_said("batch_put_session_revoke", self._native.put_session_revoke(keys))


def _fits(offset: int, length: int, room: int | None) -> bool:
    """Whether a fragment is within a buffer, as far as the end of the buffer is known."""
    return offset >= 0 and (room is None or offset + length <= room)
