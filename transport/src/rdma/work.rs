//! The work of a lane, and its possible errors.

use super::registry::Registration;
use super::sys;
use crate::memory::Slice;
use std::io;

/// The kind of a transfer, seen from its submitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// From the peer's memory into local memory.
    Read,
    /// From local memory into the peer's memory.
    Write,
}

/// A position in a peer's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address of the first byte, in the address space of the peer's registration.
    pub address: u64,
    /// The key of the peer's registration.
    pub rkey: u32,
}

/// A transfer between one contiguous range of a peer's memory and local memory. Each local part has
/// a registration that covers it.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Read or write.
    pub verb: Verb,
    /// The first byte at the peer.
    pub remote: Remote,
    /// The local memory, in order. Its total length is the length of the transfer.
    pub local: Vec<(Registration, Slice)>,
}

/// The cause of a failed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The transfer was invalid. Nothing was sent, and the lane stays open.
    Invalid,
    /// The local side: its registration, queue pair or device.
    Local,
    /// The peer refused it: its key, bounds or access rights.
    Remote,
    /// The peer did not answer.
    Path,
    /// The queue pair ended before the work did. Whether the bytes moved is unknown, but none move
    /// any more.
    Flushed,
}

/// Why a work request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({status}, vendor code {vendor:#x})")]
pub struct WorkError {
    /// The cause.
    pub fault: Fault,
    /// The status by its name in the verbs.
    pub status: &'static str,
    /// The vendor's code; 0 when there is none.
    pub vendor: u32,
    /// A message for people.
    pub message: String,
}

impl Transfer {
    /// The length in bytes.
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
            format!("the device refused a work request: {error}"),
        )
    }

    /// The error of a failed completion.
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
    const LOCAL: &str = "the device failed to perform the work";
    const REMOTE: &str = "the peer refused the access";
    match status {
        1 => ("LOC_LEN_ERR", Fault::Local, LOCAL),
        2 => ("LOC_QP_OP_ERR", Fault::Local, LOCAL),
        3 => ("LOC_EEC_OP_ERR", Fault::Local, LOCAL),
        4 => (
            "LOC_PROT_ERR",
            Fault::Local,
            "the local memory is not registered for this access",
        ),
        sys::WC_WR_FLUSH_ERR => ("WR_FLUSH_ERR", Fault::Flushed, "the queue pair ended first"),
        6 => ("MW_BIND_ERR", Fault::Local, LOCAL),
        7 => (
            "BAD_RESP_ERR",
            Fault::Remote,
            "the peer's answer was invalid",
        ),
        8 => (
            "LOC_ACCESS_ERR",
            Fault::Local,
            "the local memory is not registered for this access",
        ),
        9 => ("REM_INV_REQ_ERR", Fault::Remote, REMOTE),
        10 => ("REM_ACCESS_ERR", Fault::Remote, REMOTE),
        11 => (
            "REM_OP_ERR",
            Fault::Remote,
            "the peer failed to perform the work",
        ),
        12 => ("RETRY_EXC_ERR", Fault::Path, "the peer does not answer"),
        13 => ("RNR_RETRY_EXC_ERR", Fault::Path, "the peer was never ready"),
        14 => ("LOC_RDD_VIOL_ERR", Fault::Local, LOCAL),
        15 => ("REM_INV_RD_REQ_ERR", Fault::Remote, REMOTE),
        16 => ("REM_ABORT_ERR", Fault::Remote, "the peer aborted the work"),
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
