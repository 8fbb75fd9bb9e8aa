//! The real CUDA driver. With a GPU: bytes go in and come out unchanged, from several threads, and
//! memory that is not the device's is refused. Without one: the tests print that they are skipped.

// UNSAFETY: allocates and frees device memory through the driver's C interface.
#![allow(unsafe_code, reason = "the CUDA driver is a C library")]

use cudarc::driver::{result, sys};
use kvpool_transport::Slice;
use kvpool_transport::gpu::{self, CopyEngine, Device, DeviceCopy, DeviceRange, GpuError};
use kvpool_types::{Length, Offset};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const MIB: usize = 1 << 20;

/// Held by a test: one captures a graph, and whoever allocates on another thread ends the capture.
static ALONE: Mutex<()> = Mutex::new(());

/// Device memory of the first GPU.
struct Allocated(sys::CUdeviceptr);

impl Allocated {
    fn new(length: usize) -> Self {
        let device = result::device::get(0).unwrap();
        // SAFETY: the device is the driver's own.
        let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
        // SAFETY: the context was retained just now and is never released.
        unsafe { result::ctx::set_current(context) }.unwrap();
        // SAFETY: a context is current.
        Self(unsafe { result::malloc_sync(length) }.unwrap())
    }

    fn range(&self, from: u64, length: usize) -> DeviceRange {
        DeviceRange {
            address: self.0 + from,
            length: Length(length as u64),
        }
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        // SAFETY: it was allocated in `new`, and no copy is in progress, because copies are waited
        // for.
        unsafe { result::free_sync(self.0) }.unwrap();
    }
}

fn engine(test: &str) -> Option<(Arc<dyn CopyEngine>, MutexGuard<'static, ()>)> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match gpu::open() {
        Ok(engine) => Some((engine, alone)),
        Err(error) => {
            assert!(matches!(error, GpuError::Unavailable(_)), "{error}");
            assert_eq!(gpu::open().unwrap_err(), error, "it is looked for once");
            eprintln!("SKIPPED {test}: {error}");
            None
        }
    }
}

fn copy(pieces: &[DeviceRange], host: &Slice) -> [DeviceCopy; 1] {
    [DeviceCopy {
        pieces: pieces.to_vec(),
        host: host.clone(),
    }]
}

fn pattern(seed: usize, length: usize) -> Vec<u8> {
    let bytes = (0..length).map(|at| (at * 13 + seed * 101 + at / 4093) % 256);
    bytes.map(|byte| u8::try_from(byte).unwrap()).collect()
}

#[test]
fn the_gpus_are_in_use_once_the_driver_is_loaded() {
    // If each test has its own process, nothing has loaded the driver before.
    drop(gpu::in_use());
    if engine("the_gpus_are_in_use_once_the_driver_is_loaded").is_some() {
        assert!(gpu::in_use().is_some());
    } else {
        assert!(gpu::in_use().is_none());
    }
}

#[test]
fn bytes_round_trip_through_device_memory() {
    let Some((engine, _alone)) = engine("bytes_round_trip_through_device_memory") else {
        return;
    };
    let memory = Allocated::new(64 * MIB);
    let device = engine.device_of(memory.range(0, 64 * MIB)).unwrap();
    assert_eq!(device, Device(0));
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (engine, memory) = (&engine, &memory);
            scope.spawn(move || {
                let host = engine
                    .pinned(device, Length(8 * MIB as u64))
                    .unwrap()
                    .whole();
                let base = (thread * 16 * MIB) as u64;
                for round in 0..20 {
                    let bytes = pattern(thread * 100 + round, 5 * MIB + 17);
                    let pieces = [
                        memory.range(base + 3, MIB),
                        memory.range(base + 9 * MIB as u64, 4 * MIB + 17),
                    ];
                    host.write_at(Offset(0), &bytes);
                    let given = host.slice(Offset(0), Length(bytes.len() as u64)).unwrap();
                    let copy = copy(&pieces, &given);
                    engine.copy_in(device, &copy).unwrap();
                    host.write_at(Offset(0), &vec![0; bytes.len()]);
                    engine.copy_out(device, &copy).unwrap();
                    assert!(given.to_vec() == bytes, "thread {thread}, round {round}");
                }
            });
        }
    });
}

#[test]
fn the_layers_of_many_blocks_move_in_one_call() {
    const LAYERS: usize = 64;
    const PIECE: usize = 16 << 10;
    const BLOCKS: usize = 32;
    let Some((engine, _alone)) = engine("the_layers_of_many_blocks_move_in_one_call") else {
        return;
    };
    let layer = BLOCKS * PIECE;
    // Two allocations; half of the layers lie in each.
    let halves = [(); 2].map(|()| Allocated::new(LAYERS / 2 * layer));
    let block_bytes = LAYERS * PIECE;
    let host = engine
        .pinned(Device(0), Length((BLOCKS * block_bytes) as u64))
        .unwrap()
        .whole();
    let copies: Vec<DeviceCopy> = (0..BLOCKS)
        .map(|block| {
            let piece = |at: usize| {
                let from = at % (LAYERS / 2) * layer + block * PIECE;
                halves[at / (LAYERS / 2)].range(from as u64, PIECE)
            };
            let from = Offset((block * block_bytes) as u64);
            DeviceCopy {
                pieces: (0..LAYERS).map(piece).collect(),
                host: host.slice(from, Length(block_bytes as u64)).unwrap(),
            }
        })
        .collect();
    let bytes = pattern(7, BLOCKS * block_bytes);
    host.write_at(Offset(0), &bytes);
    engine.copy_in(Device(0), &copies).unwrap();
    host.write_at(Offset(0), &vec![0; bytes.len()]);
    engine.copy_out(Device(0), &copies).unwrap();
    assert!(host.to_vec() == bytes, "a piece is at another place");
    // One piece alone, read from where it must lie.
    let place = halves[1].range((3 * layer + 5 * PIECE) as u64, PIECE);
    let one = host.slice(Offset(0), Length(PIECE as u64)).unwrap();
    engine.copy_out(Device(0), &copy(&[place], &one)).unwrap();
    let from = 5 * block_bytes + (LAYERS / 2 + 3) * PIECE;
    assert!(one.to_vec() == bytes[from..from + PIECE]);
}

