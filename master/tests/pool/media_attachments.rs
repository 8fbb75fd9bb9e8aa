//! Media that are attached to the pool, stay away, return changed, and leave.

use crate::support::media::*;
use crate::support::{SPACE, commit, pool, registration, reserve_with};
use kvpool_master::Config;
use kvpool_master::membership::StoreNode;
use kvpool_master::pool::{OfferedMedium, Pool};
use kvpool_proto::master_message::Body;
use kvpool_proto::{MasterMessage, MediumState};
use kvpool_types::medium::Generation;
use kvpool_types::{Code, MediumId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinHandle;

type Orders = UnboundedReceiver<Result<MasterMessage, tonic::Status>>;

/// A node in a session. It answers nothing by itself.
async fn joined(pool: &Arc<Pool>) -> (Arc<StoreNode>, u64, Orders) {
    let registration = registration("n", 1, 8 * BLOCK);
    let node = pool.register(&registration).await.unwrap();
    let (outbox, orders) = tokio::sync::mpsc::unbounded_channel();
    let session = pool.activate(&node, &registration, outbox);
    (node, session, orders)
}

async fn order_to_attach(orders: &mut Orders) -> (MediumId, Generation) {
    loop {
        if let Some(Body::AttachMedium(attach)) = orders.recv().await.unwrap().unwrap().body {
            let medium = MediumId::from_slice(&attach.medium_id).unwrap();
            break (medium, Generation(attach.generation));
        }
    }
}

/// The node says that it has attached the medium.
fn confirm(
    pool: &Arc<Pool>,
    node: &Arc<StoreNode>,
    session: u64,
    medium: MediumId,
    generation: Generation,
) -> JoinHandle<()> {
    let (pool, node) = (Arc::clone(pool), Arc::clone(node));
    tokio::spawn(async move {
        pool.medium_attached(&node, session, medium, generation)
            .await;
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_that_is_not_what_the_pool_remembers_is_formatted() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let first = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_attachment(&disk).await;
    let blocks = 64 * MIB / BLOCK;
    for number in 0..blocks {
        put_paced(&pool, number).await;
    }
    // Another node shows up with a clone while the first one is connected.
    let clone = Disk::new(1);
    clone.generation.store(1, Ordering::SeqCst);
    let stranger = join(&pool, "m", 9, 16 * MIB, &clone, 512 * MIB, 32 * MIB).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(
        clone.generation.load(Ordering::SeqCst),
        1,
        "the clone is not attached"
    );
    assert_eq!(
        clone.resets.load(Ordering::SeqCst),
        0,
        "nor is it formatted"
    );
    drop(stranger);
    // The first node's disk returns with the state of two attachments ago.
    let before = present(&pool, 0..blocks / 2).await;
    assert!(before.iter().filter(|is_held| **is_held).count() > 100);
    drop(first);
    let second = join(&pool, "n", 2, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    // A node leaves before the master knows of its attachment. The master then remembers the
    // medium's state before.
    until("attached", || disk.known.load(Ordering::SeqCst) == 2).await;
    drop(second);
    disk.generation.store(1, Ordering::SeqCst);
    let _third = join(&pool, "n", 3, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    until("formatted and attached", || {
        disk.resets.load(Ordering::SeqCst) == 1 && disk.generation.load(Ordering::SeqCst) == 1
    })
    .await;
    for number in 0..blocks / 2 {
        assert!(
            !comes_back(&pool, number).await,
            "{number} was on the old image"
        );
    }
    assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
}

/// The node would wait for an answer, also when it stops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_hears_that_its_medium_is_refused_and_may_attach_it_when_the_other_copy_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let first = join(&pool, "m", 9, 8 * MIB, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    let copy = Disk::new(1);
    copy.generation.store(1, Ordering::SeqCst);
    let offered = vec![copy.offer(64 * MIB, 4 * MIB)];
    let (node, session, mut orders) = joined(&pool).await;
    let list = offered.clone();
    pool.media_offered(&node, session, list).await.unwrap();
    let refusal = loop {
        match orders.recv().await.unwrap().unwrap().body {
            Some(Body::RefuseMedium(refusal)) => break refusal,
            Some(Body::AttachMedium(_)) => panic!("two nodes have the medium"),
            _ => {}
        }
    };
    assert_eq!(MediumId::from_slice(&refusal.medium_id), Some(MediumId(1)));
    assert!(refusal.reason.starts_with("node m has "), "{refusal:?}");

    drop(first);
    pool.media_offered(&node, session, offered).await.unwrap();
    let attached = order_to_attach(&mut orders).await;
    assert_eq!(attached, (MediumId(1), Generation(2)));
}

/// A medium whose node does not come back is forgotten in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_that_stays_away_is_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        ssd_drop_after: Duration::from_millis(500),
        ..Config::default()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    for number in 0..32 * MIB / BLOCK {
        put_paced(&pool, number).await;
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(comes_back(&pool, 10).await, "it is there, so it stays");
    pool.drop_node(&node.node);
    drop(node);
    tokio::time::sleep(Duration::from_millis(900)).await;
    let node = join(&pool, "n", 2, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    until("formatted", || disk.resets.load(Ordering::SeqCst) == 1).await;
    assert!(!comes_back(&pool, 10).await, "its blocks are forgotten");
    drop(node);
}

/// The record of its attachment is being appended meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_that_is_detached_before_its_attachment_is_logged_stays_detached() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let (node, session, mut orders) = joined(&pool).await;
    let offered = vec![Disk::new(1).offer(64 * MIB, 4 * MIB)];
    pool.media_offered(&node, session, offered).await.unwrap();
    let (medium, generation) = order_to_attach(&mut orders).await;

    let gate = store.gate.lock().await;
    let confirmed = confirm(&pool, &node, session, medium, generation);
    tokio::time::sleep(Duration::from_millis(100)).await;
    pool.detach(&node, session);
    let detaching = Arc::clone(&pool);
    let detached = tokio::spawn(async move { detaching.detach_medium(medium, true).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(gate);
    confirmed.await.unwrap();
    detached.await.unwrap().unwrap();
    assert!(pool.media().is_empty(), "{:?}", pool.media());
}

/// A node reports once that it has a medium, and once that it has attached it. The store may be
/// full at either time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_is_attached_when_a_full_store_has_room_again() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let (node, session, mut orders) = joined(&pool).await;
    let disk = Disk::new(1);
    let offered = vec![disk.offer(64 * MIB, 4 * MIB)];

    store.is_full.store(true, Ordering::SeqCst);
    let (offering, of) = (Arc::clone(&pool), Arc::clone(&node));
    let offer = tokio::spawn(async move { offering.media_offered(&of, session, offered).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(pool.media().is_empty(), "its record has room");
    store.is_full.store(false, Ordering::SeqCst);
    offer.await.unwrap().unwrap();
    let (medium, generation) = order_to_attach(&mut orders).await;

    store.is_full.store(true, Ordering::SeqCst);
    let confirmed = confirm(&pool, &node, session, medium, generation);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(pool.media()[0].state, "attaching");
    store.is_full.store(false, Ordering::SeqCst);
    confirmed.await.unwrap();
    assert_eq!(pool.media()[0].state, "ready");
}

/// The node reports each state once. The store may have room when the list with either state is
/// processed next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_that_waited_for_room_has_the_state_that_its_node_told_last() {
    for full_for in [50, 350] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, store) = pool(directory.path(), Config::default()).await;
        let (node, session, mut orders) = joined(&pool).await;
        let disk = Disk::new(1);
        let told = |state| {
            let offer = OfferedMedium {
                state,
                ..disk.offer(64 * MIB, 4 * MIB)
            };
            tokio::spawn(pool.media_offered(&node, session, vec![offer]))
        };
        store.is_full.store(true, Ordering::SeqCst);
        let first = told(MediumState::MediumSlow);
        tokio::time::sleep(Duration::from_millis(250)).await;
        let second = told(MediumState::MediumReady);
        tokio::time::sleep(Duration::from_millis(full_for)).await;
        assert!(pool.media().is_empty(), "its record has room");
        store.is_full.store(false, Ordering::SeqCst);
        second.await.unwrap().unwrap();
        first.await.unwrap().unwrap();
        let (medium, generation) = order_to_attach(&mut orders).await;
        let confirmed = confirm(&pool, &node, session, medium, generation);
        confirmed.await.unwrap();
        assert_eq!(pool.media()[0].state, "ready", "after {full_for} ms");
    }
}

/// A block that is committed after the scan of the node's blocks would leave with the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_that_is_attached_to_a_draining_node_waits_for_its_puts() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 8 * MIB, &disk, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    let granted = reserve_with(&pool, &key(1), BLOCK, &patient()).await;
    pool.draining(&node.node, false);
    let (medium, generation) = (MediumId(1), Generation(1));
    pool.medium_attached(&node.node, node.session, medium, generation)
        .await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!disk.is_demoted.load(Ordering::SeqCst), "a put is open");
    let committed = commit(&pool, &key(1), BLOCK, granted.unwrap()).await;
    assert_eq!(committed, [Code::Ok]);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    assert_eq!(disk.left.load(Ordering::SeqCst), 0);
    assert!(disk.stores.load(Ordering::SeqCst) >= 1);
}

/// The node returns before the master has noticed the end of its broken session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_loads_of_an_earlier_session_end_with_the_next_offer_of_the_medium() {
    let cold = Cold::block(Config::default()).await;
    let Cold {
        pool, disk, node, ..
    } = &cold;
    disk.loads_stall.store(true, Ordering::SeqCst);
    let (loading, keys) = (Arc::clone(pool), key(1));
    let load = tokio::spawn(async move {
        let keys = [keys.as_ref()];
        loading.restore(SPACE, &keys[..], Duration::MAX).await
    });
    until("ordered", || pool.open_transfers() > 0).await;
    load.abort();
    let registration = registration("n", node.node.incarnation.0, 8 * MIB);
    let (outbox, _unread) = tokio::sync::mpsc::unbounded_channel();
    let session = pool.activate(&node.node, &registration, outbox);
    let offered = vec![disk.offer(32 * MIB, 4 * MIB)];
    let offered = pool.media_offered(&node.node, session, offered);
    offered.await.unwrap();
    until("given up", || pool.open_transfers() == 0).await;
}
