//! The CUDA driver, loaded at its first use.

// UNSAFETY: calls the driver's C interface. Device addresses were checked to be device memory. Host
// addresses come from slices, which keep their memory alive: every copy is waited for before its
// slice is dropped.
#![allow(unsafe_code, reason = "the CUDA driver is a C library")]

use super::absent::Absent;
use super::{CopyEngine, Device, DeviceRange, GpuError};
use crate::memory::{Region, Slice};
use cudarc::driver::result::{self, DriverError, stream};
use cudarc::driver::sys;
use kvpool_types::{Length, Offset};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// A flag of `cuMemHostAlloc`: pinned for all contexts.
const PORTABLE: u32 = 1;

/// Opens the GPUs of this host. The process looks for the driver once, and logs once that it is
/// absent.
///
/// # Errors
///
/// [`GpuError::Unavailable`] without a driver or a GPU.
pub fn open() -> Result<Arc<dyn CopyEngine>, GpuError> {
    static CUDA: OnceLock<Result<Arc<Cuda>, GpuError>> = OnceLock::new();
    let cuda = CUDA.get_or_init(|| {
        let opened = Cuda::open();
        if let Err(error) = &opened {
            tracing::warn!(%error, "GPU buffers are disabled");
        }
        opened.map(Arc::new)
    });
    cuda.clone().map(|cuda| cuda as Arc<dyn CopyEngine>)
}

/// The GPUs, if this process has loaded the driver already. Until then no address can be device
/// memory.
pub fn in_use() -> Option<Arc<dyn CopyEngine>> {
    static DRIVER: Absent = Absent::new();
    if DRIVER.is_so(is_loaded) {
        return None;
    }
    open().ok()
}

/// Whether the process has loaded the driver.
fn is_loaded() -> bool {
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: `RTLD_NOLOAD` loads nothing and runs no initialiser.
    let loaded = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), flags) };
    if loaded.is_null() {
        return false;
    }
    // SAFETY: releases the count that `dlopen` has just taken.
    unsafe { libc::dlclose(loaded) };
    true
}

/// The driver and the devices used so far.
#[derive(Debug)]
struct Cuda {
    devices: Mutex<BTreeMap<Device, Arc<Gpu>>>,
}

/// One device, by its primary context. The process's other libraries share that context.
#[derive(Debug)]
struct Gpu {
    context: sys::CUcontext,
    /// Streams that no copy uses.
    idle: Mutex<Vec<Stream>>,
}

/// Restores the calling thread's context when dropped. A context belongs to a thread, so this stays
/// on its thread.
struct Entered {
    before: sys::CUcontext,
}

#[derive(Debug)]
struct Stream(sys::CUstream);

/// Pinned host memory, freed with the last region over it.
struct Pinned {
    start: NonNull<c_void>,
    gpu: Arc<Gpu>,
}

// SAFETY: contexts, streams and pinned memory are handles that any thread may use.
unsafe impl Send for Gpu {}
// SAFETY: as above; a lock hands out the streams.
unsafe impl Sync for Gpu {}
// SAFETY: as for `Gpu`.
unsafe impl Send for Stream {}
// SAFETY: as for `Gpu`; `Pinned` is only freed.
unsafe impl Send for Pinned {}
// SAFETY: as for `Gpu`; nothing reads `Pinned`.
unsafe impl Sync for Pinned {}

impl Cuda {
    fn open() -> Result<Self, GpuError> {
        // SAFETY: loads the library and runs its initialisers, as every program that uses CUDA
        // does.
        if !unsafe { sys::is_culib_present() } {
            let why = "this host has no libcuda.so (the NVIDIA driver)";
            return Err(GpuError::Unavailable(why.to_owned()));
        }
        let unavailable =
            |error: DriverError| GpuError::Unavailable(format!("the CUDA driver says {error:?}"));
        result::init().map_err(unavailable)?;
        if result::device::get_count().map_err(unavailable)? == 0 {
            return Err(GpuError::Unavailable("there is no GPU".to_owned()));
        }
        Ok(Self {
            devices: Mutex::default(),
        })
    }

    fn gpu(&self, device: Device) -> Result<Arc<Gpu>, GpuError> {
        let mut devices = self.devices.lock();
        if let Some(gpu) = devices.get(&device) {
            return Ok(Arc::clone(gpu));
        }
        let ordinal = i32::try_from(device.0).unwrap_or(i32::MAX);
        let handle = result::device::get(ordinal).map_err(failed("cuDeviceGet"))?;
        // SAFETY: the handle is the driver's own. The context is kept for the life of the process.
        let context = unsafe { result::primary_ctx::retain(handle) }
            .map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let gpu = Arc::new(Gpu {
            context,
            idle: Mutex::default(),
        });
        devices.insert(device, Arc::clone(&gpu));
        Ok(gpu)
    }

    /// The device that an address belongs to.
    fn device_at(&self, address: u64) -> Option<Device> {
        let kind: u32 = attribute(
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            address,
        )?;
        if kind != sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
            return None;
        }
        attribute(
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
        )
        .map(Device)
    }

    /// Enqueues copies on one stream and waits for them, also when `enqueue` failed half-way.
    fn copy(
        &self,
        device: Device,
        enqueue: impl FnOnce(sys::CUstream) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let gpu = self.gpu(device)?;
        let _entered = gpu.enter()?;
        let stream = gpu.stream()?;
        let enqueued = enqueue(stream.0);
        // SAFETY: no other call uses the stream until it is returned below.
        let ended = unsafe { stream::synchronize(stream.0) }.map_err(failed("cuStreamSynchronize"));
        if ended.is_ok() {
            gpu.idle.lock().push(stream);
        }
        enqueued.and(ended)
    }
}

