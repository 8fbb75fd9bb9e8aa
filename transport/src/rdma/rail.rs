//! One port of one device, and what is made on it.

// UNSAFETY: opens devices of the library's list while the list is there.
#![allow(unsafe_code, reason = "calls libibverbs")]

use super::completions::Completions;
use super::device::{Device, mtu_bytes};
use super::matching::Port;
use super::options::RdmaOptions;
use super::registry::{Access, Cache, Registration};
use super::sys::{self, Library};
use crate::memory::Slice;
use std::ffi::c_int;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How many parts of memory one work request names at most, whatever the device could: more makes
/// every entry of the send queue longer.
const SCATTER: u32 = 16;

/// One port of one device. Two ports of a device are two rails that share nothing.
pub struct Rail {
    pub(super) device: Arc<Device>,
    pub(super) completions: Completions,
    pub(super) options: RdmaOptions,
    cache: Arc<Cache>,
    name: String,
    port: u8,
    numa_node: Option<u32>,
    gigabits: u32,
    gid_index: u8,
    mtu: u32,
    limits: Limits,
}

/// What a rail can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest work request in bytes, by the device and the options.
    pub slice: u32,
    /// How many parts of memory one work request has at most.
    pub scatter: u32,
    /// How many work requests a queue pair holds.
    pub queue_depth: u32,
    /// How many reads a queue pair has on the wire at most.
    pub reads_out: u8,
    /// How many reads of its peer a queue pair serves at once.
    pub reads_in: u8,
    /// The longest registration in bytes.
    pub registration: u64,
    /// How many registrations the device holds.
    pub registrations: u32,
}

/// What a port says of itself now.
pub(super) struct PortState {
    pub(super) lid: u16,
    pub(super) mtu: u32,
    pub(super) gid: [u8; 16],
    pub(super) is_ethernet: bool,
}

impl Rail {
    /// The device's name and the port's number, as in `mlx5_0:1`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node of memory that the device is nearest to, if it says so.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// The speed of the port in Gb/s, as the port reports it.
    pub fn gigabits(&self) -> u32 {
        self.gigabits
    }

    /// What it can do.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Which entry of its GID table it uses.
    pub fn gid_index(&self) -> u8 {
        self.gid_index
    }

    /// The path MTU in bytes that it asked for when it was opened: the port's, or less if set so.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// False once the device has failed: its lanes are closed, and others will not work either.
    pub fn is_usable(&self) -> bool {
        self.completions.shared().is_usable()
    }

    /// Registers memory. The registration keeps the region; registering the same or overlapping
    /// memory again gives another registration.
    pub fn register(self: &Arc<Self>, slice: &Slice, access: Access) -> io::Result<Registration> {
        self.with_room(|| Registration::of_slice(&self.device, slice, access))
    }

    /// A registration that covers a slice, for local use, from the cache or made for it. It keeps
    /// nothing: who uses it keeps the slice, as [`Transfer`](super::Transfer) does.
    pub fn cached(self: &Arc<Self>, slice: &Slice) -> io::Result<Registration> {
        self.with_room(|| self.cache.registration(&self.device, slice))
    }

    /// Registers `length` bytes of a dmabuf from `offset` on, such as memory of a GPU; work requests
    /// name them by addresses from `address` on. A transfer's slice over such memory is a region that
    /// was made from the same addresses. Fails with `Unsupported` where the library cannot do it, and
    /// with the kernel's error where the driver cannot.
    pub fn register_dmabuf(
        self: &Arc<Self>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        address: u64,
        access: Access,
    ) -> io::Result<Registration> {
        Registration::of_dmabuf(&self.device, dmabuf, offset, length, address, access)
    }

    /// How many registrations are alive, those of the cache too.
    pub fn registrations(&self) -> usize {
        self.device.registrations.load(Ordering::Acquire)
    }

    /// Empties the registration cache of what no work uses.
    pub fn forget_cached(&self) {
        self.cache.clear();
    }

    /// How many work requests are posted and have not ended.
    pub fn in_flight(&self) -> usize {
        self.completions.shared().in_flight()
    }

    /// How many lanes have not ended.
    pub fn lanes(&self) -> usize {
        self.completions.shared().lanes()
    }

    /// What the port says now; an error when it is not active any more.
    pub(super) fn state(&self) -> io::Result<PortState> {
        let port = self.device.port(self.port)?;
        if port.state != sys::PORT_ACTIVE {
            return Err(io::Error::new(
                io::ErrorKind::NetworkDown,
                format!("RDMA port {} is not active", self.name),
            ));
        }
        let gid = self.device.gid(self.port, u32::from(self.gid_index))?;
        Ok(PortState {
            lid: port.lid,
            mtu: path_mtu(&port, &self.options),
            gid: gid.gid.0,
            is_ethernet: port.link_layer == sys::LINK_LAYER_ETHERNET,
        })
    }

    /// Its address now; `None` while the port is not active.
    pub(super) fn address(&self) -> Option<Port> {
        let PortState { gid, lid, .. } = self.state().ok()?;
        Some(Port { gid, lid })
    }

