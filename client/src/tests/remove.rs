use super::{block, key};
use crate::fake::{Master, Passage, Pool, connect, options, pool_with, serve_behind_wire};
use crate::{PutOptions, Remove, RemoveError};
use kvpool_types::Code;
use std::sync::Arc;
use std::time::Duration;

fn keys(names: &[&str]) -> Remove {
    Remove::Keys(names.iter().map(|name| key(name)).collect())
}

async fn put(pool: &Pool, names: &[&str]) {
    let blocks = names.iter().map(|name| block(name, b"x")).collect();
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

/// Another client may have put the key since, and been told that it is stored.
#[tokio::test]
async fn a_removal_that_may_have_been_done_is_not_done_again() {
    let pool = pool_with(|_| {}).await;
    put(&pool, &["a"]).await;
    pool.master.state().lost_removals = [true].into();
    let error = pool.client.remove(keys(&["a"]), true).await.unwrap_err();
    assert!(
        matches!(&error, RemoveError::OutcomeUnknown(why) if why.code == Code::Unreachable),
        "{error}"
    );
    assert_eq!(pool.master.calls("remove"), 1);
}

#[tokio::test]
async fn a_removal_that_reached_no_master_is_made_when_one_is_there() {
    let master = Arc::new(Master::default());
    let wire = serve_behind_wire(&master).await;
    let (_nodes, client) = connect(options(vec![wire.url.clone()])).await;
    wire.set(Passage::Dead);
    let restart = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        wire.set(Passage::Open);
    };
    // The end of the old connection is noticed first.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (removed, ()) = tokio::join!(client.remove(keys(&["a"]), true), restart);
    assert_eq!(removed.unwrap().codes, [Code::Missing]);
    assert_eq!(master.calls("remove"), 1);
}

#[tokio::test]
async fn the_messages_of_a_large_removal_have_outcomes_of_their_own() {
    let pool = pool_with(|options| options.max_batch_keys = 2).await;
    put(&pool, &["a", "c"]).await;
    pool.master.state().lost_removals = [false, true].into();
    let names = ["a", "b", "c", "d", "e"];
    let removed = pool.client.remove(keys(&names), true).await.unwrap();
    let lost = Code::Unreachable;
    assert_eq!(
        removed.codes,
        [Code::Ok, Code::Missing, lost, lost, Code::Missing]
    );
    assert_eq!((removed.removed, pool.master.calls("remove")), (1, 3));
}
