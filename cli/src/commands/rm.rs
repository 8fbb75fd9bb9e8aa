//! `kvctl rm`.

use crate::connection::{parse_key, remove_error};
use crate::context::Context;
use crate::exit;
use anyhow::bail;
use kvpool_client::Remove;
use kvpool_types::{Code, Key};
use serde::Serialize;

/// Remove blocks
///
/// Without --force, leased and pinned blocks stay and the exit code is 1. With --force, a reader that holds a
/// lease still gets the correct bytes or a miss. Exits with code 3 if a named key is not in the pool.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl rm greeting farewell
  kvctl rm --pattern '^tmp/'
  kvctl rm --all --namespace chat --force")]
#[group(skip)]
pub(crate) struct Args {
    /// The keys
    #[arg(value_parser = parse_key, required_unless_present_any = ["pattern", "all"])]
    keys: Vec<Key>,
    /// Remove every block of the namespace in whose key this regular expression matches anywhere
    #[arg(long, value_name = "REGEX", conflicts_with_all = ["keys", "all"])]
    pattern: Option<String>,
    /// Remove every block of the namespace
    #[arg(long, conflicts_with = "keys")]
    all: bool,
    /// Remove leased and pinned blocks too
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct Outcome {
    removed: u64,
    kept: u64,
    missing: Vec<String>,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let what = if let Some(pattern) = args.pattern {
        Remove::Pattern(pattern)
    } else if args.all {
        Remove::Namespace
    } else {
        Remove::Keys(args.keys.clone())
    };
    let client = context.connection.connect().await?;
    let removed = client
        .remove(what, args.force)
        .await
        .map_err(remove_error)?;
    let outcome = Outcome {
        removed: removed.removed,
        kept: removed.kept,
        missing: args
            .keys
            .iter()
            .zip(&removed.codes)
            .filter(|(_, code)| **code == Code::Missing)
            .map(|(key, _)| key.to_string())
            .collect(),
    };
    context.output.show(&outcome, |outcome| {
        format!("removed {}, kept {}", outcome.removed, outcome.kept)
    })?;
    if outcome.kept > 0 {
        bail!(
            "{} blocks are leased or pinned: wait until their leases end, or use --force",
            outcome.kept
        );
    }
    let unknown = |code: &&Code| !matches!(code, Code::Ok | Code::Missing | Code::Leased);
    if let Some(code) = removed.codes.iter().find(unknown) {
        bail!(
            "{code}: some requests were not answered, so the remaining keys may or may not be removed"
        );
    }
    if !outcome.missing.is_empty() {
        return Err(exit::Missing(outcome.missing.join(", ")).into());
    }
    Ok(())
}
