//! The flags of tokens that both daemons share.

use crate::http_guard::HttpOpen;
use serde::Serialize;
use std::path::PathBuf;

/// The flags of tokens, to be flattened into a daemon's flags.
#[derive(Debug, Default, clap::Args, Serialize)]
// The daemons call their own flags so too, and clap takes a name once.
#[group(skip)]
#[command(next_help_heading = "Security")]
pub struct Flags {
    /// Ask callers for a token that one of the keys in this JWKS file has signed; a changed file is read
    /// again. Requires --auth-issuer and --auth-policy [default: nobody needs a token]
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auth_jwks: Option<PathBuf>,
    /// Issuer of tokens: their claim iss
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auth_issuer: Option<String>,
    /// Audience of tokens: one of their claim aud [default: kvpool]
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auth_audience: Option<String>,
    /// Policy that gives roles to tokens: a TOML file, read again when it changes
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auth_policy: Option<PathBuf>,
    /// HTTP paths that need no token: health, metrics, both, or none [default: health]
    #[arg(long, value_name = "PATHS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    auth_http_open: Option<Vec<HttpOpen>>,
}
