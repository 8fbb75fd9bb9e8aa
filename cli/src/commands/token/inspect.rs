//! `kvctl token inspect`.

use super::{ISSUER, JWKS, POLICY};
use crate::context::Context;
use crate::exit;
use anyhow::Context as _;
use kvpool_auth::{AuthSettings, Authority, Role, now, peek};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Show what a token says, and whether a pool would take it
///
/// The token itself is not printed. Without --dir nothing is verified.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl token inspect /var/run/secrets/kvpool/token
  kvctl token inspect kvpool-auth/team-a.token --dir kvpool-auth")]
pub(super) struct Args {
    /// File with the token [default: --token-file]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Directory with jwks.json and policy.toml, by which to verify the token
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Issuer: the --auth-issuer of the daemons
    #[arg(long, value_name = "NAME", default_value = ISSUER)]
    issuer: String,
    /// Audience: the --auth-audience of the daemons
    #[arg(long, value_name = "NAME", default_value = AuthSettings::DEFAULT_AUDIENCE)]
    audience: String,
}

#[derive(Serialize)]
struct Shown {
    claims: Map<String, Value>,
    /// In seconds; negative after the end.
    expires_in: Option<i64>,
    /// The roles anywhere, if the token is verified and taken.
    roles: Option<Vec<&'static str>>,
    /// The patterns of the namespaces of each role; none for a role of the whole pool.
    namespaces: BTreeMap<&'static str, Vec<String>>,
    /// Why the pool would refuse it.
    refused: Option<String>,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    let file = args
        .file
        .as_ref()
        .or(context.connection.token_file.as_ref());
    let file = file.ok_or_else(|| exit::Usage("name the file with the token".to_owned()))?;
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("cannot read {}", file.display()))?;
    let token = text.trim();
    let claims = peek(token);
    let claims = claims.with_context(|| format!("{} holds no JWT", file.display()))?;
    let expires = claims.get("exp").and_then(Value::as_i64);
    let judged = args.dir.as_ref().map(|dir| {
        let authority = Authority::open(AuthSettings {
            jwks: dir.join(JWKS),
            issuer: args.issuer.clone(),
            audience: args.audience.clone(),
            policy: dir.join(POLICY),
        })?;
        Ok::<_, anyhow::Error>(authority.judge(token))
    });
    let judged = judged.transpose()?;
    let judged = judged.map(|judged| match judged {
        Ok(known) if known.any_roles().is_empty() => {
            Err("the policy gives its subject no role".to_owned())
        }
        Ok(known) => Ok(known),
        Err(error) => Err(error.to_string()),
    });
    let is_refused = matches!(judged, Some(Err(_)));
    let mut namespaces = BTreeMap::new();
    let (roles, refused) = match judged {
        None => (None, None),
        Some(Err(why)) => (None, Some(why)),
        Some(Ok(known)) => {
            let roles: Vec<Role> = known.any_roles().iter().collect();
            let of = |role: &Role| (role.label(), known.namespaces_of(*role));
            namespaces.extend(roles.iter().map(of));
            let roles = roles.into_iter().map(Role::label);
            (Some(roles.collect()), None)
        }
    };
    let shown = Shown {
        claims,
        expires_in: expires.map(|at| at.saturating_sub(i64::try_from(now()).unwrap_or(i64::MAX))),
        roles,
        namespaces,
        refused,
    };
    context.output.show(&shown, table)?;
    if is_refused {
        anyhow::bail!("a pool with these keys and this policy refuses the token");
    }
    Ok(())
}

/// A role with its namespaces: `writer in team-a, team-b`.
fn role_in(shown: &Shown, role: &str) -> String {
    match shown.namespaces.get(role).map(Vec::as_slice) {
        None | Some([]) => role.to_owned(),
        Some(patterns) => format!("{role} in {}", patterns.join(", ")),
    }
}

fn table(shown: &Shown) -> String {
    let claims = shown.claims.iter();
    let mut lines: Vec<String> = claims
        .map(|(name, value)| format!("{name}: {value}"))
        .collect();
    lines.push(match shown.expires_in {
        None => "it names no end: a pool refuses it".to_owned(),
        Some(left) => {
            let time = Duration::from_secs(left.unsigned_abs());
            let time = humantime::format_duration(time);
            if left < 0 {
                format!("expired {time} ago")
            } else {
                format!("expires in {time}")
            }
        }
    });
    lines.push(match (&shown.roles, &shown.refused) {
        (_, Some(why)) => format!("refused: {why}"),
        (Some(roles), None) => {
            let roles: Vec<String> = roles.iter().map(|role| role_in(shown, role)).collect();
            format!("verified; roles: {}", roles.join("; "))
        }
        (None, None) => "not verified: add --dir".to_owned(),
    });
    lines.join("\n")
}
