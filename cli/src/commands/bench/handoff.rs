//! `kvctl bench handoff`.

use crate::context::Context;
use crate::exit;
use crate::handoff::{self, Load, PAGE_BYTES, Report};
use crate::size::parse_size;
use bytesize::ByteSize;
use clap::value_parser;
use std::path::PathBuf;

/// The most pages of one hand-off: 16 GiB.
const MAX_PAGES: u32 = 16 << 10;

/// Measure hand-offs of KV between two sessions, beside bare TCP
///
/// Both ends are in this process, connected over loopback. The command needs no pool and ignores --master.
/// Each round moves the same bytes by each case: bare TCP, push, pull, two ranks to one, and layer by layer.
/// The table has the medians of the rounds: the rate of each case, and its ratio to bare TCP of the same round.
///
/// The command takes six times --size of memory.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl bench handoff
  kvctl bench handoff --size 64MiB --rounds 3
  kvctl bench handoff --output json | jq .cases.push.of_tcp")]
pub(super) struct Args {
    /// Bytes of one hand-off: whole MiB, at most 16GiB
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    size: ByteSize,
    /// How often each case is measured
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Streams of bare TCP. A hand-off uses two connections to each rank
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u32).range(1..=64))]
    streams: u32,
    /// Also write the results to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures and reports.
pub(super) async fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    let load = args.load()?;
    super::warn_of_build();
    let report = handoff::run(load).await?;
    super::write_json(args.json.as_deref(), &report)?;
    context.output.show(&report, Report::tables)
}

impl Args {
    fn load(&self) -> Result<Load, exit::Usage> {
        let bytes = self.size.as_u64();
        let pages = u32::try_from(bytes / PAGE_BYTES);
        match pages {
            Ok(pages @ 1..=MAX_PAGES) if bytes.is_multiple_of(PAGE_BYTES) => Ok(Load {
                pages,
                rounds: self.rounds,
                streams: self.streams,
            }),
            _ => Err(exit::Usage(
                "--size must be whole MiB from 1MiB to 16GiB".to_owned(),
            )),
        }
    }
}
