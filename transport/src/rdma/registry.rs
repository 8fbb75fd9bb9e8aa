//! Registered memory: what a device may touch, and the keys that name it.

// UNSAFETY: hands ranges of memory to the device. A registration made here lies inside one living
// region, and pages stay locked by the kernel until it is undone, whatever becomes of the region.
#![allow(unsafe_code, reason = "calls libibverbs")]

mod cache;

pub(super) use cache::Cache;

use super::device::{Device, check};
use super::sys;
use crate::memory::{Region, Slice};
use std::ffi::{c_int, c_uint};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Who may touch registered memory, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Work requests of this process: as a source, and as a destination where it is writable.
    Local,
    /// Peers may read it too.
    RemoteRead,
    /// Peers may read and write it too.
    RemoteReadWrite,
}

/// Memory that a device may touch. It is undone when the last clone is gone; work requests that are
/// in flight keep one.
#[derive(Clone)]
pub struct Registration(Arc<Registered>);

/// Memory of a caller's that is registered on every port for as long as this lives, so that no transfer
/// waits for that.
#[derive(Clone, Debug, Default)]
pub struct RegisteredBuffer {
    /// The ports' caches do not drop what is in use.
    pub(super) _held: Vec<Registration>,
}

struct Registered {
    device: Arc<Device>,
    /// `None` once it is undone.
    raw: Option<NonNull<sys::Mr>>,
    address: u64,
    length: u64,
    lkey: u32,
    rkey: u32,
    can_receive: bool,
    /// What must outlive the registration; the cache's registrations keep nothing.
    _keeps: Option<Region>,
}

// SAFETY: the handle is used once more, to undo the registration, which any thread may do.
unsafe impl Send for Registered {}
// SAFETY: as for `Send`; all else is plain values.
unsafe impl Sync for Registered {}

impl Registration {
    pub(super) fn of_slice(
        device: &Arc<Device>,
        slice: &Slice,
        access: Access,
    ) -> io::Result<Self> {
        let keeps = Some(slice.region().clone());
        let address = slice.as_ptr().addr();
        // SAFETY: the slice lies in its region, which the registration keeps.
        unsafe {
            Self::of_range(
                device,
                address,
                slice.length().as_usize(),
                slice.is_writable(),
                access,
                keeps,
            )
        }
    }

