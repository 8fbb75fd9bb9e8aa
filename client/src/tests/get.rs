use super::{assert_soon, block, get_one, key, put_twice};
use crate::testing::{Fault, Mode, Pool, pool, pool_with};
use crate::{GetBlock, GetError, GetOptions, GetOutcome, PutOptions, Region};
use kvpool_proto::{
    Location, LookupReply, RenewReply, RenewRequest, ReportReplicasRequest, ReportedReplica,
};
use kvpool_types::wire::keys::unpack;
use kvpool_types::{Code, Length, Offset};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[tokio::test]
async fn bytes_that_do_not_match_are_never_returned() {
    let pool = pool().await;
    put_twice(&pool, "a", b"right bytes").await;
    let (reports, segment) = (watch_reports(&pool), first_segment(&pool, "a"));
    pool.nodes.set(1, Mode::Lies);
    for _ in 0..20 {
        let (outcome, bytes) = get_one(&pool, "a", 11).await;
        assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        assert_eq!(bytes, b"right bytes");
    }
    assert!(pool.client.counters().checksum_mismatches > 0);
    first_replica_is_dropped(&pool, "a", &reports, segment).await;
}

/// The reports that reach the master from this call on.
fn watch_reports(pool: &Pool) -> Arc<Mutex<Vec<ReportedReplica>>> {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&reports);
    let keep = move |request: &mut ReportReplicasRequest| seen.lock().extend(&request.reports);
    pool.master.on_request("report_replicas", keep);
    reports
}

/// Waits until the master has dropped the replica of `name` on the first node, for a report of that replica.
async fn first_replica_is_dropped(
    pool: &Pool,
    name: &str,
    reports: &Mutex<Vec<ReportedReplica>>,
    segment: u32,
) {
    let begun = Instant::now();
    while pool.master.replicas(name) != ["n2"] {
        assert!(begun.elapsed() < Duration::from_secs(2), "{reports:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let report = reports.lock()[0];
    assert_eq!((report.segment, report.code), (segment, 20));
}

/// The segment of the first node.
fn first_segment(pool: &Pool, name: &str) -> u32 {
    let replicas = pool.master.described(name).unwrap().replicas;
    let first = replicas.iter().find(|replica| replica.node.0 == *"n1");
    first.unwrap().segment.0
}

#[tokio::test]
async fn when_all_replicas_lie_the_get_is_a_miss_and_not_their_bytes() {
    let pool = pool().await;
    put_twice(&pool, "a", b"right bytes").await;
    pool.nodes.set(1, Mode::Lies);
    pool.nodes.set(2, Mode::Lies);
    let (outcome, _) = get_one(&pool, "a", 11).await;
    assert_eq!(outcome, Ok(GetOutcome::Miss));
}

#[tokio::test]
async fn a_node_that_hangs_takes_only_its_share_of_the_deadline() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.nodes.set(1, Mode::Hangs);
    for _ in 0..4 {
        let begun = Instant::now();
        let (outcome, bytes) = get_one(&pool, "a", 5).await;
        assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        assert_eq!(bytes, b"bytes");
        assert_soon(begun, Duration::from_millis(1500));
    }
    // After the node has hung once, the client deprioritizes it.
    assert!(pool.nodes.reads(1) <= 1, "{}", pool.nodes.reads(1));
}

#[tokio::test]
async fn a_node_that_hangs_holds_up_no_block_of_another() {
    let pool = pool().await;
    let names: Vec<String> = (0..50).map(|n| format!("k{n}")).collect();
    // Half of the blocks are only on the node that hangs.
    for (at, name) in names.iter().enumerate() {
        put_on(&pool, if at % 2 == 0 { "n2" } else { "n1" }, name).await;
    }
    pool.nodes.set(1, Mode::Hangs);
    let memory: Vec<Region> = names.iter().map(|_| Region::allocate(Length(8))).collect();
    let gets = names
        .iter()
        .zip(&memory)
        .map(|(name, memory)| GetBlock::new(key(name), memory.whole()))
        .collect();
    let begun = Instant::now();
    let outcomes = pool.client.batch_get(gets, &GetOptions::default()).await;
    assert_soon(begun, Duration::from_millis(2500));
    for (at, outcome) in outcomes.iter().enumerate() {
        if at % 2 == 0 {
            assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        } else {
            assert_eq!(outcome.as_ref().unwrap_err().code(), Code::DeadlineExceeded);
        }
    }
}

/// Puts one block on one node.
async fn put_on(pool: &Pool, node: &str, name: &str) {
    let options = PutOptions {
        preferred_nodes: vec![node.to_owned()],
        ..PutOptions::default()
    };
    let blocks = vec![block(name, name.as_bytes())];
    let outcomes = pool.client.batch_put(blocks, &options).await;
    assert!(outcomes[0].is_ok(), "{outcomes:?}");
    assert_eq!(pool.master.replicas(name), [node]);
}

#[tokio::test]
async fn a_block_of_dropped_nodes_is_a_miss_and_one_of_unreachable_nodes_an_error_in_time() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Fails(Code::Unreachable));
    }
    let begun = Instant::now();
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert_eq!(outcome.unwrap_err().code(), Code::Unreachable);
    assert_soon(begun, Duration::from_millis(2500));
    let master = pool.master.pool();
    for node in master.members.all() {
        master.drop_node(&node);
    }
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert_eq!(outcome, Ok(GetOutcome::Miss));
}

