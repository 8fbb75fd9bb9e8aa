//! The conversion of codes to gRPC statuses.

use super::refused::Refused;
use kvpool_proto::CODE_METADATA;
use kvpool_types::Code;
use tonic::metadata::MetadataValue;
use tonic::{Code as Grpc, Status};

/// The status of a refused call. The code travels as metadata; the message is for people.
pub(super) fn status(code: Code, message: impl Into<String>) -> Status {
    let grpc = match code {
        Code::Ok => Grpc::Ok,
        Code::InvalidArgument | Code::Malformed | Code::WrongCluster => Grpc::InvalidArgument,
        Code::Oversized | Code::TooLarge | Code::OutOfRange | Code::OverQuota => Grpc::OutOfRange,
        Code::UnknownNamespace | Code::Missing => Grpc::NotFound,
        Code::Exists => Grpc::AlreadyExists,
        Code::VersionMismatch
        | Code::NotLeader
        | Code::StaleEpoch
        | Code::WrongIncarnation
        | Code::IncarnationDropped
        | Code::GrantEnded
        | Code::LeaseEnded
        | Code::LocationExpired
        | Code::Leased
        | Code::NamespaceInUse
        | Code::LastNode
        | Code::LastReplica
        | Code::NotDraining
        | Code::NodeStops
        | Code::NodeUnheard => Grpc::FailedPrecondition,
        Code::Full
        | Code::NoNodes
        | Code::TooManyHeld
        | Code::StoreFull
        | Code::MemoryQuota
        | Code::BlocksQuota
        | Code::RequestRate
        | Code::ByteRate => Grpc::ResourceExhausted,
        Code::GrantRefused | Code::LocationRefused | Code::Forbidden => Grpc::PermissionDenied,
        Code::Unauthenticated | Code::TokenExpired => Grpc::Unauthenticated,
        Code::InProgress | Code::AlreadyWritten => Grpc::Aborted,
        Code::Draining | Code::Unreachable | Code::StoreFailed => Grpc::Unavailable,
        Code::DeadlineExceeded => Grpc::DeadlineExceeded,
        Code::ChecksumMismatch => Grpc::DataLoss,
        Code::Unimplemented => Grpc::Unimplemented,
        Code::Internal => Grpc::Internal,
    };
    let mut status = Status::new(grpc, message);
    status
        .metadata_mut()
        .insert(CODE_METADATA, MetadataValue::from(code.to_wire()));
    status
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        status(refused.code, refused.message)
    }
}
