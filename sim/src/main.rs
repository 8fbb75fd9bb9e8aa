//! `kvpool-sim`: runs histories of a simulated pool.

use clap::Parser;
use kvpool_sim::{Plan, Report, run, shrink};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Runs histories of a simulated pool. A history that breaks a rule is made smaller and printed.
///
/// It ends with 0 when no rule was broken, and with 1 otherwise. After the first broken rule no further seed begins,
/// unless `--keep-going` is there. Up to 150 smaller histories are tried. RUST_LOG shows what the processes log. A seed
/// means another history in another revision.
#[derive(Debug, Parser)]
struct Arguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print the trace of each history.
    #[arg(long)]
    trace: bool,
    /// Print a failing history as it is.
    #[arg(long)]
    no_shrink: bool,
    /// Go on after a failure, and list all failing seeds.
    #[arg(long)]
    keep_going: bool,
    /// Histories at a time, each on a thread of its own [default: 1 with `--trace`, else one a core].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    jobs: Option<u64>,
}

#[derive(Debug, Default)]
struct Totals {
    runs: u64,
    simulated_ms: u64,
    events: u64,
    puts: u64,
    hits: u64,
    misses: u64,
    failures: u64,
    disk_writes: u64,
    disk_reads: u64,
    broken: Vec<(u64, String)>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if std::env::var_os("RUST_LOG").is_some() {
        tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_writer(std::io::stderr)
            .without_time()
            .init();
    }
    let begun = Instant::now();
    let totals = run_all(&arguments);
    let seconds = begun.elapsed().as_secs_f64().max(0.001);
    let hours = |ms: u64| ms as f64 / 3_600_000.0;
    println!(
        "{} seeds in {seconds:.1} s: {:.2} simulated hours ({:.0} an hour), {} events ({:.0} a second), \
         {} puts, {} hits, {} misses, {} failures, {} writes and {} reads of disks",
        totals.runs,
        hours(totals.simulated_ms),
        hours(totals.simulated_ms) / seconds * 3600.0,
        totals.events,
        totals.events as f64 / seconds,
        totals.puts,
        totals.hits,
        totals.misses,
        totals.failures,
        totals.disk_writes,
        totals.disk_reads
    );
    if totals.broken.is_empty() {
        println!("no rule was broken");
        return ExitCode::SUCCESS;
    }
    // Seeds begin in order, so the first of them is the lowest that breaks a rule.
    let mut broken = totals.broken;
    broken.sort_unstable();
    for (seed, violation) in broken {
        println!("seed {seed}: {violation}");
    }
    ExitCode::FAILURE
}

fn run_all(arguments: &Arguments) -> Totals {
    let totals = Mutex::new(Totals::default());
    let next = AtomicU64::new(arguments.seed);
    let end = arguments.seed.saturating_add(arguments.seeds);
    let stopped = AtomicBool::new(false);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let by_default = if arguments.trace { 1 } else { cores };
    let jobs = arguments.jobs.unwrap_or(by_default);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while !stopped.load(Ordering::Acquire) {
                    let seed = next.fetch_add(1, Ordering::AcqRel);
                    if seed >= end {
                        return;
                    }
                    let plan = Plan::of(seed);
                    let report = run(&plan);
                    let violation = report.violation.clone();
                    let mut totals = totals
                        .lock()
                        .unwrap_or_else(|poisoned| poisoned.into_inner());
                    add(&mut totals, &report);
                    if arguments.trace {
                        print(&plan, &report);
                    }
                    let Some(violation) = violation else { continue };
                    totals.broken.push((seed, violation.clone()));
                    if arguments.keep_going {
                        println!("seed {seed}: {violation}");
                        continue;
                    }
                    stopped.store(true, Ordering::Release);
                    if !arguments.no_shrink {
                        let (plan, report) = shrink(&plan, report);
                        println!(
                            "seed {seed} breaks a rule; the smallest history found that does:"
                        );
                        print(&plan, &report);
                    }
                }
            });
        }
    });
    totals
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn add(totals: &mut Totals, report: &Report) {
    totals.runs += 1;
    totals.simulated_ms += report.simulated_ms;
    totals.events += report.events;
    totals.puts += report.puts;
    totals.hits += report.hits;
    totals.misses += report.misses;
    totals.failures += report.failures;
    totals.disk_writes += report.disk_writes;
    totals.disk_reads += report.disk_reads;
}

fn print(plan: &Plan, report: &Report) {
    print!("{plan}");
    for line in &report.trace {
        println!("{line}");
    }
    if let Some(violation) = &report.violation {
        println!("BROKEN: {violation}");
    }
}
