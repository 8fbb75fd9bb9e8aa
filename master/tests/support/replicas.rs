//! Nodes that the test controls: they answer pulls when the test says so. Also the tasks that order
//! pulls.

use super::{SPACE, commit, pool, registration, reserve};
use kvpool_master::Config;
use kvpool_master::membership::{Registration, Reported, StoreNode};
use kvpool_master::placement::PlacementHints;
use kvpool_master::placement::quarantine::Suspected;
use kvpool_master::pool::{Blocks, Change, Pool, ReserveOptions, TaskState, TaskView, Wish};
use kvpool_proto::master_message::Body;
use kvpool_proto::{self as proto};
use kvpool_types::{Code, Extent, Key, NodeName};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const BLOCK: u64 = 64 << 10;
pub(crate) const MIB: u64 = 1 << 20;

/// A node that fences at once, and keeps the pulls that it was ordered to make.
pub(crate) struct Node {
    pub(crate) node: Arc<StoreNode>,
    pub(crate) session: u64,
    pub(crate) pulls: Arc<Mutex<Vec<proto::Pull>>>,
    /// The numbers of blocks that leave with it, one for each report of the master.
    pub(crate) left: Arc<Mutex<Vec<u64>>>,
}

pub(crate) async fn join(pool: &Arc<Pool>, name: &str, life: u128) -> Node {
    join_fencing(pool, &registration(name, life, 4 * MIB), Duration::ZERO).await
}

/// [`join`] of a node with this registration, whose fences take this long.
pub(crate) async fn join_fencing(
    pool: &Arc<Pool>,
    registration: &Registration,
    late: Duration,
) -> Node {
    let node = pool.register(registration).await.unwrap();
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = pool.activate(&node, registration, outbox);
    pool.heard(&node, Some(Reported::default()));
    let pulls = Arc::new(Mutex::new(Vec::new()));
    let left = Arc::new(Mutex::new(Vec::new()));
    let (of, taken, pool) = (Arc::clone(&node), Arc::clone(&pulls), Arc::clone(pool));
    let told = Arc::clone(&left);
    tokio::spawn(async move {
        while let Some(Ok(message)) = inbox.recv().await {
            match message.body {
                Some(Body::Fence(fence)) => {
                    let tickets: Vec<u64> = fence.items.iter().map(|item| item.ticket).collect();
                    if !late.is_zero() {
                        tokio::time::sleep(late).await;
                    }
                    pool.fenced(&of, &tickets);
                }
                Some(Body::Pulls(orders)) => taken.lock().extend(orders.pulls),
                Some(Body::Undrain(order)) => pool.undrained(&of, order.number),
                Some(Body::Demoted(demoted)) => told.lock().push(demoted.left),
                _ => {}
            }
        }
    });
    Node {
        node,
        session,
        pulls,
        left,
    }
}

impl Node {
    /// The next pull that the node was ordered to make.
    pub(crate) async fn next(&self) -> proto::Pull {
        for _ in 0..500 {
            if let Some(pull) = self.pulls.lock().pop() {
                return pull;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no pull was ordered within 5 s");
    }
}

pub(crate) fn key(number: u8) -> Key {
    Key::from_digest([number; 32])
}

pub(crate) async fn put(pool: &Arc<Pool>, key: &Key) {
    let granted = reserve(pool, key, BLOCK).await.unwrap();
    assert_eq!(commit(pool, key, BLOCK, granted).await, [Code::Ok]);
}

pub(crate) async fn begin(
    pool: &Arc<Pool>,
    change: Change,
    from: Option<&str>,
    key: &Key,
) -> TaskView {
    begin_to(pool, change, from, &[], key).await
}

pub(crate) async fn begin_to(
    pool: &Arc<Pool>,
    change: Change,
    from: Option<&str>,
    to: &[&str],
    key: &Key,
) -> TaskView {
    let name = |name: &&str| NodeName((*name).into());
    let wish = Wish {
        change,
        from: from.as_ref().map(name),
        to: to.iter().map(name).collect(),
        evict: false,
    };
    let blocks = Blocks::Keys(SPACE, &[key.as_ref()]);
    pool.change_replicas(wish, blocks).await.unwrap()
}

pub(crate) async fn end(pool: &Arc<Pool>, task: &TaskView) -> TaskView {
    for _ in 0..500 {
        let task = pool.replica_tasks(&[task.id]).remove(0);
        if task.state != TaskState::Running {
            return task;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the task has not ended within 5 s");
}

/// The replica of key 1 on a node.
pub(crate) fn suspected_on(pool: &Arc<Pool>, node: &Node) -> Suspected {
    let found = pool.lookup(SPACE, &[key(1).as_ref()][..], false);
    let located = found.answer[0].clone().unwrap();
    let mut replicas = located.replicas.iter();
    let on_it = replicas.find(|one| node.node.segments().contains(&one.segment));
    let replica = on_it.unwrap();
    let extent = Extent {
        segment: replica.segment,
        offset: replica.offset,
        length: located.length,
    };
    Suspected {
        namespace: SPACE,
        key: key(1),
        version: located.version,
        extent,
        checksum: located.checksum,
    }
}

pub(crate) fn holders(pool: &Arc<Pool>, key: &Key) -> Vec<String> {
    let keys = [key.as_ref()];
    let described = pool.describe(SPACE, &keys[..]);
    let replicas = described
        .into_iter()
        .flatten()
        .flat_map(|block| block.replicas);
    replicas.map(|replica| replica.node.0).collect()
}

/// A put of one replica, on this node if it has room.
pub(crate) fn on(node: &str) -> ReserveOptions {
    ReserveOptions {
        hints: PlacementHints {
            replicas: 1,
            preferred: vec![NodeName(node.into())],
            host: None,
        },
        ..ReserveOptions::default()
    }
}

/// The bytes in use on a node.
pub(crate) fn used_on(pool: &Pool, node: &Arc<StoreNode>) -> u64 {
    let segments = pool.placement.segments();
    let own = segments.iter().filter(|s| Arc::ptr_eq(&s.node, node));
    own.map(|segment| segment.used()).sum()
}

/// Waits until this many bytes are in use on all nodes together.
pub(crate) async fn wait_used(pool: &Pool, bytes: u64) {
    let used = || {
        let segments = pool.placement.segments();
        segments.iter().map(|segment| segment.used()).sum::<u64>()
    };
    for _ in 0..500 {
        if used() == bytes {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!(
        "{} bytes are in use, not {bytes}: an extent was leaked",
        used()
    );
}

/// A pool with the nodes `a` and `b`, where `a` has the block of key 1.
pub(crate) async fn with_a_block(
    directory: &std::path::Path,
    ttl: Duration,
) -> (Arc<Pool>, Node, Node) {
    let config = Config {
        lease_ttl: ttl,
        ..Config::default()
    };
    let (pool, _) = pool(directory, config).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    (pool, a, b)
}

/// [`with_a_block`], where `b` has a replica too.
pub(crate) async fn with_two_replicas(
    directory: &std::path::Path,
    ttl: Duration,
) -> (Arc<Pool>, Node, Node) {
    let (pool, a, b) = with_a_block(directory, ttl).await;
    let copy = begin(&pool, Change::Copy, None, &key(1)).await;
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &copy).await.changed, 1);
    (pool, a, b)
}
