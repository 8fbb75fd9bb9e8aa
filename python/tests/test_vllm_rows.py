"""The memory of the copies of blocks: each row is lent to one owner at a time, and comes back."""

from __future__ import annotations

import gc
import random
import threading

from kvpool.vllm.rows import RowPool, Rows


def test_rows_are_lent_to_one_at_a_time_and_come_back() -> None:
    pool, seeded = RowPool(64), random.Random(7)
    held: list[Rows] = []
    for _ in range(3000):
        if held and seeded.random() < 0.5:
            del held[seeded.randrange(len(held))]
        else:
            rows = pool.take(seeded.randrange(1, 17))
            if rows is not None:
                held.append(rows)
        lent = sorted((rows.start, rows.start + rows.count) for rows in held)
        assert all(end <= start for (_, end), (start, _) in zip(lent, lent[1:]))
        assert not lent or (lent[0][0] >= 0 and lent[-1][1] <= 64)
    del rows
    held.clear()
    gc.collect()
    # All rows are one run again.
    whole = pool.take(64)
    assert whole is not None and pool.take(1) is None


def test_rows_without_room_are_not_lent() -> None:
    pool = RowPool(4)
    assert pool.take(5) is None and pool.take(0) is None
    kept = pool.take(3)
    assert kept is not None and pool.take(2) is None
    assert RowPool(0).take(1) is None


def test_threads_share_the_rows() -> None:
    pool = RowPool(8)
    used = bytearray(8)
    wrong = []

    def work() -> None:
        for _ in range(2000):
            rows = pool.take(3)
            if rows is None:
                continue
            part = slice(rows.start, rows.start + rows.count)
            if any(used[part]):
                wrong.append(part)
            used[part] = b"\1\1\1"
            used[part] = b"\0\0\0"
            del rows

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
