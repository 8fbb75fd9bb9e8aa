"""The memory that may hold a block's bytes, and the memory that may not."""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import kvpool
import pytest
from live_pools import LivePool

MIB = 1 << 20

numpy = pytest.importorskip("numpy")
_keys = (f"memory-{n}" for n in itertools.count())


@pytest.fixture
def pool(shared_pool: LivePool) -> Iterator[kvpool.Pool]:
    with kvpool.Pool.connect(shared_pool.url) as pool:
        yield pool


def kinds() -> list[tuple[str, Any, Any]]:
    """Returns for each kind of memory: its name, a block of 4096 bytes, and a target for the block."""
    pattern = bytes(n % 256 for n in range(4096))
    return [
        ("bytes", pattern, bytearray(4096)),
        ("memoryview", memoryview(pattern), memoryview(bytearray(4096))),
        ("part", memoryview(pattern * 2)[4096:], memoryview(bytearray(8192))[:4096]),
        ("array", array.array("I", pattern), array.array("I", bytes(4096))),
        ("numpy", numpy.frombuffer(pattern, "uint8"), numpy.zeros(4096, "uint8")),
        ("float16", numpy.frombuffer(pattern, "float16"), numpy.zeros((2, 32, 32), "float16")),
        ("row", numpy.frombuffer(pattern, "uint8"), numpy.zeros((3, 4096), "uint8")[1]),
        ("date", numpy.frombuffer(pattern, "datetime64[s]"), numpy.zeros(512, "datetime64[s]")),
        ("ctypes", (ctypes.c_char * 4096)(*pattern), (ctypes.c_char * 4096)()),
    ]


def raw(memory: Any) -> bytes:
    """Returns the bytes of any kind of memory."""
    return bytes(memory.tobytes() if hasattr(memory, "tobytes") else memory)


@pytest.mark.parametrize("name, block, target", kinds(), ids=lambda kind: str(kind)[:8])
def test_contiguous_memory_of_any_kind_is_used_in_place(
    pool: kvpool.Pool, name: str, block: Any, target: Any
) -> None:
    key = next(_keys)
    assert pool.put(key, block) is True
    assert pool.batch_get([key], [target]) == [4096]
    assert raw(target) == raw(block) == pool.get(key)


def test_addresses_and_lengths_name_memory(pool: kvpool.Pool) -> None:
    source = numpy.arange(1000, dtype="uint8")
    target = numpy.zeros(1000, "uint8")
    key = next(_keys)
    assert pool.put(key, (source.ctypes.data, 1000)) is True
    assert pool.batch_get([key], [(target.ctypes.data, 1000)]) == [1000]
    assert (target == source).all()
    wrong = pool.batch_put(["w1", "w2", "w3"], [(-1, 8), (0, 8), (2**64 - 4, 8)])
    assert [type(one) for one in wrong] == [kvpool.InvalidArgumentError] * 3


def test_an_address_without_memory_fails_its_own_key(pool: kvpool.Pool) -> None:
    wild = (0x1000, 64)
    key, good = next(_keys), next(_keys)
    wrong, put = pool.batch_put([key, good], [wild, b"x" * 64])
    assert isinstance(wrong, kvpool.InvalidArgumentError) and put is True
    with pytest.raises(kvpool.InvalidArgumentError, match="0x1000"):
        pool.put(key, [b"x", wild])
    assert pool.get(key) is None
    target = bytearray(64)
    wrong, got = pool.batch_get([good, good], [wild, target])
    assert isinstance(wrong, kvpool.InvalidArgumentError) and got == 64
    assert target == b"x" * 64
    with pytest.raises(kvpool.InvalidArgumentError, match="0x1000"):
        pool.register_buffer(wild)


