//! The verbs library, and the RDMA devices of this host.

// UNSAFETY: opens and queries devices. Every pointer comes from the library and is used until
// `Drop` returns it, once.
#![allow(unsafe_code, reason = "calls libibverbs")]

use super::cooldowns::PairCooldowns;
use super::options::{RdmaOptions, Unavailable};
use super::rail::{Rail, open_rails};
use super::registry::RegisteredBuffer;
use super::sys::{self, Library, Zeroed};
use crate::memory::Slice;
use std::ffi::c_int;
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};

/// The usable ports of this host, opened.
#[derive(Debug)]
pub struct Fabric {
    rails: Vec<Arc<Rail>>,
    /// Cooldowns of pairs that failed.
    pub(super) cooldowns: Arc<PairCooldowns>,
}

/// An opened device with its protection domain.
pub(super) struct Device {
    pub(super) library: &'static Library,
    pub(super) context: NonNull<sys::Context>,
    pub(super) pd: NonNull<sys::Pd>,
    pub(super) attributes: sys::DeviceAttr,
    pub(super) registrations: AtomicUsize,
}

// SAFETY: any thread may call the library for a device, and the library takes the necessary locks.
unsafe impl Send for Device {}
// SAFETY: as for `Send`.
unsafe impl Sync for Device {}

impl Fabric {
    /// Opens every port that the options name. Ports that are not active are left out.
    ///
    /// # Errors
    ///
    /// See [`Unavailable`].
    pub fn open(options: &RdmaOptions) -> Result<Arc<Self>, Unavailable> {
        options.validate()?;
        let library = library()?;
        let list = DeviceList::get(library)?;
        let mut rails = Vec::new();
        let mut reasons = Vec::new();
        let mut found = vec![false; options.devices.len()];
        for entry in list.entries() {
            // SAFETY: the list is freed after this loop.
            let name = unsafe { sys::device_name(entry) };
            let asked: Vec<usize> = (0..found.len())
                .filter(|&i| device_of(&options.devices[i]).0 == name)
                .collect();
            if !options.devices.is_empty() && asked.is_empty() {
                continue;
            }
            let ports: Vec<Option<u8>> = if asked.is_empty() {
                vec![None]
            } else {
                asked
                    .iter()
                    .map(|&i| device_of(&options.devices[i]).1)
                    .collect()
            };
            // SAFETY: the list is freed after this loop.
            let opened = unsafe { open_rails(library, entry, &name, &ports, options) };
            match opened {
                Ok(opened) => {
                    asked.iter().for_each(|&i| found[i] = true);
                    rails.extend(opened);
                }
                Err(reason) if asked.is_empty() => reasons.push(format!("{name}: {reason}")),
                Err(reason) => return Err(Unavailable::Device { name, reason }),
            }
        }
        if let Some(missing) = found.iter().position(|found| !found) {
            return Err(Unavailable::Device {
                name: options.devices[missing].clone(),
                reason: "this host has no such device".to_owned(),
            });
        }
        if rails.is_empty() {
            return Err(Unavailable::NoPort(reasons.join("; ")));
        }
        for reason in reasons {
            tracing::info!(%reason, "RDMA device not used");
        }
        Ok(Arc::new(Self {
            rails,
            cooldowns: Arc::default(),
        }))
    }

    /// Registers memory for later transfers. Registering the same or overlapping memory again is
    /// harmless. Registration locks the pages, which takes a while, so it pays for large,
    /// long-lived buffers.
    ///
    /// # Errors
    ///
    /// The error of the device that refused the registration, for example because of the limit of
    /// locked memory.
    pub fn register_buffer(&self, memory: &Slice) -> io::Result<RegisteredBuffer> {
        let rails = self.rails.iter();
        let held = rails.map(|rail| rail.cached(memory));
        Ok(RegisteredBuffer {
            _held: held.collect::<io::Result<_>>()?,
        })
    }

    /// The open ports, in the order of the library's list.
    pub fn rails(&self) -> &[Arc<Rail>] {
        &self.rails
    }
}

