use super::{block, get_one, key, put_twice};
use crate::fake::{Mode, Pool, pool};
use crate::{GetBlock, GetError, GetOptions, GetOutcome, PutOptions, Region};
use kvpool_proto::ReportedReplica;
use kvpool_types::{Code, Length, Offset};
use std::time::{Duration, Instant};

#[tokio::test]
async fn bytes_that_do_not_match_are_never_returned() {
    let pool = pool().await;
    put_twice(&pool, "a", b"right bytes").await;
    pool.nodes.set(1, Mode::Lies);
    for _ in 0..20 {
        let (outcome, bytes) = get_one(&pool, "a", 11).await;
        assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        assert_eq!(bytes, b"right bytes");
    }
    assert!(pool.client.counters().checksum_mismatches > 0);
    let report = first_report(&pool).await;
    assert_eq!((report.segment, report.code), (0, 20));
}

/// It comes on its own, so it may be a little behind.
async fn first_report(pool: &Pool) -> ReportedReplica {
    let begun = Instant::now();
    loop {
        if let Some(report) = pool.master.state().reports.first() {
            return *report;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "nothing was reported"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
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
        assert!(
            begun.elapsed() < Duration::from_millis(1500),
            "{:?}",
            begun.elapsed()
        );
    }
    // Once it has hung it is shunned: it is not asked every time.
    assert!(pool.nodes.reads(1) <= 1, "{}", pool.nodes.reads(1));
}

#[tokio::test]
async fn a_node_that_hangs_holds_up_no_block_of_another() {
    let pool = pool().await;
    let names: Vec<String> = (0..50).map(|n| format!("k{n}")).collect();
    for name in &names {
        put_twice(&pool, name, name.as_bytes()).await;
    }
    // Half of the blocks lie on the node that hangs and nowhere else.
    for (at, name) in names.iter().enumerate() {
        let segment = u32::from(at % 2 == 0);
        pool.master.state().blocks.get_mut(name).unwrap().segments = vec![segment];
    }
    pool.master.state().hides = false;
    pool.nodes.set(1, Mode::Hangs);
    let memory: Vec<Region> = names.iter().map(|_| Region::allocate(Length(8))).collect();
    let gets = names
        .iter()
        .zip(&memory)
        .map(|(name, memory)| GetBlock::new(key(name), memory.whole()))
        .collect();
    let begun = Instant::now();
    let outcomes = pool.client.batch_get(gets, &GetOptions::default()).await;
    assert!(
        begun.elapsed() < Duration::from_millis(2500),
        "{:?}",
        begun.elapsed()
    );
    for (at, outcome) in outcomes.iter().enumerate() {
        if at % 2 == 0 {
            assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        } else {
            assert_eq!(outcome.as_ref().unwrap_err().code(), Code::DeadlineExceeded);
        }
    }
}

#[tokio::test]
async fn what_the_master_hides_is_a_miss_and_what_it_does_not_is_an_error_in_time() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    put_twice(&pool, "b", b"bytes").await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Fails(Code::Unreachable));
    }
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert_eq!(outcome, Ok(GetOutcome::Miss));
    pool.master.state().hides = false;
    let begun = Instant::now();
    let (outcome, _) = get_one(&pool, "b", 5).await;
    assert_eq!(outcome.unwrap_err().code(), Code::Unreachable);
    assert!(
        begun.elapsed() < Duration::from_millis(2500),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn bytes_read_after_the_lease_are_read_again() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.state().lease_ttl_ms = 40;
    pool.master.state().renews = false;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Slow(Duration::from_millis(80)));
    }
    let (outcome, _) = get_one(&pool, "a", 5).await;
    // It is never a hit, and no replica is blamed.
    assert_eq!(outcome.unwrap_err().code(), Code::LeaseEnded);
    assert!(pool.client.counters().leases_outrun > 1);
    assert_eq!(pool.client.counters().checksum_mismatches, 0);
    assert!(pool.master.state().reports.is_empty());
}

#[tokio::test]
async fn a_long_read_renews_its_lease() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.state().lease_ttl_ms = 100;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Slow(Duration::from_millis(300)));
    }
    let (outcome, bytes) = get_one(&pool, "a", 5).await;
    assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
    assert_eq!(bytes, b"bytes");
    assert!(pool.master.calls("renew") >= 3);
    assert_eq!(pool.client.counters().leases_outrun, 0);
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_ends_no_other() {
    let pool = pool().await;
    for name in ["a", "b"] {
        put_twice(&pool, name, b"bytes").await;
    }
    {
        let mut state = pool.master.state();
        state.lease_ttl_ms = 400;
        state.unrenewed = ["b".to_owned()].into();
        // One node is read from, under one lease.
        for block in state.blocks.values_mut() {
            block.segments = vec![0];
        }
    }
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(1000)));
    let memory: Vec<Region> = (0..2).map(|_| Region::allocate(Length(5))).collect();
    let gets = ["a", "b"].into_iter().zip(&memory);
    let gets = gets.map(|(name, memory)| GetBlock::new(key(name), memory.whole()));
    let options = GetOptions {
        timeout: Some(Duration::from_secs(10)),
        ..GetOptions::default()
    };
    let again = async {
        tokio::time::sleep(Duration::from_millis(800)).await;
        pool.master.state().unrenewed.clear();
    };
    let (outcomes, ()) = tokio::join!(pool.client.batch_get(gets.collect(), &options), again);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    // The block whose lease ended is read again, and the other is not.
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
    // A call that takes its leases back leaves nothing behind to be used.
    let memory = Region::allocate(Length(5));
    put_twice(&pool, "b", b"other").await;
    for released in 1..=2 {
        let gets = vec![GetBlock::new(key("b"), memory.whole())];
        let options = GetOptions {
            release: true,
            ..GetOptions::default()
        };
        let outcomes = pool.client.batch_get(gets, &options).await;
        assert!(matches!(outcomes[0], Ok(GetOutcome::Hit { .. })));
        let of_b = |(key, _): &&(String, u64)| key == "b";
        let state = pool.master.state();
        assert_eq!(state.released.iter().filter(of_b).count(), released);
        drop(state);
        assert_eq!(pool.master.calls("lookup"), 1 + released);
    }
}

#[tokio::test]
async fn a_release_that_is_not_answered_holds_no_bytes_back() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.state().release_hangs = true;
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
    // The master is not doubted for it.
    let hellos = pool.master.calls("hello");
    pool.master.state().release_hangs = false;
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
async fn a_range_is_verified_by_its_chunks() {
    let pool = pool().await;
    let bytes: Vec<u8> = (0..200_000u32)
        .map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1])
        .collect();
    put_twice(&pool, "a", &bytes).await;
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
    let report = first_report(&pool).await;
    assert_eq!((report.segment, report.code), (0, 20));
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