impl CopyEngine for Cuda {
    fn device_of(&self, range: DeviceRange) -> Result<Device, GpuError> {
        let last = range.length.0.checked_sub(1);
        let last = last.and_then(|last| range.address.checked_add(last));
        let first = self.device_at(range.address);
        match (first, last.and_then(|last| self.device_at(last))) {
            (Some(first), Some(last)) if first == last => Ok(first),
            _ => Err(GpuError::NotDeviceMemory(range)),
        }
    }

    fn pinned(&self, device: Device, length: Length) -> Result<Region, GpuError> {
        let gpu = self.gpu(device)?;
        let entered = gpu.enter()?;
        let mut start = std::ptr::null_mut();
        // SAFETY: the address of the new memory is written to `start`, which lives here.
        unsafe { sys::cuMemHostAlloc(&raw mut start, length.as_usize(), PORTABLE) }
            .result()
            .map_err(failed("cuMemHostAlloc"))?;
        let start = NonNull::new(start).ok_or(GpuError::Driver {
            call: "cuMemHostAlloc",
            reason: "it gave no memory".to_owned(),
        })?;
        drop(entered);
        let keeper = Arc::new(Pinned { start, gpu });
        // SAFETY: the memory exists until the keeper frees it, and nothing else uses it.
        Ok(unsafe { Region::from_raw(start.cast(), length, keeper) })
    }

    fn copy_out(&self, device: Device, from: &[DeviceRange], to: &Slice) -> Result<(), GpuError> {
        self.copy(device, |stream| {
            let mut at = 0;
            for range in from {
                let target = to.slice(Offset(at), range.length).ok_or_else(too_short)?;
                // SAFETY: the target lies in `to`, whose memory outlives the copy, which is waited
                // for. The source was checked to be device memory.
                unsafe {
                    sys::cuMemcpyDtoHAsync_v2(
                        target.as_ptr().cast(),
                        range.address,
                        range.length.as_usize(),
                        stream,
                    )
                }
                .result()
                .map_err(failed("cuMemcpyDtoHAsync"))?;
                at += range.length.0;
            }
            Ok(())
        })
    }

    fn copy_in(&self, device: Device, from: &Slice, to: &[DeviceRange]) -> Result<(), GpuError> {
        self.copy(device, |stream| {
            let mut at = 0;
            for range in to {
                let length = Length(range.length.0.min(from.length().0 - at));
                let source = from.slice(Offset(at), length).ok_or_else(too_short)?;
                // SAFETY: the source lies in `from`, whose memory outlives the copy, which is
                // waited for. The target was checked to be device memory.
                unsafe {
                    sys::cuMemcpyHtoDAsync_v2(
                        range.address,
                        source.as_ptr().cast_const().cast(),
                        length.as_usize(),
                        stream,
                    )
                }
                .result()
                .map_err(failed("cuMemcpyHtoDAsync"))?;
                at += length.0;
            }
            Ok(())
        })
    }
}

impl Gpu {
    /// Makes this device the thread's current one until the guard is dropped. The embedding program
    /// may have set another device on the thread.
    fn enter(&self) -> Result<Entered, GpuError> {
        let mut before = std::ptr::null_mut();
        // SAFETY: the driver writes the thread's context, or null, to `before`, which lives here.
        unsafe { sys::cuCtxGetCurrent(&raw mut before) }
            .result()
            .map_err(failed("cuCtxGetCurrent"))?;
        // SAFETY: the context is retained for the life of the process.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("cuCtxSetCurrent"))?;
        Ok(Entered { before })
    }

    /// A non-blocking stream, which is not ordered with other work of the device.
    fn stream(&self) -> Result<Stream, GpuError> {
        if let Some(stream) = self.idle.lock().pop() {
            return Ok(stream);
        }
        stream::create(stream::StreamKind::NonBlocking)
            .map(Stream)
            .map_err(failed("cuStreamCreate"))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: it was the thread's context just now, or null, and no call in between destroys a
        // context.
        if let Err(error) = unsafe { result::ctx::set_current(self.before) } {
            tracing::warn!(?error, "restoring the thread's CUDA context failed");
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let freed = self.gpu.enter().and_then(|_entered| {
            // SAFETY: the memory came from `cuMemHostAlloc`, and its last region is being dropped.
            unsafe { result::free_host(self.start.as_ptr()) }.map_err(failed("cuMemFreeHost"))
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "freeing pinned memory failed");
        }
    }
}

/// An attribute of an address; `None` when the driver does not know the address.
fn attribute(which: sys::CUpointer_attribute, address: u64) -> Option<u32> {
    let mut value = 0_u32;
    // SAFETY: both attributes used here are four bytes long, as `value` is.
    let asked =
        unsafe { sys::cuPointerGetAttribute((&raw mut value).cast::<c_void>(), which, address) };
    asked.result().is_ok().then_some(value)
}

fn failed(call: &'static str) -> impl FnOnce(DriverError) -> GpuError {
    move |error| GpuError::Driver {
        call,
        reason: format!("{error:?}"),
    }
}

fn too_short() -> GpuError {
    GpuError::Driver {
        call: "copy",
        reason: "the host memory is shorter than the device memory".to_owned(),
    }
}
