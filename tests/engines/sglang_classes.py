"""SGLang's classes of a transfer back end, with one process for each rank, without a model.

Run it in SGLang's virtual environment: `python sglang_classes.py BACKEND PREFILL_RANKS:DECODE_RANKS PORT`.
Prefill's ranks send pages in two chunks, and metadata with the room. The bytes of a page follow from layer,
page, token and head. The script prints one line for each check, `ok: ..` or `FAILED: ..`, and at last `at its
end`.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = 2
HEADS = 4
WIDTH = 16
PAGE = 64
PAGES = 24
# One field for each buffer. The last field is the room.
FIELDS = (64, 64, 64)
SLOTS = 4
SLOT = 2
ROOM = 4_242
# The pages of the prompt at prefill, and at decode.
SOURCE = [3, 4, 5, 9, 10, 2]
TARGET = [7, 8, 1, 14, 15, 20]
CHUNKS = (4, 6)
SECONDS = 90.0


def pattern(rank: int, ranks: int) -> np.ndarray:
    """Returns the bytes of a rank: [keys and values of each layer][page][token][head][element]."""
    shape = (2 * LAYERS, PAGES, PAGE, HEADS, WIDTH)
    numbers = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    mixed = ((numbers * np.uint64(2_654_435_761)) >> np.uint64(7)).astype(np.uint8)
    local = HEADS // ranks
    return np.ascontiguousarray(mixed[:, :, :, rank * local : (rank + 1) * local])


def arguments(memory: np.ndarray, fields: list[np.ndarray], rank: int, ranks: int) -> Any:
    """Returns SGLang's description of a rank's memory for a back end."""
    from sglang.srt.disaggregation.base.conn import KVArgs

    args = KVArgs()
    args.engine_rank = rank
    args.kv_data_ptrs = [part.ctypes.data for part in memory]
    args.kv_data_lens = [part.nbytes for part in memory]
    args.kv_item_lens = [part[0].nbytes for part in memory]
    args.kv_layer_ids = [*range(LAYERS), *range(LAYERS)]
    args.kv_cache_dtype_str = "uint8"
    args.aux_data_ptrs = [field.ctypes.data for field in fields]
    args.aux_data_lens = [field.nbytes for field in fields]
    args.aux_item_lens = [field[0].nbytes for field in fields]
    args.state_types = []
    for name in ("data_ptrs", "data_lens", "item_lens", "layer_ids", "dim_per_tensor", "slice_outer_counts"):
        setattr(args, f"state_{name}", [])
    args.state_conv_shard_groups = []
    args.is_hybrid_mla_backend = False
    args.swa_kv_cache_layout = None
    args.ib_device = ""
    args.gpu_id = 0
    args.kv_head_num = HEADS // ranks
    args.total_kv_head_num = HEADS
    args.page_size = PAGE
    args.system_dp_rank = 0
    args.rust_http_port = None
    args.pp_rank = 0
    args.prefill_start_layer = 0
    args.prefill_end_layer = None
    args.mla_compression_ratios = None
    return args


def context(backend: str, mode: str, rank: int, ranks: int, port: int, model: str) -> Any:
    """Publishes the settings of a rank, as SGLang's scheduler does."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        init_mooncake_transfer_engine,
    )
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    server = ServerArgs(
        model_path=model,
        device="cpu",
        host="127.0.0.1",
        tp_size=ranks,
        page_size=PAGE,
        disaggregation_mode=mode,
        disaggregation_transfer_backend=backend,
        disaggregation_bootstrap_port=port,
        disable_overlap_schedule=True,
    )
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    get_parallel().override_permanently(pp_group=None)
    if backend == "mooncake":
        init_mooncake_transfer_engine("127.0.0.1", gpu_id=0)
    return server


def classes(backend: str) -> dict[str, Any]:
    """Returns the back end's classes."""
    from sglang.srt.disaggregation import utils

    chosen = utils.TransferBackend(backend)
    kinds = utils.KVClassType
    wanted = {
        "manager": kinds.MANAGER,
        "sender": kinds.SENDER,
        "receiver": kinds.RECEIVER,
        "bootstrap": kinds.BOOTSTRAP_SERVER,
    }
    return {name: utils.get_kv_class(chosen, kind) for name, kind in wanted.items()}