#[tokio::test]
async fn bytes_read_after_the_lease_are_read_again() {
    let ttl = Duration::from_millis(40);
    let pool = pool_with(|setup, _| setup.config.lease_ttl = ttl).await;
    put_twice(&pool, "a", b"bytes").await;
    let reports = watch_reports(&pool);
    refuse_renewals(&pool);
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Slow(Duration::from_millis(80)));
    }
    let (outcome, _) = get_one(&pool, "a", 5).await;
    // Such a read is never a hit, and no replica is reported.
    assert_eq!(outcome.unwrap_err().code(), Code::LeaseEnded);
    assert!(pool.client.counters().leases_outrun > 1);
    assert_eq!(pool.client.counters().checksum_mismatches, 0);
    assert!(reports.lock().is_empty());
}

/// The master answers every renewal as if it came too late.
fn refuse_renewals(pool: &Pool) {
    pool.master.on_answer("renew", |renewed: &mut RenewReply| {
        renewed.codes.fill(Code::LeaseEnded.to_wire().into());
    });
}

#[tokio::test]
async fn a_long_read_renews_its_lease() {
    let ttl = Duration::from_millis(100);
    let pool = pool_with(|setup, _| setup.config.lease_ttl = ttl).await;
    put_twice(&pool, "a", b"bytes").await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Slow(Duration::from_millis(300)));
    }
    let (outcome, bytes) = get_one(&pool, "a", 5).await;
    assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
    assert_eq!(bytes, b"bytes");
    assert!(pool.master.calls("renew") >= 3);
    assert_eq!(pool.client.counters().leases_outrun, 0);
}

/// Another version may be reserved before the lookup, and committed while the earlier one is read.
#[tokio::test]
async fn a_long_read_renews_the_lease_on_its_own_version_alone() {
    let ttl = Duration::from_millis(100);
    let pool = pool_with(|setup, _| setup.config.lease_ttl = ttl).await;
    put_twice(&pool, "a", b"bytes").await;
    put_twice(&pool, "later", b"bytes").await;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let versions = Arc::clone(&asked);
    pool.master
        .on_request("renew", move |renew: &mut RenewRequest| {
            versions.lock().extend(renew.versions.iter().copied());
        });
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Slow(Duration::from_millis(300)));
    }
    let (outcome, _) = get_one(&pool, "a", 5).await;
    let Ok(GetOutcome::Hit { version, .. }) = outcome else {
        panic!("{outcome:?}");
    };
    let asked = asked.lock();
    assert!(!asked.is_empty());
    assert!(asked.iter().all(|asked| *asked == version.0), "{asked:?}");
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_ends_no_other() {
    let ttl = Duration::from_millis(400);
    let pool = pool_with(|setup, _| setup.config.lease_ttl = ttl).await;
    // All blocks are read from one node, under one lease.
    for name in ["a", "b"] {
        put_on(&pool, "n1", name).await;
    }
    let asked = Arc::new(Mutex::new(Vec::new()));
    let keys = Arc::clone(&asked);
    pool.master
        .on_request("renew", move |renew: &mut RenewRequest| {
            *keys.lock() = unpack(&renew.keys)
                .map(Result::unwrap)
                .map(|k| k.to_string())
                .collect();
        });
    let until = Instant::now() + Duration::from_millis(800);
    pool.master
        .on_answer("renew", move |renewed: &mut RenewReply| {
            for (key, code) in asked.lock().iter().zip(&mut renewed.codes) {
                if key == "b" && Instant::now() < until {
                    *code = Code::LeaseEnded.to_wire().into();
                }
            }
        });
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(1000)));
    let memory: Vec<Region> = (0..2).map(|_| Region::allocate(Length(1))).collect();
    let gets = ["a", "b"].into_iter().zip(&memory);
    let gets = gets.map(|(name, memory)| GetBlock::new(key(name), memory.whole()));
    let options = GetOptions {
        timeout: Some(Duration::from_secs(10)),
        ..GetOptions::default()
    };
    let outcomes = pool.client.batch_get(gets.collect(), &options).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    // Only the block whose lease ended is read again.
    assert_eq!(pool.client.counters().leases_outrun, 1);
}

