//! `kvctl token`.

mod create;
mod inspect;
mod rotate;

use crate::context::Context;
use clap::Subcommand;

/// Make keys and tokens for a pool without an issuer, and look at tokens
///
/// A pool asks for tokens when its daemons get --auth-jwks, --auth-issuer and --auth-policy.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl token create --subject node-1 --role node
  kvctl token create --subject team-a --role writer --in team-a --ttl 30days
  kvctl token inspect kvpool-auth/team-a.token --dir kvpool-auth
  kvctl token rotate")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Create(create::Args),
    Inspect(inspect::Args),
    Rotate(rotate::Rotate),
    Forget(rotate::Forget),
}

/// The issuer of tokens that are made here.
const ISSUER: &str = "kvctl";
/// The key that signs, in a directory of `create`.
const SIGNING_KEY: &str = "signing-key.json";
/// The public keys in a directory of `create`.
const JWKS: &str = "jwks.json";
/// The policy in a directory of `create`.
const POLICY: &str = "policy.toml";

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    match args.what {
        What::Create(args) => create::run(&args, context),
        What::Inspect(args) => inspect::run(&args, context),
        What::Rotate(args) => rotate::rotate(&args, context).await,
        What::Forget(args) => rotate::forget(&args, context),
    }
}
