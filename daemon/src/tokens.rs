//! The flags of tokens that both daemons share, and the metrics of tokens and their files.

use crate::http_guard::HttpOpen;
use kvpool_auth::{Authority, Credentials};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGauge, Registry};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

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
    /// Issuer of tokens, exactly as in their claim iss; kvctl for tokens of `kvctl token create`
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    auth_issuer: Option<String>,
    /// Audience of tokens, which their claim aud must contain [default: kvpool]
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

/// The files with keys and policy.
struct Files {
    authority: Option<Arc<Authority>>,
    failed: IntGauge,
}

impl Collector for Files {
    fn desc(&self) -> Vec<&Desc> {
        self.failed.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let problem = self.authority.as_ref().and_then(|it| it.problem());
        self.failed.set(i64::from(problem.is_some()));
        self.failed.collect()
    }
}

/// A daemon's own token.
struct OwnToken {
    credentials: Credentials,
    begins: IntGauge,
    expires: IntGauge,
    failed: IntGauge,
}

impl OwnToken {
    fn gauges(&self) -> [&IntGauge; 3] {
        [&self.begins, &self.expires, &self.failed]
    }
}

impl Collector for OwnToken {
    fn desc(&self) -> Vec<&Desc> {
        let gauges = self.gauges().into_iter();
        gauges.flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let signed = |seconds: u64| i64::try_from(seconds).unwrap_or(i64::MAX);
        let life = self.credentials.life();
        self.begins.set(life.map_or(0, |life| signed(life.begins)));
        self.expires
            .set(life.map_or(0, |life| signed(life.expires)));
        self.failed.set(i64::from(self.credentials.has_failed()));
        let gauges = self.gauges().into_iter();
        gauges.flat_map(Collector::collect).collect()
    }
}

/// Adds to `registry` whether the JWKS and the policy can be used. The metric's name begins with `prefix`, which may be
/// empty.
pub fn watch_files(
    registry: &Registry,
    prefix: &str,
    authority: Option<Arc<Authority>>,
) -> Result<(), prometheus::Error> {
    let failed = IntGauge::new(
        format!("{prefix}auth_files_failed"),
        "1 while the JWKS or the policy cannot be used as it is; else 0.",
    )?;
    registry.register(Box::new(Files { authority, failed }))
}

/// Adds to `registry` when the daemon's own token ends, and whether its file can be used.
pub fn watch_token(
    registry: &Registry,
    prefix: &str,
    credentials: Credentials,
) -> Result<(), prometheus::Error> {
    let gauge = |name: &str, help: &str| IntGauge::new(format!("{prefix}{name}"), help);
    registry.register(Box::new(OwnToken {
        credentials,
        begins: gauge(
            "token_begins_timestamp_seconds",
            "When the daemon's own token was issued; 0 without a token, or when it does not say.",
        )?,
        expires: gauge(
            "token_expires_timestamp_seconds",
            "When the daemon's own token expires; 0 without a token.",
        )?,
        failed: gauge(
            "token_file_failed",
            "1 while the file of the daemon's own token cannot be used; else 0.",
        )?,
    }))
}