class Index:
    """A number that is no int."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize("kind", [numpy.int64, numpy.uint64, Index])
def test_an_address_and_a_length_may_be_other_integers(pool: kvpool.Pool, kind: Any) -> None:
    source = numpy.arange(1000, dtype="uint8")
    target = numpy.zeros(1000, "uint8")
    key = next(_keys)
    assert pool.put(key, (kind(source.ctypes.data), kind(1000))) is True
    assert pool.get(key) == source.tobytes()
    # One of the two may be an int.
    assert pool.batch_get([key], [(target.ctypes.data, kind(1000))]) == [1000]
    assert (target == source).all()
    pool.register_buffer((kind(source.ctypes.data), kind(1000))).unregister()
    (wrong,) = pool.batch_put(["w4"], [(kind(0), 8)])
    assert isinstance(wrong, kvpool.InvalidArgumentError)


def test_two_arrays_with_one_integer_each_are_memory(pool: kvpool.Pool) -> None:
    class Scalar(Tensor):
        def __index__(self) -> int:
            return int(self.memory[0])

    ones = [numpy.full(1, number, "int64") for number in (1, 2)]
    for pair in [tuple(ones), (numpy.array(1), numpy.array(2)), tuple(map(Scalar, ones))]:
        key = next(_keys)
        assert pool.put(key, pair) is True
        assert pool.get(key) == numpy.array([1, 2]).tobytes()


def test_a_block_is_gathered_from_and_scattered_to_several_buffers(pool: kvpool.Pool) -> None:
    parts = [b"one", bytearray(b"two!"), numpy.arange(5, dtype="uint8"), memoryview(b"end"), b""]
    whole = b"".join(map(bytes, parts))
    key = next(_keys)
    assert pool.put(key, parts) is True
    assert pool.get(key) == whole
    targets = (bytearray(2), numpy.zeros(7, "uint8"), memoryview(bytearray(20)))
    assert pool.batch_get([key], [targets]) == [len(whole)]
    assert b"".join(map(bytes, targets))[: len(whole)] == whole


def test_sixty_four_layers_of_a_block_move_in_one_call(pool: kvpool.Pool) -> None:
    layers = numpy.random.default_rng(1).integers(0, 256, (64, 2, 4096), dtype="uint8")
    keys = [next(_keys), next(_keys)]
    blocks = [[layer[half] for layer in layers] for half in (0, 1)]
    assert pool.batch_put(keys, blocks) == [True, True]
    back = numpy.zeros_like(layers)
    into = [[layer[half] for layer in back] for half in (0, 1)]
    assert pool.batch_get(keys, into) == [64 * 4096] * 2
    assert (back == layers).all()


def test_memory_that_is_read_only_or_in_pieces_fails_its_own_key(pool: kvpool.Pool) -> None:
    keys = [next(_keys) for _ in range(4)]
    stripes = numpy.zeros((8, 8), "uint8")[:, ::2]
    outcomes = pool.batch_put(keys, [b"abcd", stripes, memoryview(b"abcdefgh")[::2], b"efgh"])
    assert [outcomes[0], outcomes[3]] == [True, True]
    frozen = numpy.zeros(8, "uint8")
    frozen.flags.writeable = False
    targets = [bytearray(4), frozen, b"12345678", stripes, memoryview(b"1234")]
    asked = [keys[0], *[keys[3]] * 4]
    found = pool.batch_get(asked, targets)
    assert found[0] == 4
    for failed in [*outcomes[1:3], *found[1:]]:
        assert isinstance(failed, kvpool.InvalidArgumentError)
        assert "contiguous" in str(failed)
    assert not frozen.any() and targets[2] == b"12345678"


def test_memory_of_python_objects_is_refused(pool: kvpool.Pool) -> None:
    objects = numpy.array([object(), None])
    outcomes = pool.batch_put(["o1", "o2"], [objects, memoryview(objects)])
    found = pool.batch_get(["o1", "o2"], [objects, memoryview(objects)])
    assert all(isinstance(one, kvpool.InvalidArgumentError) for one in [*outcomes, *found])


class Tensor:
    """The attributes of a torch tensor."""

    def __init__(
        self, memory: Any, device: str = "cpu", contiguous: bool = True, conjugate: bool = False
    ) -> None:
        self.memory, self.contiguous, self.conjugate = memory, contiguous, conjugate
        self.device = type("device", (), {"type": device, "__str__": lambda _: device})()

    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)

    def is_contiguous(self) -> bool:
        return self.contiguous

    def is_conj(self) -> bool:
        return self.conjugate

    def numel(self) -> int:
        return int(self.memory.size)

    def element_size(self) -> int:
        return int(self.memory.itemsize)


def test_an_object_with_a_tensors_attributes_is_used_in_place(pool: kvpool.Pool) -> None:
    source = numpy.arange(256, dtype="float32")
    target = numpy.zeros(256, "float32")
    key = next(_keys)
    assert pool.put(key, Tensor(source)) is True
    assert pool.batch_get([key], [[Tensor(target[:100]), Tensor(target[100:])]]) == [1024]
    assert (target == source).all()
    refused = [
        (Tensor(source, "xpu"), "CPU"),
        (Tensor(source, contiguous=False), "contig"),
        (Tensor(source, conjugate=True), "lazy"),
    ]
    for wrong, why in refused:
        (failed,) = pool.batch_get([key], [wrong])
        assert isinstance(failed, kvpool.InvalidArgumentError) and why in str(failed)


class CudaArray:
    """The attributes of a GPU array of CuPy, Numba and others. Its memory is on no GPU."""

    def __init__(self, memory: Any, **shown: Any) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "data": (int(memory.ctypes.data), False),
            "shape": memory.shape,
            "typestr": memory.dtype.str,
            "version": 3,
            **shown,
        }


def test_gpu_memory_is_known_by_its_owner_and_never_taken_for_host_memory(pool: kvpool.Pool) -> None:
    memory = numpy.arange(256, dtype="float32")
    before = memory.copy()
    good, key = next(_keys), next(_keys)
    pool.put(key, memory)
    strides = (memory.itemsize,)
    on_a_gpu = [Tensor(memory, "cuda"), CudaArray(memory), CudaArray(memory, strides=strides)]
    for one in on_a_gpu:
        # Without a GPU, or with other memory at the address, only that block fails.
        for block in (one, [one, one]):
            stored, failed = pool.batch_put([good, "on a gpu"], [b"x", block], upsert=True)
            assert stored is True and isinstance(failed, kvpool.InvalidArgumentError)
            assert "1024 bytes" in str(failed) and "GPU" in str(failed)
            found, failed = pool.batch_get([key, key], [memory, block])
            assert found == 1024 and isinstance(failed, kvpool.InvalidArgumentError)
        with pytest.raises(kvpool.InvalidArgumentError, match="GPU"):
            pool.register_buffer(one)
    assert pool.is_exist(["on a gpu"]) == [False] and (memory == before).all()


def test_an_unusable_gpu_array_is_refused_with_the_reason(pool: kvpool.Pool) -> None:
    memory = numpy.arange(256, dtype="float32").reshape(16, 16)
    wrong = {
        "contiguous": CudaArray(memory, strides=memory.T.strides),
        "read-only": CudaArray(memory, data=(int(memory.ctypes.data), True)),
        "cannot be bytes": CudaArray(memory, typestr="|O8"),
    }
    for why, array in wrong.items():
        (failed,) = pool.batch_get([next(_keys)], [array])
        assert isinstance(failed, kvpool.InvalidArgumentError) and why in str(failed)
    with pytest.raises(TypeError):
        pool.put(next(_keys), CudaArray(memory, data=None))
    # A dimension of length one may have any stride.
    (failed,) = pool.batch_get([next(_keys)], [CudaArray(memory, shape=(1, 256), strides=(7, 4))])
    assert "memory of a GPU" in str(failed)


def test_an_array_of_the_host_that_a_gpu_reaches_too_is_host_memory(pool: kvpool.Pool) -> None:
    class Mapped(numpy.ndarray):
        """A host array that a GPU can reach, like Numba's mapped arrays."""

        __cuda_array_interface__ = property(lambda self: CudaArray(self).__cuda_array_interface__)

    source, target = numpy.arange(256, dtype="float32").view(Mapped), numpy.zeros(256, "float32").view(Mapped)
    key = next(_keys)
    assert pool.put(key, source) is True
    assert pool.batch_get([key], [target]) == [1024]
    assert (target == source).all()


