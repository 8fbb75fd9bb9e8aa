//! The effect on users when the leader fails in each possible way.
//!
//! `KVPOOL_FAILOVERS=20` kills the leader this many times, and applies each other fault a quarter
//! as often. The defaults keep the suite quick. The test asserts the rules: no acknowledged block
//! is lost, no byte is wrong, no epoch goes back, and the pool recovers. It prints the time that
//! this takes beside the goal, because a busy machine must not fail the suite.

use kvpool_tests::masters::{self, ETCD, Layout, Options, POOL, Pool, party};
use kvpool_tests::net::Net;
use kvpool_tests::outage::{Load, Report, Summary, What};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The goal for puts and lookups to work again after the leader's process has died.
const GOAL_GONE: Duration = Duration::from_secs(3);
/// The goal after the leader hangs or is cut off.
const GOAL_CUT: Duration = Duration::from_secs(6);
/// The limit in every case.
const LIMIT: Duration = Duration::from_secs(30);
/// How long a lasting fault is kept: longer than a leader keeps its term without etcd.
const HELD: Duration = Duration::from_secs(7);

/// A fault of a leader.
struct Fault {
    name: &'static str,
    /// How often the fault is applied, of 20.
    share: u32,
    /// The goal for the longest time without a put or lookup.
    goal: Duration,
    /// Whether the fault must make another master lead.
    deposes: bool,
    hurt: fn(&mut Pool, usize),
    repair: fn(&mut Pool, usize),
}

impl Fault {
    fn runs(&self) -> u32 {
        let asked = std::env::var("KVPOOL_FAILOVERS").ok();
        match asked.and_then(|text| text.parse::<u32>().ok()) {
            Some(kills) => (kills * self.share).div_ceil(20),
            None => self.share.div_ceil(10),
        }
    }
}

/// Applies a fault to the leader of a pool under load, again and again, and prints the effect.
async fn fail_over(fault: &Fault, layout: Layout) {
    let options = Options {
        layout,
        ..Options::default()
    };
    let mut pool = Pool::start(options).unwrap();
    let mut load = Load::default().start(&pool.client_options()).await.unwrap();
    for _ in 0..fault.runs() {
        let leader = pool.wait_settled().unwrap();
        pool.wait_live(2).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let begun = load.event(fault.name);
        (fault.hurt)(&mut pool, leader.index);
        if fault.deposes {
            let next = pool.wait_leader(leader.epoch).unwrap();
            println!("{}: {leader:?}, then {next:?}", fault.name);
        } else {
            tokio::time::sleep_until((begun + HELD).into()).await;
        }
        let recovered = load.wait_success(&What::ALL, Instant::now(), LIMIT).await;
        recovered.unwrap_or_else(|error| panic!("{error}\n{}", pool.logs()));
        load.event("the same, when it is over");
        (fault.repair)(&mut pool, leader.index);
    }
    pool.wait_settled().unwrap();
    let report = load.end().await.unwrap();
    judge(fault, &pool, &report).await;
}

async fn judge(fault: &Fault, pool: &Pool, report: &Report) {
    let mut summary = Summary::default();
    summary.add(report);
    let worst = summary.worst(fault.name);
    let goal = fault.goal;
    let verdict = match worst.put.max(worst.lookup) < goal {
        true => "met",
        false => "missed",
    };
    println!(
        "{summary}the goal of {goal:?} is {verdict}; {} puts acknowledged, failed {:?}",
        report.acknowledged(),
        report.failures(What::Put)
    );
    let client = pool.client().await.unwrap();
    let lost_and_wrong = report.lost_and_wrong(&client).await.unwrap();
    assert_eq!(lost_and_wrong, (0, 0), "of all acknowledged blocks");
    assert_eq!(report.wrong(), 0);
    let missed = report.missed_at();
    assert_eq!(
        missed,
        [],
        "gets missed blocks that were there; {}",
        pool.logs()
    );
    let gone_back = report.epochs_gone_back();
    assert!(gone_back.is_empty(), "two leaders at once: {gone_back:#?}");
    assert!(worst.put < LIMIT && worst.lookup < LIMIT, "{worst:?}");
}

