//! Hard-pinned blocks that wait for their copies.

use super::super::demoter::MOST_AT_QUOTA;
use super::*;
use kvpool_types::{Namespace, NamespaceSettings, Setting};

/// The queue has more blocks of the namespace at its quota than the demoter examines in one round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_blocks_at_a_quota_delay_none_of_another_namespace() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let small = NamespaceSettings::default().with(Setting::MediaHard, 4096);
    for (name, settings) in [("a", small), ("b", NamespaceSettings::default())] {
        let namespace = Namespace {
            name: name.into(),
            ..Namespace::default()
        };
        let created = pool.create_namespace(namespace, settings).await;
        assert!(created.unwrap());
    }
    // The test does the demoter's work.
    pool.term.end();
    let (node, session, mut sent) = connected(&pool);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    node.add_segment(SegmentId(1));
    attach(&pool, &node, session, medium.id);
    pool.tiering.demotions.lock().expect(node.incarnation);
    let put = |name: &str, version: u64| {
        let pinned = NewBlock {
            namespace: pool.namespace(name).unwrap(),
            hard_pin: true,
            ..block(&format!("block-{version}"), version)
        };
        let published = pool.directory.publish(std::slice::from_ref(&pinned));
        pool.queue_for_media(std::iter::once(Put {
            namespace: pinned.namespace,
            key: &pinned.key,
            parent: None,
            block: published[0].id.unwrap(),
            version: pinned.version,
            bytes: 100,
            hard_pin: true,
            replicas: &pinned.replicas,
        }));
    };
    let many = u64::try_from(2 * MOST_AT_QUOTA).unwrap();
    (1..=many).for_each(|version| put("a", version));
    (0..3).for_each(|_| pool.tend_media());
    assert!(sent.try_recv().is_err(), "the quota takes no copy");
    put("b", many + 1);
    pool.tend_media();
    let order = sent.try_recv().expect("it has its turn at once").unwrap();
    let Some(Body::Transfers(orders)) = &order.body else {
        panic!("{order:?}");
    };
    assert_eq!(orders.transfers[0].version, many + 1);
    let waiting = {
        let demotions = pool.tiering.demotions.lock();
        let line = &demotions.nodes[&node.incarnation];
        (line.at_quota.len(), line.pinned.len())
    };
    assert_eq!(waiting, (2 * MOST_AT_QUOTA, 0));
    pool.retire().await;
}