def test_torch_tensors_are_used_in_place(pool: kvpool.Pool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    source = torch.arange(4096, dtype=torch.float32).to(torch.bfloat16)
    target = torch.zeros_like(source, requires_grad=True)
    key = next(_keys)
    assert pool.put(key, source) is True
    assert pool.batch_get([key], [target]) == [8192]
    assert torch.equal(source, target)
    (failed,) = pool.batch_get([key], [target.view(64, 64).t()])
    assert isinstance(failed, kvpool.InvalidArgumentError)


def test_a_tensor_that_misbehaves_raises_its_own_error(pool: kvpool.Pool) -> None:
    class Broken(Tensor):
        def is_contiguous(self) -> bool:
            raise RuntimeError("no storage")

    with pytest.raises(RuntimeError, match="no storage"):
        pool.put(next(_keys), Broken(numpy.zeros(1)))


def test_a_buffer_is_not_resized_during_a_call_and_free_after_it(pool: kvpool.Pool) -> None:
    target = bytearray(4)
    key = next(_keys)
    pool.put(key, b"four")
    assert pool.batch_get([key], [target]) == [4]
    target.extend(b"more")
    assert target == b"fourmore"


def test_registered_memory_is_used_by_its_parts(pool: kvpool.Pool) -> None:
    memory = numpy.zeros(MIB, "uint8")
    memory[:4096] = 7
    key = next(_keys)
    with pool.register_buffer(memory) as registration:
        assert (registration.address, len(registration)) == (memory.ctypes.data, MIB)
        assert pool.put(key, memory[:4096]) is True
        assert pool.batch_get([key], [(registration.address + 8192, 4096)]) == [4096]
        with pytest.raises(kvpool.InvalidArgumentError, match="already"):
            pool.register_buffer(memory)
    assert (memory[8192:12288] == 7).all()
    registration.unregister()
    pool.register_buffer((memory.ctypes.data, 4096)).unregister()
    assert pool.batch_get([key], [memory]) == [4096]


def test_unusable_memory_is_not_registered(pool: kvpool.Pool) -> None:
    for wrong in (b"read-only", bytearray(0), (0, 10), numpy.zeros((4, 4))[:, ::2]):
        with pytest.raises(kvpool.InvalidArgumentError):
            pool.register_buffer(wrong)
    for wrong in (7, "text", [bytearray(1)], None):
        with pytest.raises(TypeError):
            pool.register_buffer(wrong)  # type: ignore[arg-type]
    held = bytearray(10)
    registration = pool.register_buffer(held)
    with pytest.raises(BufferError):
        held.extend(b"x")
    del registration
    held.extend(b"x")
