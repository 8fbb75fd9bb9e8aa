//! The effects of a registration. Its fields prove nothing about the sender, except the proofs
//! themselves.

use crate::support::{join, pool, registration};
use kvpool_master::Config;
use kvpool_master::membership::Registration;
use kvpool_types::{
    Code, Epoch, Extent, IncarnationSecret, Length, NodeName, Offset, SegmentId, TermProver,
};
use std::time::Duration;
use tokio::time::timeout;

const MIB: u64 = 1 << 20;

async fn refused(pool: &std::sync::Arc<kvpool_master::pool::Pool>, bad: &Registration) -> Code {
    pool.register(bad).await.unwrap_err().code
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_epoch_without_proof_ends_no_term() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let name = NodeName("n".into());
    let later = |epoch: u64, proof: Vec<u8>| Registration {
        epoch_seen: Epoch(epoch),
        epoch_proof: proof.into(),
        ..registration("n", 1, MIB)
    };
    let ahead = pool.epoch.0 + 1;
    let own = pool.prove_term(&name);
    for bad in [
        later(ahead, Vec::new()),
        later(u64::MAX, vec![0; 16]),
        // A proof of another term or another pool.
        later(ahead, own.to_vec()),
        later(
            ahead,
            TermProver::new(pool.cluster, 0)
                .prove(&name, Epoch(ahead))
                .to_vec(),
        ),
    ] {
        assert_eq!(refused(&pool, &bad).await, Code::NotLeader);
    }
    let superseded = timeout(Duration::from_millis(50), pool.superseded()).await;
    assert!(superseded.is_err(), "a number ended the term");
    assert!(pool.members.get(&name).is_none());
}

fn copy_all(from: &std::path::Path, to: &std::path::Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let copy = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&copy).unwrap();
            copy_all(&entry.path(), &copy);
        } else {
            std::fs::copy(entry.path(), copy).unwrap();
        }
    }
}

/// The data directory was restored to an older state, so the master must begin above the later
/// terms.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_welcomed_to_a_later_term_ends_this_one() {
    let directory = tempfile::tempdir().unwrap();
    let copy = tempfile::tempdir().unwrap();
    let name = NodeName("n".into());
    let (first, store) = pool(directory.path(), Config::default()).await;
    let old = first.epoch;
    first.stop().await;
    drop((first, store));
    copy_all(directory.path(), copy.path());
    let mut later = registration("n", 1, MIB);
    for _ in 0..3 {
        let (pool, store) = pool(directory.path(), Config::default()).await;
        later.epoch_seen = pool.epoch;
        later.epoch_proof = pool.prove_term(&name);
        pool.stop().await;
        drop((pool, store));
    }
    let (pool, _store) = pool(copy.path(), Config::default()).await;
    assert!(old < pool.epoch && pool.epoch < later.epoch_seen);
    assert_eq!(refused(&pool, &later).await, Code::NotLeader);
    let superseded = timeout(Duration::from_secs(5), pool.superseded()).await;
    assert_eq!(superseded.unwrap(), later.epoch_seen);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impossible_registration_is_refused_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    join(&pool, "good", 1, MIB).await;
    let before = pool.placement.usage().capacity;
    let with = |change: fn(&mut Registration)| {
        let mut bad = registration("bad", 2, MIB);
        change(&mut bad);
        bad
    };
    let cases = [
        with(|r| r.segments.clear()),
        with(|r| r.segments = vec![(Length(0), None)]),
        with(|r| r.segments = vec![(Length(1 << 62), None)]),
        with(|r| r.segments = vec![(Length(1 << 63), None), (Length(1 << 63), None)]),
        with(|r| r.segments = vec![(Length(4096), None); 100_000]),
        with(|r| r.name = NodeName(String::new())),
        with(|r| r.name = NodeName("n".repeat(256))),
        with(|r| r.name = NodeName("a\nb".into())),
        with(|r| r.name = NodeName("\u{1b}[2Jn".into())),
        with(|r| r.name = NodeName("n\u{202e}".into())),
        with(|r| r.data_address = "127.0.0.1:1\n".into()),
        with(|r| r.data_address = "a".repeat(10_000)),
        with(|r| r.shm_path = "/tmp/\u{7}".into()),
        with(|r| r.version = "1.0\u{1b}[2J".into()),
        with(|r| r.version = "1".repeat(1000)),
    ];
    for bad in &cases {
        assert_eq!(
            refused(&pool, bad).await,
            Code::InvalidArgument,
            "{:.200?}",
            bad
        );
    }
    assert_eq!(pool.members.all().len(), 1);
    assert_eq!(pool.placement.usage().capacity, before);
}

/// An operator who upgrades a pool sees which nodes are new. A node of an earlier version tells none.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_has_the_version_that_it_registered_with() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    for (name, version) in [("old", ""), ("new", "0.2.0-rc.1+b7")] {
        let registered = Registration {
            version: version.into(),
            ..registration(name, 1, MIB)
        };
        let node = pool.register(&registered).await.unwrap();
        let (outbox, _unread) = tokio::sync::mpsc::unbounded_channel();
        pool.activate(&node, &registered, outbox);
        assert_eq!(node.version(), version);
    }
}

/// Every client knows the name and the incarnation of every node, and the welcome contains the
/// term's grant key.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_session_of_an_incarnation_needs_its_secret() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let secret = IncarnationSecret::new([9; 32]);
    let mut own = registration("n", secret.incarnation().0, MIB);
    own.secret = Some(secret);
    let stranger = |secret| Registration {
        secret,
        ..own.clone()
    };
    let other = Some(IncarnationSecret::new([8; 32]));
    // No session of the incarnation is open yet, as after a restart of the master.
    assert_eq!(refused(&pool, &stranger(None)).await, Code::GrantRefused);
    assert_eq!(
        refused(&pool, &stranger(other.clone())).await,
        Code::GrantRefused
    );
    let node = pool.register(&own).await.unwrap();
    let (outbox, _inbox) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&node, &own, outbox);
    assert_eq!(refused(&pool, &stranger(None)).await, Code::GrantRefused);
    assert_eq!(refused(&pool, &stranger(other)).await, Code::GrantRefused);
    // The network was cut, and the node returns while its old session seems alive.
    pool.register(&own).await.unwrap();

    // A node of an earlier version has no secret: it returns after its session has ended.
    let old = registration("old", 5, MIB);
    let node = pool.register(&old).await.unwrap();
    let (outbox, _inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = pool.activate(&node, &old, outbox);
    assert_eq!(refused(&pool, &old).await, Code::InProgress);
    pool.detach(&node, session);
    pool.register(&old).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_shuts_no_memory_but_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let other = join(&pool, "other", 1, MIB).await;
    let mut greedy = registration("greedy", 2, MIB);
    let range = |segment: SegmentId, offset: u64, length: u64| Extent {
        segment,
        offset: Offset(offset),
        length: Length(length),
    };
    let foreign = other.segments()[0];
    greedy.held = vec![
        range(foreign, 0, MIB),
        range(foreign, 4096, u64::MAX),
        range(SegmentId(77), u64::MAX, u64::MAX),
    ];
    let node = pool.register(&greedy).await.unwrap();
    let (outbox, _inbox) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&node, &greedy, outbox);
    let usage = pool.placement.usage();
    assert_eq!((usage.used, usage.quarantined), (0, 0));
}
