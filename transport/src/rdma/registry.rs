//! Registered memory: the memory that a device may touch, and its keys.

// UNSAFETY: hands ranges of memory to the device. A registration made here lies inside one living
// region. The kernel keeps its pages locked until the registration is undone, whatever happens to
// the region.
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

/// The access that a registration gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Work requests of this process: as a source, and as a destination if the memory is writable.
    Local,
    /// Also reads by peers.
    RemoteRead,
    /// Also reads and writes by peers.
    RemoteReadWrite,
}

/// Memory that a device may touch. Undone when the last clone is dropped; work requests in flight
/// keep a clone.
#[derive(Clone)]
pub struct Registration(Arc<RegisteredMemory>);

/// A caller's memory, registered on every port while this lives, so that transfers need not
/// register it.
#[derive(Clone, Debug, Default)]
pub struct RegisteredBuffer {
    /// The ports' caches keep registrations that are in use.
    pub(super) _held: Vec<Registration>,
}

struct RegisteredMemory {
    device: Arc<Device>,
    /// `None` once undone.
    raw: Option<NonNull<sys::Mr>>,
    address: u64,
    length: u64,
    lkey: u32,
    rkey: u32,
    can_receive: bool,
    /// Kept alive by the registration. Registrations of the cache keep nothing.
    _keeps: Option<Region>,
}

// SAFETY: the handle is used once more, to undo the registration. Any thread may do that.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as for `Send`; the other fields are plain values.
unsafe impl Sync for RegisteredMemory {}

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
    /// The range is mapped memory of this process, writable if `is_writable`. Until the
    /// registration is undone, either `keeps` or the caller prevents harm from the device's writes
    /// to its pages.
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
                "an empty range cannot be registered",
            ));
        }
        if access == Access::RemoteReadWrite && !is_writable {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "read-only memory cannot be given to peers to write",
            ));
        }
        let flags = flags(access, is_writable);
        let register = |flags: c_uint| {
            // SAFETY: the domain lives as long as the device; the caller guarantees the range.
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
            // A driver that does not know the ordering hint refuses it.
            if error.kind() == io::ErrorKind::OutOfMemory {
                return Err(error);
            }
            register(flags & !sys::ACCESS_RELAXED_ORDERING)
        });
        let raw = raw.map_err(|error| match error.raw_os_error() {
            Some(libc::EFAULT) if !is_writable => io::Error::new(
                io::ErrorKind::Unsupported,
                "before Linux 6.3 memory that is mapped read-only cannot be registered",
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
        // SAFETY: the domain lives as long as the device. The kernel checks the range against the
        // dmabuf, whose memory stays with the registration.
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
        Self(Arc::new(RegisteredMemory {
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

    /// The address of the first byte, in the address space of work requests.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// The length in bytes.
    pub fn length(&self) -> u64 {
        self.0.length
    }

    /// The key for local work requests.
    pub fn lkey(&self) -> u32 {
        self.0.lkey
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        self.0.rkey
    }

    /// Deregisters the memory. After success the device no longer touches the memory. Fails when a clone
    /// exists, or when the device refuses.
    pub(super) fn undo(self) -> io::Result<()> {
        let sole = Arc::into_inner(self.0);
        sole.map_or_else(
            || Err(io::Error::other("a registration is still in use")),
            |mut registered| registered.undo(),
        )
    }

    /// Whether a read may target the memory.
    pub(super) fn can_receive(&self) -> bool {
        self.0.can_receive
    }

    /// Whether a whole range lies inside.
    pub(super) fn covers(&self, address: u64, length: u64) -> bool {
        address >= self.0.address
            && address
                .checked_add(length)
                .is_some_and(|end| end <= self.0.address + self.0.length)
    }

    /// Whether the registration belongs to this device.
    pub(super) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.0.device, device)
    }

    /// Whether this is the only clone.
    fn is_sole(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RegisteredMemory {
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

impl RegisteredMemory {
    fn undo(&mut self) -> io::Result<()> {
        let Some(raw) = self.raw.take() else {
            return Ok(());
        };
        self.device.registrations.fetch_sub(1, Ordering::AcqRel);
        // SAFETY: made by the library and undone once; nothing here uses the handle any more.
        check(unsafe { (self.device.library.dereg_mr)(raw.as_ptr()) })
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            let length = self.length;
            tracing::error!(%error, length, "deregistering RDMA memory failed");
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
        // A read's bytes are in place at its completion, in whatever order they arrived. A peer's
        // writes complete at the peer, so they keep their order.
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
        format!("registering {length} bytes with the RDMA device failed: {error}{hint}"),
    )
}
