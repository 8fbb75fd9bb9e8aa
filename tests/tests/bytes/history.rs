//! Concurrent clients against a disturbed pool: a correct pool could have given every answer.
//!
//! `KVPOOL_HISTORY_SECONDS=600` sets the duration; the default is 20 s.

use kvpool_client::{Client, Options as ClientOptions};
use kvpool_tests::history::{
    Excuse, Found, Operation, Recorder, Rules, Violation, What, Wrote, check,
};
use kvpool_tests::masters::{self, ETCD, Layout, POOL, Pool, party};
use kvpool_tests::{Cluster, Options};
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const CLIENTS: usize = 6;
const KEYS: u64 = 8;

fn how_long() -> Duration {
    let asked = std::env::var("KVPOOL_HISTORY_SECONDS").ok();
    Duration::from_secs(asked.and_then(|text| text.parse().ok()).unwrap_or(20))
}

/// Running clients.
struct Clients {
    recorder: Arc<Recorder>,
    tasks: JoinSet<()>,
    until: Instant,
    stale: Duration,
}

impl Clients {
    async fn start(options: ClientOptions) -> Self {
        let recorder = Arc::new(Recorder::default());
        let mut tasks = JoinSet::new();
        let until = Instant::now() + how_long();
        let mut stale = Duration::ZERO;
        for index in 0..CLIENTS {
            let remembers = index % 2 == 0;
            let options = ClientOptions {
                location_cache: if remembers { 1000 } else { 0 },
                ..options.clone()
            };
            let client = Client::connect(options).await.unwrap();
            stale = client.limits().lease_ttl;
            let recorder = Arc::clone(&recorder);
            tasks.spawn(async move { recorder.drive(&client, remembers, KEYS, until).await });
        }
        Self {
            recorder,
            tasks,
            until,
            stale,
        }
    }

    async fn judge(mut self, excuses: Vec<Excuse>) {
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        let history = self.recorder.history();
        println!("{}", described(&history));
        let once = Rules {
            stale: self.stale,
            repeats: false,
            excuses,
        };
        println!(
            "{} answers say that a put was done twice",
            check(&history, &once).len()
        );
        let rules = Rules {
            repeats: true,
            ..once
        };
        let violations = check(&history, &rules);
        if let Some(first) = violations.first() {
            panic!(
                "{} answers that nothing explains: {}\nthe first {first:#?}\nin {}\nexcuses {:?}",
                violations.len(),
                summed_up(&violations),
                around(&history, &first.operation),
                rules.excuses
            );
        }
        let found = found_of_changed(&history, &rules);
        println!("of {CHANGED} answers that were changed {found} are found to be wrong");
        assert!(found * 4 > CHANGED, "too little is certain of this history");
        let count = |is_one: fn(&Operation) -> bool| history.iter().filter(|o| is_one(o)).count();
        let stored = count(|o| matches!(o.what, What::Put(_, Wrote::Stored)));
        let hits = count(|o| matches!(o.what, What::Get(Found::Value(_))));
        assert!(stored > 50 && hits > 50, "the clients got nothing done");
    }
}

/// For each rule, the number of answers that break it, and the time of the first and the last.
fn summed_up(violations: &[Violation]) -> String {
    let mut kinds: BTreeMap<String, (usize, BTreeSet<u64>, Duration, Duration)> = BTreeMap::new();
    for Violation {
        kind, operation, ..
    } in violations
    {
        let name = format!("{kind:?}");
        let (count, keys, from, to) =
            kinds
                .entry(name)
                .or_insert((0, BTreeSet::new(), Duration::MAX, Duration::ZERO));
        *count += 1;
        keys.insert(operation.key);
        *from = operation.start.min(*from);
        *to = operation.end.max(*to);
    }
    let lines = kinds.iter().map(|(kind, (count, keys, from, to))| {
        format!("\n  {kind}: {count}, from {from:?} to {to:?}, of keys {keys:?}")
    });
    lines.collect()
}

/// The other operations on an operation's key before and after it.
fn around(history: &[Operation], operation: &Operation) -> String {
    let mut of_key: Vec<&Operation> = history.iter().filter(|o| o.key == operation.key).collect();
    of_key.sort_by_key(|other| other.start);
    let at = of_key.partition_point(|other| other.start < operation.start);
    let near = at.saturating_sub(12)..of_key.len().min(at + 12);
    let lines = of_key[near].iter().map(|other| {
        let remembers = if other.remembers { "remembers" } else { "" };
        let (start, end) = (other.start, other.end);
        format!(
            "\n  {start:>14.6?} to {end:>14.6?} {remembers:>9} {:?}",
            other.what
        )
    });
    lines.collect()
}

