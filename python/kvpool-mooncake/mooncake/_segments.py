"""Segments that a store contributes while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypedDict

from mooncake import _codes
from mooncake._base import NOT_SET_UP, StoreBase, log
from mooncake._clients import remove_left_files
from mooncake._settings import (
    NO_SETTING,
    PAGE,
    Place,
    Settings,
    find_place,
    is_for_this_host_alone,
    node_name,
    parse_size,
)


class Mounted(TypedDict):
    """The outcome of a mount: a code, the names of the segments, and their size in bytes."""

    ret: int
    segment_ids: list[str]
    allocated_size: int


class SegmentMethods(StoreBase):
    """The segment methods of a store."""

    _settings: Settings | None = None

    def allocate_and_mount_segment(
        self, size: int | str, protocol: str = "tcp", location: str = ""
    ) -> Mounted:
        """Contributes another segment of `size` bytes, rounded up to pages. It has no SSD.

        `protocol` and `location` have no effect: each client takes the best transport.
        """
        refused: Mounted = {"ret": _codes.PARAMETERS, "segment_ids": [], "allocated_size": 0}
        settings = self._settings
        if settings is None:
            self._refuse("allocate_and_mount_segment", NOT_SET_UP)
            return refused
        try:
            wanted = -(-parse_size(size, "size") // PAGE) * PAGE
            place = find_place(settings.host, 0)
        except NO_SETTING as error:
            log.error("allocate_and_mount_segment: %s", error)
            return refused
        name = node_name(place.hostname)
        code = self._contribute(settings, wanted, name, place)
        if code != _codes.OK:
            return {**refused, "ret": code}
        return {"ret": _codes.OK, "segment_ids": [name], "allocated_size": wanted}

    def _contribute(
        self, settings: Settings, size: int, name: str, place: Place, medium: Sequence[str] = ()
    ) -> int:
        if is_for_this_host_alone(place, settings.masters):
            log.warning(
                "only workers on this host can use the segment at %s: give as local_hostname what others reach",
                place.hostname,
            )
        remove_left_files()
        code, reason, files = self._native.add_segment(
            list(settings.masters),
            size,
            list(medium),
            name,
            place.listen,
            place.advertise,
            list(settings.devices),
            settings.patience.connect_timeout_ms,
        )
        if code != _codes.OK:
            log.error("no segment of %d bytes is contributed: %s", size, reason)
        for file in files:
            log.info("blocks that leave the segment are kept in %s", file)
        return code

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Removes segments and their objects from the pool. Returns 0, or -101 for an unknown segment.

        The call waits at most two seconds for reads in progress; the grace period has no effect. A segment
        with an SSD first copies its blocks there, for at most 30 seconds.
        """
        if isinstance(segment_ids, str):
            raise TypeError("segment_ids must be a list of str, not str")
        codes = [self._remove_segment(name) for name in segment_ids]
        return next((code for code in codes if code != _codes.OK), _codes.OK)

    def _remove_segment(self, name: str) -> int:
        try:
            return self._said("unmount_segment", self._native.remove_segment(name))
        except UnicodeEncodeError:
            # UTF-8 cannot encode this name, so no segment has it.
            log.warning("unmount_segment: %r is not UTF-8 and names no segment", name)
            return _codes.NO_SEGMENT

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """As `unmount_segment`: a segment's memory is freed when it leaves the pool."""
        return self.unmount_segment(segment_ids, grace_period_seconds)

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> Mounted:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(
            "mount_segment: kvpool's segments are memory that it makes itself, so that it can tell who has "
            "it mapped; use allocate_and_mount_segment"
        )

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Takes the segment of `setup` and its SSD out of the pool. Returns 0; -101 for a store without an SSD.

        Blocks in memory are copied to the SSD first, for at most 30 seconds. A later store of this host uses
        the SSD again. After that the call waits for `grace_period_seconds`.
        """
        if not isinstance(grace_period_seconds, int):
            raise TypeError(f"grace_period_seconds must be an int, not {type(grace_period_seconds).__name__}")
        if grace_period_seconds < 0:
            return self._refuse("unmount_local_disk_segment", f"grace_period_seconds is {grace_period_seconds}")
        if not self._native.is_set_up():
            return self._refuse("unmount_local_disk_segment", NOT_SET_UP)
        settings = self._settings
        if settings is None or not settings.offload or not settings.segment_size:
            return self._refuse("unmount_local_disk_segment", "the store has no SSD", _codes.NO_SEGMENT)
        code = self.unmount_segment([node_name(self._hostname())])
        if code == _codes.OK:
            time.sleep(grace_period_seconds)
        return code

    def _hostname(self) -> str:
        raise NotImplementedError

    def get_offload_rpc_read_count(self) -> int:
        """Always 0: no RPC reads blocks on SSD, because they are loaded to memory first."""
        return 0
