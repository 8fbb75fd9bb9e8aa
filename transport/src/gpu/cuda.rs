//! CUDA's driver, loaded when it is first wanted.

// UNSAFETY: calls the driver's C interface. Device addresses were checked to be device memory; host
// addresses come from slices, which own their memory for as long as the copy runs, since every copy is
// waited for before the slice is let go of.
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

/// Flags of `cuMemHostAlloc`: pinned for all contexts.
const PORTABLE: u32 = 1;

/// The GPUs of this host, or why they cannot be used. The driver is looked for once in the life of the
/// process; that it is absent is logged once.
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

/// The GPUs, if this process uses them already: while nothing has loaded the driver, no address is device
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
    // SAFETY: with this flag nothing is loaded, and no initialiser runs.
    let loaded = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), flags) };
    if loaded.is_null() {
        return false;
    }
    // SAFETY: gives back the count that `dlopen` has just taken.
    unsafe { libc::dlclose(loaded) };
    true
}

/// The driver and the devices used so far.
#[derive(Debug)]
struct Cuda {
    devices: Mutex<BTreeMap<Device, Arc<Gpu>>>,
}

/// One device: its primary context, which its other users in this process have too.
#[derive(Debug)]
struct Gpu {
    context: sys::CUcontext,
    /// Streams that no copy uses at present.
    idle: Mutex<Vec<Stream>>,
}

/// The calling thread has another device than before; a context is a thread's, so this stays with it.
struct Entered {
    before: sys::CUcontext,
}

#[derive(Debug)]
struct Stream(sys::CUstream);

/// Pinned host memory, freed with the last region that counts it.
struct Pinned {
    start: NonNull<c_void>,
    gpu: Arc<Gpu>,
}

// SAFETY: contexts, streams and pinned memory are handles that the driver lets any thread use.
unsafe impl Send for Gpu {}
// SAFETY: as above; streams are handed out under a lock.
unsafe impl Sync for Gpu {}
// SAFETY: as for `Gpu`.
unsafe impl Send for Stream {}
// SAFETY: as for `Gpu`; it is only freed.
unsafe impl Send for Pinned {}
// SAFETY: as for `Gpu`; nothing reads it.
unsafe impl Sync for Pinned {}

impl Cuda {
    fn open() -> Result<Self, GpuError> {
        // SAFETY: loads the library, which runs its initialisers, as any program that uses CUDA does.
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

    /// Which device an address belongs to.
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

    /// Starts copies on one stream by `enqueue`, and waits for them, also when one could not be started.
    fn copy(
        &self,
        device: Device,
        enqueue: impl FnOnce(sys::CUstream) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let gpu = self.gpu(device)?;
        let _entered = gpu.enter()?;
        let stream = gpu.stream()?;
        let enqueued = enqueue(stream.0);
        // SAFETY: the stream is this call's own until it is given back below.
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
        // SAFETY: the memory is there until the keeper frees it, and nothing else uses it.
        Ok(unsafe { Region::from_raw(start.cast(), length, keeper) })
    }

    fn copy_out(&self, device: Device, from: &[DeviceRange], to: &Slice) -> Result<(), GpuError> {
        self.copy(device, |stream| {
            let mut at = 0;
            for range in from {
                let target = to.slice(Offset(at), range.length).ok_or_else(too_short)?;
                // SAFETY: the target lies in `to`, whose memory outlives the copy, which is waited for;
                // the source was checked to be device memory.
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
                // SAFETY: the source lies in `from`, whose memory outlives the copy, which is waited
                // for; the target was checked to be device memory.
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
    /// Makes the device the calling thread's until the answer is dropped: the thread may be one of the
    /// program that embeds this, with another device.
    fn enter(&self) -> Result<Entered, GpuError> {
        let mut before = std::ptr::null_mut();
        // SAFETY: the thread's context, or null where it has none, is written to `before`, which lives here.
        unsafe { sys::cuCtxGetCurrent(&raw mut before) }
            .result()
            .map_err(failed("cuCtxGetCurrent"))?;
        // SAFETY: the context is retained for the life of the process.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("cuCtxSetCurrent"))?;
        Ok(Entered { before })
    }

    /// A stream for one copy; it waits for no other work of the device.
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
        // SAFETY: it was the thread's context just now, or none, and no call in between destroys one.
        if let Err(error) = unsafe { result::ctx::set_current(self.before) } {
            tracing::warn!(?error, "a thread keeps the GPU of a copy as its own");
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let freed = self.gpu.enter().and_then(|_entered| {
            // SAFETY: the memory came from `cuMemHostAlloc`, and the last region over it is going.
            unsafe { result::free_host(self.start.as_ptr()) }.map_err(failed("cuMemFreeHost"))
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "pinned memory could not be freed");
        }
    }
}

/// A number that the driver keeps of an address; `None` when it does not know the address.
fn attribute(which: sys::CUpointer_attribute, address: u64) -> Option<u32> {
    let mut value = 0_u32;
    // SAFETY: both attributes asked for are four bytes long, as `value` is.
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
