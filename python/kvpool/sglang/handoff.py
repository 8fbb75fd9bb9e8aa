"""A back end of SGLang's disaggregation over `kvpool.handoff`.

```
python -m sglang.launch_server ... --disaggregation-mode prefill --disaggregation-transfer-backend kvpool
```

SGLang's own bootstrap server tells decode the addresses of prefill's ranks. This back end uses that
registration and the table of failures of SGLang's common classes. It does not use their ZMQ messages: one
session of `kvpool.handoff` for each rank carries everything. Settings, from the environment:

- `KVPOOL_HANDOFF_DECODE_RANKS`: decode's attention tensor parallel ranks (default: as many as prefill's)
- `KVPOOL_HANDOFF_SECRET_FILE`: a file with the secret that both engines share (default: none)
- `KVPOOL_HANDOFF_TIMEOUT`: the longest time of a hand-off, in seconds (default: 300)

Written for the interface of SGLang 0.5.23.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import (  # type: ignore[import-not-found]
    AttentionArch,
    ModelConfig,
)
from sglang.srt.disaggregation.base.conn import (  # type: ignore[import-not-found]
    KVPoll,
    KVTransferDestination,
)
from sglang.srt.disaggregation.common.conn import (  # type: ignore[import-not-found]
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)

import kvpool
from kvpool import handoff
from kvpool.sglang.models import draft, setting

logger = logging.getLogger(__name__)

_REFUSED = (kvpool.Error, OverflowError, TypeError, ValueError)
"""The exceptions of a hand-off that does not begin. A client chooses its room, which may not fit 64 bits."""
_FIELD = "hidden_states"
"""The field of the library's slot of metadata that holds all of SGLang's buffers, one after the other."""


def states(
    args: Any, ranks: int, heads: int | None, draft_heads: int | None = None
) -> list[handoff.State]:
    """The states of a rank: the regions of the model, then those of its draft model.

    `heads` and `draft_heads` are the KV heads of all `ranks` ranks together. None means latent attention (MLA),
    where all ranks hold the same bytes. Raises ValueError for a cache that does not consist of keys and values.
    """
    if args.state_types:
        others = ", ".join(str(kind.value) for kind in args.state_types)
        raise ValueError(f"kvpool hands off the KV cache only, not {others}")
    regions = list(zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True))
    drafts = int(getattr(args, "num_draft_entries", 0))
    of_model, of_draft = regions[: len(regions) - drafts], regions[len(regions) - drafts :]
    found = _states(args, of_model, ranks, heads, 0, args.kv_cache_dtype_str)
    if of_draft:
        # Engines with different draft models cannot use each other's bytes, so the names of the states differ.
        told = [str(setting("spec", "speculative_draft_kv_cache_dtype")), *draft()]
        digest = hashlib.sha256(repr(told).encode()).hexdigest()
        name = f"{args.kv_cache_dtype_str} draft {digest[:16]}"
        layers = 1 + max((state.layer for state in found), default=-1)
        found += _states(args, of_draft, ranks, draft_heads, layers, name)
    return found


def _states(
    args: Any,
    regions: Sequence[tuple[int, int, int]],
    ranks: int,
    heads: int | None,
    first_layer: int,
    name: str,
) -> list[handoff.State]:
    """A model's layers: one region for the keys and one for the values, or one for both (MLA)."""
    kinds = ["mla"] if heads is None else ["k", "v"]
    if len(regions) % len(kinds):
        raise ValueError(
            f"kvpool: {len(regions)} regions are no {' and '.join(kinds)} of each layer"
        )
    layers = len(regions) // len(kinds)
    found = []
    for at, (base, length, page) in enumerate(regions):
        parts, outer, rule = 1, 1, "one_source"
        if heads is not None:
            # Pages are [token][head][element]. With more ranks than heads each rank has one head.
            parts, outer, rule = heads, args.page_size, "slice"
        local = max(parts // ranks, 1)
        if page % (outer * local):
            raise ValueError(
                f"kvpool: a page of {page} bytes is no {outer} tokens of {local} heads"
            )
        found.append(
            handoff.State(
                name=f"{kinds[at // layers]} {name}",
                layer=first_layer + at % layers,
                base=base,
                pages=length // page,
                parts=parts,
                part_bytes=page // outer // local,
                outer=outer,
                rule=rule,
            )
        )
    return found


class KvpoolKVManager(CommonKVManager):  # type: ignore[misc]
    """A rank's session, and the known addresses of prefill's ranks."""

    supports_deferred_decode_kv_release = True
    """SGLang keeps the pages of a failed request until `is_abort_release_safe` returns true."""

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False):
        self.session: handoff.Session | None = None
        self.is_mla = bool(is_mla_backend)
        self.timeout = float(os.environ.get("KVPOOL_HANDOFF_TIMEOUT", "300"))
        self._senders: dict[tuple[str, int | None], tuple[str, ...]] = {}
        self._ending: dict[int, handoff.Receiving] = {}
        super().__init__(args, mode, server_args, is_mla_backend)
        self.opened()

    def opened(self) -> handoff.Session:
        """Returns the session. The first call opens it."""
        if self.session is None:
            args = self.kv_args
            if self.pp_size != 1:
                raise ValueError("kvpool hands off between engines without pipeline stages")
            if self.attn_cp_size != 1:
                # Decode asks rank 0 only. The rooms of the other ranks would get no offer, and fail the
                # request.
                raise ValueError(
                    f"kvpool hands off between engines without context parallel ranks, not {self.attn_cp_size}: "
                    "set --attn-cp-size to 1"
                )
            self.aux_bytes = sum(args.aux_item_lens)
            self.slot = handoff.AuxLayout(self.aux_bytes)
            secret = os.environ.get("KVPOOL_HANDOFF_SECRET_FILE", "")
            self.session = handoff.Session(
                states(args, self.attn_tp_size, self._heads(), self._draft_heads()),
                page_tokens=args.page_size,
                host=self.local_ip,
                secret=Path(secret).read_text().strip() if secret else "",
                tensor=(self.attn_tp_rank, self.attn_tp_size),
                hidden_bytes=self.aux_bytes,
            )
            logger.info("rank %d hands off at %s", self.attn_tp_rank, self.session.address)
        return self.session

    def _heads(self) -> int | None:
        """The KV heads of all ranks; None with latent attention. SGLang gives this number only to prefill."""
        if self.is_mla:
            return None
        known = getattr(self.kv_args, "total_kv_head_num", None)
        return int(known or ModelConfig.from_server_args(self.server_args).get_total_num_kv_heads())

    def _draft_heads(self) -> int | None:
        """The KV heads of the draft model, whose attention may differ from the model's."""
        if not getattr(self.kv_args, "num_draft_entries", 0):
            return None
        config = ModelConfig.from_server_args(
            self.server_args,
            model_path=setting("spec", "speculative_draft_model_path"),
            model_revision=setting("spec", "speculative_draft_model_revision"),
            is_draft_model=True,
        )
        if config.attention_arch == AttentionArch.MLA:
            return None
        return int(config.get_total_num_kv_heads())

    def register_to_bootstrap(self) -> None:
        """Registers the session's address instead of a socket for SGLang's messages."""
        self.rank_port = int(self.opened().address.rpartition(":")[2])
        super().register_to_bootstrap()

    def register_buffer_to_engine(self) -> None:
        """Does nothing: the session knows the memory."""

    @property
    def decode_ranks(self) -> int:
        """Decode's tensor parallel ranks."""
        return int(os.environ.get("KVPOOL_HANDOFF_DECODE_RANKS") or self.attn_tp_size)

    def senders(self, receiver: KvpoolKVReceiver, ranks: int) -> tuple[str, ...] | None:
        """Returns the addresses of all of prefill's ranks; `None` if a rank is not registered."""
        key = (receiver.bootstrap_addr, receiver.prefill_dp_rank)
        if key not in self._senders:
            found = [
                receiver._get_bootstrap_info_from_server(receiver.prefill_dp_rank, 0, rank, 0)
                for rank in range(ranks)
            ]
            if any(one is None for one in found):
                return None
            self._senders[key] = tuple(f"{one['rank_ip']}:{one['rank_port']}" for one in found)
        return self._senders[key]

    def forget_senders(self, receiver: KvpoolKVReceiver) -> None:
        """Forgets prefill's addresses: after a failure prefill may restart at other addresses."""
        self._senders.pop((receiver.bootstrap_addr, receiver.prefill_dp_rank), None)
        self.prefill_info_table.pop(receiver.bootstrap_addr, None)

    def declines(self, receiver: KvpoolKVReceiver) -> None:
        """Tells prefill that decode does not ask for a room, so that prefill's pages are free. Does nothing without
        known addresses: a question to the bootstrap server would delay the scheduler."""
        known = (receiver.bootstrap_addr, getattr(receiver, "prefill_dp_rank", None))
        senders = self._senders.get(known)
        if senders is None:
            return
        try:
            self.opened().decline(receiver.bootstrap_room, senders, no_pages=False)
        except _REFUSED as error:
            logger.warning("room %s: prefill does not learn of the abort: %s", receiver.bootstrap_room, error)

    def get_kv_replica_factor(self) -> int:
        return 1

    def ends(self, room: int, receiving: handoff.Receiving) -> None:
        """Notes that decode aborts a room. SGLang may drop the receiver before the last write has ended."""
        # SGLang does not report the end of every room. Without this check released rooms would stay in the
        # table.
        self._ending = {other: one for other, one in self._ending.items() if not one.released}
        self._ending[room] = receiving

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether decode's pages can be used again. The room itself tells this, without an answer of
        prefill."""
        receiving = self._ending.get(bootstrap_room)
        return receiving is None or receiving.released

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """SGLang has reused the pages, at the latest after its own timeout."""
        receiving = self._ending.pop(bootstrap_room, None)
        if receiving is not None and not receiving.released:
            logger.error(
                "room %d: SGLang reuses decode's pages, but a write of prefill's may still come: raise "
                "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
                bootstrap_room,
            )
        super().clear_deferred_abort_state(bootstrap_room)

    def aux(self, index: int) -> bytes:
        """Returns SGLang's metadata of a request as a slot of the library."""
        start, _ = self.slot.range(_FIELD)
        slot = bytearray(self.slot.slot_bytes)
        for base, size in zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True):
            slot[start : start + size] = ctypes.string_at(base + index * size, size)
            start += size
        return bytes(slot)

    def take_aux(self, index: int, slot: bytes) -> None:
        """Writes SGLang's metadata of a request into decode's buffers."""
        start, _ = self.slot.range(_FIELD)
        for base, size in zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True):
            ctypes.memmove(base + index * size, slot[start : start + size], size)
            start += size


