//! Blocks that are evicted while their copies are made.

use super::*;

/// The log may be slow, for example when it shares the disk that takes the copies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_counts_as_evicted_without_copy_only_if_it_gets_none() {
    for (code, lost) in [(Code::Ok, 0), (Code::StoreFailed, 1)] {
        for is_answered_first in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let (pool, medium) = pool_on_medium(directory.path()).await;
            let published = pool.directory.publish(&[block("block", 7)]).remove(0);
            let (node, session, _sent) = connected(&pool);
            attach(&pool, &node, session, medium.id);
            let ticket = begin(&pool, &node, session, &medium, Direction::Store);
            let release = hold_log(&pool);
            let answer = || pool.transfers_done(&node, &[(ticket, code)]);
            if is_answered_first {
                answer();
            }
            let id = published.id.unwrap();
            let evicted = pool
                .directory
                .remove_by_id(id, Version(7), |_| Verdict::Remove);
            pool.note_left_memory(&[evicted.unwrap()]);
            if !is_answered_first {
                answer();
            }
            drop(release);
            pool.journal().flush().await.unwrap();
            let key = Key::parse("block").unwrap();
            let has_copy = pool.is_on_medium(SPACE, &key, Version(7));
            assert_eq!(has_copy, code == Code::Ok);
            let counted = pool.counters()["blocks_evicted_without_copy_total"];
            assert_eq!(counted, lost, "{code:?}, {is_answered_first}");
            pool.retire().await;
        }
    }
}
