use super::{assert_soon, block, child, get_one, key};
use crate::testing::{Fault, Master, Mode, Pool, pool, pool_with};
use crate::{PutBlock, PutError, PutOptions, PutOutcome};
use futures::future::join_all;
use kvpool_proto::{CommitRequest, Outcomes, Reservation, ReserveReply, ReserveRequest};
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::{pack, unpack};
use kvpool_types::{Code, Key, NamespaceSettings, Setting, Version};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const STORED: Result<PutOutcome, PutError> = Ok(PutOutcome::Stored { replicas: 1 });

fn two() -> PutOptions {
    PutOptions {
        replicas: 2,
        ..PutOptions::default()
    }
}

fn keys(packed: &[u8]) -> Vec<Key> {
    unpack(packed).map(|key| key.unwrap().to_key()).collect()
}

/// The versions of the puts that a request commits, and whether they are in columns.
fn committed(request: &CommitRequest) -> (Vec<u64>, bool) {
    match &request.columns {
        Some(columns) => (columns.versions.clone(), true),
        None => (request.items.iter().map(|i| i.version).collect(), false),
    }
}

/// The master ends the reservations of the next `times` commits, and answers `code` for each.
pub(super) fn refuse_commits(master: &Arc<Master>, times: usize, code: Code) {
    let pool = master.pool();
    let left = Arc::new(AtomicUsize::new(times));
    let refused = Arc::clone(&left);
    master.on_request("commit", move |request: &mut CommitRequest| {
        if refused.load(Relaxed) > 0 {
            let versions: Vec<Version> = committed(request).0.into_iter().map(Version).collect();
            let keys = keys(&request.keys);
            let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
            pool.revoke(NamespaceId(0), &keys[..], &versions);
        }
    });
    master.on_answer("commit", move |answer: &mut Outcomes| {
        if left.load(Relaxed) > 0 {
            left.fetch_sub(1, Relaxed);
            answer.codes.fill(code.to_wire().into());
        }
    });
}

#[tokio::test]
async fn a_put_waits_for_room_and_then_says_full() {
    let pool = pool_with(|setup, _| setup.segment_bytes = 1 << 20).await;
    let bytes = vec![7; 600 << 10];
    let pinned = PutOptions {
        hard_pin: true,
        ..two()
    };
    let outcomes = pool
        .client
        .batch_put(vec![block("filler", &bytes)], &pinned);
    assert_eq!(outcomes.await, [Ok(PutOutcome::Stored { replicas: 2 })]);
    let options = PutOptions {
        timeout: Some(Duration::from_millis(400)),
        hard_pin: true,
        ..two()
    };
    let (putting, freeing) = (pool.client.clone(), pool.master.pool());
    let put = async |name: &str| {
        let outcomes = putting.batch_put(vec![block(name, &bytes)], &options);
        outcomes.await.remove(0)
    };
    let free = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let filler = key("filler");
        let keys = [filler.as_ref()];
        freeing.remove(NamespaceId(0), &keys, true).await.unwrap();
    };
    let (outcome, ()) = tokio::join!(put("a"), free);
    assert_eq!(outcome, Ok(PutOutcome::Stored { replicas: 2 }));
    let begun = Instant::now();
    let full = put("b").await.unwrap_err();
    assert_eq!(full.code(), Code::Full);
    // Pins hold this pool's memory, and the operator has to find them.
    assert!(full.to_string().contains("`kvctl ls` shows"), "{full}");
    assert_soon(begun, Duration::from_millis(900));
}

#[tokio::test]
async fn a_put_that_no_node_takes_names_the_command_that_shows_why() {
    let pool = pool().await;
    pool.master
        .on_request("reserve", |request: &mut ReserveRequest| {
            request.columns = false;
        });
    pool.master
        .on_answer("reserve", |reply: &mut ReserveReply| {
            for reservation in &mut reply.reservations {
                *reservation = Reservation {
                    code: Code::NoNodes.to_wire().into(),
                    ..Reservation::default()
                };
            }
        });
    let options = PutOptions {
        timeout: Some(Duration::from_millis(200)),
        ..PutOptions::default()
    };
    let outcomes = pool.client.batch_put(vec![block("a", b"x")], &options);
    let refused = outcomes.await.remove(0).unwrap_err();
    assert_eq!(refused.code(), Code::NoNodes);
    assert!(refused.to_string().contains("`kvctl status`"), "{refused}");
}

