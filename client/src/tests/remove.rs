use super::{block, key};
use crate::testing::{
    Fault, Passage, Pool, Setup, Wire, connect, leader, options, pool, pool_with,
};
use crate::{PutOptions, Remove, RemoveError};
use kvpool_types::Code;
use std::time::Duration;

fn keys(names: &[&str]) -> Remove {
    Remove::Keys(names.iter().map(|name| key(name)).collect())
}

async fn put(pool: &Pool, names: &[&str]) {
    let blocks = names.iter().map(|name| block(name, b"x")).collect();
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

/// Another client may have put the key since, with success.
#[tokio::test]
async fn a_removal_that_may_have_been_done_is_not_done_again() {
    let pool = pool().await;
    put(&pool, &["a"]).await;
    pool.master.next("remove", [Fault::AnswerLost]);
    let error = pool.client.remove(keys(&["a"]), true).await.unwrap_err();
    assert!(
        matches!(&error, RemoveError::OutcomeUnknown(why) if why.code == Code::Unreachable),
        "{error}"
    );
    assert_eq!(pool.master.calls("remove"), 1);
}

#[tokio::test]
async fn a_removal_that_reached_no_master_is_made_when_one_is_there() {
    let master = leader(Setup::default()).await;
    let wire = Wire::to(&master).await;
    let client = connect(&master, options(vec![wire.url.clone()])).await;
    wire.set(Passage::Dead);
    let restart = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        wire.set(Passage::Open);
    };
    // The client notices the end of the old connection first.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (removed, ()) = tokio::join!(client.remove(keys(&["a"]), true), restart);
    assert_eq!(removed.unwrap().codes, [Code::Missing]);
    assert_eq!(master.calls("remove"), 1);
}

#[tokio::test]
async fn the_messages_of_a_large_removal_have_outcomes_of_their_own() {
    let pool = pool_with(|_, options| options.max_batch_keys = 2).await;
    put(&pool, &["a", "c"]).await;
    pool.master.next("remove", [None, Some(Fault::AnswerLost)]);
    let names = ["a", "b", "c", "d", "e"];
    let removed = pool.client.remove(keys(&names), true).await.unwrap();
    let lost = Code::Unreachable;
    assert_eq!(
        removed.codes,
        [Code::Ok, Code::Missing, lost, lost, Code::Missing]
    );
    assert_eq!((removed.removed, pool.master.calls("remove")), (1, 3));
}
