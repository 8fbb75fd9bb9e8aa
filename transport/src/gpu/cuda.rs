//! The CUDA driver, loaded at its first use.

// UNSAFETY: calls the driver's C interface. Device addresses were checked to be device memory. Host
// addresses come from slices, which keep their memory alive: every copy is waited for before its
// slice is dropped.
#![allow(unsafe_code, reason = "the CUDA driver is a C library")]

use super::absent::Absent;
use super::rows::{Rows, rows};
use super::{CopyEngine, Device, DeviceCopy, GpuError};
use crate::memory::Region;
use cudarc::driver::result::{self, DriverError, event, stream};
use cudarc::driver::sys;
use kvpool_types::Length;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// A flag of `cuMemHostAlloc`: pinned for all contexts.
const PORTABLE: u32 = 1;

/// The handle of the default stream, in every context.
const DEFAULT_STREAM: u64 = 1;

/// Opens the GPUs of this host. The process searches for the driver once, and logs its absence once.
///
/// # Errors
///
/// [`GpuError::Unavailable`] without a driver or a GPU.
pub fn open() -> Result<Arc<dyn CopyEngine>, GpuError> {
    opened().map(|cuda| cuda as Arc<dyn CopyEngine>)
}

fn opened() -> Result<Arc<Cuda>, GpuError> {
    static CUDA: OnceLock<Result<Arc<Cuda>, GpuError>> = OnceLock::new();
    let cuda = CUDA.get_or_init(|| {
        let opened = Cuda::open();
        if let Err(error) = &opened {
            tracing::warn!(%error, "GPU buffers are disabled");
        }
        opened.map(Arc::new)
    });
    cuda.clone()
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

/// Waits until the queued work of a GPU's stream has ended. `stream` is CUDA's handle; 2 means the calling
/// thread's own default stream. The wait has no time limit.
///
/// It returns at once for the default stream (0 or 1), because copies begin after its work anyway.
///
/// # Errors
///
/// [`GpuError::Unavailable`] without a driver. [`GpuError::Driver`] if the work failed, or if the stream is being
/// captured into a graph. The capture continues.
///
/// # Safety
///
/// The handle must be that of a stream which exists until the return.
pub unsafe fn wait_for_stream(device: Device, stream: u64) -> Result<(), GpuError> {
    if stream <= DEFAULT_STREAM {
        return Ok(());
    }
    let gpu = opened()?.gpu(device)?;
    let _entered = gpu.enter()?;
    let stream = handle(stream);
    // A wait for such a stream would end its capture.
    // SAFETY: the caller promises that the stream exists.
    if unsafe { is_captured(stream) }? {
        return Err(GpuError::Driver {
            call: "cuStreamIsCapturing",
            reason: "the stream is being captured into a graph".to_owned(),
        });
    }
    // SAFETY: as above.
    unsafe { stream::synchronize(stream) }.map_err(failed("cuStreamSynchronize"))
}

/// Whether a stream is being captured into a graph. For the default stream, the driver returns an error while
/// another stream that waits for it is being captured.
///
/// # Safety
///
/// The stream must exist.
unsafe fn is_captured(stream: sys::CUstream) -> Result<bool, GpuError> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the driver writes the status to `status`, which lives here. The stream exists.
    unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }
        .result()
        .map_err(failed("cuStreamIsCapturing"))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The driver's handle of a stream.
fn handle(stream: u64) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(Length(stream).as_usize())
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
    /// Queues that no copy uses.
    idle: Mutex<Vec<Queue>>,
}

/// Restores the calling thread's context and capture mode when dropped. Both belong to one thread, so this
/// value stays on its thread.
struct Entered {
    context: sys::CUcontext,
    /// The former capture mode; `None` while the mode is unchanged.
    mode: Option<sys::CUstreamCaptureMode>,
}

/// A stream on which the copies of one call run.
#[derive(Debug)]
struct Queue {
    stream: sys::CUstream,
    /// The event that marks the end of the default stream's work before the call.
    before: sys::CUevent,
}

/// Pinned host memory, freed with the last region over it.
struct Pinned {
    start: NonNull<c_void>,
    gpu: Arc<Gpu>,
}

// SAFETY: contexts, streams and pinned memory are handles that any thread may use.
unsafe impl Send for Gpu {}
// SAFETY: as above; a lock hands out the queues.
unsafe impl Sync for Gpu {}
// SAFETY: as for `Gpu`.
unsafe impl Send for Queue {}
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

    /// Enqueues copies on one stream and waits for them, also when `enqueue` failed half-way.
    fn copy(
        &self,
        device: Device,
        copies: &[DeviceCopy],
        enqueue: impl Fn(&Rows, *mut c_void, sys::CUstream) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let gpu = self.gpu(device)?;
        let _entered = gpu.enter()?;
        let queue = gpu.queue()?;
        let enqueued = queue.follow_default_stream().and_then(|()| {
            for copy in copies {
                for rows in rows(&copy.pieces, copy.host.length(), allocation_end) {
                    let host = copy.host.slice(rows.from, rows.length());
                    let host = host.ok_or_else(too_short)?;
                    enqueue(&rows, host.as_ptr().cast(), queue.stream)?;
                }
            }
            Ok(())
        });
        // SAFETY: no other call uses the stream until it is returned below.
        let ended =
            unsafe { stream::synchronize(queue.stream) }.map_err(failed("cuStreamSynchronize"));
        if ended.is_ok() {
            gpu.idle.lock().push(queue);
        }
        enqueued.and(ended)
    }
}

