//! One token: its verification, and its claims.

use crate::keys::Keys;
use crate::{MAX_TOKEN_BYTES, backend};
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Validation, decode, decode_header};
use kvpool_types::Code;
use serde::Deserialize;
use serde_json::{Map, Value};

/// The leeway for clocks that differ, in seconds.
pub(crate) const LEEWAY_S: u64 = 30;

/// The claims of a token.
#[derive(Clone, Debug, Deserialize)]
pub struct Claims {
    /// The subject: the caller that holds the token.
    pub sub: String,
    /// The issuer of the token.
    pub iss: String,
    /// When it ends, in seconds since 1970.
    pub exp: u64,
    /// When it begins.
    #[serde(default)]
    pub nbf: Option<u64>,
    /// All other claims.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// Why a token is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// There is no token.
    #[error("this pool asks for a token: name its file (KVPOOL_TOKEN_FILE or --token-file)")]
    Missing,
    /// The token's end has passed.
    #[error("the token has expired: get a new one, or check that its file is renewed")]
    Expired,
    /// The token is not valid yet.
    #[error("the token is not valid yet: compare the clocks of its issuer and of this host")]
    NotYet,
    /// The token is for another audience.
    #[error("the token is for another audience: this pool is {0:?} (--auth-audience)")]
    Audience(String),
    /// The token was made by another issuer.
    #[error("the token is of another issuer: this pool accepts {0:?} (--auth-issuer)")]
    Issuer(String),
    /// The token is signed in a way that is not accepted.
    #[error("the token is not signed with EdDSA, ES256 or RS256")]
    Algorithm,
    /// No key verifies the token.
    #[error("no key of the JWKS verifies the token: was it made with another key?")]
    Signature,
    /// The token cannot be read.
    #[error("the token cannot be read: {0}")]
    Malformed(String),
}

impl TokenError {
    /// The stable code.
    pub const fn code(&self) -> Code {
        match self {
            Self::Expired => Code::TokenExpired,
            _ => Code::Unauthenticated,
        }
    }
}

/// Verifies `token` against the keys, and checks issuer, audience and times.
pub(crate) fn verify(
    token: &str,
    keys: &Keys,
    issuer: &str,
    audience: &str,
) -> Result<Claims, TokenError> {
    if token.is_empty() {
        return Err(TokenError::Missing);
    }
    if token.len() > MAX_TOKEN_BYTES {
        let why = format!("{} bytes is over {MAX_TOKEN_BYTES}", token.len());
        return Err(TokenError::Malformed(why));
    }
    backend::install();
    let header = decode_header(token).map_err(|error| match error.kind() {
        // The header names an algorithm that the library does not know, such as `none`.
        ErrorKind::Json(_) if names_unknown_algorithm(token) => TokenError::Algorithm,
        _ => TokenError::Malformed("its header is no header of a JWT".to_owned()),
    })?;
    if !backend::is_allowed(header.alg) {
        return Err(TokenError::Algorithm);
    }
    if header.crit.is_some() {
        let why = "it has critical extensions, which are not known here";
        return Err(TokenError::Malformed(why.to_owned()));
    }
    let mut validation = Validation::new(header.alg);
    validation.leeway = LEEWAY_S;
    validation.validate_nbf = true;
    validation.set_issuer(&[issuer]);
    validation.set_audience(&[audience]);
    validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
    let mut refused = TokenError::Signature;
    for candidate in keys.candidates(header.kid.as_deref(), header.alg) {
        match decode::<Claims>(token, &candidate.key, &validation) {
            Ok(decoded) => return Ok(decoded.claims),
            Err(error) => match error.into_kind() {
                ErrorKind::InvalidSignature => {}
                kind => {
                    refused = refusal(kind, issuer, audience);
                    break;
                }
            },
        }
    }
    Err(refused)
}

fn refusal(kind: ErrorKind, issuer: &str, audience: &str) -> TokenError {
    match kind {
        ErrorKind::ExpiredSignature => TokenError::Expired,
        ErrorKind::ImmatureSignature => TokenError::NotYet,
        ErrorKind::InvalidAudience => TokenError::Audience(audience.to_owned()),
        ErrorKind::InvalidIssuer => TokenError::Issuer(issuer.to_owned()),
        ErrorKind::InvalidAlgorithm | ErrorKind::UnsupportedAlgorithm => TokenError::Algorithm,
        ErrorKind::MissingRequiredClaim(claim) => {
            TokenError::Malformed(format!("it has no claim {claim:?}"))
        }
        ErrorKind::InvalidClaimFormat(claim) => {
            TokenError::Malformed(format!("its claim {claim:?} has an impossible value"))
        }
        _ => TokenError::Malformed("its claims are not what tokens of kvpool have".to_owned()),
    }
}

fn names_unknown_algorithm(token: &str) -> bool {
    #[derive(Deserialize)]
    struct Named {
        alg: String,
    }
    let head = token.split('.').next().unwrap_or_default();
    part::<Named>(head).is_some_and(|named| !named.alg.is_empty())
}

/// The token of a header `Authorization: Bearer TOKEN`; `None` for another scheme.
pub fn bearer(value: &str) -> Option<&str> {
    // RFC 9110: the scheme is compared without regard to case.
    let (scheme, token) = value.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then_some(token.trim())
}

/// The claims of a token, without any check: only for its own holder, and for people.
pub fn peek(token: &str) -> Option<Map<String, Value>> {
    part(token.trim().split('.').nth(1)?)
}

fn part<T: serde::de::DeserializeOwned>(encoded: &str) -> Option<T> {
    use base64::Engine;
    let raw = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(encoded);
    serde_json::from_slice(&raw.ok()?).ok()
}
