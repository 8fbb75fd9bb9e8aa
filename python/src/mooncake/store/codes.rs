//! The numbers that callers of `mooncake.store` know outcomes by.

use kvpool_client::{ControlError, GetError, PutError, RemoveError};
use kvpool_types::Code;

/// Done.
pub(super) const OK: i64 = 0;
/// No segment is called so.
pub(super) const NO_SEGMENT: i64 = -101;
/// No room, or no node to hold the block.
pub(super) const NO_SPACE: i64 = -200;
/// A parameter is outside its documented range, or the store is not set up.
pub(super) const PARAMETERS: i64 = -600;
/// What was written is not what was announced.
pub(super) const INVALID_WRITE: i64 = -700;
/// The key is being written.
pub(super) const NOT_READY: i64 = -703;
/// The key is absent.
pub(super) const NOT_FOUND: i64 = -704;
/// The same is under way already.
pub(super) const BUSY: i64 = -714;
/// A transfer failed.
pub(super) const TRANSFER: i64 = -800;
/// The master cannot be asked.
pub(super) const RPC: i64 = -900;

/// What a code of kvpool is called here. `unreachable` is what it means that the other side cannot be
/// reached, which depends on who that is.
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

/// Why a call to the master failed.
pub(super) const fn of_control(error: &ControlError) -> i64 {
    of(error.code, RPC)
}

/// Why blocks were not removed.
pub(super) const fn of_remove(error: &RemoveError) -> i64 {
    of(error.code(), RPC)
}

/// Why a block was not put.
pub(super) const fn of_put(error: &PutError) -> i64 {
    of(error.code(), TRANSFER)
}

/// Why a block could not be got.
pub(super) const fn of_get(error: &GetError) -> i64 {
    of(error.code(), TRANSFER)
}
