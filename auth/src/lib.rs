//! Tokens and rights: the identity of a caller, and its roles in each namespace.
//!
//! ```text
//!  token ──► keys (JWKS file) ──► claims ──► policy (TOML file) ──► Identity: roles a namespace
//!             └── Authority: both files, read again when they change ──┘
//! ```
//!
//! - [`Authority`] verifies tokens (EdDSA, ES256, RS256) and maps their claims to roles.
//! - [`Credentials`] is the caller's side: a token, read again from its file before it expires.
//! - [`issue`] makes keys and tokens for pools without an issuer.
//!
//! The crate does not know calls: each daemon defines the roles that a call requires. ADR 0043 says why tokens are
//! JWTs and keys come from a file.

mod authority;
mod backend;
mod claims;
mod credentials;
pub mod issue;
mod keys;
mod life;
mod pattern;
mod policy;
mod roles;
mod secret_file;
mod settings;
mod toml_problem;

pub use authority::{Authority, AuthorityError};
pub use claims::{Claims, TokenError, bearer, peek};
pub use credentials::{Credentials, Current, token_file_of_environment};
pub use life::TokenLife;
pub use policy::{Identity, Policy, PolicyError};
pub use roles::{Role, Roles};
pub use secret_file::{SecretFileError, is_readable_by_others};
pub use settings::AuthSettings;
pub use toml_problem::toml_problem;

/// The longest token, in bytes. The token and the rest of a hello fit the limit for callers.
pub const MAX_TOKEN_BYTES: usize = 8 << 10;

/// The seconds since 1970. Tokens name their ends on this clock.
pub fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
