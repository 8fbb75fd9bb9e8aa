use super::{block, child, key};
use crate::fake::{Columns, CommitFault, Mode, pool, pool_with};
use crate::{PutBlock, PutError, PutOptions, PutOutcome};
use kvpool_types::Code;
use std::time::{Duration, Instant};

const STORED: Result<PutOutcome, PutError> = Ok(PutOutcome::Stored { replicas: 1 });

fn two() -> PutOptions {
    PutOptions {
        replicas: 2,
        ..PutOptions::default()
    }
}

#[tokio::test]
async fn a_put_waits_for_room_and_then_says_full() {
    let pool = pool().await;
    let full = |times| std::iter::repeat_n(Code::Full, times).collect();
    pool.master
        .state()
        .reserve_codes
        .insert("a".into(), full(3));
    pool.master
        .state()
        .reserve_codes
        .insert("b".into(), full(100_000));
    let options = PutOptions {
        timeout: Some(Duration::from_millis(400)),
        ..PutOptions::default()
    };
    let outcomes = pool
        .client
        .batch_put(vec![block("a", b"x")], &options)
        .await;
    assert_eq!(outcomes, [STORED]);
    let begun = Instant::now();
    let outcomes = pool
        .client
        .batch_put(vec![block("b", b"x")], &options)
        .await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().code(), Code::Full);
    assert!(
        begun.elapsed() < Duration::from_millis(900),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn a_batch_that_was_granted_a_part_asks_for_the_rest_without_a_pause() {
    let pool = pool().await;
    let names: Vec<String> = (0..12).map(|number| format!("k{number}")).collect();
    for (number, name) in names.iter().enumerate() {
        let full = std::iter::repeat_n(Code::Full, number).collect();
        let codes = &mut pool.master.state().reserve_codes;
        codes.insert(name.clone(), full);
    }
    let blocks = names.iter().map(|name| block(name, b"x")).collect();
    let begun = Instant::now();
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert!(outcomes.iter().all(|outcome| *outcome == STORED));
    // Eleven pauses, each between half of its length and all of it, would take more than 750 ms.
    assert!(
        begun.elapsed() < Duration::from_millis(400),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn a_master_that_answers_in_columns_is_told_in_columns() {
    let pool = pool().await;
    pool.master.state().columns = Columns::Allowed;
    pool.master
        .state()
        .reserve_codes
        .insert("b".into(), [Code::Exists].into());
    let blocks = vec![
        block("a", b"x"),
        block("b", b"yy"),
        child("c", "a", b"zzz"),
        child("d", "elsewhere", b"w"),
    ];
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert_eq!(outcomes, [STORED, Ok(PutOutcome::Present), STORED, STORED]);
    {
        let state = pool.master.state();
        assert!(state.commits_in_columns > 0);
        assert_eq!(state.blocks["c"].length, 3);
        assert_eq!(state.parents.get("c").map(String::as_str), Some("a"));
        assert!(state.reservations.is_empty());
    }
    assert_eq!(pool.client.get(&key("c")).await.unwrap().unwrap(), b"zzz");
    // What is granted several extents has no columns.
    let before = pool.master.state().commits_in_columns;
    let outcomes = pool.client.batch_put(vec![block("e", b"v")], &two()).await;
    assert_eq!(outcomes, [Ok(PutOutcome::Stored { replicas: 2 })]);
    assert_eq!(pool.master.state().commits_in_columns, before);
}

#[tokio::test]
async fn columns_of_different_lengths_are_refused() {
    let pool = pool().await;
    pool.master.state().columns = Columns::Short;
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
    assert!(pool.master.state().commits.is_empty());
}

/// Whatever it was granted would keep the key from the put itself until the grant ends.
#[tokio::test]
async fn a_reservation_whose_answer_was_lost_is_named_when_it_is_asked_for_again() {
    let pool = pool().await;
    pool.master.state().lost_reserves = 2;
    let blocks = vec![block("a", b"x"), block("b", b"y")];
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert_eq!(outcomes, [STORED, STORED]);
    let outcomes = pool
        .client
        .batch_put(vec![block("c", b"z")], &PutOptions::default())
        .await;
    assert_eq!(outcomes, [STORED]);
    let reserves = pool.master.state().reserves.clone();
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
}

#[tokio::test]
async fn a_key_that_another_writes_holds_up_no_neighbour() {
    let pool = pool().await;
    pool.master.state().in_progress.insert("a".into());
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
    pool.master
        .state()
        .commit_faults
        .push_back(CommitFault::AnswerLost);
    let outcomes = pool
        .client
        .batch_put(vec![block("a", b"x")], &PutOptions::default())
        .await;
    assert_eq!(outcomes, [STORED]);
    assert_eq!(pool.master.calls("commit"), 2);
    assert_eq!(pool.master.calls("reserve"), 1);
}

#[tokio::test]
async fn a_commit_whose_answer_stays_lost_claims_nothing() {
    let pool = pool().await;
    {
        let state = &mut *pool.master.state();
        state.commit_faults.extend([CommitFault::AnswerLost; 1000]);
        // Nor can a second reserve tell.
        let codes = [Code::Ok].into_iter().chain([Code::InProgress; 1000]);
        state.reserve_codes.insert("a".into(), codes.collect());
    }
    let options = PutOptions {
        timeout: Some(Duration::from_millis(300)),
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
async fn a_commit_whose_answer_stays_lost_is_settled_by_putting_again() {
    let pool = pool().await;
    pool.master
        .state()
        .commit_faults
        .extend([CommitFault::AnswerLost; 1000]);
    let outcome = pool.client.put(&key("a"), b"x".to_vec()).await;
    assert_eq!(outcome, Ok(PutOutcome::Present));
}

#[tokio::test]
async fn a_grant_that_ended_is_asked_for_again() {
    let pool = pool().await;
    let ended = CommitFault::Refused(Code::GrantEnded);
    pool.master.state().commit_faults.push_back(ended);
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
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(100)));
    let client = pool.client.clone();
    let put = tokio::spawn(async move {
        client
            .batch_put(vec![block("a", b"x")], &PutOptions::default())
            .await
    });
    while pool.master.calls("reserve") == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    {
        // The new term has given the same number to another client, which writes the same key.
        let state = &mut *pool.master.state();
        state.fail_over();
        let of_another = ("a".to_owned(), vec![0], 1 << 30);
        state.reservations.insert(1, of_another);
    }
    assert_eq!(put.await.unwrap(), [STORED]);
    assert_eq!(pool.master.calls("reserve"), 2);
    assert_eq!(pool.client.epoch().0, 2);
    // What was committed is what was written, not the other's reservation.
    assert_eq!(pool.master.state().blocks["a"].version, 2);
    assert_eq!(pool.client.get(&key("a")).await.unwrap().unwrap(), b"x");
}

#[tokio::test]
async fn a_replica_that_cannot_be_written_is_left_out() {
    for mode in [Mode::Fails(Code::Unreachable), Mode::Hangs] {
        let pool = pool().await;
        pool.nodes.set(2, mode);
        let outcomes = pool.client.batch_put(vec![block("a", b"x")], &two()).await;
        assert_eq!(outcomes, [STORED]);
        assert_eq!(pool.master.state().blocks["a"].segments, [0]);
    }
}

#[tokio::test]
async fn a_put_that_is_given_up_gives_its_grants_back() {
    let pool = pool().await;
    pool.nodes.set(1, Mode::Hangs);
    let client = pool.client.clone();
    let put = tokio::spawn(async move {
        client
            .batch_put(vec![block("a", b"x")], &PutOptions::default())
            .await
    });
    while pool.master.state().reservations.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    put.abort();
    let begun = Instant::now();
    while pool.master.state().revoked != [1] {
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "nothing was revoked"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(pool.master.state().blocks.is_empty());
}

#[tokio::test]
async fn a_block_that_was_committed_is_not_given_back() {
    let pool = pool().await;
    let outcomes = pool.client.batch_put(vec![block("a", b"x")], &two()).await;
    assert!(outcomes[0].is_ok());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(pool.master.state().revoked.is_empty());
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
    pool.master.state().alternates = true;
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(100)));
    let names: Vec<String> = (0..20).map(|n| format!("k{n}")).collect();
    let outcomes = pool
        .client
        .batch_put(chain(&names), &PutOptions::default())
        .await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let state = pool.master.state();
    for pair in names.windows(2) {
        assert_eq!(state.parents.get(&pair[1]), Some(&pair[0]));
    }
}

#[tokio::test]
async fn a_block_whose_parent_gets_no_room_is_put_without_it() {
    let pool = pool().await;
    pool.master.state().in_progress.insert("k1".into());
    let names: Vec<String> = (0..4).map(|n| format!("k{n}")).collect();
    let outcomes = pool
        .client
        .batch_put(chain(&names), &PutOptions::default())
        .await;
    assert_eq!(outcomes[1].as_ref().unwrap_err().code(), Code::InProgress);
    for at in [0, 2, 3] {
        assert_eq!(outcomes[at], STORED);
    }
    let state = pool.master.state();
    assert_eq!(state.parents.get("k3"), Some(&"k2".to_owned()));
    assert_eq!(state.parents.get("k2"), None);
}

#[tokio::test]
async fn a_chain_over_several_messages_stays_linked() {
    let pool = pool_with(|options| options.max_batch_keys = 1).await;
    // Every other message would be done before the one with its block's parent.
    pool.master.state().alternates = true;
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(30)));
    let names: Vec<String> = (0..10).map(|n| format!("k{n}")).collect();
    let outcomes = pool
        .client
        .batch_put(chain(&names), &PutOptions::default())
        .await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let state = pool.master.state();
    assert!(state.commits.iter().all(|keys| keys.len() == 1));
    for pair in names.windows(2) {
        assert_eq!(state.parents.get(&pair[1]), Some(&pair[0]));
    }
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
