//! Who may call which operation: one table, and the one place that judges calls by it.
//!
//! ```text
//!  gRPC call, frame ──► Bearer::allow ──► Operation's row ──► Allowed<request> ──► Calls
//! ```
//!
//! The methods of `Calls` take an `Allowed` request, and only `Bearer::allow` makes one. So a call
//! that was not judged does not compile. ADR 0044 gives the reasons for the roles in the table.

mod bearer;
mod table;

pub(super) use bearer::{Allowed, Bearer, Who, bearer_of, pass_on};
pub use table::{Need, Operation, Via};

use kvpool_auth::{Authority, Identity, TokenError};
use kvpool_types::Code;
use std::sync::Arc;

use super::refused::{Refused, refused};

/// The namespace of a caller that names no namespace.
pub(super) const DEFAULT_NAMESPACE: &str = kvpool_types::namespace::DEFAULT_NAME;

/// The judge of tokens. `None` while tokens are off: every call is then allowed.
#[derive(Clone, Debug, Default)]
pub struct Guard(Option<Arc<Authority>>);

impl Guard {
    /// The guard of a master whose tokens `authority` verifies.
    pub const fn new(authority: Option<Arc<Authority>>) -> Self {
        Self(authority)
    }

    /// The verifier of tokens; `None` while tokens are off.
    pub const fn authority(&self) -> Option<&Arc<Authority>> {
        self.0.as_ref()
    }

    /// The problem of the files of keys and of the policy, if there is one.
    pub(crate) fn problem(&self) -> Option<String> {
        self.authority()?.problem()
    }
}

/// The refusal of a caller whose token was refused.
fn unknown_caller(error: &TokenError) -> Refused {
    refused(error.code(), error.to_string())
}

/// Whether `identity` may do `operation` in `namespace`.
fn judge(identity: &Identity, operation: Operation, namespace: &str) -> Result<(), Refused> {
    let need = operation.need();
    let fits = match need {
        Need::Known => !identity.any_roles().is_empty(),
        Need::Namespace(roles) => identity.roles_in(namespace).has_any(roles),
        Need::Pool(roles) => identity.pool_roles().has_any(roles),
    };
    if fits {
        return Ok(());
    }
    let what = match need {
        Need::Known => "any role".to_owned(),
        Need::Namespace(roles) => format!("one of the roles {roles} in namespace {namespace:?}"),
        Need::Pool(roles) => format!("one of the roles {roles} for the whole pool"),
    };
    let subject = identity.subject();
    Err(refused(
        Code::Forbidden,
        format!("{operation} needs {what}, which the policy does not give {subject:?}"),
    ))
}