#[tokio::test]
async fn a_block_that_can_never_fit_fails_at_once_and_says_what_bounds_it() {
    let pool = pool_with(|setup, _| setup.segment_bytes = 4 << 20).await;
    let hard = NamespaceSettings::default().with(Setting::MemoryHard, 1 << 20);
    let changed = pool.client.change_namespace("default", &hard, &[]);
    changed.await.unwrap();
    let longest = pool.master.pool().longest_block();
    let put = async |name: &str, bytes: usize, replicas: u32| {
        let options = PutOptions {
            timeout: Some(Duration::from_secs(60)),
            replicas,
            ..PutOptions::default()
        };
        let blocks = vec![block(name, &vec![7; bytes])];
        let outcomes = pool.client.batch_put(blocks, &options);
        outcomes.await.remove(0)
    };
    let begun = Instant::now();
    // Each of the two replicas alone would fit.
    let refused = put("a", 600 << 10, 2).await.unwrap_err();
    assert_eq!(refused.code(), Code::OverQuota, "{refused}");
    let said = refused.to_string();
    let names = |number: u64| said.contains(&number.to_string());
    assert!(names(600 << 10) && names(1 << 20), "{said}");
    assert!(said.contains("memory_hard"), "{said}");
    assert_eq!(put("b", 600 << 10, 1).await, STORED);
    let no_settings = NamespaceSettings::default();
    let none = pool
        .client
        .change_namespace("default", &no_settings, &[Setting::MemoryHard]);
    none.await.unwrap();
    let refused = put("c", 5 << 20, 1).await.unwrap_err();
    assert_eq!(refused.code(), Code::TooLarge, "{refused}");
    let said = refused.to_string();
    let names = |number: u64| said.contains(&number.to_string());
    assert!(names(5 << 20) && names(longest), "{said}");
    assert_soon(begun, Duration::from_secs(30));
}

/// An operator reads which quota is too small, and how large it is.
#[tokio::test]
async fn a_put_that_waits_in_vain_for_a_quota_names_it_and_its_value() {
    let quotas = [
        (Setting::MemoryHard, 1 << 20, Code::MemoryQuota, "bytes"),
        (Setting::BlocksHard, 1, Code::BlocksQuota, "blocks"),
    ];
    for (setting, limit, code, unit) in quotas {
        let pool = pool_with(|setup, _| setup.segment_bytes = 4 << 20).await;
        let hard = NamespaceSettings::default().with(setting, limit);
        let changed = pool.client.change_namespace("default", &hard, &[]);
        changed.await.unwrap();
        let put = async |name: &str| {
            let options = PutOptions {
                timeout: Some(Duration::from_millis(500)),
                hard_pin: true,
                ..PutOptions::default()
            };
            let blocks = vec![block(name, &vec![7; 600 << 10])];
            pool.client.batch_put(blocks, &options).await.remove(0)
        };
        assert_eq!(put("a").await, STORED);
        let refused = put("b").await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        let said = refused.to_string();
        let expected = format!("{setting}, which is {limit} {unit}");
        assert!(said.contains(&expected), "{said}");
        assert!(said.contains("raise the quota"), "{said}");
    }
}

#[tokio::test]
async fn a_batch_that_was_granted_a_part_asks_for_the_rest_without_a_pause() {
    let pool = pool().await;
    // Only the first key of each request finds room.
    let cut = Arc::new(AtomicUsize::new(0));
    let open = Arc::clone(&cut);
    pool.master
        .on_request("reserve", move |request: &mut ReserveRequest| {
            let keys = keys(&request.keys);
            open.store(keys.len() - 1, Relaxed);
            request.keys = pack(&keys[..1]).into();
            request.lengths.truncate(1);
            request.columns = false;
        });
    pool.master
        .on_answer("reserve", move |reply: &mut ReserveReply| {
            let full = Reservation {
                code: Code::Full.to_wire().into(),
                ..Reservation::default()
            };
            let asked = 1 + cut.load(Relaxed);
            reply.reservations.resize(asked, full);
        });
    let names: Vec<String> = (0..12).map(|number| format!("k{number}")).collect();
    let blocks = names.iter().map(|name| block(name, b"x")).collect();
    let begun = Instant::now();
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert!(outcomes.iter().all(|outcome| *outcome == STORED));
    assert_eq!(pool.master.calls("reserve"), 12);
    // Eleven pauses, each between half and all of its length, would take more than 750 ms.
    assert_soon(begun, Duration::from_millis(400));
}