    /// The number of its port.
    pub(super) fn port(&self) -> u8 {
        self.port
    }

    /// Tries once more without what the cache keeps, when memory may not be locked.
    fn with_room(
        &self,
        register: impl Fn() -> io::Result<Registration>,
    ) -> io::Result<Registration> {
        match register() {
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory && self.cache.clear() > 0 => {
                register()
            }
            other => other,
        }
    }
}

impl fmt::Debug for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rail")
            .field("name", &self.name)
            .field("numa_node", &self.numa_node)
            .field("gid_index", &self.gid_index)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Opens the active ports of one device; `None` among the asked ports means all.
///
/// # Safety
///
/// The entry is of a list that has not been freed.
pub(super) unsafe fn open_rails(
    library: &'static Library,
    entry: *mut sys::Device,
    name: &str,
    asked: &[Option<u8>],
    options: &RdmaOptions,
) -> Result<Vec<Arc<Rail>>, String> {
    // SAFETY: the caller's word.
    if unsafe { (*entry).transport_type } == sys::TRANSPORT_IWARP {
        return Err(
            "it is iWARP, where a write is reported done before the peer has it".to_owned(),
        );
    }
    let open = || {
        // SAFETY: the caller's word.
        let device = unsafe { Device::open(library, entry) };
        device.map_err(|error| format!("it cannot be opened: {error}"))
    };
    let mut rails = Vec::new();
    let mut reasons = Vec::new();
    let first = open()?;
    let ports = 1..=first.attributes.phys_port_cnt;
    let mut first = Some(first);
    for port in ports {
        if !(asked.contains(&None) || asked.contains(&Some(port))) {
            continue;
        }
        // Each rail has a context of its own: rails share no lock and no thread.
        let device = match first.take() {
            Some(device) => device,
            None => open()?,
        };
        match open_rail(device, name, port, options) {
            Ok(rail) => rails.push(Arc::new(rail)),
            Err(reason) => reasons.push(reason),
        }
    }
    let wanting = asked
        .iter()
        .flatten()
        .any(|port| !rails.iter().any(|rail: &Arc<Rail>| rail.port == *port));
    if rails.is_empty() || wanting {
        if reasons.is_empty() {
            reasons.push("it has no such port".to_owned());
        }
        return Err(reasons.join("; "));
    }
    Ok(rails)
}

fn open_rail(
    device: Device,
    name: &str,
    number: u8,
    options: &RdmaOptions,
) -> Result<Rail, String> {
    let port = device
        .port(number)
        .map_err(|error| format!("port {number} cannot be asked: {error}"))?;
    if port.state != sys::PORT_ACTIVE {
        return Err(format!("port {number} is not active"));
    }
    let gid_index = match options.gid_index {
        Some(index) => index,
        None => device.best_gid(number, &port)?,
    };
    let limits = limits(&device.attributes, &port, options);
    let device = Arc::new(device);
    let cache = Arc::new(Cache::new(options.cached_ranges, options.cached_bytes));
    let completions = Completions::start(&device, &cache)
        .map_err(|error| format!("its completion queue cannot be made: {error}"))?;
    Ok(Rail {
        device,
        completions,
        options: options.clone(),
        cache,
        name: format!("{name}:{number}"),
        port: number,
        numa_node: numa_node(name),
        gigabits: gigabits(port.active_width, port.active_speed),
        gid_index,
        mtu: path_mtu(&port, options),
        limits,
    })
}

fn path_mtu(port: &sys::PortAttr, options: &RdmaOptions) -> u32 {
    let active = mtu_bytes(port.active_mtu);
    options.mtu.map_or(active, |asked| asked.min(active))
}

fn limits(device: &sys::DeviceAttr, port: &sys::PortAttr, options: &RdmaOptions) -> Limits {
    let positive = |value: c_int| u32::try_from(value).unwrap_or(0).max(1);
    let small = |value: c_int| u8::try_from(value.max(1)).unwrap_or(u8::MAX);
    let mut scatter = positive(device.max_sge).min(SCATTER);
    if device.max_sge_rd > 0 {
        scatter = scatter.min(positive(device.max_sge_rd));
    }
    Limits {
        slice: options.slice.min(port.max_msg_sz.max(4096)),
        scatter,
        queue_depth: options.queue_depth.min(positive(device.max_qp_wr)),
        reads_out: small(device.max_qp_init_rd_atom),
        reads_in: small(device.max_qp_rd_atom),
        registration: device.max_mr_size,
        registrations: positive(device.max_mr),
    }
}

fn numa_node(device: &str) -> Option<u32> {
    let path = format!("/sys/class/infiniband/{device}/device/numa_node");
    // A device that is near no node in particular says -1.
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn gigabits(width: u8, speed: u8) -> u32 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return 0,
    };
    let tenths = match speed {
        1 => 25,
        2 => 50,
        4 | 8 => 100,
        16 => 140,
        32 => 250,
        64 => 500,
        128 => 1000,
        _ => return 0,
    };
    lanes * tenths / 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_told_in_gigabits() {
        assert_eq!(gigabits(2, 64), 200);
        assert_eq!(gigabits(1, 1), 2);
    }
}
