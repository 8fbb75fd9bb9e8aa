//! Rights on the HTTP port: which paths need a token, and with which role.
//!
//! A program sends `Authorization: Bearer TOKEN`. A browser asks its user for a name and a password,
//! and the password is the token: `Authorization: Basic`. A token in a URL would stay in logs.

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kvpool_auth::{Authority, Roles, TokenError};
use kvpool_types::Code;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The header that carries the stable code of a refusal.
const CODE_HEADER: &str = "kvpool-code";

/// Paths that may need no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum HttpOpen {
    /// `/health`, `/healthz` and `/readyz`.
    Health,
    /// `/metrics`.
    Metrics,
    /// No path.
    None,
}

impl HttpOpen {
    /// Orchestrators have no token for probes.
    pub const DEFAULT: &[Self] = &[Self::Health];
}

/// The right that a path takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// None, where the setting names this group.
    OpenAs(HttpOpen),
    /// The role operator or admin for the whole pool.
    Watcher,
}

/// The paths that do not need [`Need::Watcher`]. All other paths show the whole pool.
const PATHS: &[(&str, Need)] = &[
    ("/health", Need::OpenAs(HttpOpen::Health)),
    ("/healthz", Need::OpenAs(HttpOpen::Health)),
    ("/readyz", Need::OpenAs(HttpOpen::Health)),
    ("/metrics", Need::OpenAs(HttpOpen::Metrics)),
];

fn need(path: &str) -> Need {
    let listed = PATHS.iter().find(|(listed, _)| *listed == path);
    listed.map_or(Need::Watcher, |(_, need)| *need)
}

/// Makes the paths of `router` require a token, except the paths in `open`. Without an authority the router is
/// unchanged.
pub fn guard(router: Router, authority: Option<Arc<Authority>>, open: Vec<HttpOpen>) -> Router {
    let Some(authority) = authority else {
        return router;
    };
    let open: Arc<[HttpOpen]> = open.into();
    router.layer(axum::middleware::from_fn(
        move |request: Request, next: Next| {
            let judged = judge(&authority, &open, request.uri().path(), request.headers());
            async move {
                match judged {
                    Ok(()) => next.run(request).await,
                    Err(refusal) => refusal.into_response(),
                }
            }
        },
    ))
}

/// Why a request is refused.
#[derive(Debug)]
struct Refusal {
    code: Code,
    message: String,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = if self.code == Code::Forbidden {
            StatusCode::FORBIDDEN
        } else {
            StatusCode::UNAUTHORIZED
        };
        let mut response = (status, self.message + "\n").into_response();
        let headers = response.headers_mut();
        headers.insert(CODE_HEADER, HeaderValue::from(self.code.to_wire()));
        if status == StatusCode::UNAUTHORIZED {
            let asked = r#"Basic realm="kvpool: the password is a token", charset="UTF-8""#;
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            headers.append(header::WWW_AUTHENTICATE, HeaderValue::from_static(asked));
        }
        response
    }
}

fn judge(
    authority: &Authority,
    open: &[HttpOpen],
    path: &str,
    headers: &HeaderMap,
) -> Result<(), Refusal> {
    if let Need::OpenAs(group) = need(path)
        && open.contains(&group)
    {
        return Ok(());
    }
    let refused = |error: TokenError| Refusal {
        code: error.code(),
        message: error.to_string(),
    };
    let token = token(headers).ok_or_else(|| refused(TokenError::Missing))?;
    let identity = authority.judge(&token).map_err(refused)?;
    if identity.pool_roles().has_any(Roles::WATCHERS) {
        return Ok(());
    }
    let subject = identity.subject();
    Err(Refusal {
        code: Code::Forbidden,
        message: format!(
            "{path} needs the role operator or admin for the whole pool, which the policy does not give {subject:?}"
        ),
    })
}

fn token(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    if let Some(token) = kvpool_auth::bearer(value) {
        return Some(token.to_owned());
    }
    let (scheme, value) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(value.trim()).ok()?).ok()?;
    decoded
        .split_once(':')
        .map(|(_, password)| password.to_owned())
}