#[tokio::test]
async fn a_location_is_asked_for_once_while_its_lease_runs() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    for _ in 0..3 {
        let (outcome, _) = get_one(&pool, "a", 5).await;
        assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })));
    }
    assert_eq!(pool.master.calls("lookup"), 1);
    // A call that releases its leases leaves no cached location behind.
    let memory = Region::allocate(Length(5));
    put_twice(&pool, "b", b"other").await;
    // The first release is that of "a".
    settled(&pool, 1).await;
    for released in 1..=2 {
        let gets = vec![GetBlock::new(key("b"), memory.whole())];
        let options = GetOptions {
            release: true,
            ..GetOptions::default()
        };
        let outcomes = pool.client.batch_get(gets, &options).await;
        assert!(matches!(outcomes[0], Ok(GetOutcome::Hit { .. })));
        assert_eq!(pool.master.calls("release"), 1 + released);
        assert!(pool.master.described("b").unwrap().lease_left.is_zero());
        assert_eq!(pool.master.calls("lookup"), 1 + released);
    }
}

/// Waits until the client has sent this many releases, which it does shortly after a get.
async fn settled(pool: &Pool, releases: usize) {
    let begun = Instant::now();
    while pool.master.calls("release") < releases {
        assert!(begun.elapsed() < Duration::from_secs(10), "no release came");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_release_that_is_not_answered_holds_no_bytes_back() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.always("release", Fault::AnswerHangs);
    let memory = Region::allocate(Length(5));
    let options = GetOptions {
        release: true,
        timeout: Some(Duration::from_secs(600)),
    };
    let gets = vec![GetBlock::new(key("a"), memory.whole())];
    let get = pool.client.batch_get(gets, &options);
    let outcomes = tokio::time::timeout(Duration::from_secs(60), get).await;
    let outcomes = outcomes.expect("a get that ends");
    assert!(matches!(outcomes[0], Ok(GetOutcome::Hit { .. })));
    assert_eq!(memory.whole().to_vec(), b"bytes");
    assert_eq!(pool.master.calls("release"), 1);
    // The client does not doubt the master for this.
    let hellos = pool.master.calls("hello");
    pool.master.always("release", None);
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
    assert_eq!(pool.master.calls("hello"), hellos);
}

#[tokio::test]
async fn a_block_that_was_written_anew_is_got_whole() {
    let pool = pool().await;
    put_twice(&pool, "a", b"first").await;
    assert_eq!(pool.client.get(&key("a")).await.unwrap().unwrap(), b"first");
    let upsert = pool
        .client
        .upsert(vec![block("a", b"second, longer")], &PutOptions::default())
        .await;
    assert!(upsert[0].is_ok());
    assert_eq!(
        pool.client.get(&key("a")).await.unwrap().unwrap(),
        b"second, longer"
    );
    // A lease would keep the block. The lease of each get ends shortly after it.
    settled(&pool, 2).await;
    let removed = pool
        .client
        .remove(crate::Remove::Keys(vec![key("a"), key("z")]), false)
        .await
        .unwrap();
    assert_eq!(removed.codes, [Code::Ok, Code::Missing]);
    assert_eq!(pool.client.get(&key("a")).await.unwrap(), None);
}

#[tokio::test]
async fn each_item_of_a_batch_has_its_own_outcome() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    let memory: Vec<Region> = [5, 9, 3, 5].map(|n| Region::allocate(Length(n))).into();
    let gets = vec![
        GetBlock::new(key("a"), memory[0].whole()),
        GetBlock::new(key("a"), memory[1].whole()),
        GetBlock::new(key("a"), memory[2].whole()),
        GetBlock::new(key("absent"), memory[3].whole()),
    ];
    let outcomes = pool.client.batch_get(gets, &GetOptions::default()).await;
    assert!(matches!(
        outcomes[0],
        Ok(GetOutcome::Hit {
            length: Length(5),
            ..
        })
    ));
    assert!(matches!(
        outcomes[1],
        Ok(GetOutcome::Hit {
            length: Length(5),
            ..
        })
    ));
    assert_eq!(
        outcomes[2],
        Err(GetError::BufferTooSmall {
            buffers: Length(3),
            block: Length(5)
        })
    );
    assert_eq!(outcomes[3], Ok(GetOutcome::Miss));
    assert_eq!(memory[0].whole().to_vec(), b"bytes");
    assert_eq!(memory[1].whole().to_vec(), b"bytes\0\0\0\0");
}

