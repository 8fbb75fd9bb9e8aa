//! Drains of nodes to their media.

use super::*;

/// A node may be silent for a moment while its medium is attached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_to_a_medium_begins_while_its_node_is_suspect() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let (node, session, mut sent) = connected(&pool);
    node.drain();
    node.set_state(NodeState::Suspect);
    let offered = Use {
        is_attached: false,
        ..in_use(&node, session)
    };
    let medium = SegmentId::on_medium(1);
    pool.tiering.traffic.lock().uses.insert(medium, offered);
    pool.medium_attached(&node, session, MediumId(1), Generation(1))
        .await;
    let told = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let told = told.expect("the drain has begun").unwrap().unwrap();
    assert!(matches!(told.body, Some(Body::Demoted(_))), "{told:?}");
    pool.retire().await;
}

/// The slow medium's last stores are not recorded when the session ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_stores_on_a_medium_that_has_become_slow() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, slow) = pool_on_medium(directory.path()).await;
    pool.tier.set_medium(record::Medium {
        medium: MediumId(2),
        ..medium_of(2)
    });
    assert!(
        pool.directory
            .publish(&[block("block", 7)])
            .remove(0)
            .id
            .is_some()
    );
    let (node, session, mut sent) = connected(&pool);
    node.drain();
    attach(&pool, &node, session, slow.id);
    let ticket = begin(&pool, &node, session, &slow, Direction::Store);
    {
        let mut traffic = pool.tiering.traffic.lock();
        let used = traffic.uses.get_mut(&slow.id).unwrap();
        used.state = MediumState::MediumSlow;
        let offered = Use {
            is_attached: false,
            ..in_use(&node, session)
        };
        traffic.uses.insert(SegmentId::on_medium(2), offered);
    }
    let order = sent.recv().await.unwrap().unwrap();
    assert!(matches!(order.body, Some(Body::Transfers(_))), "{order:?}");
    pool.medium_attached(&node, session, MediumId(2), Generation(1))
        .await;
    let early = tokio::time::timeout(Duration::from_millis(300), sent.recv()).await;
    assert!(early.is_err(), "{early:?}");
    pool.transfers_done(&node, &[(ticket, Code::Ok)]);
    let told = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let told = told.expect("the drain has ended").unwrap().unwrap();
    assert!(matches!(told.body, Some(Body::Demoted(_))), "{told:?}");
    pool.retire().await;
}