#[test]
fn a_copy_follows_the_work_of_the_default_stream() {
    let Some((engine, _alone)) = engine("a_copy_follows_the_work_of_the_default_stream") else {
        return;
    };
    let memory = Allocated::new(4 << 30);
    let host = engine
        .pinned(Device(0), Length(MIB as u64))
        .unwrap()
        .whole();
    for round in 1..20_u8 {
        let last = memory.range((4 << 30) - MIB as u64, MIB);
        for _ in 0..4 {
            // The last bytes get their value at the end of milliseconds of work.
            // SAFETY: the memory is this test's own, and is freed after the copy has waited for this.
            unsafe { sys::cuMemsetD8Async(memory.0, round, 4 << 30, std::ptr::null_mut()) }
                .result()
                .unwrap();
        }
        engine.copy_out(Device(0), &copy(&[last], &host)).unwrap();
        assert_eq!(host.to_vec(), vec![round; MIB], "round {round}");
    }
}

#[test]
fn copies_and_allocations_go_beside_the_capture_of_a_graph() {
    let Some((engine, _alone)) = engine("copies_and_allocations_go_beside_the_capture_of_a_graph")
    else {
        return;
    };
    let memory = Allocated::new(2 * MIB);
    let (begun, captures) = std::sync::mpsc::channel();
    let (copied, ends) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let memory = &memory;
        let capturing = scope.spawn(move || {
            let device = result::device::get(0).unwrap();
            // SAFETY: the device is the driver's own, and its context is never released.
            let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
            // SAFETY: the context was retained just now.
            unsafe { result::ctx::set_current(context) }.unwrap();
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
            // In this mode no thread may allocate or wait, unless it says that it takes care itself.
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            // SAFETY: the stream is this thread's own.
            unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }
                .result()
                .unwrap();
            // SAFETY: the memory outlives the graph, which is never launched.
            unsafe { sys::cuMemsetD8Async(memory.0, 1, MIB, stream) }
                .result()
                .unwrap();
            begun.send(()).unwrap();
            ends.recv().unwrap();
            let mut graph = std::ptr::null_mut();
            // SAFETY: the driver writes the graph to `graph`, which lives here.
            unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) }
                .result()
                .unwrap();
            assert!(!graph.is_null());
        });
        captures.recv().unwrap();
        // It ends the capture also when something below panics.
        let copied = copied;
        let host = engine.pinned(Device(0), Length(MIB as u64)).unwrap();
        let bytes = pattern(3, MIB);
        host.whole().write_at(Offset(0), &bytes);
        let copies = copy(&[memory.range(MIB as u64, MIB)], &host.whole());
        engine.copy_in(Device(0), &copies).unwrap();
        host.whole().write_at(Offset(0), &vec![0; MIB]);
        engine.copy_out(Device(0), &copies).unwrap();
        assert!(host.whole().to_vec() == bytes);
        drop(host);
        copied.send(()).unwrap();
        capturing.join().unwrap();
    });
}

#[test]
fn memory_outside_the_device_is_refused() {
    let Some((engine, _alone)) = engine("memory_outside_the_device_is_refused") else {
        return;
    };
    let memory = Allocated::new(MIB);
    let on_host = vec![0_u8; MIB];
    for range in [
        DeviceRange {
            address: on_host.as_ptr().expose_provenance() as u64,
            length: Length(MIB as u64),
        },
        DeviceRange {
            address: 0,
            length: Length(1),
        },
        memory.range(0, 0),
        memory.range(0, 1 << 40),
    ] {
        let refused = engine.device_of(range).unwrap_err();
        assert_eq!(refused, GpuError::NotDeviceMemory(range));
    }
}

#[test]
fn a_copy_restores_the_threads_context() {
    let test = "a_copy_restores_the_threads_context";
    let Some((engine, _alone)) = engine(test) else {
        return;
    };
    let memory = Allocated::new(MIB);
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes the thread's context, or null, to `context`, which lives here.
        unsafe { sys::cuCtxGetCurrent(&raw mut context) }
            .result()
            .unwrap();
        context.addr()
    };
    for mine in [current(), 0] {
        if mine == 0 {
            // SAFETY: a thread may have no context.
            unsafe { result::ctx::set_current(std::ptr::null_mut()) }.unwrap();
        }
        let host = engine.pinned(Device(0), Length(MIB as u64)).unwrap();
        assert_eq!(current(), mine);
        let copy = copy(&[memory.range(0, MIB)], &host.whole());
        engine.copy_in(Device(0), &copy).unwrap();
        engine.copy_out(Device(0), &copy).unwrap();
        drop(host);
        assert_eq!(current(), mine);
    }
    // Freeing needs a context.
    let device = result::device::get(0).unwrap();
    // SAFETY: the device is the driver's own, and its context is never released.
    let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
    // SAFETY: the context was retained just now.
    unsafe { result::ctx::set_current(context) }.unwrap();
}