def until(poll: Any, wanted: int, seen: list[int]) -> int:
    """Polls until a state or a failure. Notes every change."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        state = int(poll())
        if not seen or seen[-1] != state:
            seen.append(state)
        if state in (0, wanted):
            break
        time.sleep(0.002)
    return seen[-1]


def prefill(backend: str, rank: int, ranks: int, port: int, model: str) -> list[tuple[str, bool]]:
    """Runs a rank of prefill. Returns its checks."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    server = context(backend, "prefill", rank, ranks, port, model)
    kinds = classes(backend)
    bootstrap = kinds["bootstrap"]("127.0.0.1", port) if rank == 0 else None
    memory = pattern(rank, ranks)
    fields = [np.zeros((SLOTS, size), dtype=np.uint8) for size in FIELDS]
    for at, field in enumerate(fields[:-1]):
        field[SLOT] = np.arange(field.shape[1]) + at
    fields[-1][SLOT].view(np.uint64)[0] = ROOM
    manager = kinds["manager"](
        arguments(memory, fields, rank, ranks), DisaggregationMode.PREFILL, server, False
    )
    sender = kinds["sender"](mgr=manager, bootstrap_addr=f"127.0.0.1:{port}", bootstrap_room=ROOM)
    seen: list[int] = []
    until(sender.poll, 2, seen)
    sender.init(len(SOURCE), SLOT)
    first = 0
    for last in CHUNKS:
        sender.send(np.array(SOURCE[first:last], dtype=np.int32))
        first = last
    until(sender.poll, 4, seen)
    time.sleep(1.0)
    if bootstrap is not None:
        bootstrap.close()
    return [(f"prefill {rank}: polls are 1, 2, (3), 4: {seen}", seen in ([1, 2, 4], [1, 2, 3, 4]))]


def decode(
    backend: str, rank: int, ranks: int, port: int, model: str
) -> list[tuple[str, bool]]:
    """Runs a rank of decode. Returns its checks."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    server = context(backend, "decode", rank, ranks, port, model)
    kinds = classes(backend)
    memory = np.zeros_like(pattern(rank, ranks))
    fields = [np.zeros((SLOTS, size), dtype=np.uint8) for size in FIELDS]
    manager = kinds["manager"](
        arguments(memory, fields, rank, ranks), DisaggregationMode.DECODE, server, False
    )
    address = f"127.0.0.1:{port}"
    end = time.monotonic() + SECONDS
    while not manager.try_ensure_parallel_info(address):
        if time.monotonic() > end:
            return [(f"decode {rank}: finds prefill", False)]
        time.sleep(0.2)
    receiver = kinds["receiver"](mgr=manager, bootstrap_addr=address, bootstrap_room=ROOM)
    seen = [int(receiver.poll())]
    receiver.init(0)
    until(receiver.poll, 2, seen)
    receiver.send_metadata(np.array(TARGET, dtype=np.int32), SLOT)
    until(receiver.poll, 4, seen)
    wanted = np.zeros_like(memory)
    wanted[:, TARGET] = pattern(rank, ranks)[:, SOURCE]
    room = int(fields[-1][SLOT].view(np.uint64)[0])
    other = all((field[SLOT] == np.arange(field.shape[1]) + at).all() for at, field in enumerate(fields[:-1]))
    untouched = all(not np.delete(field, SLOT, axis=0).any() for field in fields)
    return [
        (f"decode {rank}: polls are 1, 2, (3), 4: {seen}", seen in ([1, 2, 4], [1, 2, 3, 4])),
        (f"decode {rank}: its pages have prefill's bytes, all others none", bool((memory == wanted).all())),
        (f"decode {rank}: the metadata name the room {ROOM}: {room}", room == ROOM),
        (f"decode {rank}: and are whole, other slots untouched", bool(other) and untouched),
    ]


def run_rank(said: Any, role: str, *rest: Any) -> None:
    """Runs a rank in a process. Reports its checks, or the reason why there are none."""
    try:
        said.put((prefill if role == "prefill" else decode)(*rest))
    except Exception:
        traceback.print_exc()
        said.put([(f"{role} {rest[1]} runs to its end", False)])


def main() -> None:
    backend, shape, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model = str(Path.cwd() / "llama")
    prefills, decodes = (int(count) for count in shape.split(":"))
    spawn = multiprocessing.get_context("spawn")
    said = spawn.Queue()
    ranks = [
        spawn.Process(target=run_rank, args=(said, role, backend, rank, count, port, model), daemon=True)
        for role, count in (("prefill", prefills), ("decode", decodes))
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    for _ in ranks:
        for what, holds in said.get(timeout=3 * SECONDS):
            print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)
    for rank in ranks:
        rank.join(timeout=10)
        rank.kill()
    print("at its end", flush=True)


if __name__ == "__main__":
    main()
