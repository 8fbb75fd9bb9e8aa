//! CUDA's own driver, where there is a GPU: bytes go in and come out as they were, from several threads,
//! and what is not device memory is refused. Elsewhere: that it says so.

// UNSAFETY: allocates and frees device memory through the driver's C interface.
#![allow(unsafe_code, reason = "the CUDA driver is a C library")]

use cudarc::driver::{result, sys};
use kvpool_transport::gpu::{self, CopyEngine, Device, DeviceRange, GpuError};
use kvpool_types::{Length, Offset};
use std::sync::Arc;

const MIB: usize = 1 << 20;

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
        // SAFETY: it was allocated in `new`, and no copy is under way: copies are waited for.
        unsafe { result::free_sync(self.0) }.unwrap();
    }
}

fn engine(test: &str) -> Option<Arc<dyn CopyEngine>> {
    match gpu::open() {
        Ok(engine) => Some(engine),
        Err(error) => {
            assert!(matches!(error, GpuError::Unavailable(_)), "{error}");
            assert_eq!(gpu::open().unwrap_err(), error, "it is looked for once");
            eprintln!("SKIPPED {test}: {error}");
            None
        }
    }
}

fn pattern(seed: usize, length: usize) -> Vec<u8> {
    let bytes = (0..length).map(|at| (at * 13 + seed * 101 + at / 4093) % 256);
    bytes.map(|byte| u8::try_from(byte).unwrap()).collect()
}

#[test]
fn the_gpus_are_in_use_once_the_driver_is_loaded() {
    // Where each test has a process of its own, nothing has loaded the driver before.
    drop(gpu::in_use());
    if engine("the_gpus_are_in_use_once_the_driver_is_loaded").is_some() {
        assert!(gpu::in_use().is_some());
    } else {
        assert!(gpu::in_use().is_none());
    }
}

#[test]
fn bytes_go_in_and_come_out_as_they_were() {
    let Some(engine) = engine("bytes_go_in_and_come_out_as_they_were") else {
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
                    let ranges = [
                        memory.range(base + 3, MIB),
                        memory.range(base + 9 * MIB as u64, 4 * MIB + 17),
                    ];
                    host.write_at(Offset(0), &bytes);
                    let given = host.slice(Offset(0), Length(bytes.len() as u64)).unwrap();
                    engine.copy_in(device, &given, &ranges).unwrap();
                    host.write_at(Offset(0), &vec![0; bytes.len()]);
                    engine.copy_out(device, &ranges, &given).unwrap();
                    assert!(given.to_vec() == bytes, "thread {thread}, round {round}");
                }
            });
        }
    });
}

#[test]
fn what_is_not_device_memory_is_refused() {
    let Some(engine) = engine("what_is_not_device_memory_is_refused") else {
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
fn a_copy_leaves_the_calling_thread_the_context_that_it_had() {
    let test = "a_copy_leaves_the_calling_thread_the_context_that_it_had";
    let Some(engine) = engine(test) else {
        return;
    };
    let memory = Allocated::new(MIB);
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the thread's context, or null, is written to `context`, which lives here.
        unsafe { sys::cuCtxGetCurrent(&raw mut context) }
            .result()
            .unwrap();
        context.addr()
    };
    for mine in [current(), 0] {
        if mine == 0 {
            // SAFETY: no context is a state of a thread like any other.
            unsafe { result::ctx::set_current(std::ptr::null_mut()) }.unwrap();
        }
        let host = engine.pinned(Device(0), Length(MIB as u64)).unwrap();
        assert_eq!(current(), mine);
        let range = [memory.range(0, MIB)];
        engine.copy_in(Device(0), &host.whole(), &range).unwrap();
        engine.copy_out(Device(0), &range, &host.whole()).unwrap();
        drop(host);
        assert_eq!(current(), mine);
    }
    // Freeing takes a context.
    let device = result::device::get(0).unwrap();
    // SAFETY: the device is the driver's own, and its context is never released.
    let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
    // SAFETY: the context was retained just now.
    unsafe { result::ctx::set_current(context) }.unwrap();
}
