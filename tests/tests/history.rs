//! Concurrent clients against a pool in trouble: every answer that they got must be one that a pool
//! may give.
//!
//! `KVPOOL_HISTORY_SECONDS=600` goes on for so long; without it, 20 s.

use kvpool_client::{Client, Options as ClientOptions};
use kvpool_tests::history::{Excuse, Found, Operation, Recorder, Rules, What, Wrote, check};
use kvpool_tests::masters::{self, Pool};
use kvpool_tests::{Cluster, Options};
use rand::Rng;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const CLIENTS: usize = 6;
const KEYS: u64 = 8;

fn how_long() -> Duration {
    let asked = std::env::var("KVPOOL_HISTORY_SECONDS").ok();
    Duration::from_secs(asked.and_then(|text| text.parse().ok()).unwrap_or(20))
}

/// Clients that are under way.
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
        for _ in 0..CLIENTS {
            let client = Client::connect(options.clone()).await.unwrap();
            stale = client.limits().lease_ttl;
            let recorder = Arc::clone(&recorder);
            tasks.spawn(async move { recorder.drive(&client, 0..KEYS, until).await });
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
        let rules = Rules {
            stale: self.stale,
            excuses,
        };
        let violations = check(&history, &rules);
        assert!(
            violations.is_empty(),
            "{} answers that nothing explains, the first {:#?}; excuses {:?}",
            violations.len(),
            violations[0],
            rules.excuses
        );
        let count = |is_one: fn(&Operation) -> bool| history.iter().filter(|o| is_one(o)).count();
        let stored = count(|o| matches!(o.what, What::Put(_, Wrote::Stored)));
        let hits = count(|o| matches!(o.what, What::Get(Found::Value(_))));
        assert!(stored > 50 && hits > 50, "the clients got nothing done");
    }
}

fn described(history: &[Operation]) -> String {
    let mut counts = std::collections::BTreeMap::new();
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

/// Longer than it takes the master to learn that a node's memory is gone, once its successor serves.
const SURELY_KNOWN: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_explained_while_the_one_embedded_master_and_a_node_die() {
    let options = Options {
        nodes: 2,
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

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_explained_while_masters_die_and_hang_and_nodes_die() {
    let test = "every_answer_is_explained_while_masters_die_and_hang_and_nodes_die";
    if !masters::available(test) {
        return;
    }
    let options = masters::Options {
        segment: "64MiB".into(),
        ..masters::Options::default()
    };
    let mut pool = Pool::start(options.master(&["--lease-ttl", "1s"])).unwrap();
    let clients = Clients::start(pool.client_options()).await;
    let mut excuses = Vec::new();
    let mut done = Vec::new();
    while Instant::now() + Duration::from_secs(6) < clients.until {
        let (rest, dice) = {
            let mut random = rand::rng();
            (random.random_range(500..2500), random.random_range(0..10))
        };
        tokio::time::sleep(Duration::from_millis(rest)).await;
        done.push(dice);
        match dice {
            0..4 => {
                let leader = pool.wait_settled().unwrap();
                pool.kill(leader.index).unwrap();
                tokio::time::sleep(Duration::from_millis(rest)).await;
                pool.restart(leader.index).unwrap();
            }
            4..7 => {
                let leader = pool.wait_settled().unwrap();
                pool.pause(leader.index).unwrap();
                tokio::time::sleep(Duration::from_millis(2 * rest)).await;
                pool.resume(leader.index).unwrap();
            }
            7 => {
                pool.wait_settled().unwrap();
                let standby = pool.standbys()[0];
                pool.kill(standby).unwrap();
                pool.restart(standby).unwrap();
            }
            _ => {
                let begun = Instant::now();
                pool.replace_node(0).unwrap();
                pool.wait_live(2).unwrap();
                let over = Instant::now() + SURELY_KNOWN;
                excuses.push(clients.recorder.lost(begun, over));
            }
        }
    }
    println!("done to it (0..4 kill, 4..7 stop, 7 kill a standby, 8.. a node): {done:?}");
    clients.judge(excuses).await;
}
