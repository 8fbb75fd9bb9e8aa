//! The RDMA ports of this host.

// UNSAFETY: opens devices and asks them. Every pointer comes from the library and is used until it is
// given back, once, in `Drop`.
#![allow(unsafe_code, reason = "calls libibverbs")]

use super::completions::Completions;
use super::options::{RdmaOptions, Unavailable};
use super::registry::{Access, Cache, Registration};
use super::sys::{self, Library, Zeroed};
use crate::memory::Slice;
use std::ffi::c_int;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// How many parts of memory one work request names at most, whatever the device could: more makes
/// every entry of the send queue longer.
const SCATTER: u32 = 16;

/// The usable ports of this host, opened.
#[derive(Debug)]
pub struct Fabric {
    rails: Vec<Arc<Rail>>,
}

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

/// An opened device with its protection domain.
pub(super) struct Device {
    pub(super) library: &'static Library,
    pub(super) context: NonNull<sys::Context>,
    pub(super) pd: NonNull<sys::Pd>,
    pub(super) attributes: sys::DeviceAttr,
    pub(super) registrations: AtomicUsize,
}

/// What a port says of itself now.
pub(super) struct PortState {
    pub(super) lid: u16,
    pub(super) mtu: u32,
    pub(super) gid: [u8; 16],
    pub(super) is_ethernet: bool,
}

// SAFETY: the library may be called from any thread with the same device, and locks what it must.
unsafe impl Send for Device {}
// SAFETY: as for `Send`.
unsafe impl Sync for Device {}

impl Fabric {
    /// Opens every port that the options ask for. Ports that are not active now are left out.
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
            match open_rails(library, entry, &name, &ports, options) {
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
                reason: "there is no such device".to_owned(),
            });
        }
        if rails.is_empty() {
            return Err(Unavailable::NoPort(reasons.join("; ")));
        }
        for reason in reasons {
            tracing::info!(%reason, "an RDMA device is not used");
        }
        Ok(Arc::new(Self { rails }))
    }

    /// The ports, in the order of the library's list.
    pub fn rails(&self) -> &[Arc<Rail>] {
        &self.rails
    }
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
    /// nothing: who uses it keeps the slice.
    pub fn cached(self: &Arc<Self>, slice: &Slice) -> io::Result<Registration> {
        self.with_room(|| self.cache.registration(&self.device, slice))
    }

    /// Registers `length` bytes of a dmabuf from `offset` on, such as memory of a GPU; work requests
    /// name them by addresses from `address` on. Fails with `Unsupported` where the library cannot.
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
        let active = mtu_bytes(port.active_mtu);
        Ok(PortState {
            lid: port.lid,
            mtu: self.options.mtu.map_or(active, |asked| asked.min(active)),
            gid: gid.gid.0,
            is_ethernet: port.link_layer == sys::LINK_LAYER_ETHERNET,
        })
    }

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

impl Device {
    fn open(library: &'static Library, entry: *mut sys::Device) -> io::Result<Self> {
        // SAFETY: the entry is of a list that has not been freed.
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
        // SAFETY: the context is open, and the structure is ours.
        check(unsafe { (library.query_device)(context.as_ptr(), &raw mut device.attributes) })?;
        Ok(device)
    }

    fn port(&self, port: u8) -> io::Result<sys::PortAttr> {
        let mut attributes = sys::PortAttr::zeroed();
        // SAFETY: the context is open, and the structure is ours.
        check(unsafe {
            (self.library.query_port)(self.context.as_ptr(), port, &raw mut attributes)
        })?;
        Ok(attributes)
    }

    fn gid(&self, port: u8, index: u32) -> io::Result<sys::GidEntry> {
        let mut entry = sys::GidEntry::zeroed();
        // SAFETY: the context is open, and the structure is ours and as long as is said.
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

    /// The entry of the GID table that is best for peers on other hosts.
    fn best_gid(&self, port: u8, attributes: &sys::PortAttr) -> Result<u8, String> {
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

    /// The descriptor that becomes readable when the device has something to say.
    pub(super) fn async_fd(&self) -> RawFd {
        // SAFETY: the context is open.
        unsafe { (*self.context.as_ptr()).async_fd }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: all that was made from the domain keeps the device, so there is nothing of it.
        let code = unsafe { (self.library.dealloc_pd)(self.pd.as_ptr()) };
        if code != 0 {
            tracing::error!(code, "an RDMA protection domain could not be freed");
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
        // SAFETY: the length is ours to fill.
        let first = unsafe { (library.get_device_list)(&raw mut length) };
        let Some(first) = NonNull::new(first) else {
            let error = io::Error::last_os_error();
            // What a kernel says that has none of RDMA loaded.
            return Err(match error.raw_os_error() {
                Some(libc::ENOSYS) => Unavailable::NoDevice,
                _ => Unavailable::NoPort(format!("they cannot be listed: {error}")),
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

/// Opens the active ports of one device; `None` among the asked ports means all.
fn open_rails(
    library: &'static Library,
    entry: *mut sys::Device,
    name: &str,
    asked: &[Option<u8>],
    options: &RdmaOptions,
) -> Result<Vec<Arc<Rail>>, String> {
    // SAFETY: the entry is of a list that has not been freed.
    if unsafe { (*entry).transport_type } == sys::TRANSPORT_IWARP {
        return Err(
            "it is iWARP, where a write is reported done before the peer has it".to_owned(),
        );
    }
    let open =
        || Device::open(library, entry).map_err(|error| format!("it cannot be opened: {error}"));
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
        limits,
    })
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

/// The library, loaded at the first use.
fn library() -> Result<&'static Library, Unavailable> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(Library::load)
        .as_ref()
        .map_err(|error| Unavailable::Library(error.clone()))
}

/// `name` or `name:port`, taken apart.
fn device_of(asked: &str) -> (&str, Option<u8>) {
    match asked.rsplit_once(':') {
        Some((name, port)) => match port.parse() {
            Ok(port) => (name, Some(port)),
            Err(_) => (asked, None),
        },
        None => (asked, None),
    }
}

/// How good a GID is for reaching other hosts, less being better; `None` for an empty entry. RoCE v2
/// is routed, and an address that was given (IPv4 first) is more stable than a link-local one.
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

fn numa_node(device: &str) -> Option<u32> {
    let path = format!("/sys/class/infiniband/{device}/device/numa_node");
    // A device that is near no node in particular says -1.
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The MTU that a number in the verbs stands for.
pub(super) fn mtu_bytes(number: c_int) -> u32 {
    128 << number.clamp(1, 5)
}

/// The number in the verbs for an MTU.
pub(super) fn mtu_number(bytes: u32) -> c_int {
    match bytes {
        ..512 => 1,
        512..1024 => 2,
        1024..2048 => 3,
        2048..4096 => 4,
        4096.. => 5,
    }
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

/// The outcome of a call that answers 0 or an errno.
pub(super) fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Some calls answer -1 and set errno, others answer the errno itself.
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

    #[test]
    fn speeds_are_told_in_gigabits() {
        assert_eq!(gigabits(2, 64), 200);
        assert_eq!(gigabits(1, 1), 2);
    }
}
