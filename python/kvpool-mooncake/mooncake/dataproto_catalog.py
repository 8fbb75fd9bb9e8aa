"""A catalog of tables: which keys have which fields, in which table. Puts, reads and removals keep it correct.

`DataProtoCatalog` is the state, in one process. `DataProtoCatalogTransfer` moves the bytes, in every process.
It reaches the catalog by a call that its creator provides: a method call, an actor, or RPC.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncake._structured.catalog import CatalogDrained, DataProtoCatalog
from mooncake._structured.tables import export_dataproto_ref, sections

__all__ = ["DataProtoCatalog", "DataProtoCatalogTransfer", "logger"]

logger = logging.getLogger(__name__)

# With these errors the catalog has refused a publication completely.
_REFUSALS = (ValueError, TypeError, CatalogDrained)
# The attribute of an output that keeps the results from which it was made.
_RESULTS = "_catalog_results"


class DataProtoCatalogTransfer:
    """Puts tables under keys, and removes tables that the catalog retires.

    `catalog_call(method, *args, **kwargs)` calls a method of the catalog. A publication whose call fails is
    repeated once, under the same id. If the repetition fails too, its error is raised. The outcome is then
    unknown, so the bytes stay. The publication is repeated before the next one.
    """

    def __init__(self, transfer: Any, catalog_call: Callable[..., Any]) -> None:
        self.transfer = transfer
        self._call = catalog_call
        # Publications of unknown outcome: the method, the id, and the arguments.
        self._open: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {}
        # Results that could not be released.
        self._unreleased: list[Any] = []

    def put(
        self,
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None = None,
        **put_kwargs: Any,
    ) -> dict[str, Any]:
        """Puts a table whose row `i` is key `i`, and publishes it. Returns the catalog's answer.

        Raises ValueError if the numbers of different keys and rows differ. Nothing is put then.
        """
        self._settle()
        rows = sections(data, put_kwargs.get("type", "dataproto")).rows
        if rows != len(keys) or len(set(keys)) != rows:
            raise ValueError(f"the table has {rows} rows for {len(set(keys))} different keys")
        ref = self.transfer.put(data, partition=partition, **put_kwargs)
        return self._publish("publish", (partition, tuple(keys)), {"tags": tags, "handle": export_dataproto_ref(ref)})

    def append(
        self,
        fragment_id: str,
        handle: Mapping[str, Any],
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        stage: str,
        **append_kwargs: Any,
    ) -> dict[str, Any]:
        """Adds columns to a published table, as `resolve` named it.

        Raises ValueError if the table has changed since `resolve`. The new columns are removed then.
        """
        self._settle()
        ref = self.transfer.append_dataproto_fields(handle, data, stage=stage, **append_kwargs)
        answer = self._publish(
            "publish_append",
            (fragment_id, partition, tuple(keys)),
            {"previous_handle": dict(handle), "handle": export_dataproto_ref(ref)},
        )
        if "append_rejected" in answer:
            raise ValueError(f"the columns are not added: {answer['append_rejected']}")
        return answer

    def _publish(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        operation = uuid.uuid4().hex
        self._open[operation] = (method, (operation, *args), kwargs)
        try:
            return self._finish(operation)
        except _REFUSALS:
            raise
        except Exception:
            logger.warning("the catalog did not answer the publication %s: it is repeated", operation, exc_info=True)
            return self._finish(operation)

    def _finish(self, operation: str) -> dict[str, Any]:
        method, args, kwargs = self._open[operation]
        try:
            answer: dict[str, Any] = self._call(method, *args, **kwargs)
        except _REFUSALS:
            self._withdraw(operation)
            raise
        if "append_rejected" in answer:
            self._withdraw(operation)
            return answer
        self._call("ack_publication", operation)
        del self._open[operation]
        return {**answer, "retired_handles": self._remove_retired(answer)}

    def _withdraw(self, operation: str) -> None:
        """Removes the bytes of a publication that the catalog refused."""
        _, _, kwargs = self._open.pop(operation)
        if "previous_handle" in kwargs:
            self.transfer.cleanup_dataproto_append(kwargs["previous_handle"], kwargs["handle"])
        else:
            self.transfer.cleanup_dataproto(kwargs["handle"])

    def _settle(self) -> None:
        """Repeats publications of unknown outcome. Raises RuntimeError if one fails again."""
        for operation in list(self._open):
            try:
                self._finish(operation)
            except _REFUSALS:
                logger.warning("the catalog refused the publication %s, which was repeated", operation, exc_info=True)
            except Exception:
                logger.warning("the publication %s failed again", operation, exc_info=True)
        if self._open:
            raise RuntimeError(f"{len(self._open)} publications are not in the catalog yet: see the log")

    def _remove_retired(self, answer: Mapping[str, Any]) -> list[Any]:
        """Removes retired tables. The catalog's next answer names the tables that stay again."""
        gone, left = [], []
        for handle in answer.get("retired_handles", ()):
            try:
                self.transfer.cleanup_dataproto(handle)
                gone.append(handle)
            except RuntimeError:
                left.append(handle)
                logger.warning("a retired table is not removed yet", exc_info=True)
        if gone:
            self._call("ack_retired", gone)
        return left

    def resolve(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the locations of fields of keys. The tables stay until `release_read` of the answer's
        `read_token`."""
        answer: dict[str, Any] = self._call("resolve", partition, keys, fields, pin=True)
        return answer

    def release_read(self, token: int) -> None:
        """Ends a read of `resolve`, and removes the tables that waited for its end."""
        self._remove_retired(self._call("release_read", token))

    def attach_results(self, output: Any, results: Sequence[Any]) -> None:
        """Keeps results with the output that was made from them, until `release_result` of the output."""
        setattr(output, _RESULTS, [*getattr(output, _RESULTS, ()), *results])

    def release_result(self, output: Any) -> None:
        """Releases the results of an output. Does nothing for an output without results."""
        results = getattr(output, _RESULTS, None)
        if results:
            setattr(output, _RESULTS, [])
            self.discard_results(results)

    def discard_results(self, results: Sequence[Any], *, strict: bool = False) -> None:
        """Releases results. A failed release is tried again later; with `strict` it raises RuntimeError."""
        failed = []
        for result in [*self._unreleased, *results]:
            try:
                self.transfer.release_result(result)
            except Exception:
                failed.append(result)
                logger.warning("a result is not released yet", exc_info=True)
        self._unreleased = failed
        if failed and strict:
            raise RuntimeError(f"{len(failed)} results are not released: see the log")

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Returns the tags of all keys, by partition."""
        answer: dict[str, dict[str, Any]] = self._call("list", partition)
        return answer

    def remove(self, partition: str, keys: Sequence[str]) -> None:
        """Removes keys, and the tables that no key and no read uses any more."""
        self._remove_retired(self._call("remove", partition, keys))

    def drain(self) -> None:
        """Removes all published tables. Raises RuntimeError while a read is pinned."""
        self._settle()
        self._remove_retired(self._call("drain"))

    def close(self) -> None:
        """Ends open work: publications of unknown outcome, and results that were not released."""
        self._settle()
        self.discard_results([], strict=True)
