"""The routes of objects."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mooncake._rest.answers import Failure, answering, body_of, call, said


class ObjectRoutes:
    """Putting, getting, finding and removing objects."""

    store: Any

    @answering
    async def handle_put(self, request: Any) -> web.StreamResponse:
        """`PUT /api/put` with {"key", "value"}: puts the text of the value."""
        given = await body_of(request)
        key, value = given.get("key"), given.get("value")
        if not key or value is None:
            raise Failure(400, "Missing key or value")
        if not isinstance(key, str) or not isinstance(value, str):
            raise Failure(400, "key and value must be text")
        code = await call(self.store.put, key, value.encode())
        if code != 0:
            raise Failure(500, "PUT operation failed", code=code)
        return _success()

    @answering
    async def handle_get(self, request: Any) -> web.StreamResponse:
        """`GET /api/get/{key}`: the bytes of an object; 404 if it is absent."""
        key = request.match_info["key"]
        await self._must_exist(key)
        value = await call(self.store.get, key)
        if not value:
            # The object may have left between the two calls. No object is empty, so empty bytes mean a miss.
            await self._must_exist(key)
            raise Failure(500, "GET operation failed")
        return web.Response(body=value, content_type="application/octet-stream")

    async def _must_exist(self, key: str) -> None:
        code = await call(self.store.is_exist, key)
        if code < 0:
            raise Failure(500, "Exist check failed", code=code)
        if code == 0:
            raise Failure(404, "Key not found")

    @answering
    async def handle_exist(self, request: Any) -> web.StreamResponse:
        """`GET /api/exist/{key}`: {"exists": bool}."""
        code = await call(self.store.is_exist, request.match_info["key"])
        if code < 0:
            raise Failure(500, "Exist check failed", code=code)
        return said({"exists": code > 0})

    @answering
    async def handle_remove(self, request: Any) -> web.StreamResponse:
        """`DELETE /api/remove/{key}`; 500 with the store's code for an object that is absent or leased."""
        code = await call(self.store.remove, request.match_info["key"])
        if code != 0:
            raise Failure(500, "Remove operation failed", code=code)
        return _success()

    @answering
    async def handle_remove_all(self, _request: Any) -> web.StreamResponse:
        """`DELETE /api/remove_all`: removes the tenant's objects, except leased ones."""
        count = await call(self.store.remove_all)
        if count < 0:
            raise Failure(500, "RemoveAll operation failed", code=count)
        return _success(f"success removed {count} keys")


def _success(status: str = "success") -> web.Response:
    return said({"status": status})
