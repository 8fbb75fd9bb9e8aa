"""The back end of SGLang's disaggregation, over stand-ins of SGLang's own classes: aborts, draft models, and
refusals."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from kvpool import handoff
from sglang_stands import Context

FAILED, TRANSFERRING = 0, 3
ROOM = 7
PAGES = 8
# Far below the patience of the back end, and far above the time that a slow machine needs.
SOON = 60.0


class Room:
    """Stands for `handoff.Receiving`: a room whose last write has not ended."""

    error = "draining"
    aux = None

    def __init__(self) -> None:
        self.poll = handoff.Poll.TRANSFERRING
        self.released = False
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True
        self.poll = handoff.Poll.FAILED


class Manager:
    """The part of SGLang's manager that an abort needs."""

    supports_deferred_decode_kv_release = False
    pp_size = attn_cp_size = attn_tp_size = 1

    def __init__(self, *_args: Any) -> None:
        self.enable_deferred_decode_kv_release = self.supports_deferred_decode_kv_release
        self.kv_args = types.SimpleNamespace(page_size=16)
        self.prefill_info_table: dict[str, Any] = {}
        self.cleared: list[int] = []

    def record_failure(self, _room: int, _why: str) -> None:
        pass

    def update_status(self, _room: int, _status: int) -> None:
        pass

    def clear_deferred_abort_state(self, room: int) -> None:
        self.cleared.append(room)


class Sender:
    """The part of SGLang's sender that an abort needs."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self.conclude_state: int | None = None
        self.curr_idx = 0

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self.num_kv_indices, self.aux_index = num_kv_indices, aux_index

    def _record_transfer_indices(self, *_args: Any) -> None:
        """Counts for SGLang's metrics."""

    def abort(self) -> None:
        self.conclude_state = FAILED


class Receiver:
    """The part of SGLang's receiver that an abort needs."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.prefill_dp_rank = 0
        self.prefill_info = types.SimpleNamespace(attn_tp_size=1)
        self.conclude_state: int | None = None
        self.abort_notified = False

    def poll(self) -> int:
        return 1 if self.conclude_state is None else self.conclude_state

    def abort(self) -> None:
        self.conclude_state = FAILED
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        if not self.abort_notified:
            self._send_abort_notification(force_arm=force_arm)
            self.abort_notified = True

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        raise AssertionError("the back end has no sockets of SGLang's")

    def failure_exception(self) -> None:
        self.conclude_state = FAILED


class ModelConfig:
    """SGLang's configuration of the draft model."""

    asked: dict[str, Any]
    attention_arch = "MHA"
    heads = 8

    @classmethod
    def from_server_args(cls, _server_args: Any, **asked: Any) -> Any:
        cls.asked = asked
        return cls()

    def get_total_num_kv_heads(self) -> int:
        return self.heads


