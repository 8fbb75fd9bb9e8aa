//! One run of kvbench: selects the cases, measures them, and shows the report.

use crate::cases::{Case, Path, table};
use crate::left_out::{self, LeftOut};
use crate::machine::{self, Machine};
use crate::report::{FEWEST_PAIRS, Report, Row};
use crate::runner::{Runner, Settings};
use anyhow::{Context as _, bail};
use bytesize::ByteSize;
use clap::value_parser;
use indicatif::ProgressBar;
use kvctl::connection::control_error;
use kvctl::context::Context;
use kvctl::size::parse_size;
use kvctl::{output, progress};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The options that kvctl does not have.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of pairs: runs of a case and of its limit [default: 9; with --quick 3]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1000))]
    pairs: Option<u32>,
    /// Run only cases whose name contains one of these
    #[arg(long, value_name = "PATTERN", value_delimiter = ',')]
    only: Vec<String>,
    /// List the cases and their goals; measure nothing
    #[arg(long)]
    list: bool,
    /// Few pairs, short windows, little memory: a smoke test, not a measurement
    #[arg(long)]
    quick: bool,
    /// Memory that transfers cycle through on each side; cases with larger batches are skipped
    /// [default: the size of the largest cache; with --quick 128 MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    span: Option<ByteSize>,
    /// Add the cases with 1,000,000 blocks in a pool
    #[arg(long)]
    large: bool,
    /// Add the cases of pools that ask for tokens, and of pools with TLS
    #[arg(long)]
    secured: bool,
    /// Give each store node an SSD medium of this size, beside its memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    ssd: Option<ByteSize>,
    /// How long full/node-loss measures puts after the node's death
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "9s")]
    node_loss: Duration,
    /// Also write all results to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const PAIRS: u32 = 9;
const QUICK_PAIRS: u32 = 3;
const QUICK_SPAN: u64 = machine::SPAN_STEP;

/// Measures the selected cases and prints the report, or lists them.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let foreign = context.connection.master.is_some();
    let all = table();
    let cases = select(&all, &args, foreign);
    if args.list {
        return context.output.show(&listing(&cases), |lines| list(lines));
    }
    if cases.is_empty() {
        bail!("no case matches --only: --list shows the names");
    }
    let machine = Machine::read();
    if !machine.optimised {
        tracing::warn!("this build is not optimised: its results are meaningless");
    }
    let span = if args.quick {
        QUICK_SPAN
    } else {
        machine.span()
    };
    let span = if let Some(span) = args.span {
        span.as_u64()
    } else if foreign {
        let client = context.connection.connect().await?;
        let stats = client.stats().await.map_err(control_error)?;
        machine::share_of(stats.capacity.0, span)
    } else {
        span
    };
    let no_rdma = left_out::no_rdma(&cases, &context.connection).await?;
    let (mut cases, left_out) = left_out::part(cases, span, no_rdma.as_deref());
    if cases.is_empty() {
        let reasons: Vec<String> = left_out.iter().map(LeftOut::text).collect();
        bail!("no case can run: {}", reasons.join("; "));
    }
    let pairs = args
        .pairs
        .unwrap_or(if args.quick { QUICK_PAIRS } else { PAIRS });
    let (veth, tcp) = left_out::path(&mut cases, &context.connection);
    let begin = Instant::now();
    let bar = progress::bar(cases.len() as u64, "cases");
    let mut rows = Vec::with_capacity(cases.len());
    // In turn: each runner has its own memory for pools and limits.
    for (path, veth) in [(Path::Loopback, None), (Path::Veth, veth)] {
        let cases: Vec<Case> = cases
            .iter()
            .filter(|case| case.place.path == path)
            .cloned()
            .collect();
        if cases.is_empty() {
            continue;
        }
        let mut runner = Runner::start(Settings {
            pairs,
            quick: args.quick,
            span,
            ssd: args.ssd.map(|size| size.as_u64()),
            node_loss: args.node_loss,
            connection: context.connection.clone(),
            veth,
        })
        .await?;
        let measured = measure(&mut runner, &cases, &all, &bar).await;
        // Also after a failure: the run removes its blocks from an existing pool.
        let stopped = runner.stop().await;
        if let (Err(_), Err(error)) = (&measured, &stopped) {
            tracing::warn!("blocks of this run may still be in the pool: {error:#}");
        }
        rows.extend(measured?);
        stopped?;
    }
    bar.finish_and_clear();
    let order = |row: &Row| cases.iter().position(|case| case.id == row.case);
    rows.sort_by_key(order);
    let (goals, goals_met) = Report::count_goals(&rows);
    let report = Report {
        machine,
        pairs,
        span_bytes: span,
        quick: args.quick,
        foreign_pool: foreign,
        cases: rows,
        tcp,
        left_out,
        goals,
        goals_met,
        fewest_pairs: FEWEST_PAIRS,
        seconds: begin.elapsed().as_secs_f64(),
    };
    if let Some(path) = &args.json {
        let text = serde_json::to_vec_pretty(&report)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    context.output.show(&report, Report::tables)
}