impl Device {
    /// # Safety
    ///
    /// The entry belongs to a list that has not been freed.
    pub(super) unsafe fn open(
        library: &'static Library,
        entry: *mut sys::Device,
    ) -> io::Result<Self> {
        // SAFETY: guaranteed by the caller.
        let context = unsafe { (library.open_device)(entry) };
        let context = NonNull::new(context).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the context was just opened.
        let pd = unsafe { (library.alloc_pd)(context.as_ptr()) };
        let Some(pd) = NonNull::new(pd) else {
            let error = io::Error::last_os_error();
            // SAFETY: nothing was made from the context.
            unsafe { (library.close_device)(context.as_ptr()) };
            return Err(error);
        };
        let mut device = Self {
            library,
            context,
            pd,
            attributes: sys::DeviceAttr::zeroed(),
            registrations: AtomicUsize::new(0),
        };
        // SAFETY: the context is open, and the structure is local.
        check(unsafe { (library.query_device)(context.as_ptr(), &raw mut device.attributes) })?;
        Ok(device)
    }

    pub(super) fn port(&self, port: u8) -> io::Result<sys::PortAttr> {
        let mut attributes = sys::PortAttr::zeroed();
        // SAFETY: the context is open, and the structure is local.
        check(unsafe {
            (self.library.query_port)(self.context.as_ptr(), port, &raw mut attributes)
        })?;
        Ok(attributes)
    }

    pub(super) fn gid(&self, port: u8, index: u32) -> io::Result<sys::GidEntry> {
        let mut entry = sys::GidEntry::zeroed();
        // SAFETY: the context is open; the structure is local and has the given size.
        check(unsafe {
            (self.library.query_gid)(
                self.context.as_ptr(),
                u32::from(port),
                index,
                &raw mut entry,
                0,
                size_of::<sys::GidEntry>(),
            )
        })?;
        Ok(entry)
    }

    /// The GID table entry that suits peers on other hosts best.
    pub(super) fn best_gid(&self, port: u8, attributes: &sys::PortAttr) -> Result<u8, String> {
        let entries = u8::try_from(attributes.gid_tbl_len).unwrap_or(u8::MAX);
        (0..entries)
            .filter_map(|index| {
                let entry = self.gid(port, u32::from(index)).ok()?;
                Some((rank(entry.gid_type, &entry.gid.0)?, index))
            })
            .min()
            .map(|(_, index)| index)
            .ok_or_else(|| format!("port {port} has no GID"))
    }

    /// The descriptor that becomes readable when the device has an event.
    pub(super) fn async_fd(&self) -> RawFd {
        // SAFETY: the context is open.
        unsafe { (*self.context.as_ptr()).async_fd }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain keeps the device alive, so nothing is left in it.
        let code = unsafe { (self.library.dealloc_pd)(self.pd.as_ptr()) };
        if code != 0 {
            tracing::error!(code, "freeing an RDMA protection domain failed");
        }
        // SAFETY: as above, for the context.
        unsafe { (self.library.close_device)(self.context.as_ptr()) };
    }
}

/// The library's list of devices.
struct DeviceList {
    library: &'static Library,
    first: NonNull<*mut sys::Device>,
    length: usize,
}

impl DeviceList {
    fn get(library: &'static Library) -> Result<Self, Unavailable> {
        let mut length: c_int = 0;
        // SAFETY: the length is local.
        let first = unsafe { (library.get_device_list)(&raw mut length) };
        let Some(first) = NonNull::new(first) else {
            let error = io::Error::last_os_error();
            // The error of a kernel without the RDMA modules.
            return Err(match error.raw_os_error() {
                Some(libc::ENOSYS) => Unavailable::NoDevice,
                _ => Unavailable::NoPort(format!("listing the devices failed: {error}")),
            });
        };
        let list = Self {
            library,
            first,
            length: usize::try_from(length).unwrap_or(0),
        };
        if list.length == 0 {
            return Err(Unavailable::NoDevice);
        }
        Ok(list)
    }