/// Counts the commits that come in columns.
fn count_columns(pool: &Pool) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&count);
    pool.master
        .on_request("commit", move |request: &mut CommitRequest| {
            seen.fetch_add(committed(request).1.into(), Relaxed);
        });
    count
}

#[tokio::test]
async fn a_master_that_answers_in_columns_is_told_in_columns() {
    let pool = pool().await;
    assert_eq!(pool.client.put(&key("b"), b"x".to_vec()).await, STORED);
    let columns = count_columns(&pool);
    let blocks = vec![
        block("a", b"x"),
        block("b", b"yy"),
        child("c", "a", b"zzz"),
        child("d", "elsewhere", b"w"),
    ];
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert_eq!(outcomes, [STORED, Ok(PutOutcome::Present), STORED, STORED]);
    assert!(columns.load(Relaxed) > 0);
    assert_eq!(pool.master.described("c").unwrap().length.0, 3);
    assert_eq!(pool.master.pool().reservations(), 0);
    assert_eq!(pool.client.get(&key("c")).await.unwrap().unwrap(), b"zzz");
    // A reply with several extents per key has no columns.
    let before = columns.load(Relaxed);
    let outcomes = pool.client.batch_put(vec![block("e", b"v")], &two()).await;
    assert_eq!(outcomes, [Ok(PutOutcome::Stored { replicas: 2 })]);
    assert_eq!(columns.load(Relaxed), before);
}

#[tokio::test]
async fn a_master_that_knows_no_columns_is_told_in_items() {
    let pool = pool().await;
    let columns = count_columns(&pool);
    pool.master
        .on_request("reserve", |request: &mut ReserveRequest| {
            request.columns = false
        });
    let blocks = vec![block("a", b"x"), child("b", "a", b"yy")];
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert_eq!(outcomes, [STORED, STORED]);
    assert_eq!(columns.load(Relaxed), 0);
    assert_eq!(pool.client.get(&key("b")).await.unwrap().unwrap(), b"yy");
}

#[tokio::test]
async fn columns_of_different_lengths_are_refused() {
    let pool = pool().await;
    pool.master
        .on_answer("reserve", |reply: &mut ReserveReply| {
            reply.columns.as_mut().unwrap().offsets.pop();
        });
    let options = PutOptions {
        timeout: Some(Duration::from_millis(400)),
        ..PutOptions::default()
    };
    let outcomes = pool
        .client
        .batch_put(vec![block("a", b"x"), block("b", b"y")], &options)
        .await;
    let codes: Vec<Code> = outcomes
        .iter()
        .map(|outcome| outcome.as_ref().unwrap_err().code())
        .collect();
    assert_eq!(codes, [Code::Malformed; 2]);
    assert_eq!(pool.master.calls("commit"), 0);
}

/// A grant from the lost answer would block the key for the put itself until the grant ends.
#[tokio::test]
async fn a_reservation_whose_answer_was_lost_is_named_when_it_is_asked_for_again() {
    let pool = pool().await;
    pool.master.next("reserve", [Fault::AnswerLost; 2]);
    let reserves = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&reserves);
    pool.master
        .on_request("reserve", move |request: &mut ReserveRequest| {
            let named = (request.request, request.instead_of.clone());
            seen.lock().push(named);
        });
    let blocks = vec![block("a", b"x"), block("b", b"y")];
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert_eq!(outcomes, [STORED, STORED]);
    let outcomes = pool
        .client
        .batch_put(vec![block("c", b"z")], &PutOptions::default())
        .await;
    assert_eq!(outcomes, [STORED]);
    let reserves = reserves.lock().clone();
    let names: Vec<u64> = reserves.iter().map(|(name, _)| *name).collect();
    let sorted = |names: &[u64]| {
        let mut names = names.to_vec();
        names.sort_unstable();
        names
    };
    let [first, second, ..] = names[..] else {
        panic!("{names:?}")
    };
    let instead: Vec<Vec<u64>> = reserves.into_iter().map(|(_, instead)| instead).collect();
    let both = sorted(&[first, second]);
    assert_eq!(instead, [vec![], vec![first], both, vec![]]);
    assert_eq!(pool.master.pool().reservations(), 0);
}

