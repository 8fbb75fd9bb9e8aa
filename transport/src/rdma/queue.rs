//! One reliable connection: a queue pair, from its creation to its end.
//!
//! ```text
//!  create ─► INIT ─ connect ─► RTR ─► RTS ─ fail ─► ERR ─ drop ─► destroyed
//! ```

// UNSAFETY: drives a queue pair through its states and posts to it. `Drop` destroys the handle
// once. `post` states what it requires of its caller.
#![allow(unsafe_code, reason = "calls libibverbs")]

use super::completions::Reserved;
use super::device::{check, mtu_number};
use super::rail::Rail;
use super::sys::{self, Zeroed};
use super::work::{Remote, Verb};
pub use kvpool_types::wire::rdma::QueueAddress;
use std::ffi::{c_int, c_uint};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// A queue pair that only serves its peer posts nothing.
const SERVING_DEPTH: u32 = 1;

/// The hop limit of packets.
const HOP_LIMIT: u8 = 64;

/// 0.64 ms. It has no effect, because no work here waits for a receiver.
const RNR_TIMER: u8 = 12;
const RNR_RETRY: u8 = 6;

/// How often, and at what interval, the destruction of a queue pair is attempted. The kernel may be
/// short of resources briefly.
const DESTROY_TRIES: u32 = 100;
const DESTROY_PAUSE: Duration = Duration::from_millis(20);

/// The access that a queue pair gives its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Allows {
    /// No access: this end reads and writes. Only such a queue pair has room to post.
    Nothing,
    /// Read access to memory registered for it.
    Reads,
    /// Read and write access to memory registered for it.
    Writes,
}

/// One end of a reliable connection. Once dropped, it sends and receives nothing: no peer touches
/// memory through it, and it touches no local memory.
#[derive(Debug)]
pub struct QueuePair {
    rail: Arc<Rail>,
    raw: NonNull<sys::Qp>,
    address: QueueAddress,
    is_ethernet: bool,
    depth: u32,
    reserved: Option<Reserved>,
}

/// Work requests to post by one call, with their lists of memory.
#[derive(Default)]
pub(super) struct WorkChain {
    requests: Vec<sys::SendWr>,
    parts: Vec<sys::Sge>,
}

/// The device accepted, or may have accepted, the first `taken` requests of a chain. It refused the
/// others.
pub(super) struct PostRefused {
    pub(super) taken: usize,
    pub(super) error: io::Error,
}

