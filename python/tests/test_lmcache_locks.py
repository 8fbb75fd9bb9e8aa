"""The locks of the LMCache adapter over a live pool: the part that needs no LMCache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import kvpool
import pytest
from kvpool._engines.leases import Keeper
from kvpool.lmcache.locks import Locks
from live_pools import LivePool

_names = itertools.count()


@pytest.fixture
def pool(shared_pool: LivePool) -> Iterator[kvpool.Pool]:
    """A connection in a namespace of its own."""
    namespace = kvpool.Namespace(f"test-locks-{next(_names)}")
    with kvpool.Pool.connect(shared_pool.url, namespace=namespace) as pool:
        yield pool


@pytest.fixture
def locks() -> Iterator[Locks]:
    locks = Locks()
    yield locks
    locks.close()


def leased(pool: kvpool.Pool, keys: str) -> list[bool]:
    """Whether each of the keys, one letter each, is leased."""
    return [known is not None and known.lease_left > 0 for known in pool.describe(list(keys))]


def wait_until_free(pool: kvpool.Pool, keys: str) -> None:
    end = time.monotonic() + 2
    while any(leased(pool, keys)):
        assert time.monotonic() < end, "leases run for 5 s: these were not released"
        time.sleep(0.02)


def test_present_keys_are_found_and_locked_at_every_position(pool: kvpool.Pool, locks: Locks) -> None:
    pool.batch_put(list("abdf"), [b"x"] * 4)
    assert locks.look_up(pool, list("abcdef")) == [True, True, False, True, False, True]
    assert leased(pool, "abdf") == [True] * 4
    locks.unlock(list("abdf"))
    wait_until_free(pool, "abdf")


def test_a_key_is_free_when_it_was_unlocked_as_often_as_locked(pool: kvpool.Pool, locks: Locks) -> None:
    pool.batch_put(list("ab"), [b"x"] * 2)
    locks.look_up(pool, list("ab"))
    locks.look_up(pool, list("a"))
    locks.unlock(list("ab"))
    wait_until_free(pool, "b")
    assert leased(pool, "a") == [True]
    locks.unlock(list("a"))
    wait_until_free(pool, "a")


def test_a_lock_outlasts_the_lease_that_it_began_with(pool: kvpool.Pool, locks: Locks) -> None:
    pool.put("a", b"x")
    locks.look_up(pool, ["a"])
    time.sleep(6.5)
    assert leased(pool, "a") == [True]


class Failing:
    """A pool of which one call fails once."""

    def __init__(self, pool: kvpool.Pool, call: str) -> None:
        self._pool = pool
        self._call: str | None = call

    def __getattr__(self, name: str) -> Any:
        if name != self._call:
            return getattr(self._pool, name)
        self._call = None

        def fails(*_arguments: Any, **_named: Any) -> None:
            raise kvpool.DeadlineError("the master answered too late")

        return fails


def test_a_lookup_that_fails_half_way_locks_nothing(pool: kvpool.Pool, locks: Locks) -> None:
    pool.batch_put(list("ac"), [b"x"] * 2)
    failing: Any = Failing(pool, "is_exist")
    with pytest.raises(kvpool.DeadlineError):
        locks.look_up(failing, list("abc"))
    wait_until_free(pool, "ac")
    # A later lock of the same key ends with its own unlock.
    assert locks.look_up(failing, list("abc")) == [True, False, True]
    locks.unlock(list("ac"))
    wait_until_free(pool, "ac")


def test_a_lock_outlasts_a_renewal_that_failed_and_a_lease_that_ended(pool: kvpool.Pool) -> None:
    class Lease:
        """A lease of half a second. Its first renewal fails, and its second renewal is refused."""

        def __init__(self) -> None:
            self.end = time.monotonic() + 0.5
            self.renewals = 0
            self.releases = 0

        @property
        def left(self) -> float:
            return self.end - time.monotonic()

        def renew(self) -> int:
            self.renewals += 1
            if self.renewals == 1:
                raise kvpool.DeadlineError("the master answered too late")
            self.end = time.monotonic()
            return 1

        def release(self) -> None:
            self.releases += 1

    first, second = Lease(), Lease()
    keeper = Keeper(lambda owner: second if owner == "a" else None)
    keeper.hold("a", first)
    end = time.monotonic() + 5
    while second.renewals == 0:
        if first.renewals == 1:
            assert first.releases == 0, "it still ran"
        assert time.monotonic() < end, "no lease followed the one that had ended"
        time.sleep(0.01)
    keeper.close()
    assert first.renewals == 2


def test_an_error_with_one_lease_leaves_the_other_leases_to_the_keeper() -> None:
    class Panic(BaseException):
        """Stands for a panic of the native module, which is no `Exception`."""

    class Lease:
        """A lease that needs a renewal at each look."""

        def __init__(self, error: BaseException | None) -> None:
            self.error = error
            self.renewals = self.releases = self.looks = 0

        @property
        def left(self) -> float:
            self.looks += 1
            return 60.0 if self.looks == 1 else 20.0

        def renew(self) -> int:
            self.renewals += 1
            return self.answer()

        def release(self) -> None:
            self.releases += 1
            self.answer()

        def answer(self) -> int:
            if self.error is not None:
                raise self.error
            return 0

    keeper = Keeper()
    wrong = [Lease(ValueError("a bad reply")), Lease(Panic("a panic"))]
    for at, lease in enumerate(wrong):
        keeper.hold(f"wrong {at}", lease)
    good = Lease(None)
    keeper.hold("good", good)
    end = time.monotonic() + 5
    while good.renewals < 2:
        assert time.monotonic() < end, "the keeper's thread has ended"
        time.sleep(0.01)
    for at in range(len(wrong)):
        keeper.let_go(f"wrong {at}")
    keeper.let_go("good")
    while good.releases == 0:
        assert time.monotonic() < end, "the keeper's thread has ended"
        time.sleep(0.01)
    keeper.close()
    assert [lease.releases for lease in wrong] == [1, 1]


def test_unlocking_skips_keys_without_a_lock(pool: kvpool.Pool, locks: Locks) -> None:
    pool.put("a", b"x")
    locks.unlock(["a", "never"])
    assert locks.look_up(pool, ["a"]) == [True]
    locks.unlock(["a", "a"])
    wait_until_free(pool, "a")
