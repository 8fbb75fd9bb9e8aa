//! Histories of a simulated pool. One seed decides everything, so that a failure can be repeated:
//!
//! ```sh
//! KVPOOL_SIM_SEEDS=10000 cargo test -p kvpool-sim --test histories
//! cargo xtask simulate --seed 4711 --trace
//! ```

use kvpool_sim::{Noise, Plan, Report, Tenant, run, shrink};
use std::sync::atomic::{AtomicU64, Ordering};

/// The seeds of a usual run.
const USUALLY: u64 = 300;
/// Histories at a time.
const JOBS: u64 = 2;

/// Runs seeds; the first that breaks a rule is made smaller, printed, and fails the test.
fn run_all(seeds: impl Iterator<Item = u64>) -> Vec<Report> {
    let seeds: Vec<u64> = seeds.collect();
    let next = AtomicU64::new(0);
    let work = || {
        let mut reports = Vec::new();
        loop {
            let at = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap();
            let Some(seed) = seeds.get(at) else {
                return reports;
            };
            let plan = Plan::of(*seed);
            let report = run(&plan);
            if report.violation.is_some() {
                let (plan, report) = shrink(&plan, report);
                let trace = report.trace.join("\n");
                panic!("seed {seed}: {:?}\n{plan}{trace}", report.violation);
            }
            reports.push(report);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..JOBS).map(|_| scope.spawn(work)).collect();
        let reports = workers.into_iter().map(|worker| worker.join().unwrap());
        reports.flatten().collect()
    })
}

#[test]
fn every_history_of_a_pool_keeps_every_rule() {
    let seeds = std::env::var("KVPOOL_SIM_SEEDS").ok();
    let seeds = seeds.map_or(USUALLY, |seeds| seeds.parse().unwrap());
    let reports = run_all(0..seeds);
    let sum = |count: fn(&Report) -> u64| reports.iter().map(count).sum::<u64>();
    let (puts, hits) = (sum(|report| report.puts), sum(|report| report.hits));
    let (writes, reads) = (
        sum(|report| report.disk_writes),
        sum(|report| report.disk_reads),
    );
    println!(
        "{seeds} seeds: {} events, {puts} puts, {hits} hits, {} misses, {} failures, {writes} writes and \
         {reads} reads of disks",
        sum(|report| report.events),
        sum(|report| report.misses),
        sum(|report| report.failures)
    );
    // A pool that stores nothing, or finds nothing, would keep every rule.
    assert!(puts > 20 * seeds && hits > 20 * seeds);
    assert!(writes > 5 * seeds && reads > 2 * seeds);
    // A master that answers no drain would excuse every block that was lost.
    let drains = sum(|report| report.drains);
    assert!(drains > seeds / 4, "{drains} nodes were drained");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 0..8 {
        let (first, second) = (run(&Plan::of(seed)), run(&Plan::of(seed)));
        let differs = first
            .trace
            .iter()
            .zip(&second.trace)
            .position(|(one, other)| one != other);
        if let Some(at) = differs {
            panic!(
                "seed {seed}, line {at}:\n{}\n{}",
                first.trace[at], second.trace[at]
            );
        }
        assert_eq!(first.trace.len(), second.trace.len(), "seed {seed}");
    }
}

#[test]
fn without_faults_no_call_fails() {
    for seed in 0..12 {
        let plan = Plan {
            noise: Noise::default(),
            faults: Vec::new(),
            ambushes: Vec::new(),
            keeps_all: true,
            tenants: vec![Tenant::default()],
            segment_bytes: 8 << 20,
            ..Plan::of(seed)
        };
        let report = run(&plan);
        assert_eq!(report.violation, None, "seed {seed}");
        assert_eq!(report.failures, 0, "seed {seed}");
        assert!(report.puts > 0 && report.hits > 0, "seed {seed}");
    }
}