/// There are more blocks than [`crate::revoker`] queues. So some grants are not revoked before they expire.
const MORE_THAN_THE_REVOKER_QUEUES: usize = 10_000;

#[tokio::test]
async fn blocks_whose_writes_failed_are_put_again_at_once_however_many_they_are() {
    let pool = pool().await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Fails(Code::GrantRefused));
    }
    let names: Vec<String> = (0..MORE_THAN_THE_REVOKER_QUEUES)
        .map(|number| format!("block {number}"))
        .collect();
    let blocks = names.iter().map(|name| block(name, b"bytes")).collect();
    let client = pool.client.clone();
    let putting = tokio::spawn(async move {
        let options = PutOptions {
            timeout: Some(Duration::from_secs(20)),
            ..PutOptions::default()
        };
        client.batch_put(blocks, &options).await
    });
    while pool.client.counters().transfer_retries < MORE_THAN_THE_REVOKER_QUEUES as u64 {
        assert!(!putting.is_finished());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Well);
    }
    let well = Instant::now();
    let outcomes = putting.await.unwrap();
    assert!(outcomes.iter().all(|outcome| *outcome == STORED));
    assert_soon(well, Duration::from_secs(4));
}

#[tokio::test]
async fn a_batch_over_the_clients_cap_on_a_node_is_written_in_turns_under_the_same_grants() {
    let pool = pool().await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::HoldsAtMost(3));
    }
    let names: Vec<String> = (0..50).map(|number| format!("block {number}")).collect();
    let blocks = names.iter().map(|name| block(name, b"bytes")).collect();
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert!(outcomes.iter().all(|outcome| *outcome == STORED));
    assert_eq!(pool.master.calls("reserve"), 1);
    assert_eq!(pool.client.counters().transfer_retries, 0);
}

#[tokio::test]
async fn a_put_that_stays_over_the_clients_cap_says_so_at_its_deadline() {
    let pool = pool().await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::HoldsAtMost(0));
    }
    let options = PutOptions {
        timeout: Some(Duration::from_millis(400)),
        ..PutOptions::default()
    };
    let begun = Instant::now();
    let outcomes = pool
        .client
        .batch_put(vec![block("a", b"x")], &options)
        .await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().code(), Code::TooManyHeld);
    assert_soon(begun, Duration::from_millis(900));
}

/// The puts of one client share its runtime with its other calls.
#[tokio::test]
async fn puts_that_stay_over_the_clients_cap_leave_the_thread_to_others() {
    let pool = pool().await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::HoldsAtMost(0));
    }
    let options = PutOptions {
        timeout: Some(Duration::from_millis(400)),
        ..PutOptions::default()
    };
    // Pauses are random. With this many puts, a put without pauses would still spin for long.
    let puts = (0..24).map(|number| {
        let blocks = vec![block(&format!("k{number}"), b"x")];
        pool.client.batch_put(blocks, &options)
    });
    let mut puts = pin!(join_all(puts));
    let mut longest = Duration::ZERO;
    let outcomes = poll_fn(|context| {
        let begun = Instant::now();
        let polled = puts.as_mut().poll(context);
        longest = longest.max(begun.elapsed());
        polled
    });
    for outcomes in outcomes.await {
        assert_eq!(outcomes[0].as_ref().unwrap_err().code(), Code::TooManyHeld);
    }
    assert!(
        longest < Duration::from_millis(50),
        "the thread was kept for {longest:?}"
    );
}

