"""mc_store_rest_server: a store behind a REST interface.

| route | does |
|---|---|
| `PUT /api/put` with {"key", "value"} | puts the text of the value |
| `GET /api/get/{key}` | answers the bytes |
| `GET /api/exist/{key}` | answers {"exists": bool} |
| `DELETE /api/remove/{key}` | removes an object |
| `DELETE /api/remove_all` | removes the tenant's objects |
| `POST /api/mount`, `/api/unmount`, `/api/unmount_local_disk` | contribute and withdraw memory and the SSD |
| `POST /api/mount_shm`, `/api/unmount_shm`, `/api/reconfigure` | mount others' memory, which kvpool refuses |

It needs the package aiohttp (the extra `rest` of the wheel). It authenticates no caller.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

try:
    from aiohttp import web
except ImportError as error:
    raise ImportError("mooncake_store_service needs the package aiohttp, an extra of the wheel: rest") from error

from mooncake import _codes
from mooncake import mooncake_config as _config
from mooncake._rest.answers import log as _log
from mooncake._rest.objects import ObjectRoutes as _ObjectRoutes
from mooncake._rest.segments import SegmentRoutes as _SegmentRoutes
from mooncake._rest.segments import shm_path as _shm_name_to_path
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore

__all__ = ["MooncakeConfig", "MooncakeDistributedStore", "MooncakeStoreService", "main", "parse_arguments", "sync_main"]

_LARGEST_BODY = 100 << 20
_RETRY_SECONDS = 1.0


class MooncakeStoreService(_ObjectRoutes, _SegmentRoutes):
    """A store and its REST interface."""

    def __init__(self, config_path: str | None = None, cli_config: Mapping[str, Any] | None = None) -> None:
        """Reads the configuration from a file or from the environment, and overrides it. Raises OSError or
        ValueError."""
        self.store: MooncakeDistributedStore | None = None
        self.config = MooncakeConfig.from_file(config_path) if config_path else MooncakeConfig.load_from_env()
        for name, value in (cli_config or {}).items():
            if hasattr(self.config, name):
                setattr(self.config, name, _config._READERS.get(name, lambda given: given)(value))
            else:
                _log.warning("the setting %s is unknown and has no effect", name)
        self.current_mode = "prefill"
        self.mounted_segment_ids: list[str] = []
        self.last_mount_info: dict[str, Any] = {}
        self._state_lock = asyncio.Lock()

    async def start_store_service(
        self, max_wait_time: float = 60, shutdown_event: asyncio.Event | None = None
    ) -> bool:
        """Sets the store up, repeatedly for `max_wait_time` seconds or until the event. Returns whether it
        succeeded."""
        end = time.monotonic() + max_wait_time
        stopping = shutdown_event or asyncio.Event()
        # An earlier signal can set the event here.
        await asyncio.sleep(0)
        while not stopping.is_set():
            left = end - time.monotonic()
            if left <= 0:
                _log.error("the store is not set up after %s s", max_wait_time)
                return False
            self.store = MooncakeDistributedStore()
            try:
                code = await asyncio.to_thread(self.store.setup, self._settings())
            except (RuntimeError, TypeError) as error:
                _log.error("setup: %s", error)
                code = _codes.INTERNAL
            if stopping.is_set():
                await self.stop()
                return False
            if code == 0:
                _log.info("the store is set up as %s", self.config.local_hostname)
                return True
            _log.warning("the set-up failed with %d; it is tried again for %.0f s", code, left)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopping.wait(), min(_RETRY_SECONDS, max(left, 0)))
        return False

    def _settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "local_hostname": config.local_hostname,
            "metadata_server": config.metadata_server,
            "global_segment_size": config.global_segment_size,
            "local_buffer_size": config.local_buffer_size,
            "protocol": config.protocol,
            "rdma_devices": config.device_name,
            "master_server_addr": config.master_server_address,
            "enable_ssd_offload": config.enable_ssd_offload,
            "ssd_offload_path": config.ssd_offload_path,
            "tenant_id": config.tenant_id,
            "enable_client_http_server": config.enable_client_http_server,
            "client_http_port": config.client_http_port,
        }

    async def start_http_service(self, port: int = 8080) -> bool:
        """Serves the routes on every interface. Raises OSError if the port is taken."""
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.add_routes(
            [
                web.put("/api/put", self.handle_put),
                web.get("/api/get/{key}", self.handle_get),
                web.get("/api/exist/{key}", self.handle_exist),
                web.delete("/api/remove/{key}", self.handle_remove),
                web.delete("/api/remove_all", self.handle_remove_all),
                web.post("/api/mount", self.handle_mount),
                web.post("/api/unmount", self.handle_unmount),
                web.post("/api/unmount_local_disk", self.handle_unmount_local_disk),
                web.post("/api/mount_shm", self.handle_mount_shm),
                web.post("/api/unmount_shm", self.handle_unmount_shm),
                web.post("/api/reconfigure", self.handle_reconfigure),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", port).start()
        _log.info("the REST interface is served at port %d", port)
        return True

    async def stop(self) -> None:
        """Closes the store."""
        store, self.store = self.store, None
        if store is None:
            return
        code = await asyncio.to_thread(store.close)
        if code != 0:
            _log.warning("close returned %d", code)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("mc_store_rest_server", description="A store behind a REST interface")
    parser.add_argument("--config", help="a configuration file; default: the variables MOONCAKE_*")
    parser.add_argument("-D", "--define", action="append", default=[], help="override a setting: -Dname=value")
    parser.add_argument("--port", type=int, default=8080, help="serve HTTP at this port (8080)")
    parser.add_argument(
        "--max-wait-time", type=float, default=60, help="how long to try to join the pool, in seconds (60)"
    )
    return parser.parse_args()


def _install_shutdown_signal_handlers(loop: asyncio.AbstractEventLoop, shutdown_event: asyncio.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, shutdown_event.set)


async def main() -> None:
    """Serves until a signal arrives. Raises RuntimeError if the store cannot be set up."""
    args = parse_arguments()
    given = dict(item.split("=", 1) for item in args.define if "=" in item)
    for item in args.define:
        if "=" not in item:
            _log.warning("-D%s has no value and no effect", item)
    service = MooncakeStoreService(args.config, given)
    stopping = asyncio.Event()
    _install_shutdown_signal_handlers(asyncio.get_running_loop(), stopping)
    try:
        if not await service.start_store_service(args.max_wait_time, stopping):
            if stopping.is_set():
                return
            raise RuntimeError("the store cannot be set up")
        if not stopping.is_set():
            await service.start_http_service(args.port)
            await stopping.wait()
    finally:
        await service.stop()


def sync_main() -> None:
    """Runs the command."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        asyncio.run(main())
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"mc_store_rest_server: {error}")


if __name__ == "__main__":
    sync_main()
