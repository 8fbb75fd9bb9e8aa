//! The meaning of gRPC statuses.

use crate::errors::ControlError;
use kvpool_proto::CODE_METADATA;
use kvpool_tls::grpc::refusal;
use kvpool_types::Code;
use std::error::Error;
use tonic::Status;

/// The error that stands for `status` from the master at `address`.
pub(super) fn error(address: &str, method: &str, status: &Status) -> ControlError {
    let code = code(status);
    // gRPC says only that the connection ended.
    let why = match code {
        Code::Unreachable => refused(address),
        _ => None,
    };
    let why = why.as_deref().unwrap_or(status.message());
    ControlError::new(code, format!("{}: {why}", call(method, address)))
}

/// Why the master at `address` refused a connection of this process a moment ago.
pub(super) fn refused(address: &str) -> Option<String> {
    let authority = address.rsplit('/').find(|part| !part.is_empty());
    authority.and_then(refusal)
}

/// A call, in an error for people. A client says hello when it connects.
pub(super) fn call(method: &str, address: &str) -> String {
    match method {
        "Hello" => format!("connect to {address}"),
        method => format!("{method} at {address}"),
    }
}

/// The master's own code if the status has one; else a code for the state of the connection.
fn code(status: &Status) -> Code {
    let stable = status
        .metadata()
        .get(CODE_METADATA)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse().ok())
        .and_then(Code::from_wire);
    if let Some(code) = stable {
        return code;
    }
    match status.code() {
        // A connection that breaks during a call shows as any of these codes, depending on the moment.
        tonic::Code::Unavailable
        | tonic::Code::Unknown
        | tonic::Code::Internal
        | tonic::Code::Aborted
        | tonic::Code::Cancelled => Code::Unreachable,
        tonic::Code::DeadlineExceeded => Code::DeadlineExceeded,
        tonic::Code::OutOfRange | tonic::Code::ResourceExhausted => Code::Oversized,
        tonic::Code::InvalidArgument => Code::InvalidArgument,
        tonic::Code::Unimplemented => Code::VersionMismatch,
        // A proxy, or a master of a later version, refused the caller.
        tonic::Code::Unauthenticated => Code::Unauthenticated,
        tonic::Code::PermissionDenied => Code::Forbidden,
        _ => Code::Internal,
    }
}

/// Whether the call was not sent, because no connection to the master could be made.
pub(super) fn has_no_connection(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_connect_names_no_call_of_the_protocol() {
        let status = Status::unavailable("refused");
        let told = |method| error("http://a:1", method, &status).message;
        assert_eq!(told("Hello"), "connect to http://a:1: refused");
        assert_eq!(told("Lookup"), "Lookup at http://a:1: refused");
    }

    #[test]
    fn the_masters_own_code_goes_before_grpcs() {
        let mut status = Status::unavailable("x");
        assert_eq!(code(&status), Code::Unreachable);
        status
            .metadata_mut()
            .insert(CODE_METADATA, "25".parse().unwrap());
        assert_eq!(code(&status), Code::NotLeader);
        status
            .metadata_mut()
            .insert(CODE_METADATA, "60000".parse().unwrap());
        assert_eq!(code(&status), Code::Unreachable);
    }
}