impl CopyEngine for Cuda {
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

    fn copy_out(&self, device: Device, copies: &[DeviceCopy]) -> Result<(), GpuError> {
        for copy in copies {
            let length: u64 = copy.pieces.iter().map(|piece| piece.length.0).sum();
            if length > copy.host.length().0 {
                return Err(too_short());
            }
        }
        self.copy(device, copies, |rows, host, stream| {
            let width = Length(rows.width).as_usize();
            if rows.height > 1 {
                let copy = sys::CUDA_MEMCPY2D {
                    dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
                    dstHost: host,
                    dstPitch: width,
                    ..rows.on_device()
                };
                // SAFETY: as below.
                return unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream) }
                    .result()
                    .map_err(failed("cuMemcpy2DAsync"));
            }
            // SAFETY: the target lies in a block's host memory, which outlives the copy, because `copy` waits
            // for it. The source was checked to be device memory.
            unsafe { sys::cuMemcpyDtoHAsync_v2(host, rows.address, width, stream) }
                .result()
                .map_err(failed("cuMemcpyDtoHAsync"))
        })
    }

    fn copy_in(&self, device: Device, copies: &[DeviceCopy]) -> Result<(), GpuError> {
        self.copy(device, copies, |rows, host, stream| {
            let width = Length(rows.width).as_usize();
            if rows.height > 1 {
                let copy = sys::CUDA_MEMCPY2D {
                    srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
                    srcHost: host.cast_const(),
                    srcPitch: width,
                    ..rows.on_device()
                };
                // SAFETY: as below.
                return unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream) }
                    .result()
                    .map_err(failed("cuMemcpy2DAsync"));
            }
            // SAFETY: the source lies in a block's host memory, which outlives the copy, because `copy` waits
            // for it. The target was checked to be device memory.
            unsafe { sys::cuMemcpyHtoDAsync_v2(rows.address, host.cast_const(), width, stream) }
                .result()
                .map_err(failed("cuMemcpyHtoDAsync"))
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
        // The guard comes first: it restores the context also when the mode cannot be set.
        let mut entered = Entered {
            context: before,
            mode: None,
        };
        // Another thread may be capturing its own streams into a graph. In its default mode that forbids
        // other threads to allocate and to wait, and would fail both the capture and this call.
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver exchanges the thread's mode with `mode`, which lives here.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
            .result()
            .map_err(failed("cuThreadExchangeStreamCaptureMode"))?;
        entered.mode = Some(mode);
        Ok(entered)
    }

    /// A queue that no other call uses. Its stream is not ordered with other work of the device.
    fn queue(&self) -> Result<Queue, GpuError> {
        if let Some(queue) = self.idle.lock().pop() {
            return Ok(queue);
        }
        let before = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(failed("cuEventCreate"))?;
        match stream::create(stream::StreamKind::NonBlocking) {
            Ok(stream) => Ok(Queue { stream, before }),
            Err(error) => {
                // SAFETY: the event was created just now, and nothing uses it.
                let _destroyed = unsafe { event::destroy(before) };
                Err(failed("cuStreamCreate")(error))
            }
        }
    }
}

impl Queue {
    /// Makes the next copies wait for the work that is queued on the default stream now. Later work of that
    /// stream does not wait for the copies.
    fn follow_default_stream(&self) -> Result<(), GpuError> {
        // An event on it would end the capture of a stream that waits for it.
        // SAFETY: the default stream always exists.
        unsafe { is_captured(handle(DEFAULT_STREAM)) }?;
        // SAFETY: the event and the stream are this queue's own, and the default stream always exists.
        unsafe { event::record(self.before, handle(DEFAULT_STREAM)) }
            .map_err(failed("cuEventRecord"))?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        unsafe { stream::wait_event(self.stream, self.before, flags) }
            .map_err(failed("cuStreamWaitEvent"))
    }
}

impl Rows {
    /// The driver's description of a copy, with the device's side on both sides.
    const fn on_device(&self) -> sys::CUDA_MEMCPY2D {
        let kind = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let pitch = Length(self.pitch).as_usize();
        sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: kind,
            srcHost: std::ptr::null(),
            srcDevice: self.address,
            srcArray: std::ptr::null_mut(),
            srcPitch: pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: kind,
            dstHost: std::ptr::null_mut(),
            dstDevice: self.address,
            dstArray: std::ptr::null_mut(),
            dstPitch: pitch,
            WidthInBytes: Length(self.width).as_usize(),
            Height: Length(self.height).as_usize(),
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: the driver exchanges the thread's mode with `mode`, which lives here.
            let restored = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
            if let Err(error) = restored.result() {
                tracing::warn!(?error, "restoring the thread's capture mode failed");
            }
        }
        // SAFETY: it was the thread's context just now, or null, and no call in between destroys a
        // context.
        if let Err(error) = unsafe { result::ctx::set_current(self.context) } {
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

/// The end of the allocation at a device address. If it is unknown, this is the address itself, so that no
/// pieces are joined.
fn allocation_end(address: u64) -> u64 {
    let (mut start, mut length) = (0, 0);
    // SAFETY: the driver writes both values, which live here.
    let asked = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut length, address) };
    match asked.result() {
        Ok(()) => start.saturating_add(length as u64),
        Err(_) => address,
    }
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
