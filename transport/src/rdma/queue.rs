//! One reliable connection: a queue pair, from its creation to its end.
//!
//! ```text
//!  create ─► INIT ─ connect ─► RTR ─► RTS ─ fail ─► ERR ─ drop ─► destroyed
//! ```

// UNSAFETY: drives a queue pair through its states and posts to it. The handle is destroyed once, in
// `Drop`; what posting needs of its caller stands at `post`.
#![allow(unsafe_code, reason = "calls libibverbs")]

use super::completions::Reserved;
use super::device::{check, mtu_number};
use super::rail::Rail;
use super::sys::{self, Zeroed};
use super::work::{Remote, Verb};
pub use kvpool_types::wire::rdma::Queue as QueueAddress;
use std::ffi::{c_int, c_uint};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// A queue pair that only serves its peer posts nothing.
const SERVING_DEPTH: u32 = 1;

/// How many hops a packet may take.
const HOP_LIMIT: u8 = 64;

/// 0.64 ms; no work here ever waits for a receiver, so it has no effect.
const RNR_TIMER: u8 = 12;
const RNR_RETRY: u8 = 6;

/// How often, and how far apart, the destruction of a queue pair is tried: the kernel may be short
/// of something for a moment.
const DESTROY_TRIES: u32 = 100;
const DESTROY_PAUSE: Duration = Duration::from_millis(20);

/// What the peer of a queue pair may do through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Allows {
    /// Nothing: this is the side that reads and writes. Only such a queue pair has room to post.
    Nothing,
    /// To read what is registered for that.
    Reads,
    /// To read and to write what is registered for that.
    Writes,
}

/// One end of a reliable connection. When it is dropped, nothing is sent or received through it any
/// more: no peer touches memory here by it, and no local memory is touched.
#[derive(Debug)]
pub struct QueuePair {
    rail: Arc<Rail>,
    raw: NonNull<sys::Qp>,
    address: QueueAddress,
    is_ethernet: bool,
    depth: u32,
    reserved: Option<Reserved>,
}

/// Work requests to post at once, with their lists of memory.
#[derive(Default)]
pub(super) struct Chain {
    requests: Vec<sys::SendWr>,
    parts: Vec<sys::Sge>,
}

/// The device took the first `taken` requests of a chain, or may have; the others it did not.
pub(super) struct Refused {
    pub(super) taken: usize,
    pub(super) error: io::Error,
}

// SAFETY: the library's calls lock the queue pair, and it belongs to no thread.
unsafe impl Send for QueuePair {}
// SAFETY: as for `Send`.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Makes one on a rail.
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
        // SAFETY: the domain and the completion queue live as long as the rail, which is kept.
        let raw = unsafe { (device.library.create_qp)(device.pd.as_ptr(), &raw mut attributes) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: just made.
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

    /// What the peer must know.
    pub fn address(&self) -> &QueueAddress {
        &self.address
    }

    /// The rail that it is on.
    pub fn rail(&self) -> &Arc<Rail> {
        &self.rail
    }

    /// Connects it to a peer's. The peer must have connected its own before anything is sent.
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
        // Ethernet is always routed by GID, InfiniBand only into another subnet.
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

    /// Ends it: nothing more is sent or taken, and what is in flight ends with an error.
    pub fn fail(&self) {
        let mut attributes = sys::QpAttr::zeroed();
        attributes.qp_state = sys::QPS_ERR;
        if let Err(error) = self.modify(&mut attributes, sys::QP_STATE) {
            // Destroying it ends it too.
            tracing::debug!(%error, number = self.address.number, "a queue pair did not fail");
        }
    }

    /// How many work requests may be posted and not ended.
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    /// Says that it is dropped with completions to come, or that may be in the completion queue: the
    /// room for them there is not given to others before they are out.
    pub(super) fn leaves_completions(&mut self) {
        if let Some(reserved) = &mut self.reserved {
            reserved.leaves_completions();
        }
    }

    /// Posts a chain and empties it.
    ///
    /// # Safety
    ///
    /// All memory that the chain names stays what it is until each work request has ended or the
    /// queue pair has been dropped.
    pub(super) unsafe fn post(&self, chain: &mut Chain) -> Result<(), Refused> {
        chain.link();
        let Some(first) = chain.requests.first_mut() else {
            return Ok(());
        };
        let first: *mut sys::SendWr = first;
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives; `link` made the chain valid, and it is borrowed uniquely for
        // the call; the memory that it names is the caller's word.
        let code = unsafe { sys::post_send(self.raw.as_ptr(), first, &raw mut bad) };
        // A driver that names none may have taken all.
        let taken = chain
            .requests
            .iter()
            .position(|request| std::ptr::from_ref(request) == bad.cast_const())
            .unwrap_or(chain.requests.len());
        chain.requests.clear();
        chain.parts.clear();
        check(code).map_err(|error| Refused { taken, error })
    }

    fn modify(&self, attributes: &mut sys::QpAttr, mask: c_int) -> io::Result<()> {
        // SAFETY: the queue pair lives and the attributes are ours.
        check(unsafe { (self.rail.device.library.modify_qp)(self.raw.as_ptr(), attributes, mask) })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.fail();
        for _ in 0..DESTROY_TRIES {
            // SAFETY: made by the library and not destroyed yet; when this succeeds the device does
            // not touch memory for it any more.
            let code = unsafe { (self.rail.device.library.destroy_qp)(self.raw.as_ptr()) };
            match code.abs() {
                // A device that is gone touches nothing either.
                0 | libc::EIO | libc::ENODEV => {
                    drop(self.reserved.take());
                    return;
                }
                _ => std::thread::sleep(DESTROY_PAUSE),
            }
        }
        // Going on would let memory be used again that a peer or the device may still write into.
        tracing::error!("an RDMA queue pair cannot be destroyed: this process must end");
        std::process::abort();
    }
}

impl Chain {
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

    /// Has the last request end with a completion.
    pub(super) fn signal_last(&mut self) {
        if let Some(last) = self.requests.last_mut() {
            last.send_flags |= sys::SEND_SIGNALED;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Makes the pointers, once nothing moves any more.
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
