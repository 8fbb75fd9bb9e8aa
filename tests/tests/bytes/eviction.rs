//! Invariant 8: eviction removes only the blocks whose room is needed, and puts wait for room
//! instead of failing.

use kvpool_client::{GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions};
use kvpool_tests::blocks::{is_right, key, put_all, source, target};
use kvpool_tests::{Cluster, Options};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const POOL: u64 = 256 << 20;

/// The length of a block: 4 KiB to 16 MiB, mostly small, and the same for a key in every process.
fn length_of(number: u64) -> usize {
    let step = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) % 13;
    (4096 << step) - usize::try_from(number % 61).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_filled_to_three_times_its_size_fails_no_put_and_tears_no_read() {
    let flags = [
        "--eviction-high-watermark-ratio",
        "0.9",
        "--lease-ttl",
        "500ms",
    ];
    let options = Options {
        nodes: 2,
        segment: "128MiB".into(),
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&flags)).unwrap();
    let put_bytes = Arc::new(AtomicU64::new(0));
    let newest = Arc::new(AtomicU64::new(1));
    let done = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for _ in 0..8 {
        let client = cluster.client().await.unwrap();
        let (put_bytes, newest) = (Arc::clone(&put_bytes), Arc::clone(&newest));
        writers.push(tokio::spawn(async move {
            while put_bytes.load(Ordering::Acquire) < 3 * POOL {
                let number = newest.fetch_add(1, Ordering::AcqRel);
                let length = length_of(number);
                let put = PutBlock::new(key(number), source(&key(number), length));
                let options = PutOptions {
                    timeout: Some(Duration::from_secs(20)),
                    ..Default::default()
                };
                let outcome = client.batch_put(vec![put], &options).await.remove(0);
                outcome.unwrap_or_else(|error| panic!("put {number} of {length}: {error}"));
                put_bytes.fetch_add(length as u64, Ordering::AcqRel);
            }
        }));
    }
    let mut readers = Vec::new();
    for seed in 0..8 {
        let client = cluster.client().await.unwrap();
        let (newest, done) = (Arc::clone(&newest), Arc::clone(&done));
        readers.push(tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(seed);
            let mut hits = 0u64;
            while !done.load(Ordering::Acquire) {
                let newest = newest.load(Ordering::Acquire);
                let number = random.random_range(newest.saturating_sub(60).max(1)..=newest);
                let target = target(length_of(number));
                let get = GetBlock::new(key(number), target.clone());
                let options = GetOptions {
                    release: true,
                    ..GetOptions::default()
                };
                if let Ok(GetOutcome::Hit { .. }) =
                    client.batch_get(vec![get], &options).await.remove(0)
                {
                    assert!(
                        is_right(&key(number), &target, length_of(number)),
                        "{number}"
                    );
                    hits += 1;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            hits
        }));
    }
    let watch = {
        let done = Arc::clone(&done);
        let http = cluster.master.http.clone();
        std::thread::spawn(move || {
            let limit = POOL / 10 * 9;
            let (mut above_since, mut longest) = (None, Duration::ZERO);
            while !done.load(Ordering::Acquire) {
                let text = kvpool_tests::raw::http_get(&http, "/api/v1/counters").unwrap();
                let counters: serde_json::Value = serde_json::from_str(&text).unwrap();
                if counters["used_bytes"].as_u64().unwrap() > limit {
                    let since = *above_since.get_or_insert_with(Instant::now);
                    longest = longest.max(since.elapsed());
                } else {
                    above_since = None;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            longest
        })
    };
    for writer in writers {
        writer.await.unwrap();
    }
    done.store(true, Ordering::Release);
    let mut hits = 0;
    for reader in readers {
        hits += reader.await.unwrap();
    }
    let above = watch.join().unwrap();
    let metric = |name: &str| {
        cluster
            .master
            .metric(&format!("kvpool_master_{name}"))
            .unwrap()
    };
    println!(
        "{} MiB put into {} MiB, {hits} hits verified, {} rounds, above the watermark for {above:?}",
        put_bytes.load(Ordering::Acquire) >> 20,
        POOL >> 20,
        metric("eviction_rounds_total"),
    );
    assert!(hits > 100, "{hits}");
    assert!(above <= Duration::from_millis(100), "{above:?}");
    assert!(metric("above_watermark_milliseconds_max") <= 100.0);
    assert!(metric("eviction_rounds_total") > 0.0);
    assert_eq!(metric("eviction_rounds_beyond_target_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn leased_and_pinned_blocks_stay_and_a_full_pool_says_so() {
    let flags = ["--lease-ttl", "60s", "--eviction-ratio", "0"];
    let options = Options {
        segment: "8MiB".into(),
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&flags)).unwrap();
    let client = cluster.client().await.unwrap();
    let put = |number: u64, options: PutOptions| {
        let client = client.clone();
        async move {
            let block = PutBlock::new(key(number), source(&key(number), 1 << 20));
            client.batch_put(vec![block], &options).await.remove(0)
        }
    };
    let pinned = PutOptions {
        hard_pin: true,
        ..PutOptions::default()
    };
    for number in 0..3 {
        put(number, pinned.clone()).await.unwrap();
    }
    put_all(&client, 3..7, 1 << 20).await.unwrap();
    // The exist call leases blocks 3 to 6, so nothing may be evicted now.
    let leased: Vec<_> = (3..7).map(key).collect();
    assert_eq!(client.match_prefix(&leased).await.unwrap().blocks, 4);
    let hasty = PutOptions {
        timeout: Some(Duration::from_millis(300)),
        ..PutOptions::default()
    };
    let started = Instant::now();
    let error = put(7, hasty).await.unwrap_err();
    assert_eq!(error.code(), kvpool_types::Code::Full);
    assert!(started.elapsed() < Duration::from_secs(2));
    let present = client
        .is_exist(&(0..7).map(key).collect::<Vec<_>>())
        .await
        .unwrap();
    assert_eq!(present, [true; 7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_never_evicted_before_its_descendants() {
    let flags = ["--lease-ttl", "50ms", "--eviction-ratio", "0"];
    let options = Options {
        segment: "8MiB".into(),
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&flags)).unwrap();
    let client = cluster.client().await.unwrap();
    let chain: Vec<_> = (0..60).map(key).collect();
    // Parents are put first and never touched again, so plain recency would take them first.
    for (at, block) in chain.iter().enumerate() {
        let put = PutBlock {
            key: block.clone(),
            parent: (at > 0).then(|| chain[at - 1].clone()),
            buffers: vec![source(block, 100_000)],
        };
        client
            .batch_put(vec![put], &PutOptions::default())
            .await
            .remove(0)
            .unwrap();
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    for other in 1000..1030 {
        put_all(&client, other..other + 1, 100_000).await.unwrap();
        let described = client.describe(&chain).await.unwrap();
        let present: Vec<bool> = described.iter().map(Option::is_some).collect();
        let leading = present.iter().take_while(|there| **there).count();
        let all = present.iter().filter(|there| **there).count();
        assert_eq!(leading, all, "a parent went before its child: {present:?}");
    }
    let left = client.match_prefix(&chain).await.unwrap().blocks;
    assert!(left > 0 && left < 60, "{left}");
}

#[tokio::test(flavor = "multi_thread")]
async fn soft_pinned_blocks_go_last() {
    let flags = ["--lease-ttl", "50ms", "--eviction-ratio", "0"];
    let options = Options {
        segment: "8MiB".into(),
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&flags)).unwrap();
    let client = cluster.client().await.unwrap();
    let pinned = PutOptions {
        soft_pin: Some(Duration::from_secs(600)),
        ..PutOptions::default()
    };
    for number in 0..3 {
        let put = PutBlock::new(key(number), source(&key(number), 1 << 20));
        client
            .batch_put(vec![put], &pinned)
            .await
            .remove(0)
            .unwrap();
    }
    for number in 10..40 {
        put_all(&client, number..number + 1, 1 << 20).await.unwrap();
    }
    let oldest: Vec<_> = (0..3).map(key).collect();
    assert_eq!(client.is_exist(&oldest).await.unwrap(), [true; 3]);
}

/// The usual life of a cache: blocks are put and then read, and the pool is full. Leases of ended
/// gets, which last 60 s here, would keep every block.
#[tokio::test(flavor = "multi_thread")]
async fn puts_each_followed_by_a_get_find_room_in_a_full_pool() {
    let options = Options {
        segment: "64MiB".into(),
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&["--lease-ttl", "60s"])).unwrap();
    let client = cluster.client().await.unwrap();
    let mut longest = Duration::ZERO;
    for number in 0..256 {
        let key = key(number);
        // The reader looks the block up before it reads, as workers do.
        assert_eq!(
            client.is_exist(std::slice::from_ref(&key)).await,
            Ok(vec![false])
        );
        let begun = Instant::now();
        let put = PutBlock::new(key.clone(), source(&key, 1 << 20));
        let outcomes = client.batch_put(vec![put], &PutOptions::default()).await;
        assert!(outcomes[0].is_ok(), "put {number}: {outcomes:?}");
        longest = longest.max(begun.elapsed());
        assert_eq!(
            client.is_exist(std::slice::from_ref(&key)).await,
            Ok(vec![true])
        );
        let memory = target(1 << 20);
        let get = vec![GetBlock::new(key.clone(), memory.clone())];
        let got = client.batch_get(get, &GetOptions::default()).await;
        assert!(matches!(got[0], Ok(GetOutcome::Hit { .. })), "{got:?}");
        assert!(is_right(&key, &memory, 1 << 20));
    }
    println!("the longest of 256 puts took {longest:?}");
    assert!(longest < Duration::from_secs(3), "{longest:?}");
}
