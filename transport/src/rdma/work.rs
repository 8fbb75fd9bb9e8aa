//! What a lane is asked to do, and how that may end.

use super::registry::Registration;
use super::sys;
use crate::memory::Slice;
use std::io;

/// Which way the bytes go, seen from who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// A place in a peer's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The first byte's address, as the peer's registration counts.
    pub address: u64,
    /// The key of the peer's registration.
    pub rkey: u32,
}

/// One contiguous range of a peer's memory and the memory here that it is read into or written from,
/// in order, each part with a registration that covers it.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Which way.
    pub verb: Verb,
    /// Where at the peer it begins.
    pub remote: Remote,
    /// Our side; the total length is what is moved.
    pub local: Vec<(Registration, Slice)>,
}

/// Whose fault the end of a work request was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The transfer made no sense; nothing was sent and the lane goes on.
    Invalid,
    /// This side's: its registration, its queue pair, its device.
    Local,
    /// The peer refused it: its key, its bounds, its rights.
    Remote,
    /// The peer did not answer.
    Path,
    /// Nobody's: the work was given up because its queue pair ended. What came of it is not known,
    /// and no byte is moved by it any more.
    Flushed,
}

/// How a work request ended that did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({status}, vendor code {vendor:#x})")]
pub struct WorkError {
    /// Whose fault.
    pub fault: Fault,
    /// The status by its name in the verbs.
    pub status: &'static str,
    /// What the device's maker adds, 0 if nothing.
    pub vendor: u32,
    /// For people.
    pub message: String,
}

impl Transfer {
    /// The bytes that are moved.
    pub fn length(&self) -> u64 {
        self.local.iter().map(|(_, slice)| slice.length().0).sum()
    }
}

impl WorkError {
    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self {
            fault: Fault::Invalid,
            status: "not sent",
            vendor: 0,
            message: message.into(),
        }
    }

    pub(super) fn local(status: &'static str, message: impl Into<String>) -> Self {
        Self {
            fault: Fault::Local,
            status,
            vendor: 0,
            message: message.into(),
        }
    }

    pub(super) fn flushed(message: impl Into<String>) -> Self {
        Self {
            fault: Fault::Flushed,
            status: "WR_FLUSH_ERR",
            vendor: 0,
            message: message.into(),
        }
    }

    pub(super) fn refused(error: &io::Error) -> Self {
        Self::local(
            "not posted",
            format!("the device took no work request: {error}"),
        )
    }

    /// What a completion that is not a success says.
    pub(super) fn of_completion(completion: &sys::Wc) -> Self {
        let (status, fault, message) = meaning(completion.status);
        Self {
            fault,
            status,
            vendor: completion.vendor_err,
            message: message.to_owned(),
        }
    }
}

fn meaning(status: i32) -> (&'static str, Fault, &'static str) {
    const LOCAL: &str = "the device could not do the work";
    const REMOTE: &str = "the peer refused the access";
    match status {
        1 => ("LOC_LEN_ERR", Fault::Local, LOCAL),
        2 => ("LOC_QP_OP_ERR", Fault::Local, LOCAL),
        3 => ("LOC_EEC_OP_ERR", Fault::Local, LOCAL),
        4 => (
            "LOC_PROT_ERR",
            Fault::Local,
            "the memory here is not registered for this",
        ),
        sys::WC_WR_FLUSH_ERR => ("WR_FLUSH_ERR", Fault::Flushed, "the queue pair ended first"),
        6 => ("MW_BIND_ERR", Fault::Local, LOCAL),
        7 => (
            "BAD_RESP_ERR",
            Fault::Remote,
            "the peer's answer made no sense",
        ),
        8 => (
            "LOC_ACCESS_ERR",
            Fault::Local,
            "the memory here is not registered for this",
        ),
        9 => ("REM_INV_REQ_ERR", Fault::Remote, REMOTE),
        10 => ("REM_ACCESS_ERR", Fault::Remote, REMOTE),
        11 => (
            "REM_OP_ERR",
            Fault::Remote,
            "the peer could not do the work",
        ),
        12 => ("RETRY_EXC_ERR", Fault::Path, "the peer does not answer"),
        13 => ("RNR_RETRY_EXC_ERR", Fault::Path, "the peer is never ready"),
        14 => ("LOC_RDD_VIOL_ERR", Fault::Local, LOCAL),
        15 => ("REM_INV_RD_REQ_ERR", Fault::Remote, REMOTE),
        16 => ("REM_ABORT_ERR", Fault::Remote, "the peer gave the work up"),
        19 => ("FATAL_ERR", Fault::Local, LOCAL),
        20 => ("RESP_TIMEOUT_ERR", Fault::Path, "the peer does not answer"),
        21 => ("GENERAL_ERR", Fault::Local, LOCAL),
        _ => ("other", Fault::Local, LOCAL),
    }
}

#[cfg(all(test, feature = "rdma-sys"))]
pub(super) fn name_of_status(status: i32) -> (&'static str, Fault) {
    let (name, fault, _) = meaning(status);
    (name, fault)
}
