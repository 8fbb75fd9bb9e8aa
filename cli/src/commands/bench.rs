//! `kvctl bench`.

use crate::bench::{memcpy, pool, tcp};
use crate::cli::Context;
use crate::stats::{gigabytes_a_second, median};
use crate::{output, progress};
use clap::value_parser;
use serde::Serialize;

/// Measure puts and gets, beside memcpy and a bare TCP stream
///
/// Each round copies cold blocks of 1 MiB with memcpy, sends as much through a bare TCP connection
/// over loopback, and then puts and gets through the pool: batches of 32 blocks of 1 MiB, and single
/// blocks of 4 KiB. Rates are medians over the rounds; latencies are over all calls. What is put is
/// checked after each get, and removed at the end of its round.
///
/// A figure is worth something on a machine that does nothing else.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl bench
  kvctl bench --transport tcp --rounds 9 --output json")]
pub(crate) struct Args {
    /// How many rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u32).range(1..))]
    rounds: u32,
}

#[derive(Serialize)]
struct Result {
    transport: crate::connection::Transport,
    rounds: u32,
    memcpy_gb_per_s: f64,
    tcp_stream_gb_per_s: f64,
    operations: Vec<Operation>,
}

#[derive(Serialize)]
struct Operation {
    operation: String,
    gb_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    ratio_to_memcpy: f64,
    ratio_to_tcp_stream: f64,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let bytes = pool::LARGE.bytes();
    let mut copies = memcpy::Copies::new(pool::LARGE.block_bytes());
    let mut stream = tcp::Stream::open(bytes)?;
    let mut cases = [pool::LARGE, pool::SMALL].map(pool::Case::new);
    let (mut copied, mut streamed) = (Vec::new(), Vec::new());
    let bar = progress::bar(args.rounds.into(), "rounds");
    for round in 0..args.rounds {
        let (copy, sent) =
            tokio::task::block_in_place(|| (copies.run(pool::LARGE.blocks()), stream.run()));
        copied.push(gigabytes_a_second(bytes, copy));
        streamed.push(gigabytes_a_second(bytes, sent?));
        for case in &mut cases {
            case.round(&client, round).await?;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let memcpy = median(&copied).unwrap_or_default();
    let tcp = median(&streamed).unwrap_or_default();
    let operations = cases.iter().flat_map(pool::Case::operations);
    let result = Result {
        transport: context.connection.transport,
        rounds: args.rounds,
        memcpy_gb_per_s: memcpy,
        tcp_stream_gb_per_s: tcp,
        operations: operations
            .map(|(operation, measured)| {
                let rate = median(&measured.rates).unwrap_or_default();
                let summary = measured.calls.summary();
                Operation {
                    operation,
                    gb_per_s: rate,
                    p50_us: summary.p50_us,
                    p99_us: summary.p99_us,
                    ratio_to_memcpy: rate / memcpy,
                    ratio_to_tcp_stream: rate / tcp,
                }
            })
            .collect(),
    };
    context.output.show(&result, table)
}

fn table(result: &Result) -> String {
    let mut table = output::table(["operation", "GB/s", "p50", "p99", "of memcpy", "of TCP"]);
    let percent = |ratio: f64| format!("{:.0} %", ratio * 100.0);
    for (name, rate) in [
        ("memcpy, cold blocks of 1 MiB", result.memcpy_gb_per_s),
        ("bare TCP stream, loopback", result.tcp_stream_gb_per_s),
    ] {
        table.add_row([
            name.to_owned(),
            format!("{rate:.2}"),
            String::new(),
            String::new(),
            percent(rate / result.memcpy_gb_per_s),
            percent(rate / result.tcp_stream_gb_per_s),
        ]);
    }
    for operation in &result.operations {
        table.add_row([
            operation.operation.clone(),
            format!("{:.3}", operation.gb_per_s),
            output::micros(operation.p50_us),
            output::micros(operation.p99_us),
            percent(operation.ratio_to_memcpy),
            percent(operation.ratio_to_tcp_stream),
        ]);
    }
    output::align_right(&mut table, 1..6);
    table.to_string()
}
