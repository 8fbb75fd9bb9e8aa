//! A writer that dies during a put does not block its key for other writers.

use kvpool_client::{GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, PutOutcome, Region};
use kvpool_tests::blocks::{bytes_of, key, source};
use kvpool_tests::{Cluster, Hand, Options};
use kvpool_types::Length;
use std::time::{Duration, Instant};

/// The put takes long enough to be killed before its end.
const LARGE: u64 = 192 << 20;
const SMALL: usize = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_a_writer_killed_in_its_put_is_put_by_another_at_once() {
    let cluster = Cluster::start(Options {
        segment: "1GiB".into(),
        ..Options::default()
    })
    .unwrap();
    let client = cluster.client().await.unwrap();
    // A writer that ended before it could be killed proves nothing.
    let mut tried = 0;
    for way in ["shm", "tcp"] {
        let mut rounds = 0;
        while rounds < 3 {
            tried += 1;
            assert!(tried < 60, "no writer was killed in its put");
            let key = key(tried);
            let (number, length) = (tried.to_string(), LARGE.to_string());
            let mut hand =
                Hand::start(&["put-once", &cluster.master_url(), &number, &length, way]).unwrap();
            hand.line().unwrap();
            let is_reserved = || Ok(cluster.gauge("reservations")? > 0);
            cluster.wait_for("a reservation", is_reserved).unwrap();
            hand.kill().unwrap();
            let begun = Instant::now();
            if client.is_exist(std::slice::from_ref(&key)).await.unwrap()[0] {
                client
                    .remove(kvpool_client::Remove::Everything, true)
                    .await
                    .unwrap();
                continue;
            }
            rounds += 1;
            let block = PutBlock::new(key.clone(), source(&key, SMALL));
            let mut outcomes = client.batch_put(vec![block], &PutOptions::default()).await;
            let took = begun.elapsed();
            println!("{way}: the next put of the key took {took:?} from the kill on");
            assert_eq!(outcomes.remove(0), Ok(PutOutcome::Stored { replicas: 1 }));
            // Earlier versions waited for the put's whole timeout, 10 s.
            assert!(took < Duration::from_secs(3), "{way}: {took:?}");
            let memory = Region::allocate(Length(SMALL as u64));
            let get = GetBlock::new(key.clone(), memory.whole());
            let mut got = client.batch_get(vec![get], &GetOptions::default()).await;
            assert!(matches!(got.remove(0), Ok(GetOutcome::Hit { .. })));
            assert_eq!(memory.whole().to_vec(), bytes_of(&key, SMALL));
            client
                .remove(kvpool_client::Remove::Everything, true)
                .await
                .unwrap();
        }
    }
}
