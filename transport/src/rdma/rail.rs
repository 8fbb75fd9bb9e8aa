//! One port of one device, and the objects made on it.

// UNSAFETY: opens devices of the library's list while the list exists.
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

/// The most parts of memory in one work request, whatever the device allows. More would make every
/// entry of the send queue longer.
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

/// The limits of a rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest work request in bytes, by the device and the options.
    pub slice: u32,
    /// The most parts of memory in one work request.
    pub scatter: u32,
    /// The most work requests in a queue pair.
    pub queue_depth: u32,
    /// The most reads that a queue pair has on the wire.
    pub reads_out: u8,
    /// The most reads of its peer that a queue pair serves at once.
    pub reads_in: u8,
    /// The longest registration in bytes.
    pub registration: u64,
    /// The most registrations that the device holds.
    pub registrations: u32,
}

/// The present state of a port.
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

    /// The NUMA node nearest to the device, if the device reports one.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// The speed of the port in Gb/s, as the port reports it.
    pub fn gigabits(&self) -> u32 {
        self.gigabits
    }

    /// The limits by the device and the options.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The index of its entry in the GID table.
    pub fn gid_index(&self) -> u8 {
        self.gid_index
    }

    /// The path MTU in bytes, set at opening: the port's, or the smaller one of the options.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Whether the device works. After a failure its lanes are closed, and new ones fail too.
    pub fn is_usable(&self) -> bool {
        self.completions.shared().is_usable()
    }

    /// Registers memory. The registration keeps the region alive. Registering the same or
    /// overlapping memory again gives another registration.
    ///
    /// # Errors
    ///
    /// `OutOfMemory` when the process may not lock so much memory, or the device's error.
    pub fn register(self: &Arc<Self>, slice: &Slice, access: Access) -> io::Result<Registration> {
        self.with_room(|| Registration::of_slice(&self.device, slice, access))
    }

    /// A registration that covers a slice, for local use, from the cache or new. It does not keep
    /// the slice alive: its user must, as [`Transfer`](super::Transfer) does.
    ///
    /// # Errors
    ///
    /// As [`Rail::register`].
    pub fn cached(self: &Arc<Self>, slice: &Slice) -> io::Result<Registration> {
        self.with_room(|| self.cache.registration(&self.device, slice))
    }

    /// Registers `length` bytes of a dmabuf from `offset` on, such as memory of a GPU. Work
    /// requests name these bytes by addresses from `address` on. A transfer's slice over such
    /// memory is a region made from the same addresses.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the library lacks the call, or the kernel's error when the driver does.
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

    /// The number of live registrations, including those of the cache.
    pub fn registrations(&self) -> usize {
        self.device.registrations.load(Ordering::Acquire)
    }

    /// Drops the cached registrations that no work uses.
    pub fn forget_cached(&self) {
        self.cache.clear();
    }

    /// The number of posted work requests that have not ended.
    pub fn in_flight(&self) -> usize {
        self.completions.shared().in_flight()
    }

    /// The number of lanes that have not ended.
    pub fn lanes(&self) -> usize {
        self.completions.shared().lanes()
    }

    /// The present state of the port; an error when it is not active.
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

    /// The present address; `None` while the port is not active.
    pub(super) fn address(&self) -> Option<Port> {
        let PortState { gid, lid, .. } = self.state().ok()?;
        Some(Port { gid, lid })
    }

    /// The port number.
    pub(super) fn port(&self) -> u8 {
        self.port
    }

    /// Repeats a registration without the cached ones when the process may not lock more memory.
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

/// Opens the active ports of one device. `None` in `asked` means all ports.
///
/// # Safety
///
/// The entry belongs to a list that has not been freed.
pub(super) unsafe fn open_rails(
    library: &'static Library,
    entry: *mut sys::Device,
    name: &str,
    asked: &[Option<u8>],
    options: &RdmaOptions,
) -> Result<Vec<Arc<Rail>>, String> {
    // SAFETY: guaranteed by the caller.
    if unsafe { (*entry).transport_type } == sys::TRANSPORT_IWARP {
        return Err(
            "iWARP is not supported: it reports a write done before the peer has the bytes"
                .to_owned(),
        );
    }
    let open = || {
        // SAFETY: guaranteed by the caller.
        let device = unsafe { Device::open(library, entry) };
        device.map_err(|error| format!("opening the device failed: {error}"))
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
        // Each rail has its own context, so rails share no lock and no thread.
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
            reasons.push("the device has no such port".to_owned());
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
        .map_err(|error| format!("querying port {number} failed: {error}"))?;
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
        .map_err(|error| format!("creating the completion queue failed: {error}"))?;
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
    // A device without a nearest node reports -1.
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
    fn speeds_are_converted_to_gigabits() {
        assert_eq!(gigabits(2, 64), 200);
        assert_eq!(gigabits(1, 1), 2);
    }
}
