//! GPU memory, reached through the copy engines of its device.
//!
//! ```text
//!   device memory ══copy engine══► pinned host memory ──► any transport
//!                 ◄═══════════════                    ◄──
//! ```
//!
//! A checksum is made and verified by the processor, so bytes of a GPU pass through pinned host memory on
//! their way: what arrives in device memory has been verified. Transfers between a network port and a GPU
//! without that stop are not made.
//!
//! Nothing of CUDA is linked: the driver's library is looked for when the first GPU buffer is registered.
//!
//! ADR 0015 says why bytes pass through pinned host memory.

mod absent;
mod cuda;

pub use cuda::{in_use, open};

use crate::memory::{Region, Slice};
use kvpool_types::{Length, Offset};
use std::fmt;

/// A range of device memory, by its address in the unified address space.
///
/// It is a name, not an owner: whoever makes one keeps the memory allocated while transfers use it.
/// An address that is not device memory is refused when it is registered, so that a wrong one never
/// touches this process's own memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DeviceRange {
    /// Where it begins.
    pub address: u64,
    /// How long it is.
    pub length: Length,
}

/// Which GPU of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub u32);

/// Why a GPU did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// This host has no CUDA driver, or it does not start.
    #[error("GPU memory cannot be used: {0}")]
    Unavailable(String),
    /// The range is not, or not as a whole, memory of one GPU.
    #[error("{0:?} is not memory of one GPU")]
    NotDeviceMemory(DeviceRange),
    /// A call of the driver failed.
    #[error("{call}: {reason}")]
    Driver {
        /// What was called.
        call: &'static str,
        /// What the driver said.
        reason: String,
    },
}

/// What moves bytes between device memory and pinned host memory.
pub trait CopyEngine: fmt::Debug + Send + Sync {
    /// On which GPU the range lies; [`GpuError::NotDeviceMemory`] when on none, or on several.
    fn device_of(&self, range: DeviceRange) -> Result<Device, GpuError>;

    /// Host memory that the copy engines reach by themselves: pages that stay where they are.
    fn pinned(&self, device: Device, length: Length) -> Result<Region, GpuError>;

    /// Copies ranges of device memory, in order, to host memory that is at least as long. Blocks until
    /// the bytes are there. It is not ordered with the caller's own work on the device: kernels that
    /// write the ranges must have ended.
    fn copy_out(&self, device: Device, from: &[DeviceRange], to: &Slice) -> Result<(), GpuError>;

    /// Copies host memory to ranges of device memory, in order, that are at least as long in all. Blocks
    /// until the bytes are there; kernels started afterwards see them.
    fn copy_in(&self, device: Device, from: &Slice, to: &[DeviceRange]) -> Result<(), GpuError>;
}

impl DeviceRange {
    /// A part of it; `None` when it does not lie inside.
    pub fn slice(&self, from: Offset, length: Length) -> Option<Self> {
        let end = from.0.checked_add(length.0)?;
        (end <= self.length.0).then(|| Self {
            address: self.address + from.0,
            length,
        })
    }
}

impl fmt::Debug for DeviceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {:#x}+{}", self.address, self.length)
    }
}