    fn entries(&self) -> impl Iterator<Item = *mut sys::Device> {
        (0..self.length).map(|i| {
            // SAFETY: the list has this many entries.
            let entry = unsafe { self.first.add(i) };
            // SAFETY: as above.
            unsafe { entry.read() }
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: made by the library and freed once.
        unsafe { (self.library.free_device_list)(self.first.as_ptr()) };
    }
}

/// Loads the library at the first use.
fn library() -> Result<&'static Library, Unavailable> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| {
            let library = Library::load()?;
            if let Err(error) = library.prepare_for_forks() {
                tracing::warn!(
                    %error,
                    "forks are unsafe: a forked child that runs while this process uses RDMA may break its transfers"
                );
            }
            Ok(library)
        })
        .as_ref()
        .map_err(|error| Unavailable::Library(error.clone()))
}

/// Splits `name` or `name:port`.
fn device_of(asked: &str) -> (&str, Option<u8>) {
    match asked.rsplit_once(':') {
        Some((name, port)) => match port.parse() {
            Ok(port) => (name, Some(port)),
            Err(_) => (asked, None),
        },
        None => (asked, None),
    }
}

/// Ranks a GID for reaching other hosts; less is better, `None` is an empty entry. RoCE v2 is
/// routed. A configured address (IPv4 first) is more stable than a link-local one.
fn rank(gid_type: u32, gid: &[u8; 16]) -> Option<u8> {
    const IPV4: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    if gid.iter().all(|&byte| byte == 0) {
        return None;
    }
    let is_link_local = gid.starts_with(&[0xfe, 0x80]);
    Some(match gid_type {
        sys::GID_TYPE_ROCE_V2 if gid.starts_with(&IPV4) => 0,
        sys::GID_TYPE_ROCE_V2 if !is_link_local => 1,
        sys::GID_TYPE_ROCE_V2 => 2,
        sys::GID_TYPE_ROCE_V1 => 4,
        _ => 3,
    })
}

/// The MTU in bytes for a verbs constant.
pub(super) fn mtu_bytes(number: c_int) -> u32 {
    128 << number.clamp(1, 5)
}

/// The verbs constant for an MTU in bytes.
pub(super) fn mtu_number(bytes: u32) -> c_int {
    match bytes {
        ..512 => 1,
        512..1024 => 2,
        1024..2048 => 3,
        2048..4096 => 4,
        4096.. => 5,
    }
}

/// The result of a call that returns 0 or an errno.
pub(super) fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Some calls return -1 and set errno; others return the errno.
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(start: &[u8]) -> [u8; 16] {
        let mut gid = [1; 16];
        gid[..start.len()].copy_from_slice(start);
        gid
    }

    #[test]
    fn a_routed_gid_with_a_given_address_is_preferred() {
        let ipv4 = gid(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
        let link_local = gid(&[0xfe, 0x80]);
        let global = gid(&[0x20, 0x01]);
        let mut table = [
            (sys::GID_TYPE_ROCE_V1, ipv4),
            (sys::GID_TYPE_ROCE_V2, link_local),
            (sys::GID_TYPE_ROCE_V2, global),
            (sys::GID_TYPE_ROCE_V2, ipv4),
        ];
        table.sort_by_key(|(kind, gid)| rank(*kind, gid));
        assert_eq!(table[0], (sys::GID_TYPE_ROCE_V2, ipv4));
        assert_eq!(table[1], (sys::GID_TYPE_ROCE_V2, global));
        assert_eq!(table[3], (sys::GID_TYPE_ROCE_V1, ipv4));
        assert_eq!(rank(sys::GID_TYPE_ROCE_V2, &[0; 16]), None);
    }

    #[test]
    fn devices_are_asked_for_with_or_without_a_port() {
        assert_eq!(device_of("mlx5_0"), ("mlx5_0", None));
        assert_eq!(device_of("mlx5_0:2"), ("mlx5_0", Some(2)));
        assert_eq!(device_of("odd:name"), ("odd:name", None));
    }

    #[test]
    fn mtus_have_numbers() {
        for (number, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
            assert_eq!((mtu_bytes(number), mtu_number(bytes)), (bytes, number));
        }
    }
}