#[tokio::test]
async fn a_key_that_another_writes_holds_up_no_neighbour() {
    let pool = pool().await;
    pool.master.hold("a").await;
    let blocks = vec![
        block("a", b"x"),
        block("b", b"y"),
        block("c", b""),
        block("b", b"other"),
    ];
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().code(), Code::InProgress);
    assert_eq!(outcomes[1], STORED);
    assert_eq!(outcomes[2], Err(PutError::Empty));
    assert_eq!(outcomes[3], Ok(PutOutcome::Present));
    assert_eq!(pool.client.get(&key("b")).await.unwrap().unwrap(), b"y");
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_is_asked_again() {
    let pool = pool().await;
    pool.master.next("commit", [Fault::AnswerLost]);
    let outcomes = pool
        .client
        .batch_put(vec![block("a", b"x")], &PutOptions::default())
        .await;
    assert_eq!(outcomes, [STORED]);
    assert_eq!(pool.master.calls("commit"), 2);
    assert_eq!(pool.master.calls("reserve"), 1);
}

/// Puts a block, and checks that the client reports an unknown outcome.
async fn assert_claims_nothing(pool: &Pool, timeout: Duration) {
    let options = PutOptions {
        timeout: Some(timeout),
        ..PutOptions::default()
    };
    let outcomes = pool
        .client
        .batch_put(vec![block("a", b"x")], &options)
        .await;
    assert!(
        matches!(outcomes[0], Err(PutError::OutcomeUnknown { .. })),
        "{outcomes:?}"
    );
}

#[tokio::test]
async fn a_commit_whose_answer_stays_lost_claims_nothing() {
    let pool = pool().await;
    // A second reserve cannot tell either, because another client is writing the key by then.
    refuse_commits(&pool.master, usize::MAX, Code::Ok);
    pool.master.always("commit", Fault::AnswerLost);
    // The master has the closure. A counted reference would keep both, and the pool's directory, for ever.
    let (master, held) = (Arc::downgrade(&pool.master), AtomicUsize::new(0));
    pool.master.on_answer("commit", move |_: &mut Outcomes| {
        if held.fetch_add(1, Relaxed) == 0 {
            let master = master.upgrade().unwrap();
            tokio::spawn(async move { master.hold("a").await });
        }
    });
    assert_claims_nothing(&pool, Duration::from_millis(300)).await;
}

#[tokio::test]
async fn a_commit_that_the_master_still_carries_out_claims_nothing() {
    let pool = pool().await;
    // The first attempt gets no answer, and all later ones find it in progress.
    pool.master.next("commit", [Fault::AnswerLost]);
    refuse_commits(&pool.master, usize::MAX, Code::InProgress);
    assert_claims_nothing(&pool, Duration::from_millis(400)).await;
}

#[tokio::test]
async fn a_commit_that_came_twice_claims_nothing() {
    let pool = pool().await;
    // The client knows of one attempt, and its answer is that the commit is in progress.
    refuse_commits(&pool.master, usize::MAX, Code::InProgress);
    assert_claims_nothing(&pool, Duration::from_millis(400)).await;
}

/// The first arrival may have made the block visible, and the block may have been evicted since.
#[tokio::test]
async fn a_commit_that_came_again_after_its_grant_had_ended_claims_nothing() {
    let pool = pool().await;
    refuse_commits(&pool.master, usize::MAX, Code::GrantEnded);
    assert_claims_nothing(&pool, Duration::from_millis(400)).await;
}

#[tokio::test]
async fn a_commit_whose_node_was_lost_claims_nothing() {
    let pool = pool().await;
    refuse_commits(&pool.master, usize::MAX, Code::Unreachable);
    assert_claims_nothing(&pool, Duration::from_millis(400)).await;
}

#[tokio::test]
async fn a_commit_whose_answer_stays_lost_is_settled_by_putting_again() {
    let pool = pool().await;
    pool.master.always("commit", Fault::AnswerLost);
    let outcome = pool.client.put(&key("a"), b"x".to_vec()).await;
    assert_eq!(outcome, Ok(PutOutcome::Present));
}

#[tokio::test]
async fn a_grant_that_ended_is_asked_for_again() {
    let pool = pool().await;
    refuse_commits(&pool.master, 1, Code::GrantEnded);
    let outcomes = pool
        .client
        .batch_put(vec![block("a", b"x")], &PutOptions::default())
        .await;
    assert_eq!(outcomes, [STORED]);
    assert_eq!(pool.master.calls("reserve"), 2);
    assert_eq!(pool.client.get(&key("a")).await.unwrap().unwrap(), b"x");
}

