//! `kvctl get`.

use crate::connection::{control_error, get_error, parse_key};
use crate::context::Context;
use crate::exit;
use crate::output::{self, Format};
use anyhow::Context as _;
use kvpool_client::{GetBlock, GetOptions, GetOutcome, Region};
use kvpool_types::{Key, Offset};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Get a block's bytes
///
/// Verifies the block's checksum before it writes the first byte. Exits with code 3 if the pool does not have
/// the block. With --output json a miss, or a block written to a file, is reported as JSON. A block on
/// standard output is its bytes alone.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl get greeting
  kvctl get greeting -o greeting.bin")]
pub(crate) struct Args {
    /// The block's key
    #[arg(value_parser = parse_key)]
    key: Key,
    /// Write the bytes to this file [default: standard output]
    #[arg(short = 'o', long = "to", value_name = "FILE")]
    to: Option<PathBuf>,
}

#[derive(Serialize)]
struct Written<'a> {
    key: String,
    present: bool,
    length: usize,
    to: &'a Path,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let size = client.get_size(&args.key).await.map_err(control_error)?;
    let Some(length) = size else {
        return Err(exit::missing(&args.key, context.output));
    };
    let memory = Region::allocate(length).whole();
    let block = GetBlock::new(args.key.clone(), memory.clone());
    // This process ends soon, and a remaining lease would protect the block in vain.
    let options = GetOptions {
        release: true,
        ..GetOptions::default()
    };
    let found = client
        .batch_get(vec![block], &options)
        .await
        .pop()
        .context("the client returned no outcome for this get")?
        .map_err(get_error)?;
    let bytes = match found {
        GetOutcome::Hit { length, .. } => memory
            .slice(Offset(0), length)
            .context("the block is longer than the buffer")?
            .to_vec(),
        GetOutcome::Miss => return Err(exit::missing(&args.key, context.output)),
    };
    let Some(path) = &args.to else {
        return output::write(&bytes).context("cannot write to standard output");
    };
    std::fs::write(path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
    let written = Written {
        key: args.key.to_string(),
        present: true,
        length: bytes.len(),
        to: path,
    };
    match context.output {
        Format::Json => context.output.show(&written, |_| String::new()),
        Format::Table => Ok(()),
    }
}