/// The number of answers that are changed, to test the checker.
const CHANGED: usize = 200;

/// Inverts the answer of one read at a time and counts how often [`check`] finds it. A history with too
/// many unknown outcomes would explain any answer.
fn found_of_changed(history: &[Operation], rules: &Rules) -> usize {
    let is_read = |at: &usize| matches!(history[*at].what, What::Get(_) | What::Exist(_));
    let reads: Vec<usize> = (0..history.len()).filter(is_read).collect();
    let mut random = rand::rng();
    let is_found = |at: usize| {
        let key = history[at].key;
        let mut changed = history[at];
        changed.what = match changed.what {
            What::Exist(present) => What::Exist(!present),
            What::Get(Found::Nothing) => What::Exist(true),
            _ => What::Get(Found::Nothing),
        };
        let others = history.iter().enumerate();
        let others = others.filter(|(other, o)| *other != at && o.key == key);
        let mut seeded: Vec<Operation> = others.map(|(_, operation)| *operation).collect();
        seeded.push(changed);
        !check(&seeded, rules).is_empty()
    };
    let picked = (0..CHANGED).map(|_| reads[random.random_range(0..reads.len())]);
    picked.filter(|at| is_found(*at)).count()
}

fn described(history: &[Operation]) -> String {
    let mut counts = BTreeMap::new();
    for operation in history {
        let text = match operation.what {
            What::Put(_, wrote) => format!("put {wrote:?}"),
            What::Upsert(_, wrote) => format!("upsert {wrote:?}"),
            What::Remove(removed) => format!("remove {removed:?}"),
            What::Get(Found::Value(_)) => "get hit".to_owned(),
            What::Get(found) => format!("get {found:?}"),
            What::Exist(present) => format!("exist {present}"),
        };
        *counts.entry(text).or_insert(0) += 1;
    }
    format!("{} operations: {counts:?}", history.len())
}

/// Longer than the master takes to learn that a node's memory is lost, once the node's next
/// incarnation serves.
const SURELY_KNOWN: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_explained_while_the_one_embedded_master_and_a_node_die() {
    let options = Options {
        nodes: 2,
        segment: "256MiB".into(),
        ..Options::default()
    };
    let mut cluster = Cluster::start(options.master(&["--lease-ttl", "1s"])).unwrap();
    let clients = Clients::start(cluster.client_options()).await;
    let mut excuses = Vec::new();
    let mut round = 0;
    while Instant::now() + Duration::from_secs(5) < clients.until {
        let pause = rand::rng().random_range(500..2500);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        round += 1;
        if round % 3 == 0 {
            let begun = Instant::now();
            cluster.nodes[0].kill().unwrap();
            cluster.restart_node(0).unwrap();
            cluster.wait_live(2).unwrap();
            let over = Instant::now() + SURELY_KNOWN;
            excuses.push(clients.recorder.lost(begun, over));
        } else {
            cluster.master.kill().unwrap();
            cluster.restart_master().unwrap();
            cluster.wait_live(2).unwrap();
        }
    }
    clients.judge(excuses).await;
}

/// Longer than a node takes to reach the leader again after a cut heals. Its connections wait for a
/// retransmission, or are given up.
const SURELY_BACK: Duration = Duration::from_secs(3);

/// The disturbances of a pool with standby masters.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    LeaderKilled,
    LeaderStopped,
    StandbyKilled,
    NodeKilled,
    /// The leader is cut off from these parties.
    LeaderCut(&'static [&'static str]),
    /// All masters are cut off from etcd.
    EtcdCut,
}

/// Each disturbance occurs as often as it is listed. Cuts happen only where a network can be cut.
const TROUBLES: [Trouble; 7] = [
    Trouble::LeaderKilled,
    Trouble::LeaderKilled,
    Trouble::LeaderKilled,
    Trouble::LeaderStopped,
    Trouble::LeaderStopped,
    Trouble::StandbyKilled,
    Trouble::NodeKilled,
];
const CUTS: [Trouble; 5] = [
    Trouble::LeaderCut(&[ETCD]),
    Trouble::LeaderCut(&[ETCD]),
    Trouble::LeaderCut(&[POOL]),
    Trouble::LeaderCut(&[ETCD, POOL]),
    Trouble::EtcdCut,
];