@pytest.fixture
def context() -> Context:
    return Context()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, context: Context) -> Iterator[Any]:
    """`kvpool.sglang.handoff` without SGLang."""

    class Poll:
        Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)

    common = {
        "CommonKVBootstrapServer": object,
        "CommonKVManager": Manager,
        "CommonKVReceiver": Receiver,
        "CommonKVSender": Sender,
    }
    stands: dict[str, dict[str, Any]] = {
        "srt.configs.model_config": {
            "AttentionArch": types.SimpleNamespace(MLA="MLA", MHA="MHA"),
            "ModelConfig": ModelConfig,
        },
        "srt.runtime_context": {"get_context": lambda: context},
        "srt.disaggregation.base.conn": {
            "KVPoll": Poll,
            "KVTransferDestination": types.SimpleNamespace(DEVICE=0),
        },
        "srt.disaggregation.common.conn": common,
    }
    for name, content in stands.items():
        module = types.ModuleType(f"sglang.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    ours = ("kvpool.sglang.handoff", "kvpool.sglang.models")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("kvpool.sglang.handoff")
    for name in ours:
        sys.modules.pop(name, None)


ASKED: list[dict[str, Any]] = []
"""The arguments of the calls of `receive`."""


def receive(*_args: Any, **named: Any) -> Room:
    ASKED.append(named)
    return Room()


@pytest.fixture
def manager(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    ASKED.clear()
    session = types.SimpleNamespace(address="127.0.0.1:1", receive=receive)
    monkeypatch.setattr(backend.KvpoolKVManager, "opened", lambda _self: session)
    monkeypatch.setattr(backend.KvpoolKVManager, "senders", lambda *_args: ("127.0.0.1:2",))
    return backend.KvpoolKVManager(None, None, None)


class Pair:
    """A session of prefill and one of decode in this process, and prefill's manager."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = [bytearray(PAGES * 16) for _ in range(2)]
        self.prefill, self.decode = (handoff.Session([state(memory)], page_tokens=16) for memory in self.memory)
        monkeypatch.setattr(backend.KvpoolKVManager, "opened", lambda _self: self.prefill)
        self.manager = backend.KvpoolKVManager(None, None, None)

    def asks(self, pages: int = 3) -> handoff.Receiving:
        """Decode asks with the patience of the back end."""
        patience = self.manager.timeout
        return self.decode.receive(
            ROOM, range(pages), [self.prefill.address], timeout=patience, patience=patience
        )

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def state(memory: bytearray) -> handoff.State:
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return handoff.State("k", layer=0, base=base, pages=PAGES, parts=1, part_bytes=16)


@pytest.fixture
def pair(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    pair = Pair(backend, monkeypatch)
    yield pair
    pair.close()


def open_room(backend: Any, manager: Any, room: int = ROOM) -> tuple[Any, Room]:
    receiver = backend.KvpoolKVReceiver(manager, "127.0.0.1:3", room)
    receiver.send_metadata([1, 2, 3])
    assert receiver.poll() == TRANSFERRING
    return receiver, receiver._receiving


def test_decodes_pages_stay_after_an_abort_until_the_room_is_fenced(backend: Any, manager: Any) -> None:
    assert manager.enable_deferred_decode_kv_release
    receiver, room = open_room(backend, manager)
    receiver.abort()
    assert room.is_aborted
    # Without its deferred release, SGLang frees the pages at the first poll that reports a failure.
    assert receiver.poll() == TRANSFERRING
    # SGLang counts acknowledgements of prefill. This back end has none.
    assert not manager.is_abort_release_safe(ROOM, 1)
    assert not manager.is_abort_release_safe(ROOM, 0)
    room.released = True
    assert receiver.poll() == FAILED
    assert manager.is_abort_release_safe(ROOM, 1)
    manager.clear_deferred_abort_state(ROOM)
    assert manager.cleared == [ROOM]


def test_decode_waits_for_prefills_queue_for_the_time_of_the_setting(backend: Any, manager: Any) -> None:
    manager.timeout = 123.0
    open_room(backend, manager)
    (asked,) = ASKED
    assert asked["timeout"] == asked["patience"] == 123.0


def test_a_failure_of_another_rank_ends_the_room_and_keeps_the_pages(backend: Any, manager: Any) -> None:
    receiver, room = open_room(backend, manager)
    receiver.failure_exception()
    receiver.ensure_abort_notified(force_arm=True)
    del receiver
    assert room.is_aborted
    assert not manager.is_abort_release_safe(ROOM, 1)
    room.released = True
    assert manager.is_abort_release_safe(ROOM, 1)


def test_a_receiver_without_a_room_holds_no_pages(backend: Any, manager: Any) -> None:
    receiver = backend.KvpoolKVReceiver(manager, "127.0.0.1:3", ROOM)
    receiver.abort()
    assert receiver.poll() == FAILED
    assert manager.is_abort_release_safe(ROOM, 1)


def test_prefill_learns_of_a_prompt_that_decode_aborts_before_it_asks(
    backend: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = pair.prefill.send(ROOM, [0, 1, 2], patience=300.0)
    monkeypatch.setattr(backend.KvpoolKVManager, "opened", lambda _self: pair.decode)
    # An earlier request has asked for the addresses.
    pair.manager._senders[("127.0.0.1:3", 0)] = (pair.prefill.address,)
    receiver = backend.KvpoolKVReceiver(pair.manager, "127.0.0.1:3", ROOM)
    receiver.abort()
    assert sending.wait(SOON) is handoff.Poll.FAILED
    assert (sending.error, sending.released) == ("draining", True)
    assert receiver.poll() == FAILED


def test_pages_that_sglang_reuses_too_early_are_named_in_the_log(
    backend: Any, manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    receiver, _ = open_room(backend, manager)
    receiver.abort()
    manager.clear_deferred_abort_state(ROOM)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"room {ROOM}" in caplog.text


def test_rooms_whose_end_sglang_does_not_report_are_forgotten(backend: Any, manager: Any) -> None:
    for number in range(3):
        receiver, room = open_room(backend, manager, number)
        receiver.abort()
        room.released = True
    assert list(manager._ending) == [2]


@pytest.mark.parametrize("decode_asks_first", [True, False])
def test_decode_learns_of_a_prompt_that_prefill_aborts_before_it_is_sent(
    backend: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch, decode_asks_first: bool
) -> None:
    send, sent = pair.prefill.send, []

    def recorded(room: int, pages: Sequence[int], **times: Any) -> handoff.Sending:
        sent.append(pages)
        return send(room, pages, **times)

    monkeypatch.setattr(pair.prefill, "send", recorded)
    receiving = pair.asks() if decode_asks_first else None
    sender = backend.KvpoolKVSender(pair.manager, "127.0.0.1:3", ROOM)
    sender.init(3)
    sender.abort()
    receiving = receiving or pair.asks()
    assert receiving.wait(SOON) is handoff.Poll.FAILED
    assert (receiving.error, receiving.released) == ("draining", True)
    assert sender.poll() == FAILED
    # Another number of pages than decode's would be the reason of the failure.
    assert list(map(len, sent)) == [3]
    # SGLang may abort a prompt again.
    sender.abort()
    assert len(sent) == 1


def test_a_prompt_that_prefill_aborts_in_its_queue_has_no_pages_yet(backend: Any, pair: Pair) -> None:
    receiving = pair.asks()
    backend.KvpoolKVSender(pair.manager, "127.0.0.1:3", ROOM).abort()
    assert receiving.wait(SOON) is handoff.Poll.FAILED


def test_an_abort_whose_room_cannot_be_opened_is_still_an_abort(
    backend: Any, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    sender = backend.KvpoolKVSender(pair.manager, "127.0.0.1:3", ROOM)
    other = pair.prefill.send(ROOM, [0])
    sender.abort()
    assert sender.poll() == FAILED
    assert f"room {ROOM}" in caplog.text
    assert other.poll is not handoff.Poll.FAILED


@pytest.mark.parametrize("room", [-1, 1 << 64])
def test_a_room_that_a_client_chose_too_large_or_small_ends_in_a_failure(
    backend: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(backend.KvpoolKVManager, "senders", lambda *_args: ("127.0.0.1:2",))
    sender = backend.KvpoolKVSender(pair.manager, "127.0.0.1:3", room)
    sender.init(1)
    sender.send([0])
    assert sender.poll() == FAILED
    queued = backend.KvpoolKVSender(pair.manager, "127.0.0.1:3", room)
    queued.abort()
    assert queued.poll() == FAILED
    receiver = backend.KvpoolKVReceiver(pair.manager, "127.0.0.1:3", room)
    receiver.send_metadata([1])
    assert receiver.poll() == FAILED


@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallel_ranks_are_refused(backend: Any, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(Manager, "attn_cp_size", 2)
    monkeypatch.setattr(Manager, "attn_cp_rank", rank, raising=False)
    with pytest.raises(ValueError, match="without context parallel ranks"):
        backend.KvpoolKVManager(None, None, None)


def described(sizes: Sequence[int], drafts: int = 0, bases: Sequence[int] = ()) -> Any:
    """SGLang's description of regions whose pages have these sizes. A draft model's come last."""
    return types.SimpleNamespace(
        state_types=[],
        kv_cache_dtype_str="bf16",
        page_size=2,
        kv_data_ptrs=list(bases or range(4096, 4096 * (len(sizes) + 1), 4096)),
        kv_data_lens=[size * PAGES for size in sizes],
        kv_item_lens=list(sizes),
        num_draft_entries=drafts,
    )


def test_hand_offs_with_different_draft_models_have_different_names(backend: Any, context: Context) -> None:
    def names() -> tuple[set[str], set[str]]:
        found = backend.states(described([64] * 6, drafts=2), 1, 4, 4)
        return {state.name for state in found[:4]}, {state.name for state in found[4:]}

    named = []
    for spec in [
        {"draft_model_path": "heads/a"},
        {"draft_model_path": "heads/b"},
        {"draft_model_path": "heads/a", "draft_model_revision": "main"},
        {"draft_model_path": "heads/a", "draft_model_quantization": "fp8"},
        {"draft_model_path": "heads/a", "draft": "fp8_e5m2"},
        {"draft_model_path": "/models/tiny"},
    ]:
        context.publish(algorithm="EAGLE", **spec)
        of_model, of_draft = names()
        assert of_model == {"k bf16", "v bf16"}
        named += of_draft
    assert len(set(named)) == len(named) == 12
    context.publish(algorithm="EAGLE", draft_model_path="heads/a")
    assert names()[1] == set(named[:2])


def test_the_layers_of_a_draft_model_come_after_the_models(backend: Any) -> None:
    found = backend.states(described([64] * 10, drafts=4), 1, 4, 2)
    assert [state.layer for state in found] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [state.name[0] for state in found] == list("kkkvvvkkvv")
    assert {(state.parts, state.part_bytes) for state in found[:6]} == {(4, 8)}
    assert {(state.parts, state.part_bytes) for state in found[6:]} == {(2, 16)}


@pytest.mark.parametrize("drafts", [0, 3])
def test_regions_that_are_no_pairs_are_refused(backend: Any, drafts: int) -> None:
    with pytest.raises(ValueError, match="3 regions are no k and v"):
        # With three regions for the draft model, the model has latent attention.
        heads = None if drafts else 4
        backend.states(described([64] * (3 + drafts), drafts=drafts), 1, heads, 4)


@pytest.mark.parametrize(("attention", "heads"), [("MHA", 8), ("MLA", None)])
def test_the_heads_of_the_draft_model_are_its_own(
    manager: Any,
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    heads: int | None,
) -> None:
    monkeypatch.setattr(ModelConfig, "attention_arch", attention)
    manager.server_args = None
    assert manager._draft_heads() is None
    manager.kv_args.num_draft_entries = 2
    context.publish(algorithm="EAGLE", draft_model_path="heads/a", draft_model_revision="main")
    assert manager._draft_heads() == heads
    assert ModelConfig.asked == {
        "model_path": "heads/a",
        "model_revision": "main",
        "is_draft_model": True,
    }


class Rank:
    """A rank of a model with latent attention and of its draft model with two heads, one layer each."""

    def __init__(
        self, backend: Any, rank: int, ranks: int, filled: bool, *, has_draft: bool = True
    ) -> None:
        local = 2 // ranks
        # The latent cache has 32 bytes for each page. The draft's keys and values have 8 bytes for each head of
        # each of two tokens.
        sizes = [32, 16 * local, 16 * local]
        heads = range(rank * local, (rank + 1) * local)
        latent = bytes(at % 251 for at in range(32 * PAGES))
        keys, values = (
            bytes(
                which * 100 + page * 8 + token * 4 + head + 1
                for page in range(PAGES)
                for token in range(2)
                for head in heads
                for _ in range(8)
            )
            for which in range(2)
        )
        self.whole = [latent, keys, values]
        self.sizes = sizes
        self.memory = [bytearray(one if filled else len(one)) for one in self.whole]
        bases = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self.memory]
        regions = described(sizes, 2, bases)
        if not has_draft:
            regions = described(sizes[:1], 0, bases[:1])
        states = backend.states(regions, ranks, None, 2)
        self.session = handoff.Session(states, page_tokens=2, tensor=(rank, ranks))

    def page(self, region: int, page: int, *, wanted: bool = False) -> bytes:
        size = self.sizes[region]
        memory = self.whole if wanted else self.memory
        return bytes(memory[region][page * size : (page + 1) * size])


@pytest.mark.parametrize(("prefills", "decodes"), [(2, 2), (2, 1), (1, 2)])
def test_each_rank_gets_its_part_of_a_draft_beside_latent_attention(
    backend: Any, prefills: int, decodes: int
) -> None:
    senders = [Rank(backend, rank, prefills, filled=True) for rank in range(prefills)]
    takers = [Rank(backend, rank, decodes, filled=False) for rank in range(decodes)]
    addresses = [rank.session.address for rank in senders]
    receiving = [
        rank.session.receive(ROOM, [4, 5], addresses, prefill_tp=prefills, timeout=SOON)
        for rank in takers
    ]
    sending = [
        rank.session.send(ROOM, [1, 2], decode_tp=decodes, timeout=SOON) for rank in senders
    ]
    for one in sending:
        one.produced(0, 2)
        one.finish()
    for rank, room in zip(takers, receiving, strict=True):
        assert room.wait(SOON) is handoff.Poll.SUCCESS
        for region in range(3):
            for target, source in ((4, 1), (5, 2)):
                assert rank.page(region, target) == rank.page(region, source, wanted=True)
    for rank in (*senders, *takers):
        rank.session.close()


@pytest.mark.parametrize("of_decode", ["heads/b", None])
def test_prefill_and_decode_need_the_same_draft_model(
    backend: Any, context: Context, of_decode: str | None
) -> None:
    context.publish(algorithm="EAGLE", draft_model_path="heads/a")
    prefill = Rank(backend, 0, 1, filled=True)
    context.publish(algorithm="EAGLE", draft_model_path=of_decode)
    decode = Rank(backend, 0, 1, filled=False, has_draft=of_decode is not None)
    room = decode.session.receive(ROOM, [4, 5], [prefill.session.address], timeout=SOON)
    sending = prefill.session.send(ROOM, [1, 2], timeout=SOON)
    sending.produced(0, 2)
    sending.finish()
    assert room.wait(SOON) is handoff.Poll.FAILED
    for rank in (prefill, decode):
        rank.session.close()
