//! `kvctl get`.

use crate::cli::Context;
use crate::connection::{get_error, parse_key};
use crate::exit;
use anyhow::Context as _;
use kvpool_types::Key;
use std::io::Write;
use std::path::PathBuf;

/// Get a block's bytes
///
/// They are compared with the checksum of the put before a byte is written. Exits with 3 when the
/// pool does not have the block.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl get greeting
  kvctl get greeting -o greeting.bin")]
pub(crate) struct Args {
    /// The block's key
    #[arg(value_parser = parse_key)]
    key: Key,
    /// Where the bytes go [default: standard output]
    #[arg(short = 'o', long = "to", value_name = "FILE")]
    to: Option<PathBuf>,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let bytes = client
        .get(&args.key)
        .await
        .map_err(get_error)?
        .ok_or_else(|| exit::Missing(args.key.to_string()))?;
    match &args.to {
        Some(path) => {
            std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
        }
        None => std::io::stdout()
            .lock()
            .write_all(&bytes)
            .context("cannot write"),
    }
}