async fn measure(
    runner: &mut Runner,
    cases: &[Case],
    all: &[Case],
    bar: &ProgressBar,
) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::with_capacity(cases.len());
    for (number, case) in cases.iter().enumerate() {
        bar.set_message(case.id.clone());
        let row = Box::pin(runner.run(case, all)).await;
        rows.push(row.with_context(|| case.id.clone())?);
        runner
            .forget(cases.get(number + 1..).unwrap_or_default())
            .await?;
        bar.inc(1);
    }
    Ok(rows)
}

/// The selected cases that can run here.
fn select(all: &[Case], args: &Args, foreign: bool) -> Vec<Case> {
    all.iter()
        .filter(|case| args.large || !case.is_large())
        .filter(|case| args.secured || !case.is_secured())
        .filter(|case| !foreign || !case.needs_own_pool())
        .filter(|case| {
            args.only.is_empty() || args.only.iter().any(|part| case.id.contains(part.as_str()))
        })
        .cloned()
        .collect()
}

#[derive(serde::Serialize)]
struct Line {
    case: String,
    group: &'static str,
    unit: &'static str,
    goal: String,
}

fn listing(cases: &[Case]) -> Vec<Line> {
    cases
        .iter()
        .map(|case| Line {
            case: case.id.clone(),
            group: case.group,
            unit: case.metric.unit(),
            goal: case.goal.text(case.metric),
        })
        .collect()
}

fn list(lines: &[Line]) -> String {
    let mut table = output::table(["case", "about", "in", "goal"]);
    for line in lines {
        table.add_row([&line.case, line.group, line.unit, &line.goal]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args as _, FromArgMatches};

    fn parse(arguments: &[&str]) -> Args {
        let command = Args::augment_args(clap::Command::new("kvbench").no_binary_name(true));
        Args::from_arg_matches(&command.try_get_matches_from(arguments).unwrap()).unwrap()
    }

    fn names(arguments: &[&str], foreign: bool) -> Vec<String> {
        let cases = select(&table(), &parse(arguments), foreign);
        cases.into_iter().map(|case| case.id).collect()
    }

    #[test]
    fn only_selects_by_parts_of_names() {
        let some = names(&["--only", "readers-4,match_prefix/64"], false);
        let expected = [
            "shm/readers-4/32x1MiB",
            "tcp/readers-4/32x1MiB",
            "match_prefix/64",
        ];
        assert_eq!(some, expected);
        assert!(names(&["--only", "no such case"], false).is_empty());
    }

    #[test]
    fn long_cases_run_only_with_large() {
        let large = "exist/8192/1000000".to_owned();
        assert!(!names(&[], false).contains(&large));
        assert!(names(&["--large"], false).contains(&large));
    }

    #[test]
    fn cases_of_guarded_pools_run_only_with_secured() {
        let guarded = |name: &String| name.starts_with("tokens/") || name.starts_with("tls/");
        assert!(!names(&[], false).iter().any(guarded));
        let secured = names(&["--secured"], false);
        for name in [
            "tokens/shm/get/32x1MiB",
            "tokens/exist/1",
            "tls/tcp/get/32x1MiB",
            "tls/exist/1",
        ] {
            assert!(secured.contains(&name.to_owned()), "{name}");
        }
        assert!(!secured.iter().any(|name| name.starts_with("tls/shm/")));
        assert!(!names(&["--secured"], true).iter().any(guarded));
    }

    #[test]
    fn an_existing_pool_is_measured_from_outside_only() {
        let foreign = names(&["--large"], true);
        assert!(foreign.contains(&"tcp/get/32x1MiB".to_owned()));
        assert!(foreign.contains(&"exist/8192".to_owned()));
        for part in [
            "memory/master",
            "memory/node",
            "local/",
            "durable",
            "fresh",
            "cpu",
        ] {
            let seen = foreign.iter().filter(|name| !name.starts_with("machine/"));
            assert!(!seen.clone().any(|name| name.contains(part)), "{part}");
        }
    }
}
