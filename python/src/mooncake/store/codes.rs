//! The codes by which callers of `mooncake.store` know outcomes.

use kvpool_client::{ControlError, GetError, PutError, RemoveError};
use kvpool_types::Code;

/// Success.
pub(super) const OK: i64 = 0;
/// No segment has this name.
pub(super) const NO_SEGMENT: i64 = -101;
/// No free room, or no node for the block.
pub(super) const NO_SPACE: i64 = -200;
/// A parameter is outside its documented range, or the store is not set up.
pub(super) const PARAMETERS: i64 = -600;
/// The written bytes are not the announced bytes.
pub(super) const INVALID_WRITE: i64 = -700;
/// Another put of the key is in progress.
pub(super) const NOT_READY: i64 = -703;
/// The key is absent.
pub(super) const NOT_FOUND: i64 = -704;
/// The same operation is in progress already.
pub(super) const BUSY: i64 = -714;
/// A transfer failed.
pub(super) const TRANSFER: i64 = -800;
/// The master does not answer.
pub(super) const RPC: i64 = -900;

/// The Mooncake code of a kvpool code. `unreachable` is the code for a peer that cannot be reached. It depends
/// on the peer: the master or a node.
pub(super) const fn of(code: Code, unreachable: i64) -> i64 {
    match code {
        Code::Ok => OK,
        Code::Internal => -1,
        Code::Full | Code::NoNodes | Code::MemoryQuota | Code::BlocksQuota => NO_SPACE,
        Code::InvalidArgument
        | Code::UnknownNamespace
        | Code::Malformed
        | Code::Oversized
        | Code::TooLarge
        | Code::OverQuota
        | Code::OutOfRange => PARAMETERS,
        Code::GrantEnded | Code::GrantRefused | Code::AlreadyWritten => INVALID_WRITE,
        Code::InProgress => NOT_READY,
        Code::Missing => NOT_FOUND,
        Code::Exists => -705,
        Code::Leased
        | Code::NamespaceInUse
        | Code::LastNode
        | Code::LastReplica
        | Code::NotDraining
        | Code::NodeStops
        | Code::NodeUnheard => -706,
        Code::LeaseEnded => -707,
        Code::TooManyHeld | Code::RequestRate | Code::ByteRate => BUSY,
        Code::WrongIncarnation
        | Code::IncarnationDropped
        | Code::Draining
        | Code::LocationRefused
        | Code::LocationExpired => TRANSFER,
        Code::ChecksumMismatch => -801,
        Code::Unreachable => unreachable,
        Code::VersionMismatch
        | Code::Unimplemented
        | Code::WrongCluster
        | Code::StaleEpoch
        | Code::NotLeader
        | Code::Unauthenticated
        | Code::TokenExpired
        | Code::Forbidden => RPC,
        Code::DeadlineExceeded => -901,
        Code::StoreFailed | Code::StoreFull => -1000,
    }
}

/// The code of a failed call to the master.
pub(super) const fn of_control(error: &ControlError) -> i64 {
    of(error.code, RPC)
}

/// The code of a failed removal.
pub(super) const fn of_remove(error: &RemoveError) -> i64 {
    of(error.code(), RPC)
}

/// The code of a failed put.
pub(super) const fn of_put(error: &PutError) -> i64 {
    of(error.code(), TRANSFER)
}

/// The code of a failed get.
pub(super) const fn of_get(error: &GetError) -> i64 {
    of(error.code(), TRANSFER)
}
