//! The pool copies, moves and drops replicas, node to node. No half-written block is visible, no
//! block with another replica is lost, and no extent is leaked. This holds under load, and when a
//! process dies meanwhile.
//!
//! `KVPOOL_MOVES=10000` sets the number of moved blocks under load, `KVPOOL_MOVE_KILLS=100` the
//! number of killed nodes.

use kvpool_client::{
    Client, Code, Key, ReplicaBlocks, ReplicaChange, ReplicaTask, ReplicaTaskState, ReplicaWish,
};
use kvpool_tests::accounts::empty_the_pool;
use kvpool_tests::blocks::{check_all, key, put_all};
use kvpool_tests::churn::{Churn, Shape};
use kvpool_tests::{Cluster, Options};
use rand::Rng;
use std::time::{Duration, Instant};

const KIB: usize = 1 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

fn number(variable: &str, without: u64) -> u64 {
    let asked = std::env::var(variable).ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(without)
}

fn pool(nodes: usize, segment: &str) -> Cluster {
    let options = Options {
        nodes,
        segment: segment.into(),
        ..Options::default()
    };
    Cluster::start(options.master(&["--lease-ttl", "300ms"])).unwrap()
}

fn keys(numbers: std::ops::Range<u64>) -> Vec<Key> {
    numbers.map(key).collect()
}

fn wish(change: ReplicaChange, blocks: ReplicaBlocks) -> ReplicaWish {
    ReplicaWish {
        change,
        blocks,
        from: None,
        to: Vec::new(),
        evict: false,
    }
}

/// Runs a task to its end.
async fn change(client: &Client, wish: &ReplicaWish) -> ReplicaTask {
    let begun = client.change_replicas(wish).await.unwrap();
    let task = client.wait_replica_task(begun.id, PATIENCE).await.unwrap();
    task.expect("the leader stayed")
}