// SAFETY: the library's calls lock the queue pair, which belongs to no thread.
unsafe impl Send for QueuePair {}
// SAFETY: as for `Send`.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Creates a queue pair on a rail.
    ///
    /// # Errors
    ///
    /// `NetworkDown` when the port is not active, `QuotaExceeded` when the completion queue has no
    /// room, or the device's error.
    pub fn create(rail: &Arc<Rail>, allows: Allows) -> io::Result<Self> {
        let port = rail.state()?;
        let limits = rail.limits();
        let depth = match allows {
            Allows::Nothing => limits.queue_depth,
            Allows::Reads | Allows::Writes => SERVING_DEPTH,
        };
        let reserved = rail.completions.shared().reserve(depth)?;
        let mut attributes = sys::QpInitAttr::zeroed();
        attributes.send_cq = reserved.queue();
        attributes.recv_cq = reserved.queue();
        attributes.qp_type = sys::QPT_RC;
        attributes.cap.max_send_wr = depth;
        attributes.cap.max_recv_wr = 1;
        attributes.cap.max_send_sge = limits.scatter;
        attributes.cap.max_recv_sge = 1;
        let device = &rail.device;
        // SAFETY: the domain and the completion queue live as long as the rail, which this value
        // keeps.
        let raw = unsafe { (device.library.create_qp)(device.pd.as_ptr(), &raw mut attributes) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the queue pair was just created.
        let number = unsafe { raw.as_ref() }.qp_num;
        let queue = Self {
            rail: rail.clone(),
            raw,
            address: QueueAddress {
                number,
                psn: rand::random::<u32>() & 0xff_ffff,
                gid: port.gid,
                lid: port.lid,
                mtu: port.mtu,
                reads: limits.reads_in,
            },
            is_ethernet: port.is_ethernet,
            depth,
            reserved: Some(reserved),
        };
        let mut attributes = sys::QpAttr::zeroed();
        attributes.qp_state = sys::QPS_INIT;
        attributes.port_num = rail.port();
        attributes.qp_access_flags = rights(allows);
        queue.modify(
            &mut attributes,
            sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS,
        )?;
        Ok(queue)
    }

    /// The address that the peer needs to connect.
    pub fn address(&self) -> &QueueAddress {
        &self.address
    }

    /// The rail of the queue pair.
    pub fn rail(&self) -> &Arc<Rail> {
        &self.rail
    }

    /// Connects to a peer's queue pair. The peer must have connected its own before anything is
    /// sent.
    ///
    /// # Errors
    ///
    /// `InvalidData` when the address is malformed, or the device's error.
    pub fn connect(&self, peer: &QueueAddress) -> io::Result<()> {
        if !(256..=4096).contains(&peer.mtu) || peer.number > 0xff_ffff || peer.psn > 0xff_ffff {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{peer:?} is no address of a queue pair"),
            ));
        }
        let options = &self.rail.options;
        let limits = self.rail.limits();
        let mut attributes = sys::QpAttr::zeroed();
        attributes.qp_state = sys::QPS_RTR;
        attributes.path_mtu = mtu_number(self.address.mtu.min(peer.mtu));
        attributes.dest_qp_num = peer.number;
        attributes.rq_psn = peer.psn;
        attributes.max_dest_rd_atomic = limits.reads_in;
        attributes.min_rnr_timer = RNR_TIMER;
        attributes.ah_attr.dlid = peer.lid;
        attributes.ah_attr.sl = options.service_level;
        attributes.ah_attr.port_num = self.rail.port();
        // Ethernet always routes by GID; InfiniBand only into another subnet.
        if self.is_ethernet || self.address.gid[..8] != peer.gid[..8] {
            attributes.ah_attr.is_global = 1;
            attributes.ah_attr.grh.dgid = sys::Gid(peer.gid);
            attributes.ah_attr.grh.sgid_index = self.rail.gid_index();
            attributes.ah_attr.grh.hop_limit = HOP_LIMIT;
            attributes.ah_attr.grh.traffic_class = options.traffic_class;
        }
        self.modify(
            &mut attributes,
            sys::QP_STATE
                | sys::QP_AV
                | sys::QP_PATH_MTU
                | sys::QP_DEST_QPN
                | sys::QP_RQ_PSN
                | sys::QP_MAX_DEST_RD_ATOMIC
                | sys::QP_MIN_RNR_TIMER,
        )?;
        let mut attributes = sys::QpAttr::zeroed();
        attributes.qp_state = sys::QPS_RTS;
        attributes.sq_psn = self.address.psn;
        attributes.timeout = options.retry.timeout;
        attributes.retry_cnt = options.retry.count;
        attributes.rnr_retry = RNR_RETRY;
        attributes.max_rd_atomic = limits.reads_out.min(peer.reads).max(1);
        self.modify(
            &mut attributes,
            sys::QP_STATE
                | sys::QP_TIMEOUT
                | sys::QP_RETRY_CNT
                | sys::QP_RNR_RETRY
                | sys::QP_SQ_PSN
                | sys::QP_MAX_QP_RD_ATOMIC,
        )
    }

    /// Moves to the error state: nothing more is sent or accepted, and work in flight ends with an
    /// error.
    pub fn fail(&self) {
        let mut attributes = sys::QpAttr::zeroed();
        attributes.qp_state = sys::QPS_ERR;
        if let Err(error) = self.modify(&mut attributes, sys::QP_STATE) {
            // Its destruction ends the queue pair too.
            tracing::debug!(%error, number = self.address.number, "failing a queue pair failed");
        }
    }

    /// The most work requests that may be in flight.
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    /// Marks that completions may remain in the completion queue after the drop. Their entries are
    /// freed only once the queue has been empty.
    pub(super) fn leaves_completions(&mut self) {
        if let Some(reserved) = &mut self.reserved {
            reserved.leaves_completions();
        }
    }

    /// Posts a chain and empties it.
    ///
    /// # Safety
    ///
    /// All memory that the chain names stays valid until each work request has ended or the queue
    /// pair has been dropped.
    pub(super) unsafe fn post(&self, chain: &mut WorkChain) -> Result<(), PostRefused> {
        chain.link();
        let Some(first) = chain.requests.first_mut() else {
            return Ok(());
        };
        let first: *mut sys::SendWr = first;
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives. `link` made the chain valid, and it is borrowed uniquely
        // for the call. The caller guarantees the memory that it names.
        let code = unsafe { sys::post_send(self.raw.as_ptr(), first, &raw mut bad) };
        // A driver that names no bad request may have accepted all.
        let taken = chain
            .requests
            .iter()
            .position(|request| std::ptr::from_ref(request) == bad.cast_const())
            .unwrap_or(chain.requests.len());
        chain.requests.clear();
        chain.parts.clear();
        check(code).map_err(|error| PostRefused { taken, error })
    }

    fn modify(&self, attributes: &mut sys::QpAttr, mask: c_int) -> io::Result<()> {
        // SAFETY: the queue pair lives, and the attributes are local.
        check(unsafe { (self.rail.device.library.modify_qp)(self.raw.as_ptr(), attributes, mask) })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.fail();
        for _ in 0..DESTROY_TRIES {
            // SAFETY: made by the library and not destroyed yet. After success the device touches
            // no memory for it.
            let code = unsafe { (self.rail.device.library.destroy_qp)(self.raw.as_ptr()) };
            match code.abs() {
                // A removed device touches no memory either.
                0 | libc::EIO | libc::ENODEV => {
                    drop(self.reserved.take());
                    return;
                }
                _ => std::thread::sleep(DESTROY_PAUSE),
            }
        }
        // To continue would reuse memory that a peer or the device may still write.
        tracing::error!(
            "destroying an RDMA queue pair failed: aborting the process to protect its memory"
        );
        std::process::abort();
    }
}

