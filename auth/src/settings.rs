//! The settings of tokens of a daemon.

use std::path::PathBuf;

/// The settings of tokens of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthSettings {
    /// The file with the issuer's public keys, a JWKS.
    pub jwks: PathBuf,
    /// The issuer: the claim `iss` of every token.
    pub issuer: String,
    /// The audience: one of the claim `aud` of every token.
    pub audience: String,
    /// The file with the policy, TOML.
    pub policy: PathBuf,
}

impl AuthSettings {
    /// The audience where none is set.
    pub const DEFAULT_AUDIENCE: &str = "kvpool";

    /// Combines four settings of a daemon; `None` when tokens are off.
    ///
    /// # Errors
    ///
    /// The missing setting, and the reason why it is required.
    pub fn from_parts(
        jwks: Option<&PathBuf>,
        issuer: &str,
        audience: &str,
        policy: Option<&PathBuf>,
    ) -> Result<Option<Self>, (&'static str, String)> {
        let missing = |which, given: &str| {
            let why =
                format!("required with {given}: tokens are judged by keys, issuer and policy");
            Err((which, why))
        };
        match (jwks, policy) {
            (None, None) if issuer.is_empty() => Ok(None),
            (None, _) => missing("auth_jwks", "auth_policy or auth_issuer"),
            (Some(_), None) => missing("auth_policy", "auth_jwks"),
            (Some(_), Some(_)) if issuer.is_empty() => missing("auth_issuer", "auth_jwks"),
            (Some(_), Some(_)) if audience.is_empty() => missing("auth_audience", "auth_jwks"),
            (Some(jwks), Some(policy)) => Ok(Some(Self {
                jwks: jwks.clone(),
                issuer: issuer.to_owned(),
                audience: audience.to_owned(),
                policy: policy.clone(),
            })),
        }
    }
}
