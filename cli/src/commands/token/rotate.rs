//! `kvctl token rotate` and `kvctl token forget`.

use super::{JWKS, SIGNING_KEY};
use crate::context::Context;
use crate::{exit, output};
use anyhow::Context as _;
use kvpool_auth::issue::{SigningKey, key_ids, publish, withdraw};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// Sign with a new key from now on
///
/// The JWKS gets the new public key at once. The command waits until the daemons have read it, and then replaces the
/// signing key. Tokens of the earlier key stay valid until they expire, or until `kvctl token forget` names its id.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl token rotate
  kvctl token rotate --dir kvpool-auth --wait 2min")]
pub(super) struct Rotate {
    /// Directory of the key and the JWKS
    #[arg(long, value_name = "DIR", default_value = "kvpool-auth")]
    dir: PathBuf,
    /// Time until every daemon has the JWKS. Daemons look each second; a Kubernetes ConfigMap takes minutes
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "3s")]
    wait: Duration,
}

/// Withdraw a key, so that its tokens are refused
///
/// Daemons refuse its tokens about a second after they have the changed JWKS.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl token forget 0vNJ8kXzQf3c1x2a
  kvctl token forget --dir kvpool-auth 0vNJ8kXzQf3c1x2a")]
pub(super) struct Forget {
    /// Id of the key: `kid`
    #[arg(value_name = "KID", allow_hyphen_values = true)]
    kid: String,
    /// Directory of the JWKS
    #[arg(long, value_name = "DIR", default_value = "kvpool-auth")]
    dir: PathBuf,
}

#[derive(Serialize)]
struct Rotated {
    kid: String,
    kid_before: String,
}

#[derive(Serialize)]
struct Forgot {
    kid: String,
    /// The ids of the keys that verify tokens from now on.
    kids: Vec<String>,
}

pub(super) async fn rotate(args: &Rotate, context: &Context) -> anyhow::Result<()> {
    let file = args.dir.join(SIGNING_KEY);
    let before = SigningKey::load(&file)?;
    let key = SigningKey::generate()?;
    publish(&key, &args.dir.join(JWKS))?;
    tokio::time::sleep(args.wait).await;
    key.save(&file)?;
    let rotated = Rotated {
        kid: key.id(),
        kid_before: before.id(),
    };
    context.output.show(&rotated, |rotated| {
        format!(
            "tokens are signed with key {} from now on\n\
             once no token of key {} is used: kvctl token forget --dir {} {}",
            rotated.kid,
            rotated.kid_before,
            args.dir.display(),
            rotated.kid_before
        )
    })
}

pub(super) fn forget(args: &Forget, context: &Context) -> anyhow::Result<()> {
    let jwks = args.dir.join(JWKS);
    let there = key_ids(&jwks)?;
    if !there.contains(&args.kid) {
        let (file, ids) = (jwks.display(), there.join(", "));
        let why = format!("{file} has no key {}: it has {ids}", args.kid);
        return Err(exit::Usage(why).into());
    }
    let signing = args.dir.join(SIGNING_KEY);
    if signing.exists() {
        let signing = SigningKey::load(&signing).context("cannot tell which key signs")?;
        if signing.id() == args.kid {
            let why = "this key signs the next tokens: run `kvctl token rotate` first";
            return Err(exit::Usage(why.to_owned()).into());
        }
    }
    withdraw(&args.kid, &jwks)?;
    let forgot = Forgot {
        kid: args.kid.clone(),
        kids: key_ids(&jwks)?,
    };
    context.output.show(&forgot, |forgot| {
        let left = output::count(forgot.kids.len() as u64);
        format!("key {} is withdrawn, {left} left", forgot.kid)
    })
}