/// Runs a test whose processes are all in their own network.
fn inside(net: &Arc<Net>, fault: &Fault) {
    let layout = Layout::Cuttable(Arc::clone(net));
    net.inside(POOL, || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(fail_over(fault, layout));
    });
}

fn net_of(pool: &Pool) -> &Net {
    pool.net().expect("a pool that can be cut")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_killed_is_followed() {
    if !masters::available("a_leader_that_is_killed_is_followed") {
        return;
    }
    let fault = Fault {
        name: "kill -9 of the leader",
        share: 20,
        goal: GOAL_GONE,
        deposes: true,
        hurt: |pool, leader| pool.kill(leader).unwrap(),
        repair: |pool, leader| pool.restart(leader).unwrap(),
    };
    fail_over(&fault, Layout::Plain).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_asked_to_end_hands_over() {
    if !masters::available("a_leader_that_is_asked_to_end_hands_over") {
        return;
    }
    let fault = Fault {
        name: "SIGTERM of the leader",
        share: 5,
        goal: GOAL_GONE,
        deposes: true,
        hurt: |pool, leader| pool.terminate(leader).unwrap(),
        repair: |pool, leader| pool.restart(leader).unwrap(),
    };
    fail_over(&fault, Layout::Plain).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_stopped_is_followed_and_stands_by_when_it_goes_on() {
    if !masters::available("a_leader_that_is_stopped_is_followed_and_stands_by_when_it_goes_on") {
        return;
    }
    let fault = Fault {
        name: "SIGSTOP of the leader",
        share: 5,
        goal: GOAL_CUT,
        deposes: true,
        hurt: |pool, leader| pool.pause(leader).unwrap(),
        repair: |pool, leader| pool.resume(leader).unwrap(),
    };
    fail_over(&fault, Layout::Plain).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_refuses_connections_while_it_lives_stops_nobody() {
    if !masters::available("a_leader_that_refuses_connections_while_it_lives_stops_nobody") {
        return;
    }
    let fault = Fault {
        name: "connections to the leader refused",
        share: 5,
        goal: GOAL_CUT,
        deposes: false,
        hurt: Pool::refuse,
        repair: |pool, leader| pool.accept(leader).unwrap(),
    };
    fail_over(&fault, Layout::Relayed).await;
}

#[test]
fn a_leader_that_is_cut_off_from_etcd_is_followed() {
    let test = "a_leader_that_is_cut_off_from_etcd_is_followed";
    if !masters::available(test) {
        return;
    }
    let Some(net) = masters::net_or_skip(test, 3) else {
        return;
    };
    let fault = Fault {
        name: "the leader cut off from etcd",
        share: 5,
        goal: GOAL_CUT,
        deposes: true,
        hurt: |pool, leader| net_of(pool).cut(ETCD, &party(leader)).unwrap(),
        repair: |pool, leader| net_of(pool).heal(ETCD, &party(leader)).unwrap(),
    };
    inside(&net, &fault);
}

#[test]
fn a_leader_that_is_cut_off_from_clients_and_nodes_stops_nobody() {
    let test = "a_leader_that_is_cut_off_from_clients_and_nodes_stops_nobody";
    if !masters::available(test) {
        return;
    }
    let Some(net) = masters::net_or_skip(test, 3) else {
        return;
    };
    let fault = Fault {
        name: "the leader cut off from clients and nodes",
        share: 5,
        goal: GOAL_CUT,
        deposes: false,
        hurt: |pool, leader| net_of(pool).cut(POOL, &party(leader)).unwrap(),
        repair: |pool, leader| net_of(pool).heal(POOL, &party(leader)).unwrap(),
    };
    inside(&net, &fault);
}

/// The usual state of a cache: every put needs an eviction.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_takes_puts_again_when_its_leader_is_killed() {
    const BLOCK: usize = 64 << 10;
    /// Twice as many bytes as the pool holds.
    const FILL: u64 = 2 * (512 << 20) / BLOCK as u64;
    const GOAL: Duration = Duration::from_secs(1);
    /// The newest blocks: plain LRU does not evict these within a run.
    const NEWEST: usize = 256;
    if !masters::available("a_full_pool_takes_puts_again_when_its_leader_is_killed") {
        return;
    }
    let kills = std::env::var("KVPOOL_FAILOVERS").ok();
    let kills: u32 = kills.and_then(|text| text.parse().ok()).unwrap_or(2);
    let mut pool = Pool::start(Options::default()).unwrap();
    let load = Load {
        readers: 0,
        length: BLOCK,
        standing: FILL,
        rest: Duration::from_millis(1),
        ..Load::default()
    };
    let mut load = load.start(&pool.client_options()).await.unwrap();
    let name = "kill -9 of the leader of a full pool";
    for _ in 0..kills {
        let leader = pool.wait_settled().unwrap();
        pool.wait_live(2).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (used, capacity) = (pool.gauge("used_bytes"), pool.gauge("capacity_bytes"));
        let (used, capacity) = (used.unwrap(), capacity.unwrap());
        assert!(
            used * 10 > capacity * 8,
            "{used} of {capacity} bytes are used"
        );
        load.event(name);
        pool.kill(leader.index).unwrap();
        let next = pool.wait_leader(leader.epoch).unwrap();
        println!("{name}: {leader:?}, then {next:?}");
        let recovered = load.wait_success(&[What::Put], Instant::now(), LIMIT).await;
        recovered.unwrap_or_else(|error| panic!("{error}\n{}", pool.logs()));
        // The leases of the last term end meanwhile.
        tokio::time::sleep(Duration::from_secs(8)).await;
        load.event("the same, when it is over");
        pool.restart(leader.index).unwrap();
    }
    let report = load.end().await.unwrap();
    let mut summary = Summary::default();
    summary.add(&report);
    let worst = summary.worst(name).put;
    let verdict = if worst < GOAL { "met" } else { "missed" };
    println!(
        "{summary}the goal of {GOAL:?} is {verdict}; {} puts acknowledged, failed {:?}",
        report.acknowledged(),
        report.failures(What::Put)
    );
    assert!(worst < LIMIT, "{worst:?}");
    assert!(
        report.failures(What::Put).is_empty(),
        "{:?}",
        report.failures(What::Put)
    );
    assert!(report.epochs_gone_back().is_empty());
    let client = pool.client().await.unwrap();
    let newest = report.newest(NEWEST, &client).await.unwrap();
    assert_eq!(
        newest,
        (0, 0),
        "lost and wrong of the newest {NEWEST} blocks"
    );
}

/// Both cuts at once, as when a rack's switch dies.
#[test]
fn a_leader_that_is_cut_off_from_everything_is_followed() {
    let test = "a_leader_that_is_cut_off_from_everything_is_followed";
    if !masters::available(test) {
        return;
    }
    let Some(net) = masters::net_or_skip(test, 3) else {
        return;
    };
    let fault = Fault {
        name: "the leader cut off from everything",
        share: 5,
        goal: GOAL_CUT,
        deposes: true,
        hurt: |pool, leader| each_other(leader, |other| net_of(pool).cut(other, &party(leader))),
        repair: |pool, leader| each_other(leader, |other| net_of(pool).heal(other, &party(leader))),
    };
    inside(&net, &fault);
}

/// Runs `work` for every party except one master.
fn each_other(master: usize, mut work: impl FnMut(&str) -> anyhow::Result<()>) {
    for other in [ETCD, POOL] {
        work(other).unwrap();
    }
    for other in (0..3).filter(|other| *other != master) {
        work(&party(other)).unwrap();
    }
}
