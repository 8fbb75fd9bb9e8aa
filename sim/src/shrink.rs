//! Smaller plans that fail still: what a person reads.

use crate::plan::{Mix, Noise, Plan};
use crate::world::{HANGS, Report, run};

/// The most histories that are tried.
const MOST_RUNS: usize = 150;

/// A smaller plan that breaks a rule, and its report.
pub fn shrink(plan: &Plan, report: Report) -> (Plan, Report) {
    let (mut best, mut found) = (plan.clone(), report);
    if found.violation.as_deref() == Some(HANGS) {
        // Each smaller one that hangs too takes minutes.
        return (best, found);
    }
    let broken = found.violation.clone();
    let kept = broken.as_deref().map(kind);
    let mut runs = 0;
    loop {
        let before = best.clone();
        for candidate in candidates(&before) {
            runs += 1;
            let report = run(&candidate);
            if report.violation.as_deref().map(kind) == kept {
                (best, found) = (candidate, report);
                break;
            }
            if runs >= MOST_RUNS {
                return (best, found);
            }
        }
        if best == before {
            return (best, found);
        }
    }
}

/// A violation without the words that have a number, as names of keys have: a smaller plan must break the same rule.
fn kind(violation: &str) -> Vec<&str> {
    let has_digit = |word: &&str| word.contains(|letter: char| letter.is_ascii_digit());
    let words = violation.split_whitespace();
    words.filter(|word| !has_digit(word)).collect()
}

/// Plans with one thing less, the boldest first.
fn candidates(plan: &Plan) -> Vec<Plan> {
    let mut plans = Vec::new();
    let mut add = |change: &dyn Fn(&mut Plan)| {
        let mut smaller = plan.clone();
        change(&mut smaller);
        if smaller != *plan {
            plans.push(smaller);
        }
    };
    add(&|plan| plan.noise = Noise::default());
    let half = plan.faults.len() / 2;
    if half > 0 {
        add(&|plan| plan.faults.truncate(half));
        add(&|plan| drop(plan.faults.drain(..half)));
    }
    for at in 0..plan.faults.len() {
        add(&|plan| {
            plan.faults.remove(at);
        });
    }
    for at in 0..plan.ambushes.len() {
        add(&|plan| {
            plan.ambushes.remove(at);
        });
    }
    add(&|plan| plan.noise.lost = 0);
    add(&|plan| plan.noise.twice = 0);
    add(&|plan| plan.noise.slow = 0);
    add(&|plan| plan.noise.slow_disk = 0);
    add(&|plan| plan.noise.flipped = 0);
    add(&|plan| plan.noise.flipped_writes = 0);
    add(&|plan| plan.disk_bytes = 0);
    add(&|plan| plan.pins.clear());
    add(&|plan| plan.mix = Mix::USUAL);
    add(&|plan| plan.settings_late_ms = 0);
    add(&|plan| plan.two_replicas = false);
    add(&|plan| plan.departs = None);
    add(&|plan| plan.writes_per_day = None);
    add(&|plan| plan.tenants.truncate(1));
    add(&|plan| plan.clients = plan.clients.saturating_sub(1).max(1));
    add(&|plan| plan.tasks = plan.tasks.saturating_sub(1).max(1));
    add(&|plan| plan.nodes = plan.nodes.saturating_sub(1).max(1));
    add(&|plan| plan.keys = (plan.keys / 2).max(1));
    add(&|plan| plan.length_ms = plan.length_ms * 2 / 3);
    add(&|plan| plan.drift.iter_mut().for_each(|ppm| *ppm = 0));
    plans
}
