//! `kvctl ls`.

use crate::connection::control_error;
use crate::context::Context;
use crate::output;
use serde::Serialize;

/// List blocks
///
/// Takes no leases and changes no block's recency.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl ls
  kvctl ls '^llama' --limit 20
  kvctl ls --namespace chat --output json | jq -r '.[].key'")]
pub(crate) struct Args {
    /// Only keys in which this regular expression matches anywhere [default: all keys]
    pattern: Option<String>,
    /// Maximum number of blocks to show
    #[arg(long, value_name = "N", default_value_t = 1000)]
    limit: u32,
}

#[derive(Serialize)]
struct Block {
    key: String,
    length: u64,
    replicas: u32,
    leased: bool,
    pinned: bool,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let pattern = args.pattern.unwrap_or_default();
    let mut blocks: Vec<Block> = Vec::new();
    let mut page = None;
    loop {
        let left = args
            .limit
            .saturating_sub(u32::try_from(blocks.len()).unwrap_or(u32::MAX));
        if left == 0 {
            break;
        }
        let listing = client
            .list(&pattern, left, page.as_ref())
            .await
            .map_err(control_error)?;
        blocks.extend(listing.blocks.into_iter().map(|block| Block {
            key: block.key,
            length: block.length.0,
            replicas: block.replicas,
            leased: block.leased,
            pinned: block.pinned,
        }));
        page = listing.next;
        if page.is_none() {
            break;
        }
    }
    context.output.show(&blocks, |blocks| table(blocks))?;
    if page.is_some() {
        tracing::info!(
            "only the first {} blocks are shown: raise --limit to see more",
            blocks.len()
        );
    }
    Ok(())
}

fn table(blocks: &[Block]) -> String {
    let mut table = output::table(["key", "length", "replicas", "leased", "pinned"]);
    for block in blocks {
        let mark = |set: bool| if set { "yes" } else { "" }.to_owned();
        table.add_row([
            block.key.clone(),
            output::bytes(block.length),
            block.replicas.to_string(),
            mark(block.leased),
            mark(block.pinned),
        ]);
    }
    output::align_right(&mut table, 1..3);
    table.to_string()
}