impl Trouble {
    fn any(pool: &Pool) -> Self {
        let cuts: &[Trouble] = if pool.net().is_some() { &CUTS } else { &[] };
        let at = rand::rng().random_range(0..TROUBLES.len() + cuts.len());
        *TROUBLES
            .get(at)
            .unwrap_or_else(|| &cuts[at - TROUBLES.len()])
    }

    /// Disturbs a settled pool for as long as given, and returns the answers that this excuses.
    async fn befall(self, pool: &mut Pool, recorder: &Recorder, lasts: Duration) -> Vec<Excuse> {
        let leader = pool.wait_settled().unwrap();
        let begun = Instant::now();
        match self {
            Self::LeaderKilled => {
                pool.kill(leader.index).unwrap();
                tokio::time::sleep(lasts / 2).await;
                pool.restart(leader.index).unwrap();
                Vec::new()
            }
            Self::LeaderStopped => {
                pool.pause(leader.index).unwrap();
                tokio::time::sleep(lasts).await;
                pool.resume(leader.index).unwrap();
                pool.wait_settled().unwrap();
                vec![recorder.deposed(begun, Instant::now())]
            }
            Self::StandbyKilled => {
                let standby = pool.standbys()[0];
                pool.kill(standby).unwrap();
                pool.restart(standby).unwrap();
                Vec::new()
            }
            Self::NodeKilled => {
                pool.replace_node(0).unwrap();
                pool.wait_live(2).unwrap();
                vec![recorder.lost(begun, Instant::now() + SURELY_KNOWN)]
            }
            Self::LeaderCut(from) => {
                let links = from.iter().map(|other| (party(leader.index), *other));
                cut_for(pool, links.collect(), lasts).await;
                let over = Instant::now();
                let mut excuses = vec![recorder.deposed(begun, over)];
                if from.contains(&POOL) {
                    // The nodes have to notice too, and a leader does not wait for them without
                    // limit.
                    excuses.push(recorder.hidden(begun, over + SURELY_BACK));
                }
                excuses
            }
            Self::EtcdCut => {
                let links = (0..MASTERS).map(|index| (party(index), ETCD));
                cut_for(pool, links.collect(), lasts).await;
                vec![recorder.deposed(begun, Instant::now())]
            }
        }
    }
}

/// Cuts links, heals them after a while, and waits until the pool has settled.
async fn cut_for(pool: &Pool, links: Vec<(String, &str)>, lasts: Duration) {
    let net = pool.net().expect("only a network that can be cut is cut");
    for (one, other) in &links {
        net.cut(one, other).unwrap();
    }
    tokio::time::sleep(lasts).await;
    for (one, other) in &links {
        net.heal(one, other).unwrap();
    }
    pool.wait_settled().unwrap();
    pool.wait_live(2).unwrap();
}

const MASTERS: usize = 3;

async fn masters_in_trouble(layout: Layout) {
    let options = masters::Options {
        masters: MASTERS,
        layout,
        ..masters::Options::default()
    };
    let mut pool = Pool::start(options.master(&["--lease-ttl", "1s"])).unwrap();
    let clients = Clients::start(pool.client_options()).await;
    let mut excuses = Vec::new();
    let mut befallen = BTreeMap::new();
    while Instant::now() + Duration::from_secs(6) < clients.until {
        let rest = Duration::from_millis(rand::rng().random_range(500..2500));
        tokio::time::sleep(rest).await;
        let trouble = Trouble::any(&pool);
        println!("{:>14.6?} {trouble:?}", clients.recorder.now());
        *befallen.entry(format!("{trouble:?}")).or_insert(0) += 1;
        excuses.extend(trouble.befall(&mut pool, &clients.recorder, 2 * rest).await);
    }
    println!("befallen: {befallen:?}");
    clients.judge(excuses).await;
}

#[test]
fn every_answer_is_explained_while_masters_die_and_hang_and_are_cut_off_and_nodes_die() {
    let test = "every_answer_is_explained_while_masters_die_and_hang_and_are_cut_off_and_nodes_die";
    if !masters::available(test) {
        return;
    }
    let run = |layout| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(masters_in_trouble(layout));
    };
    match masters::net_or_skip(&format!("{test} (the cuts of it)"), MASTERS) {
        Some(net) => net.inside(POOL, || run(Layout::Cuttable(Arc::clone(&net)))),
        None => run(Layout::Plain),
    }
}
