"""The routes of memory that the service contributes and withdraws."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from mooncake._rest.answers import Failure, answering, body_of, call, log, said

# The longest grace period, in seconds. A value that was meant in milliseconds must not delay a shutdown for
# hours.
LONGEST_GRACE = 3600


def shm_path(name: object) -> str | None:
    """The file of a POSIX shared memory object; `None` for anything but a plain name."""
    if not isinstance(name, str):
        return None
    plain = name.removeprefix("/")
    return None if plain in ("", ".", "..") or "/" in plain else f"/dev/shm/{plain}"


class SegmentRoutes:
    """Mounting and unmounting segments, and the switch between the modes "prefill" and "decode"."""

    store: Any
    config: Any
    current_mode: str
    mounted_segment_ids: list[str]
    last_mount_info: dict[str, Any]
    _state_lock: asyncio.Lock

    @answering
    async def handle_reconfigure(self, request: Any) -> web.StreamResponse:
        """`POST /api/reconfigure`: {"mode": "decode", "path", "size", ...} mounts, {"mode": "prefill"} unmounts."""
        given = await body_of(request)
        mode = str(given.get("mode", "")).lower()
        if mode == "decode":
            return await self._to_decode(given)
        if mode == "prefill":
            return await self._to_prefill()
        raise Failure(400, "Invalid mode. Use 'decode' or 'prefill'")

    async def _to_decode(self, given: dict[str, Any]) -> web.StreamResponse:
        path, size = given.get("path"), given.get("size")
        if not path or size is None:
            raise Failure(400, "Missing path or size for decode mode")
        place = {
            "path": path,
            "size": size,
            "offset": given.get("offset", 0),
            "protocol": given.get("protocol", self.config.protocol),
            "location": given.get("location", ""),
        }
        async with self._state_lock:
            before = list(self.mounted_segment_ids)
            # The new segment comes first. So a mount that fails leaves the old segments in service.
            mounted = await call(self.store.mount_segment, *place.values())
            if mounted["ret"] != 0:
                then = "keeping previous decode segments" if before else "rolled back to prefill"
                if not before:
                    self.current_mode = "prefill"
                    self.last_mount_info.clear()
                raise Failure(500, f"Mount failed, ret={mounted['ret']}; {then}", mode=self.current_mode)
            # The next switch tries again to unmount segments that stay.
            left = [name for name in before if await call(self.store.unmount_segment, [name]) != 0]
            if left:
                log.warning("the segments %s are not unmounted yet", ", ".join(left))
            self.mounted_segment_ids = [*mounted["segment_ids"], *left]
            self.current_mode = "decode"
            self.last_mount_info = place
            return said({"status": "success", "mode": "decode", "segment_ids": self.mounted_segment_ids})

    async def _to_prefill(self) -> web.StreamResponse:
        async with self._state_lock:
            if self.mounted_segment_ids:
                code = await call(self.store.unmount_segment, list(self.mounted_segment_ids))
                if code != 0:
                    raise Failure(500, f"Unmount failed, ret={code}")
                self.mounted_segment_ids.clear()
            self.current_mode = "prefill"
            self.last_mount_info.clear()
        return said({"status": "success", "mode": "prefill"})

    @answering
    async def handle_mount_shm(self, request: Any) -> web.StreamResponse:
        """`POST /api/mount_shm` with {"name", "size", "offset"}; 501: kvpool mounts no memory of others."""
        given = await body_of(request)
        path, size = shm_path(given.get("name")), given.get("size")
        if path is None or size is None:
            raise Failure(400, "Missing or invalid name or size")
        protocol = given.get("protocol", self.config.protocol)
        mounted = await call(
            self.store.mount_segment, path, size, given.get("offset", 0), protocol, given.get("location", "")
        )
        if mounted["ret"] != 0:
            raise Failure(500, f"Mount failed, ret={mounted['ret']}")
        return said({"status": "success", "segment_ids": list(mounted["segment_ids"])})

    @answering
    async def handle_unmount_shm(self, request: Any) -> web.StreamResponse:
        """`POST /api/unmount_shm` with {"segment_ids", "grace_period_seconds"}."""
        given = await body_of(request)
        grace, failed = given.get("grace_period_seconds", 0), []
        async with self._state_lock:
            for name in _segment_ids(given):
                if await call(self.store.unmount_segment, [name], grace) != 0:
                    failed.append(name)
                elif name in self.mounted_segment_ids:
                    self.mounted_segment_ids.remove(name)
            if not self.mounted_segment_ids:
                self.current_mode = "prefill"
        if failed:
            raise Failure(500, "Unmount failed for one or more segments", failed_segment_ids=failed)
        return said({"status": "success"})

    @answering
    async def handle_mount(self, request: Any) -> web.StreamResponse:
        """`POST /api/mount` with {"size"}: contributes that many bytes, rounded up to pages."""
        given = await body_of(request)
        size = given.get("size")
        if type(size) is not int or size <= 0:
            raise Failure(400, "Invalid size, must be a positive integer")
        protocol = given.get("protocol", self.config.protocol)
        mounted = await call(self.store.allocate_and_mount_segment, size, protocol, given.get("location", ""))
        if mounted["ret"] != 0:
            raise Failure(500, f"Allocate and mount failed, ret={mounted['ret']}")
        names, length = list(mounted["segment_ids"]), mounted["allocated_size"]
        return said({"status": "success", "segment_ids": names, "allocated_size": length})

    @answering
    async def handle_unmount(self, request: Any) -> web.StreamResponse:
        """`POST /api/unmount` with {"segment_ids"}: withdraws segments of `/api/mount`."""
        given = await body_of(request)
        names, grace = _segment_ids(given), given.get("grace_period_seconds", 0)
        code = await call(self.store.unmount_and_free_segment, names, grace)
        if code != 0:
            raise Failure(500, f"Unmount and free failed, ret={code}")
        return said({"status": "success"})

    @answering
    async def handle_unmount_local_disk(self, request: Any) -> web.StreamResponse:
        """`POST /api/unmount_local_disk` with {"grace_period_seconds"}: withdraws the SSD before a shutdown."""
        grace = (await body_of(request)).get("grace_period_seconds", 0)
        if type(grace) is not int or not 0 <= grace <= LONGEST_GRACE:
            raise Failure(400, f"Invalid grace_period_seconds, must be an integer from 0 to {LONGEST_GRACE}")
        code = await call(self.store.unmount_local_disk_segment, grace)
        if code != 0:
            raise Failure(500, f"Unmount local disk failed, ret={code}")
        return said({"status": "success"})


def _segment_ids(given: dict[str, Any]) -> list[str]:
    names = given.get("segment_ids", [])
    if isinstance(names, str):
        return [names] if names else _segment_ids({})
    if not names:
        raise Failure(400, "Missing segment_ids")
    return list(names)
