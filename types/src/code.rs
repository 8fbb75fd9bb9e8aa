//! The stable codes of all outcomes on a wire. Programs match on codes, never on text.

use std::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $label:literal, $retry:literal;)*) => {
        /// The outcome of a call or of one item. The number of a code is the same on every wire and in every
        /// version.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Code {
            $($(#[$doc])* $name = $number,)*
        }

        impl Code {
            /// All codes, in order of their numbers.
            pub const ALL: &[Code] = &[$(Code::$name,)*];

            /// The code with this wire number; `None` for a code that this version does not know.
            pub const fn from_wire(raw: u16) -> Option<Self> {
                match raw {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// The short name, for logs, labels and JSON.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                }
            }

            /// Whether the same call, unchanged, may succeed later.
            pub const fn is_retryable(self) -> bool {
                match self {
                    $(Self::$name => $retry,)*
                }
            }
        }
    };
}

codes! {
    /// Success.
    Ok = 0, "ok", false;
    /// The key is present already; the put moved nothing.
    Exists = 1, "exists", false;
    /// The key is absent.
    Missing = 2, "missing", false;
    /// An argument is outside its documented range.
    InvalidArgument = 3, "invalid_argument", false;
    /// The namespace has not been created.
    UnknownNamespace = 4, "unknown_namespace", false;
    /// The two sides share no protocol version.
    VersionMismatch = 5, "version_mismatch", false;
    /// The other side belongs to another cluster.
    WrongCluster = 6, "wrong_cluster", false;
    /// The frame or message cannot be read.
    Malformed = 7, "malformed", false;
    /// The frame or message is larger than the agreed limit.
    Oversized = 8, "oversized", false;
    /// The block is larger than the pool accepts.
    TooLarge = 9, "too_large", false;
    /// The pool is full, and no room was freed within the timeout.
    Full = 10, "full", true;
    /// No store node can hold blocks.
    NoNodes = 11, "no_nodes", true;
    /// Another client is writing the key.
    InProgress = 12, "in_progress", true;
    /// A lease or a pin protects the block; `force` would override it.
    Leased = 13, "leased", true;
    /// The grant has expired, was revoked, or is fenced.
    GrantEnded = 14, "grant_ended", true;
    /// The grant's proof does not match.
    GrantRefused = 15, "grant_refused", false;
    /// The request carries the epoch of an earlier term.
    StaleEpoch = 16, "stale_epoch", true;
    /// The request names another incarnation of the node.
    WrongIncarnation = 17, "wrong_incarnation", true;
    /// The range lies outside the extent or the segment.
    OutOfRange = 18, "out_of_range", false;
    /// The lease has expired.
    LeaseEnded = 19, "lease_ended", true;
    /// The bytes do not match their checksum.
    ChecksumMismatch = 20, "checksum_mismatch", true;
    /// The grant has been used before.
    AlreadyWritten = 21, "already_written", false;
    /// The other side is shutting down.
    Draining = 22, "draining", true;
    /// The client holds as much as it is allowed to.
    TooManyHeld = 23, "too_many_held", true;
    /// The node's incarnation was dropped: the node must register with a new incarnation.
    IncarnationDropped = 24, "incarnation_dropped", false;
    /// This master is not the leader.
    NotLeader = 25, "not_leader", true;
    /// The peer is unreachable, or the connection to it failed.
    Unreachable = 26, "unreachable", true;
    /// The deadline passed.
    DeadlineExceeded = 27, "deadline_exceeded", true;
    /// The metadata store failed.
    StoreFailed = 28, "store_failed", true;
    /// A fault in kvpool itself.
    Internal = 29, "internal", false;
    /// The peer has another version and does not implement the operation. It did nothing.
    Unimplemented = 30, "unimplemented", false;
    /// The master's data directory is full. Nothing was changed.
    StoreFull = 31, "store_full", true;
    /// The caller has no valid token.
    Unauthenticated = 32, "unauthenticated", false;
    /// The caller's token has expired. The caller may try again with a new one.
    TokenExpired = 33, "token_expired", false;
    /// The caller's token is valid, but does not permit this call.
    Forbidden = 34, "forbidden", false;
    /// The read carries no location that the master signed for this extent.
    LocationRefused = 35, "location_refused", false;
    /// The deadline of a signed location has passed. The master gives a new one.
    LocationExpired = 36, "location_expired", true;
    /// The namespace is at its hard quota of memory, and none of its own blocks could leave.
    MemoryQuota = 40, "memory_quota", true;
    /// The namespace is at its hard quota of blocks, and none of its own blocks could leave.
    BlocksQuota = 41, "blocks_quota", true;
    /// The namespace has reached its limit of calls per second.
    RequestRate = 42, "request_rate", true;
    /// The namespace has reached its limit of bytes per second.
    ByteRate = 43, "byte_rate", true;
    /// The namespace has blocks. It is deleted only with `--blocks`.
    NamespaceInUse = 44, "namespace_in_use", false;
    /// No other node takes blocks, and this node has blocks. It is drained only with `--force`.
    LastNode = 45, "last_node", false;
    /// The block alone exceeds a hard quota of its namespace.
    OverQuota = 46, "over_quota", false;
    /// The replica is the last one that can be read on a node that stays, so it is not dropped.
    LastReplica = 47, "last_replica", false;
    /// The node does not drain, for example because its drain was cancelled.
    NotDraining = 48, "not_draining", false;
    /// The node stops, so an operator cannot take it back into service.
    NodeStops = 49, "node_stops", false;
    /// The node has no session, or has not confirmed an order yet.
    NodeUnheard = 50, "node_unheard", false;
}

impl Code {
    /// The code that a peer sent. An unknown code of a later version becomes [`Code::Internal`]: the call did
    /// not succeed, and repeating it need not help.
    pub fn from_peer(raw: u32) -> Self {
        let known = u16::try_from(raw).ok().and_then(Self::from_wire);
        known.unwrap_or(Self::Internal)
    }

    /// The number of the code on every wire.
    pub const fn to_wire(self) -> u16 {
        self as u16
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_ascend_and_round_trip() {
        assert!(Code::ALL.is_sorted_by_key(|code| code.to_wire()));
        for code in Code::ALL {
            assert_eq!(Code::from_wire(code.to_wire()), Some(*code));
        }
        assert_eq!(Code::from_wire(u16::MAX), None);
    }

    #[test]
    fn a_code_of_a_later_version_is_a_failure_and_never_success() {
        for raw in [u32::from(u16::MAX), 65_536, u32::MAX] {
            assert_eq!(Code::from_peer(raw), Code::Internal);
        }
        assert_eq!(Code::from_peer(33), Code::TokenExpired);
    }
}