    /// # Safety
    ///
    /// The range is mapped memory of this process now, writable if so said, and what `keeps` holds
    /// or the caller's care keeps others from being harmed when the device writes into its pages.
    unsafe fn of_range(
        device: &Arc<Device>,
        address: usize,
        length: usize,
        is_writable: bool,
        access: Access,
        keeps: Option<Region>,
    ) -> io::Result<Self> {
        if length == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "memory of no bytes cannot be registered",
            ));
        }
        if access == Access::RemoteReadWrite && !is_writable {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "memory that is only read cannot be given to peers to write",
            ));
        }
        let flags = flags(access, is_writable);
        let register = |flags: c_uint| {
            // SAFETY: the domain lives as long as the device; the range is the caller's word.
            let raw = unsafe {
                (device.library.reg_mr)(
                    device.pd.as_ptr(),
                    std::ptr::without_provenance_mut(address),
                    length,
                    address as u64,
                    flags,
                )
            };
            NonNull::new(raw).ok_or_else(io::Error::last_os_error)
        };
        let raw = register(flags).or_else(|error| {
            // A driver that does not know the hint refuses it.
            if error.kind() == io::ErrorKind::OutOfMemory {
                return Err(error);
            }
            register(flags & !sys::ACCESS_RELAXED_ORDERING)
        });
        let raw = raw.map_err(|error| match error.raw_os_error() {
            Some(libc::EFAULT) if !is_writable => io::Error::new(
                io::ErrorKind::Unsupported,
                "before Linux 6.3 memory that is mapped for reading only cannot be registered",
            ),
            _ => explain(&error, length as u64),
        })?;
        Ok(Self::new(
            device,
            raw,
            address as u64,
            length as u64,
            flags,
            keeps,
        ))
    }

    pub(super) fn of_dmabuf(
        device: &Arc<Device>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        address: u64,
        access: Access,
    ) -> io::Result<Self> {
        let Some(register) = device.library.reg_dmabuf_mr else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this libibverbs cannot register a dmabuf (rdma-core 34 or later can)",
            ));
        };
        let flags = flags(access, true) & !sys::ACCESS_RELAXED_ORDERING;
        let bytes =
            usize::try_from(length).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: the domain lives as long as the device; the kernel checks the range against the
        // dmabuf, and its memory stays with the registration.
        let raw = unsafe {
            register(
                device.pd.as_ptr(),
                offset,
                bytes,
                address,
                dmabuf.as_raw_fd(),
                flags as c_int,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| explain(&io::Error::last_os_error(), length))?;
        Ok(Self::new(device, raw, address, length, flags, None))
    }

    fn new(
        device: &Arc<Device>,
        raw: NonNull<sys::Mr>,
        address: u64,
        length: u64,
        flags: c_uint,
        keeps: Option<Region>,
    ) -> Self {
        device.registrations.fetch_add(1, Ordering::AcqRel);
        // SAFETY: just made by the library, and read before anyone can undo it.
        let keys = unsafe { raw.as_ref() };
        Self(Arc::new(Registered {
            device: device.clone(),
            raw: Some(raw),
            address,
            length,
            lkey: keys.lkey,
            rkey: keys.rkey,
            can_receive: flags & sys::ACCESS_LOCAL_WRITE != 0,
            _keeps: keeps,
        }))
    }

    /// The address of its first byte, by which work requests of both sides count.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Its bytes.
    pub fn length(&self) -> u64 {
        self.0.length
    }

    /// The key for work requests of this side.
    pub fn lkey(&self) -> u32 {
        self.0.lkey
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        self.0.rkey
    }

    /// Undoes it: after success the device touches the memory for nobody any more. Fails when somebody
    /// has a clone, or when the device refuses.
    pub(super) fn undo(self) -> io::Result<()> {
        let sole = Arc::into_inner(self.0);
        sole.map_or_else(
            || Err(io::Error::other("a registration is still in use")),
            |mut registered| registered.undo(),
        )
    }

    /// Whether bytes may be received into it.
    pub(super) fn can_receive(&self) -> bool {
        self.0.can_receive
    }

    /// Whether all of a range lies inside.
    pub(super) fn covers(&self, address: u64, length: u64) -> bool {
        address >= self.0.address
            && address
                .checked_add(length)
                .is_some_and(|end| end <= self.0.address + self.0.length)
    }

    /// Whether it is of this device.
    pub(super) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.0.device, device)
    }

    /// Whether nobody else has a clone.
    fn is_sole(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Registered {
            address,
            length,
            lkey,
            rkey,
            ..
        } = &*self.0;
        write!(
            f,
            "Registration({address:#x}+{length}, lkey {lkey:#x}, rkey {rkey:#x})"
        )
    }
}

impl Registered {
    fn undo(&mut self) -> io::Result<()> {
        let Some(raw) = self.raw.take() else {
            return Ok(());
        };
        self.device.registrations.fetch_sub(1, Ordering::AcqRel);
        // SAFETY: made by the library and undone once: nothing is left here of what names it.
        check(unsafe { (self.device.library.dereg_mr)(raw.as_ptr()) })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            let length = self.length;
            tracing::error!(%error, length, "memory could not be deregistered");
        }
    }
}

fn flags(access: Access, is_writable: bool) -> c_uint {
    let local = if is_writable {
        sys::ACCESS_LOCAL_WRITE
    } else {
        0
    };
    match access {
        // Bytes that are read into memory are there when the completion is, in whatever order they
        // came. Peers' writes end elsewhere, so those keep their order.
        Access::Local => local | sys::ACCESS_RELAXED_ORDERING,
        Access::RemoteRead => local | sys::ACCESS_REMOTE_READ,
        Access::RemoteReadWrite => local | sys::ACCESS_REMOTE_READ | sys::ACCESS_REMOTE_WRITE,
    }
}

fn explain(error: &io::Error, length: u64) -> io::Error {
    let hint = match error.kind() {
        io::ErrorKind::OutOfMemory => ": the limit of locked memory (ulimit -l) may be too low",
        _ => "",
    };
    io::Error::new(
        error.kind(),
        format!("{length} bytes cannot be registered with the RDMA device: {error}{hint}"),
    )
}