class KvpoolKVSender(CommonKVSender):  # type: ignore[misc]
    """A prompt on a rank of prefill."""

    supports_host_tensor_indices = False
    conclude_state: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._pages: list[int] = []
        self._sending: handoff.Sending | None = None
        self._polled = False

    def send(
        self,
        kv_indices: Sequence[int],
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """Adds the pages of a chunk. The last chunk starts the hand-off."""
        if self.conclude_state is not None:
            return
        self._pages += [int(page) for page in kv_indices]
        self.curr_idx += len(kv_indices)
        self._record_transfer_indices(kv_indices, None)
        if self.curr_idx < self.num_kv_indices:
            return
        manager = self.kv_mgr
        try:
            self._sending = manager.opened().send(
                self.bootstrap_room,
                self._pages,
                decode_tp=manager.decode_ranks,
                timeout=manager.timeout,
                # A busy decode engine asks late.
                patience=manager.timeout,
            )
            self._sending.produced(0, len(self._pages))
            self._sending.finish(manager.aux(self.aux_index))
        except _REFUSED as error:
            self._fail(str(error))

    def poll(self) -> int:
        """Returns the state of the hand-off. Prefill may compute as soon as the request is known, before decode
        has asked."""
        if self.conclude_state is not None:
            return int(self.conclude_state)
        if self._sending is None:
            state = KVPoll.WaitingForInput if self._polled else KVPoll.Bootstrapping
            self._polled = True
            return int(state)
        state = int(self._sending.poll)
        if state in (KVPoll.Success, KVPoll.Failed) and not self._sending.released:
            # The scheduler reuses the pages once this reports the end.
            return int(KVPoll.Transferring)
        if state == KVPoll.Failed:
            self._fail(self._sending.error or "failed")
        elif state == KVPoll.Success:
            self.conclude_state = KVPoll.Success
        return max(state, KVPoll.WaitingForInput) if state else state

    def abort(self) -> None:
        if self._sending is None and self.conclude_state is None:
            self._open_unsent()
        if self._sending is not None:
            self._sending.abort()
        super().abort()

    def _open_unsent(self) -> None:
        """Opens the room of an unsent prompt, so that its abort reaches decode. Otherwise decode would hold its
        pages for the whole patience."""
        manager = self.kv_mgr
        try:
            self._sending = manager.opened().send(
                self.bootstrap_room,
                # No page of them is sent. With another number than decode's, the room would fail for that
                # reason.
                range(getattr(self, "num_kv_indices", 0)),
                decode_tp=manager.decode_ranks,
                timeout=manager.timeout,
                patience=manager.timeout,
            )
        except _REFUSED as error:
            logger.warning("room %s: decode does not learn of the abort: %s", self.bootstrap_room, error)

    def _fail(self, why: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, why)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed


class KvpoolKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """A prompt on a rank of decode."""

    conclude_state: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._receiving: handoff.Receiving | None = None
        self._slot: int | None = None

    def send_metadata(
        self,
        kv_indices: Sequence[int],
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Offers the pages to prefill."""
        manager = self.kv_mgr
        ranks = self.prefill_info.attn_tp_size
        senders = manager.senders(self, ranks)
        if senders is None:
            self._fail(f"not all of prefill's {ranks} ranks are registered at {self.bootstrap_addr}")
            return
        self._slot = aux_index
        try:
            self._receiving = manager.opened().receive(
                self.bootstrap_room,
                [int(page) for page in kv_indices],
                senders,
                held=(decode_prefix_len or 0) // manager.kv_args.page_size,
                prefill_tp=ranks,
                aux=aux_index is not None,
                timeout=manager.timeout,
                # Prefill opens its room only with the last chunk of the prompt, and the prompt may wait in
                # prefill's queue.
                patience=manager.timeout,
            )
        except _REFUSED as error:
            self._fail(str(error))

    def poll(self) -> int:
        if self._receiving is None:
            return int(super().poll())
        if self.conclude_state == KVPoll.Failed and not self._receiving.released:
            # A late write may still arrive, and the scheduler would reuse the pages.
            return int(KVPoll.Transferring)
        if self.conclude_state is not None:
            return int(super().poll())
        state = int(self._receiving.poll)
        if state == KVPoll.Failed:
            if not self._receiving.released:
                return int(KVPoll.Transferring)
            self._fail(self._receiving.error or "failed")
        elif state == KVPoll.Success:
            if self._slot is not None:
                self.kv_mgr.take_aux(self._slot, self._receiving.aux or b"")
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
            self.conclude_state = KVPoll.Success
        return max(state, KVPoll.WaitingForInput) if state else state

    def abort(self) -> None:
        if self._receiving is not None:
            self._receiving.abort()
        super().abort()

    def _fail(self, why: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, why)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.forget_senders(self)

    def _register_kv_args(self) -> bool:
        """Does nothing: a session sends its layout itself."""
        return True

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Aborts the room, whose end tells prefill. SGLang also calls this when another rank has failed."""
        if self._receiving is None:
            self.kv_mgr.declines(self)
            return
        self.kv_mgr.ends(self.bootstrap_room, self._receiving)
        self._receiving.abort()


class KvpoolKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's own server."""


CLASSES = {
    "manager": KvpoolKVManager,
    "sender": KvpoolKVSender,
    "receiver": KvpoolKVReceiver,
    "bootstrap_server": KvpoolKVBootstrapServer,
}