#[tokio::test]
async fn a_put_across_a_failover_is_put_again_under_the_new_term() {
    let pool = pool().await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Slow(Duration::from_millis(100)));
    }
    let client = pool.client.clone();
    let put = tokio::spawn(async move {
        client
            .batch_put(vec![block("a", b"x")], &PutOptions::default())
            .await
    });
    while pool.master.calls("reserve") == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    pool.master.resign_to("").await;
    pool.master.lead().await;
    assert_eq!(put.await.unwrap(), [STORED]);
    assert_eq!(pool.master.calls("reserve"), 2);
    assert_eq!(pool.client.epoch().0, 2);
    assert_eq!(pool.master.pool().reservations(), 0);
    assert_eq!(pool.client.get(&key("a")).await.unwrap().unwrap(), b"x");
}

#[tokio::test]
async fn a_replica_that_cannot_be_written_is_left_out() {
    for mode in [Mode::Fails(Code::Unreachable), Mode::Hangs] {
        let pool = pool().await;
        pool.nodes.set(2, mode);
        let outcomes = pool.client.batch_put(vec![block("a", b"x")], &two()).await;
        assert_eq!(outcomes, [STORED]);
        assert_eq!(pool.master.replicas("a"), ["n1"]);
    }
}

#[tokio::test]
async fn a_put_that_is_given_up_gives_its_grants_back() {
    let pool = pool().await;
    hang_all(&pool);
    let client = pool.client.clone();
    let put = tokio::spawn(async move {
        client
            .batch_put(vec![block("a", b"x")], &PutOptions::default())
            .await
    });
    let begun = Instant::now();
    let until = async |holds: bool| {
        while (pool.master.pool().reservations() > 0) != holds {
            assert!(begun.elapsed() < Duration::from_secs(2), "{holds} in vain");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    until(true).await;
    put.abort();
    until(false).await;
    assert_eq!(pool.master.calls("revoke"), 1);
    assert!(pool.master.described("a").is_none());
}

fn hang_all(pool: &Pool) {
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Hangs);
    }
}

#[tokio::test]
async fn a_block_that_was_committed_is_not_given_back() {
    let pool = pool().await;
    let outcomes = pool.client.batch_put(vec![block("a", b"x")], &two()).await;
    assert!(outcomes[0].is_ok());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(pool.master.calls("revoke"), 0);
}

/// The parents of committed blocks.
pub(super) type Links = Arc<Mutex<HashMap<String, String>>>;

/// Records the parents in commits that are present by then, or are in the same message.
pub(super) fn watch_links(pool: &Pool) -> Links {
    let links = Links::default();
    let (seen, master) = (Arc::clone(&links), pool.master.pool());
    pool.master
        .on_request("commit", move |request: &mut CommitRequest| {
            let mut named = keys(&request.keys);
            let items = named.len();
            named.extend(keys(&request.parents));
            let parents: Vec<u32> = match &request.columns {
                Some(columns) => columns.parents.clone(),
                None => request.items.iter().map(|item| item.parent).collect(),
            };
            for (child, at) in named.iter().zip(parents) {
                let Some(at) = (at as usize).checked_sub(1) else {
                    continue;
                };
                let parent = [named[at].as_ref()];
                let present = || master.describe(NamespaceId(0), &parent[..])[0].is_some();
                if at < items || present() {
                    seen.lock().insert(child.to_string(), named[at].to_string());
                }
            }
        });
    links
}

pub(super) fn assert_linked(links: &Links, names: &[String]) {
    let links = links.lock();
    for pair in names.windows(2) {
        assert_eq!(links.get(&pair[1]), Some(&pair[0]));
    }
}

/// A chain of blocks, each naming the one before it as its parent.
fn chain(names: &[String]) -> Vec<PutBlock> {
    names
        .iter()
        .enumerate()
        .map(|(at, name)| match at.checked_sub(1) {
            Some(parent) => child(name, &names[parent], b"x"),
            None => block(name, b"x"),
        })
        .collect()
}