/// The names of the nodes that hold each block.
async fn holders(client: &Client, numbers: std::ops::Range<u64>) -> Vec<Vec<String>> {
    let described = client.describe(&keys(numbers)).await.unwrap();
    let names = |replicas: Vec<kvpool_client::DescribedReplica>| {
        let mut names: Vec<String> = replicas.into_iter().map(|replica| replica.node).collect();
        names.sort();
        names
    };
    let described = described.into_iter();
    described
        .map(|block| block.map_or_else(Vec::new, |block| names(block.replicas)))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_are_copied_moved_and_dropped_by_key() {
    let mut cluster = pool(3, "64MiB");
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..64, 256 * KIB).await.unwrap();

    let copied = change(
        &client,
        &wish(ReplicaChange::Copy, ReplicaBlocks::Keys(keys(0..64))),
    )
    .await;
    assert_eq!(
        (copied.state, copied.changed),
        (ReplicaTaskState::Done, 64),
        "{copied:?}"
    );
    assert_eq!(copied.bytes.0, 64 * 256 * KIB as u64);
    let both = holders(&client, 0..64).await;
    assert!(
        both.iter()
            .all(|nodes| nodes.len() == 2 && nodes[0] != nodes[1]),
        "{both:?}"
    );

    // Reads each block from each node that has it, while the other holder is killed.
    for killed in 0..3 {
        cluster.nodes[killed].kill().unwrap();
        let name = format!("node-{killed}");
        cluster
            .wait_for("the node is suspect or gone", || {
                Ok(cluster
                    .node_states()?
                    .iter()
                    .all(|(node, state)| *node != name || state != "live"))
            })
            .unwrap();
        let seen = check_all(&client, 0..64, 256 * KIB).await;
        assert_eq!((seen.right, seen.wrong), (64, 0), "{seen:?}");
        cluster.restart_node(killed).unwrap();
        cluster.wait_live(3).unwrap();
        // The blocks of the killed node get their second replica again.
        let again = change(
            &client,
            &wish(
                ReplicaChange::Copy,
                ReplicaBlocks::Keys(with_one(&client, 64).await),
            ),
        )
        .await;
        assert_eq!(again.state, ReplicaTaskState::Done, "{again:?}");
        let both = holders(&client, 0..64).await;
        assert!(both.iter().all(|nodes| nodes.len() == 2), "{both:?}");
    }

    // Moves everything off node-0. One replica of each block moves or is already elsewhere, then
    // the node is empty.
    let off = ReplicaWish {
        from: Some("node-0".into()),
        ..wish(ReplicaChange::Move, ReplicaBlocks::OnNode)
    };
    let moved = change(&client, &off).await;
    assert_eq!(moved.state, ReplicaTaskState::Done, "{moved:?}");
    let on = holders(&client, 0..64).await;
    assert!(
        on.iter()
            .all(|nodes| nodes.len() == 2 && nodes.iter().all(|node| node != "node-0")),
        "{on:?}"
    );

    // Drops go down to the last replica, and no further.
    for (from, state) in [
        ("node-1", ReplicaTaskState::Done),
        ("node-2", ReplicaTaskState::Failed),
    ] {
        let drop = ReplicaWish {
            from: Some(from.into()),
            ..wish(ReplicaChange::Drop, ReplicaBlocks::Keys(keys(0..64)))
        };
        let dropped = change(&client, &drop).await;
        assert_eq!(dropped.state, state, "{dropped:?}");
        if state == ReplicaTaskState::Failed {
            assert_eq!(dropped.failed, 64);
            let (code, said) = dropped.failure.unwrap();
            assert_eq!(code, Code::LastReplica, "{said}");
            assert!(said.contains("last replica"), "{said}");
        }
    }
    let seen = check_all(&client, 0..64, 256 * KIB).await;
    assert_eq!((seen.right, seen.wrong), (64, 0), "{seen:?}");
    empty_the_pool(&client).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_change_the_same_blocks_leave_each_with_its_replicas() {
    const BOTH: u64 = 400;
    let cluster = pool(3, "64MiB");
    let client = cluster.client().await.unwrap();
    let all = || ReplicaBlocks::Keys(keys(0..BOTH));
    for round in 0..4 {
        put_all(&client, 0..BOTH, 64 * KIB).await.unwrap();
        let gather = |from: &str, to: &str| ReplicaWish {
            from: Some(from.into()),
            to: vec![to.into()],
            ..wish(ReplicaChange::Move, all())
        };
        // Every block is on node-0 and node-1. Then both replicas of each should move to node-2.
        change(&client, &gather("node-1", "node-0")).await;
        change(&client, &gather("node-2", "node-0")).await;
        let copy = ReplicaWish {
            to: vec!["node-1".into()],
            ..wish(ReplicaChange::Copy, all())
        };
        change(&client, &copy).await;
        let (one, two) = (gather("node-0", "node-2"), gather("node-1", "node-2"));
        let (one, two) = tokio::join!(change(&client, &one), change(&client, &two));
        assert_eq!(one.failed + two.failed, 0, "{one:?}, {two:?}");
        assert_eq!(one.changed + two.changed, BOTH, "{one:?}, {two:?}");
        let held = holders(&client, 0..BOTH).await;
        let lonely = held.iter().filter(|nodes| nodes.len() != 2).count();
        assert_eq!(lonely, 0, "round {round}: {one:?}, {two:?}");
        // The same task twice, and keys that are named twice: no block gets more replicas than
        // before.
        let twice: Vec<Key> = keys(0..BOTH).into_iter().chain(keys(0..BOTH)).collect();
        let away = ReplicaWish {
            from: Some("node-2".into()),
            ..wish(ReplicaChange::Move, ReplicaBlocks::Keys(twice))
        };
        let (one, two) = tokio::join!(change(&client, &away), change(&client, &away));
        assert_eq!(one.changed + two.changed, BOTH, "{one:?}, {two:?}");
        let held = holders(&client, 0..BOTH).await;
        assert!(held.iter().all(|nodes| nodes.len() == 2), "{held:?}");
        let seen = check_all(&client, 0..BOTH, 64 * KIB).await;
        assert_eq!((seen.right as u64, seen.wrong), (BOTH, 0), "{seen:?}");
        empty_the_pool(&client).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_survive_the_death_of_the_master() {
    let mut cluster = pool(2, "64MiB");
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..32, 64 * KIB).await.unwrap();
    let copied = wish(ReplicaChange::Copy, ReplicaBlocks::Keys(keys(0..16)));
    assert_eq!(change(&client, &copied).await.changed, 16);
    let moved = ReplicaWish {
        from: Some("node-0".into()),
        to: vec!["node-1".into()],
        ..wish(ReplicaChange::Move, ReplicaBlocks::Keys(keys(16..32)))
    };
    let moved = change(&client, &moved).await;
    assert_eq!(moved.state, ReplicaTaskState::Done, "{moved:?}");
    let before = holders(&client, 0..32).await;
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(2).unwrap();
    assert_eq!(holders(&client, 0..32).await, before);
    let seen = check_all(&client, 0..32, 64 * KIB).await;
    assert_eq!((seen.right, seen.wrong), (32, 0), "{seen:?}");
    // The new master does not know the old master's task.
    assert!(client.replica_tasks(&[]).await.unwrap().is_empty());
    empty_the_pool(&client).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wish_that_contradicts_itself_is_refused() {
    let cluster = pool(2, "16MiB");
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..1, KIB).await.unwrap();
    let keys = || ReplicaBlocks::Keys(keys(0..1));
    let (one, two) = (Some("node-0".to_owned()), vec!["node-1".to_owned()]);
    let wrong = [
        (
            Code::Missing,
            ReplicaWish {
                to: vec!["nobody".into()],
                ..wish(ReplicaChange::Copy, keys())
            },
        ),
        (
            Code::InvalidArgument,
            ReplicaWish {
                to: vec!["node-0".into(), "node-1".into()],
                ..wish(ReplicaChange::Move, keys())
            },
        ),
        (
            Code::InvalidArgument,
            ReplicaWish {
                from: Some("node-1".into()),
                to: two.clone(),
                ..wish(ReplicaChange::Move, keys())
            },
        ),
        (Code::InvalidArgument, wish(ReplicaChange::Drop, keys())),
        (
            Code::InvalidArgument,
            ReplicaWish {
                from: one.clone(),
                to: two,
                ..wish(ReplicaChange::Drop, keys())
            },
        ),
        (
            Code::InvalidArgument,
            wish(ReplicaChange::Move, ReplicaBlocks::OnNode),
        ),
        (
            Code::InvalidArgument,
            wish(ReplicaChange::Copy, ReplicaBlocks::Pattern("(".into())),
        ),
    ];
    for (code, wish) in wrong {
        let refused = client.change_replicas(&wish).await.unwrap_err();
        assert_eq!(refused.code, code, "{wish:?}: {refused}");
    }
    assert!(client.replica_tasks(&[]).await.unwrap().is_empty());
    // If the target has no room, the task reports that and changes nothing.
    put_all(&client, 1..80, 256 * KIB).await.unwrap();
    let full = ReplicaWish {
        from: one,
        ..wish(ReplicaChange::Copy, ReplicaBlocks::OnNode)
    };
    let full = change(&client, &full).await;
    assert_eq!(full.state, ReplicaTaskState::Failed, "{full:?}");
    assert_eq!(full.failure.unwrap().0, Code::Full);
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_move_under_load() {
    /// The number of gets after which the load must have got more than 100 blocks. The load begins
    /// with an empty pool, so its first gets miss. A full pool has two thirds of the load's keys.
    const GETS: u64 = 2000;
    let moves = number("KVPOOL_MOVES", 1500);
    // The pool has room for fewer blocks than the load has, so it is full all the time.
    let cluster = pool(3, "24MiB");
    let client = cluster.client().await.unwrap();
    let churn = Churn::start(
        &client,
        Shape {
            tasks: 4,
            keys: 400,
            length: 64 << 10,
        },
    );
    let asked = || {
        let seen = churn.seen();
        seen.right + seen.missed
    };
    let begun = Instant::now();
    let (mut moved, mut failed) = (0, Vec::new());
    // The same few blocks may move many times before the load has stored others. So the number of
    // moves does not tell how much the load has done.
    while churn.goes_on() && (moved < moves || asked() < GETS) {
        let seen = churn.seen();
        assert!(
            begun.elapsed() < 10 * PATIENCE,
            "{moved} moved, the load: {seen:?}, failures: {failed:?}"
        );
        for node in 0..3 {
            let away = ReplicaWish {
                from: Some(format!("node-{node}")),
                evict: true,
                ..wish(ReplicaChange::Move, ReplicaBlocks::OnNode)
            };
            let task = change(&client, &away).await;
            moved += task.changed;
            failed.extend(task.failure);
        }
    }
    let mut left = churn.end().await.unwrap();
    println!(
        "{moved} moved, the load: {:?}, failures: {failed:?}",
        left.seen
    );
    assert!(
        left.seen.stored > 100 && left.seen.right > 100,
        "{:?}",
        left.seen
    );
    let seen = left.check(&client).await.unwrap();
    println!("in the end: {seen:?}");
    assert!(seen.right > 50 && seen.failed == 0, "{seen:?}");
    empty_the_pool(&client).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_source_or_target_dies() {
    let kills = number("KVPOOL_MOVE_KILLS", 4);
    let mut cluster = pool(3, "64MiB");
    let client = cluster.client().await.unwrap();
    let mut lost = 0;
    for kill in 0..kills {
        let (killed, other) = ((kill % 3) as usize, ((kill + 1) % 3) as usize);
        put_all(&client, 0..256, 64 * KIB).await.unwrap();
        // Each block has two replicas, so that one death loses none.
        let twice = change(
            &client,
            &wish(
                ReplicaChange::Copy,
                ReplicaBlocks::Keys(with_one(&client, 256).await),
            ),
        )
        .await;
        assert_eq!(twice.state, ReplicaTaskState::Done, "{twice:?}");
        let (from, to) = match kill % 2 {
            0 => (killed, other),
            _ => (other, killed),
        };
        let wish = ReplicaWish {
            from: Some(format!("node-{from}")),
            to: vec![format!("node-{to}")],
            ..wish(ReplicaChange::Move, ReplicaBlocks::OnNode)
        };
        let task = client.change_replicas(&wish).await.unwrap();
        let moment = rand::rng().random_range(0..40);
        tokio::time::sleep(Duration::from_millis(moment)).await;
        let before = holders(&client, 0..256).await;
        cluster.nodes[killed].kill().unwrap();
        cluster.restart_node(killed).unwrap();
        cluster.wait_live(3).unwrap();
        let ended = client.wait_replica_task(task.id, PATIENCE).await.unwrap();
        let ended = ended.expect("the leader stayed");
        assert_ne!(ended.state, ReplicaTaskState::Running, "{ended:?}");
        let seen = check_all(&client, 0..256, 64 * KIB).await;
        assert_eq!((seen.wrong, seen.failed), (0, 0), "{seen:?}");
        let safe = before.iter().filter(|nodes| nodes.len() > 1).count();
        assert!(seen.right >= safe, "{seen:?} of {safe}; {ended:?}");
        lost += 256 - seen.right;
    }
    println!("{kills} kills, {lost} blocks with one replica lost");
    empty_the_pool(&client).await.unwrap();
}

/// The keys of the first blocks with one replica.
async fn with_one(client: &Client, count: u64) -> Vec<Key> {
    let holders = holders(client, 0..count).await;
    let lonely = holders
        .iter()
        .zip(0..)
        .filter(|(nodes, _)| nodes.len() == 1);
    lonely.map(|(_, number)| key(number)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_node_leaves_its_hottest_blocks_in_the_pool() {
    let blocks = number("KVPOOL_DRAIN_BLOCKS", 1500);
    let length = 16 * KIB;
    // The pool is full: the blocks take nine tenths of three nodes, and do not fit into two.
    let segment = (blocks * length as u64 * 10 / 27).next_multiple_of(4096);
    let mut cluster = pool(3, &format!("{segment}B"));
    let client = cluster.client().await.unwrap();
    for first in (0..blocks).step_by(64) {
        let last = blocks.min(first + 64);
        put_all(&client, first..last, length).await.unwrap();
    }
    // The second half is used again, so the first half may be evicted.
    let hot = blocks / 2..blocks;
    let before = check_all(&client, hot.clone(), length).await;
    assert!(before.right as u64 > blocks * 45 / 100, "{before:?}");
    let reader = {
        let (client, hot) = (client.clone(), hot.clone());
        tokio::spawn(async move {
            loop {
                let seen = check_all(&client, hot.clone(), length).await;
                assert_eq!((seen.wrong, seen.failed), (0, 0), "{seen:?}");
            }
        })
    };
    let begun = Instant::now();
    let task = client.drain_node("node-1", false).await.unwrap();
    let task = client.wait_replica_task(task.id, PATIENCE).await.unwrap();
    println!("{task:?} in {:?}", begun.elapsed());
    reader.abort();
    let _ended = reader.await;
    assert!(cluster.nodes[1].terminate().unwrap().success());
    let after = check_all(&client, hot, length).await;
    println!("{before:?} before, {after:?} after");
    let lost = before.right.saturating_sub(after.right);
    assert_eq!((after.wrong, after.failed), (0, 0), "{after:?}");
    assert!(lost * 100 <= before.right, "{before:?}, then {after:?}");
    // New blocks go to other nodes.
    put_all(&client, blocks..blocks + 64, length).await.unwrap();
    empty_the_pool(&client).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_with_wrong_bytes_gives_no_replica() {
    let cluster = pool(2, "16MiB");
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..1, 256 * KIB).await.unwrap();
    let held = client.describe(&keys(0..1)).await.unwrap().remove(0);
    let replica = held.unwrap().replicas.remove(0);
    let index: usize = replica.node.trim_start_matches("node-").parse().unwrap();
    let middle = replica.extent.offset.0 + 100_000;
    cluster.nodes[index].flip_byte(middle).unwrap();
    let copied = wish(ReplicaChange::Copy, ReplicaBlocks::Keys(keys(0..1)));
    let copied = change(&client, &copied).await;
    assert_eq!(copied.changed, 0, "{copied:?}");
    // The node found its only replica wrong too, so the block has left.
    cluster
        .wait_for("the replica is dropped", || {
            Ok(cluster.gauge("blocks")? == 0)
        })
        .unwrap();
    let seen = check_all(&client, 0..1, 256 * KIB).await;
    assert_eq!((seen.wrong, seen.missed), (0, 1), "{seen:?}");
    empty_the_pool(&client).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_stays_while_no_other_one_can_be_read() {
    let mut cluster = pool(2, "16MiB");
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, 64 * KIB).await.unwrap();
    let copied = wish(ReplicaChange::Copy, ReplicaBlocks::Keys(keys(0..8)));
    assert_eq!(change(&client, &copied).await.changed, 8);
    cluster.nodes[1].kill().unwrap();
    cluster
        .wait_for("node-1 is suspect", || {
            let states = cluster.node_states()?;
            Ok(states.contains(&("node-1".into(), "suspect".into())))
        })
        .unwrap();
    let dropped = ReplicaWish {
        from: Some("node-0".into()),
        ..wish(ReplicaChange::Drop, ReplicaBlocks::Keys(keys(0..8)))
    };
    let dropped = change(&client, &dropped).await;
    assert_eq!((dropped.changed, dropped.failed), (0, 8), "{dropped:?}");
    let seen = check_all(&client, 0..8, 64 * KIB).await;
    assert_eq!((seen.right, seen.wrong), (8, 0), "{seen:?}");
}
