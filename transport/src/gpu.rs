//! GPU memory, reached through the copy engines of its device.
//!
//! ```text
//!   device memory ══copy engine══► pinned host memory ──► any transport
//!                 ◄═══════════════                    ◄──
//! ```
//!
//! The processor computes and verifies checksums, so a GPU's bytes pass through pinned host memory.
//! Bytes that arrive in device memory are verified. There are no direct transfers between a network
//! port and a GPU.
//!
//! CUDA is not linked: the driver's library is loaded when the first GPU buffer is registered.
//!
//! ADR 0015 says why bytes pass through pinned host memory.

mod absent;
mod cuda;
mod rows;

pub use cuda::{in_use, open, wait_for_stream};

use crate::memory::{Region, Slice};
use kvpool_types::{Length, Offset};
use std::fmt;

/// A range of device memory, by its address in the unified address space.
///
/// It names memory and does not own it: the caller keeps the memory allocated while transfers use
/// it. Registration refuses an address that is not device memory, so a wrong address never reaches
/// this process's own memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DeviceRange {
    /// The address of the first byte.
    pub address: u64,
    /// The length in bytes.
    pub length: Length,
}

/// The bytes of one block in two memories: pieces of device memory, in order, and host memory.
#[derive(Clone, Debug)]
pub struct DeviceCopy {
    /// The pieces, in the order of the bytes.
    pub pieces: Vec<DeviceRange>,
    /// The host memory.
    pub host: Slice,
}

/// The ordinal of a GPU of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub u32);

/// The owner of a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host, as far as the GPUs' driver knows.
    Host,
    /// This GPU, for the whole range.
    Gpu(Device),
    /// No single owner: the processor must not touch the range, and no GPU owns all of it.
    Neither,
}

/// Why a GPU operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// This host has no CUDA driver, or the driver does not start.
    #[error("GPU memory cannot be used: {0}")]
    Unavailable(String),
    /// The range is not entirely memory of one GPU.
    #[error("{0:?} is not memory of one GPU")]
    NotDeviceMemory(DeviceRange),
    /// A driver call failed.
    #[error("{call}: {reason}")]
    Driver {
        /// The function of the driver.
        call: &'static str,
        /// The driver's error.
        reason: String,
    },
}

/// Moves bytes between device memory and pinned host memory.
pub trait CopyEngine: fmt::Debug + Send + Sync {
    /// The GPU that an address belongs to; `None` for an address of the host.
    fn device_at(&self, address: u64) -> Option<Device>;

    /// The GPU of the range.
    ///
    /// # Errors
    ///
    /// [`GpuError::NotDeviceMemory`] unless the whole range lies on one GPU.
    fn device_of(&self, range: DeviceRange) -> Result<Device, GpuError> {
        match self.side_of(range) {
            Side::Gpu(device) => Ok(device),
            Side::Host | Side::Neither => Err(GpuError::NotDeviceMemory(range)),
        }
    }

    /// The owner of the range, judged by its first and last address.
    fn side_of(&self, range: DeviceRange) -> Side {
        let last = range.length.0.saturating_sub(1);
        let last = range.address.checked_add(last);
        let last = last.map(|last| self.device_at(last));
        match (self.device_at(range.address), last) {
            (None, Some(None)) => Side::Host,
            (Some(first), Some(Some(last))) if first == last && range.length.0 > 0 => {
                Side::Gpu(first)
            }
            _ => Side::Neither,
        }
    }

    /// Allocates pinned host memory, which the copy engines read and write directly.
    ///
    /// # Errors
    ///
    /// [`GpuError::Driver`] when the driver has too little memory.
    fn pinned(&self, device: Device, length: Length) -> Result<Region, GpuError>;

    /// Copies the pieces of each block to its host memory, which is at least as long. Blocks until the bytes
    /// are there.
    ///
    /// The copies begin after the work that was queued on the device's default stream. Kernels that write the
    /// pieces on other streams must have ended: see [`wait_for_stream`].
    ///
    /// # Errors
    ///
    /// [`GpuError::Driver`], after which some of the bytes may have been copied.
    fn copy_out(&self, device: Device, copies: &[DeviceCopy]) -> Result<(), GpuError>;

    /// Copies the host memory of each block to its pieces, which are at least as long in all. Blocks until the
    /// bytes are there. Kernels that start afterwards see them.
    ///
    /// The copies begin after the work that was queued on the device's default stream, as in
    /// [`CopyEngine::copy_out`].
    ///
    /// # Errors
    ///
    /// [`GpuError::Driver`], after which some of the bytes may have been copied.
    fn copy_in(&self, device: Device, copies: &[DeviceCopy]) -> Result<(), GpuError>;
}

impl DeviceRange {
    /// A part of the range; `None` when it does not lie inside.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Two GPUs with 100 addresses each, from 1000 and from 1100 on.
    #[derive(Debug)]
    struct Addresses;

    impl CopyEngine for Addresses {
        fn device_at(&self, address: u64) -> Option<Device> {
            match address {
                1000..1100 => Some(Device(0)),
                1100..1200 => Some(Device(1)),
                _ => None,
            }
        }

        fn pinned(&self, _: Device, length: Length) -> Result<Region, GpuError> {
            Ok(Region::allocate(length))
        }

        fn copy_out(&self, _: Device, _: &[DeviceCopy]) -> Result<(), GpuError> {
            Ok(())
        }

        fn copy_in(&self, _: Device, _: &[DeviceCopy]) -> Result<(), GpuError> {
            Ok(())
        }
    }

    #[test]
    fn a_range_that_is_partly_a_gpus_is_neither_sides() {
        let (gpu, host) = (Side::Gpu(Device(0)), Side::Host);
        for (address, length, side) in [
            (0, 1000, host),
            (1200, 50, host),
            (0, 0, host),
            (1000, 100, gpu),
            (1099, 1, gpu),
            (990, 20, Side::Neither),
            (1190, 20, Side::Neither),
            (1090, 20, Side::Neither),
            (1050, 0, Side::Neither),
            (u64::MAX, 2, Side::Neither),
        ] {
            let length = Length(length);
            let range = DeviceRange { address, length };
            assert_eq!(Addresses.side_of(range), side, "{range:?}");
            let device = Addresses.device_of(range);
            assert_eq!(device.is_ok(), side == gpu, "{range:?}");
        }
    }
}