impl WorkChain {
    pub(super) fn push(
        &mut self,
        id: u64,
        verb: Verb,
        remote: Remote,
        parts: &[sys::Sge],
        is_signalled: bool,
    ) {
        let mut request = sys::SendWr::zeroed();
        request.wr_id = id;
        request.num_sge =
            c_int::try_from(parts.len()).expect("invariant: a work request has a handful of parts");
        request.opcode = match verb {
            Verb::Read => sys::WR_RDMA_READ,
            Verb::Write => sys::WR_RDMA_WRITE,
        };
        request.send_flags = if is_signalled { sys::SEND_SIGNALED } else { 0 };
        request.remote_addr = remote.address;
        request.rkey = remote.rkey;
        self.requests.push(request);
        self.parts.extend_from_slice(parts);
    }

    /// Requests a completion for the last request.
    pub(super) fn signal_last(&mut self) {
        if let Some(last) = self.requests.last_mut() {
            last.send_flags |= sys::SEND_SIGNALED;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Sets the pointers, after the vectors have stopped moving.
    fn link(&mut self) {
        let mut parts: &mut [sys::Sge] = &mut self.parts;
        let mut next = std::ptr::null_mut();
        for request in self.requests.iter_mut().rev() {
            let mine = usize::try_from(request.num_sge)
                .expect("invariant: a work request has a handful of parts");
            let (before, own) = parts.split_at_mut(parts.len() - mine);
            parts = before;
            request.sg_list = own.as_mut_ptr();
            request.next = next;
            next = request;
        }
    }
}

fn rights(allows: Allows) -> c_uint {
    match allows {
        Allows::Nothing => 0,
        Allows::Reads => sys::ACCESS_REMOTE_READ,
        Allows::Writes => sys::ACCESS_REMOTE_READ | sys::ACCESS_REMOTE_WRITE,
    }
}