#[tokio::test]
async fn a_block_that_is_written_sooner_than_its_parent_waits_for_it() {
    let pool = pool().await;
    let links = watch_links(&pool);
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(100)));
    let names: Vec<String> = (0..20).map(|n| format!("k{n}")).collect();
    let outcomes = pool
        .client
        .batch_put(chain(&names), &PutOptions::default())
        .await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_linked(&links, &names);
}

#[tokio::test]
async fn a_block_whose_parent_gets_no_room_is_put_without_it() {
    let pool = pool().await;
    pool.master.hold("k1").await;
    let links = watch_links(&pool);
    let names: Vec<String> = (0..4).map(|n| format!("k{n}")).collect();
    let outcomes = pool
        .client
        .batch_put(chain(&names), &PutOptions::default())
        .await;
    assert_eq!(outcomes[1].as_ref().unwrap_err().code(), Code::InProgress);
    for at in [0, 2, 3] {
        assert_eq!(outcomes[at], STORED);
    }
    let links = links.lock();
    assert_eq!(links.get("k3"), Some(&"k2".to_owned()));
    assert_eq!(links.get("k2"), None);
}

#[tokio::test]
async fn a_chain_over_several_messages_stays_linked() {
    let pool = pool_with(|_, options| options.max_batch_keys = 1).await;
    // Messages for the other node would end before the message with the parent of their block.
    let links = watch_links(&pool);
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(30)));
    let names: Vec<String> = (0..10).map(|n| format!("k{n}")).collect();
    let outcomes = pool
        .client
        .batch_put(chain(&names), &PutOptions::default())
        .await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_linked(&links, &names);
    assert_eq!(pool.master.calls("commit"), names.len());
}

#[tokio::test]
async fn what_is_wrong_with_a_block_is_said_before_anything_is_sent() {
    let pool = pool().await;
    let outcomes = pool
        .client
        .batch_put(vec![block("a", b"")], &PutOptions::default())
        .await;
    assert_eq!(outcomes, [Err(PutError::Empty)]);
    assert_eq!(pool.master.calls("reserve"), 0);
    assert_eq!(pool.client.counters().put_errors, 1);
}

/// The certificate of one node is wrong, and the rest of the pool works.
#[tokio::test]
async fn a_block_goes_to_another_node_where_one_is_not_trusted() {
    let pool = pool().await;
    pool.nodes.set(1, Mode::Fails(Code::InvalidArgument));
    for n in 0..8 {
        let put = vec![block(&format!("key-{n}"), &[7; 4096])];
        let stored = pool.client.batch_put(put, &PutOptions::default()).await;
        assert_eq!(stored, [STORED], "{n}");
    }
    pool.nodes.set(2, Mode::Fails(Code::InvalidArgument));
    let begun = Instant::now();
    let failed = pool
        .client
        .batch_put(vec![block("none", &[7; 4096])], &PutOptions::default())
        .await
        .remove(0);
    let failed = failed.unwrap_err();
    assert_eq!(failed.code(), Code::InvalidArgument);
    assert!(failed.to_string().contains("as told"), "{failed}");
    assert_soon(begun, Duration::from_millis(2_500));
}

/// In one call, only the last of several blocks with one key is written.
#[tokio::test]
async fn of_two_blocks_with_one_key_an_upsert_writes_the_last_and_both_are_stored() {
    let pool = pool().await;
    let blocks = || vec![block("a", b"1"), block("b", b"other"), block("a", b"22")];
    let present = Ok(PutOutcome::Present);
    let options = PutOptions::default();
    let put = pool.client.batch_put(blocks(), &options).await;
    assert_eq!(put, [STORED, STORED, present]);
    assert_eq!(get_one(&pool, "a", 1).await.1, b"1");
    let put = pool.client.upsert(blocks(), &options).await;
    assert_eq!(put, [STORED; 3]);
    assert_eq!(get_one(&pool, "a", 2).await.1, b"22");
    let counted = pool.client.counters();
    assert_eq!((counted.puts_stored, counted.puts_present), (4, 2));
    let blocks = vec![block("a", b""), block("a", b"333")];
    let put = pool.client.upsert(blocks, &options).await;
    assert_eq!(put, [Err(PutError::Empty), STORED]);
    assert_eq!(get_one(&pool, "a", 3).await.1, b"333");
}