#[tokio::test]
async fn a_block_whose_buffers_overlap_is_refused_and_its_memory_is_unchanged() {
    let pool = pool().await;
    put_twice(&pool, "a", &[7; 100]).await;
    let (memory, other) = (Region::allocate(Length(100)), Region::allocate(Length(100)));
    let part = |of: &Region, from, length| of.slice(Offset(from), Length(length)).unwrap();
    let overlapping = vec![part(&memory, 40, 60), part(&memory, 0, 60)];
    let adjacent = vec![part(&other, 60, 40), part(&other, 0, 60)];
    let (a, options) = (key("a"), GetOptions::default());
    let get = |buffers| GetBlock {
        key: a.clone(),
        buffers,
    };
    let gets = vec![get(overlapping.clone()), get(adjacent)];
    let outcomes = pool.client.batch_get(gets, &options).await;
    let refused = outcomes[0].clone().unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(outcomes[1].as_ref().unwrap().is_hit(), "{outcomes:?}");
    assert_eq!(other.whole().to_vec(), [7; 100]);
    let range = pool.client.get_range(&a, Offset(0), overlapping, &options);
    assert_eq!(range.await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(memory.whole().to_vec(), [0; 100]);
}

#[tokio::test]
async fn a_range_is_verified_by_its_chunks() {
    let pool = pool().await;
    let bytes: Vec<u8> = (0..200_000u32)
        .map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1])
        .collect();
    put_twice(&pool, "a", &bytes).await;
    let (reports, segment) = (watch_reports(&pool), first_segment(&pool, "a"));
    pool.nodes.set(1, Mode::Lies);
    for from in [0usize, 65_530, 70_000, 199_990].repeat(5) {
        let memory = Region::allocate(Length(10));
        let outcome = pool
            .client
            .get_range(
                &key("a"),
                Offset(from as u64),
                vec![memory.whole()],
                &GetOptions::default(),
            )
            .await;
        assert!(
            matches!(
                outcome,
                Ok(GetOutcome::Hit {
                    length: Length(200_000),
                    ..
                })
            ),
            "{outcome:?}"
        );
        assert_eq!(memory.whole().to_vec(), bytes[from..from + 10]);
    }
    first_replica_is_dropped(&pool, "a", &reports, segment).await;
    let memory = Region::allocate(Length(11));
    let outcome = pool
        .client
        .get_range(
            &key("a"),
            Offset(199_990),
            vec![memory.whole()],
            &GetOptions::default(),
        )
        .await;
    assert_eq!(outcome.unwrap_err().code(), Code::OutOfRange);
}

/// From now on, the first `times` answers to lookups say that the block is being loaded from an SSD.
fn comes_later(pool: &Pool, times: usize) {
    let mut told = 0;
    pool.master
        .on_answer("lookup", move |reply: &mut LookupReply| {
            told += 1;
            for location in reply.locations.iter_mut().filter(|_| told <= times) {
                *location = Location {
                    code: Code::Missing.to_wire().into(),
                    later: true,
                    ..Location::default()
                };
            }
        });
}

#[tokio::test]
async fn a_get_of_one_block_waits_for_it_to_come_from_an_ssd_until_the_deadline() {
    let pool = pool().await;
    put_twice(&pool, "a", b"right bytes").await;
    comes_later(&pool, 2);
    let asked = pool.master.calls("lookup");
    let got = pool.client.get(&key("a")).await.unwrap();
    assert_eq!(got.as_deref(), Some(&b"right bytes"[..]));
    assert_eq!(pool.master.calls("lookup") - asked, 3);

    put_twice(&pool, "b", b"right bytes").await;
    comes_later(&pool, usize::MAX);
    let begun = Instant::now();
    let wait = Some(Duration::from_millis(300));
    let outcome = pool
        .client
        .get_placed(&key("b"), wait, async |_| None)
        .await;
    assert_eq!(outcome, Ok(GetOutcome::Miss));
    assert!(begun.elapsed() > Duration::from_millis(100));
    assert_soon(begun, Duration::from_secs(2));
}

/// A reader that reports again and again hides a block once, not forever.
#[tokio::test]
async fn a_replica_that_was_found_right_is_not_hidden_again_at_once() {
    let pool = pool().await;
    let options = PutOptions::default();
    let put = pool.client.batch_put(vec![block("a", b"bytes")], &options);
    assert!(put.await[0].is_ok());
    let master = pool.master.pool();
    let stored = master.stored_blocks().remove(0);
    let (key, segment) = (stored.key.as_ref(), stored.replicas[0].segment);
    let report = || {
        let reports = [(key, stored.version, segment, Code::ChecksumMismatch)];
        assert_eq!(master.report(stored.namespace, &reports), [Code::Ok]);
    };
    let is_found = || {
        let found = master.lookup(stored.namespace, &[key][..], false);
        found.answer[0].is_some()
    };
    report();
    assert!(!is_found(), "nobody knows yet whether it is right");
    let begun = Instant::now();
    while !is_found() {
        assert_soon(begun, Duration::from_secs(2));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    report();
    assert!(is_found());
}
