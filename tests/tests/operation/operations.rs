//! Every operation of the client against a live pool, over each transport.

use kvpool_client::{
    GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, PutOutcome, Remove, TransportChoice,
    ViewOptions,
};
use kvpool_tests::blocks::{bytes_of, is_right, key, source, target};
use kvpool_tests::{Cluster, Options};
use kvpool_transport::Region;
use kvpool_types::{Code, Key, Length, Offset};

const TRANSPORTS: [TransportChoice; 2] = [TransportChoice::Shm, TransportChoice::Tcp];

async fn client(cluster: &Cluster, transport: TransportChoice) -> kvpool_client::Client {
    let options = kvpool_client::Options {
        transport,
        ..cluster.client_options()
    };
    kvpool_client::Client::connect(options).await.unwrap()
}

fn put_of(key: &Key, length: usize) -> PutBlock {
    PutBlock::new(key.clone(), source(key, length))
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_every_size_come_back_as_they_were_put() {
    let cluster = Cluster::start(Options {
        segment: "128MiB".into(),
        ..Options::default()
    })
    .unwrap();
    let sizes = [1, 63, 64, 4095, 65_536, 65_537, 1 << 20, (16 << 20) + 1];
    for (round, transport) in (0u64..).zip(TRANSPORTS) {
        let client = client(&cluster, transport).await;
        let keys: Vec<Key> = (0..sizes.len() as u64)
            .map(|n| key(round * 100 + n))
            .collect();
        let puts = keys
            .iter()
            .zip(sizes)
            .map(|(key, size)| put_of(key, size))
            .collect();
        for outcome in client.batch_put(puts, &PutOptions::default()).await {
            assert_eq!(outcome.unwrap(), PutOutcome::Stored { replicas: 1 });
        }
        let targets: Vec<_> = sizes.iter().map(|size| target(*size)).collect();
        let gets = keys
            .iter()
            .zip(&targets)
            .map(|(k, t)| GetBlock::new(k.clone(), t.clone()))
            .collect();
        let outcomes = client.batch_get(gets, &GetOptions::default()).await;
        for (((key, size), target), outcome) in keys.iter().zip(sizes).zip(&targets).zip(outcomes) {
            assert!(
                matches!(outcome.unwrap(), GetOutcome::Hit { length, .. } if length.0 == size as u64)
            );
            assert!(is_right(key, target, size), "{transport:?} {size}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scattered_buffers_are_put_and_got_in_order() {
    let cluster = Cluster::start(Options::default()).unwrap();
    for (round, transport) in (0u64..).zip(TRANSPORTS) {
        let client = client(&cluster, transport).await;
        let key = key(round);
        let bytes = bytes_of(&key, 64 * 16_384);
        let buffers = bytes
            .chunks(16_384)
            .map(|part| Region::from(part.to_vec()).whole())
            .collect();
        let put = PutBlock {
            key: key.clone(),
            parent: None,
            buffers,
        };
        let outcomes = client.batch_put(vec![put], &PutOptions::default()).await;
        assert!(outcomes.into_iter().all(|outcome| outcome.is_ok()));
        // Buffers with other boundaries than the put's, one of them odd.
        let region = Region::allocate(Length(bytes.len() as u64));
        let cut = |from: usize, to: usize| {
            region
                .slice(Offset(from as u64), Length((to - from) as u64))
                .unwrap()
        };
        let cuts = vec![cut(0, 7), cut(7, 300_001), cut(300_001, bytes.len())];
        let get = GetBlock { key, buffers: cuts };
        let outcomes = client.batch_get(vec![get], &GetOptions::default()).await;
        assert!(
            outcomes
                .into_iter()
                .all(|outcome| outcome.unwrap().is_hit())
        );
        assert_eq!(region.whole().to_vec(), bytes);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicate_keys_in_one_batch_are_each_served() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let key = key(1);
    let puts = (0..3).map(|_| put_of(&key, 5000)).collect();
    for outcome in client.batch_put(puts, &PutOptions::default()).await {
        outcome.unwrap();
    }
    let targets: Vec<_> = (0..3).map(|_| target(5000)).collect();
    let gets = targets
        .iter()
        .map(|t| GetBlock::new(key.clone(), t.clone()))
        .collect();
    for (outcome, target) in client
        .batch_get(gets, &GetOptions::default())
        .await
        .into_iter()
        .zip(&targets)
    {
        assert!(outcome.unwrap().is_hit());
        assert!(is_right(&key, target, 5000));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_beyond_the_message_limit_is_split() {
    let flags = ["--max-batch-keys", "64"];
    let cluster = Cluster::start(Options::default().master(&flags)).unwrap();
    let client = cluster.client().await.unwrap();
    let keys: Vec<Key> = (0..1000).map(key).collect();
    let puts = keys.iter().map(|key| put_of(key, 100)).collect();
    for outcome in client.batch_put(puts, &PutOptions::default()).await {
        outcome.unwrap();
    }
    assert_eq!(client.is_exist(&keys).await.unwrap(), vec![true; 1000]);
    assert_eq!(client.match_prefix(&keys).await.unwrap().blocks, 1000);
    let targets: Vec<_> = keys.iter().map(|_| target(100)).collect();
    let gets = keys
        .iter()
        .zip(&targets)
        .map(|(k, t)| GetBlock::new(k.clone(), t.clone()))
        .collect();
    let outcomes = client.batch_get(gets, &GetOptions::default()).await;
    assert!(
        outcomes
            .into_iter()
            .all(|outcome| outcome.unwrap().is_hit())
    );
    assert!(
        keys.iter()
            .zip(&targets)
            .all(|(key, target)| is_right(key, target, 100))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn match_prefix_counts_leading_blocks_only() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let chain: Vec<Key> = (0..10).map(key).collect();
    let mut puts = Vec::new();
    for at in [0, 1, 2, 4, 5] {
        let parent = (at > 0).then(|| chain[at - 1].clone());
        puts.push(PutBlock {
            parent,
            ..put_of(&chain[at], 64)
        });
    }
    for outcome in client.batch_put(puts, &PutOptions::default()).await {
        outcome.unwrap();
    }
    assert_eq!(client.match_prefix(&chain).await.unwrap().blocks, 3);
    assert_eq!(client.match_prefix(&chain[3..]).await.unwrap().blocks, 0);
    assert_eq!(client.match_prefix(&[]).await.unwrap().blocks, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_range_is_read_and_verified_alone() {
    let cluster = Cluster::start(Options::default()).unwrap();
    for (round, transport) in (0u64..).zip(TRANSPORTS) {
        let client = client(&cluster, transport).await;
        let key = key(round);
        let length = (1 << 20) + 77;
        let outcomes = client
            .batch_put(vec![put_of(&key, length)], &PutOptions::default())
            .await;
        assert!(outcomes.into_iter().all(|outcome| outcome.is_ok()));
        let bytes = bytes_of(&key, length);
        for (from, to) in [
            (0, 1),
            (65_530, 65_545),
            (131_072, 196_608),
            (length - 1, length),
        ] {
            let target = target(to - from);
            let from_offset = Offset(from as u64);
            let got = client
                .get_range(
                    &key,
                    from_offset,
                    vec![target.clone()],
                    &GetOptions::default(),
                )
                .await
                .unwrap();
            assert!(got.is_hit());
            assert_eq!(
                target.to_vec(),
                &bytes[from..to],
                "{transport:?} {from}..{to}"
            );
        }
        let beyond = client
            .get_range(
                &key,
                Offset(length as u64),
                vec![target(1)],
                &GetOptions::default(),
            )
            .await;
        assert_eq!(beyond.unwrap_err().code(), Code::OutOfRange);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_view_reads_in_place_and_holds_its_block() {
    let flags = ["--lease-ttl", "300ms"];
    let cluster = Cluster::start(Options::default().master(&flags)).unwrap();
    let client = cluster.client().await.unwrap();
    let key = key(1);
    let outcomes = client
        .batch_put(vec![put_of(&key, 100_000)], &PutOptions::default())
        .await;
    assert!(outcomes.into_iter().all(|outcome| outcome.is_ok()));
    let view = client
        .get_view(&key, &ViewOptions::default())
        .await
        .unwrap()
        .expect("a hit");
    let mut bytes = vec![0; 100_000];
    view.read_at(Offset(0), &mut bytes);
    assert_eq!(bytes, bytes_of(&key, 100_000));
    assert!(
        client
            .get_view(&self::key(2), &ViewOptions::default())
            .await
            .unwrap()
            .is_none()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn upsert_replaces_and_put_does_not() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let key = key(1);
    client.put(&key, vec![1; 1000]).await.unwrap();
    assert_eq!(
        client.put(&key, vec![2; 2000]).await.unwrap(),
        PutOutcome::Present
    );
    assert_eq!(client.get(&key).await.unwrap(), Some(vec![1; 1000]));
    let block = PutBlock::new(key.clone(), Region::from(vec![3; 3000]).whole());
    let outcomes = client.upsert(vec![block], &PutOptions::default()).await;
    assert_eq!(
        outcomes[0].as_ref().unwrap(),
        &PutOutcome::Stored { replicas: 1 }
    );
    assert_eq!(client.get(&key).await.unwrap(), Some(vec![3; 3000]));
    assert_eq!(client.get_size(&key).await.unwrap(), Some(Length(3000)));
}

#[tokio::test(flavor = "multi_thread")]
async fn removal_by_key_pattern_namespace_and_all_respects_leases() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let named = |name: &str| Key::parse(name).unwrap();
    for name in ["a/1", "a/2", "b/1", "c"] {
        client.put(&named(name), vec![7; 10]).await.unwrap();
    }
    // The blocks asked for are leased. The lease of a get ends with the get.
    client.get(&named("a/2")).await.unwrap();
    assert_eq!(client.is_exist(&[named("a/1")]).await, Ok(vec![true]));
    let is_released = async || {
        let described = client.describe(&[named("a/2")]).await.unwrap();
        described[0].as_ref().unwrap().lease_left.is_zero()
    };
    let begun = std::time::Instant::now();
    while !is_released().await {
        assert!(begun.elapsed() < std::time::Duration::from_secs(3));
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let removed = client
        .remove(Remove::Keys(vec![named("a/1"), named("zz")]), false)
        .await
        .unwrap();
    assert_eq!(removed.codes, [Code::Leased, Code::Missing]);
    let removed = client
        .remove(Remove::Pattern("^a/".into()), false)
        .await
        .unwrap();
    assert_eq!((removed.removed, removed.kept), (1, 1));
    let removed = client
        .remove(Remove::Keys(vec![named("a/1")]), true)
        .await
        .unwrap();
    assert_eq!(removed.codes, [Code::Ok]);
    assert_eq!(client.get(&named("a/1")).await.unwrap(), None);
    let bad = client.remove(Remove::Pattern("(".into()), false).await;
    assert_eq!(bad.unwrap_err().code(), Code::InvalidArgument);

    let other = kvpool_client::Options {
        namespace: kvpool_types::namespace::Namespace {
            name: "other".into(),
            ..Default::default()
        },
        ..cluster.client_options()
    };
    let other = kvpool_client::Client::connect(other).await.unwrap();
    other.put(&named("c"), vec![8; 10]).await.unwrap();
    assert_eq!(
        other.remove(Remove::Namespace, true).await.unwrap().removed,
        1
    );
    assert_eq!(client.get(&named("c")).await.unwrap(), Some(vec![7; 10]));
    assert_eq!(
        client
            .remove(Remove::Everything, true)
            .await
            .unwrap()
            .removed,
        2
    );
    assert_eq!(client.list("", 0, None).await.unwrap().blocks, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_go_to_different_nodes_and_are_described() {
    let cluster = Cluster::start(Options {
        nodes: 3,
        ..Options::default()
    })
    .unwrap();
    let client = cluster.client().await.unwrap();
    let key = key(1);
    let options = PutOptions {
        replicas: 2,
        ..PutOptions::default()
    };
    let outcomes = client.batch_put(vec![put_of(&key, 9000)], &options).await;
    assert_eq!(
        outcomes[0].as_ref().unwrap(),
        &PutOutcome::Stored { replicas: 2 }
    );
    let described = client.describe(std::slice::from_ref(&key)).await.unwrap();
    let block = described[0].as_ref().unwrap();
    assert_eq!(block.length, Length(9000));
    let mut nodes: Vec<&str> = block.replicas.iter().map(|r| r.node.as_str()).collect();
    nodes.dedup();
    assert_eq!(nodes.len(), 2);

    let preferred = PutOptions {
        preferred_nodes: vec!["node-2".into()],
        ..PutOptions::default()
    };
    let second = self::key(2);
    client
        .batch_put(vec![put_of(&second, 9000)], &preferred)
        .await
        .remove(0)
        .unwrap();
    let described = client.describe(&[second]).await.unwrap();
    assert_eq!(described[0].as_ref().unwrap().replicas[0].node, "node-2");

    let preferred = PutOptions {
        replicas: 2,
        preferred_nodes: vec!["no-such-node".into(), "node-2".into(), "node-0".into()],
        ..PutOptions::default()
    };
    for n in 10..20 {
        let key = self::key(n);
        client
            .batch_put(vec![put_of(&key, 9000)], &preferred)
            .await
            .remove(0)
            .unwrap();
        let described = client.describe(&[key]).await.unwrap();
        let replicas = &described[0].as_ref().unwrap().replicas;
        let nodes: Vec<&str> = replicas.iter().map(|r| r.node.as_str()).collect();
        assert_eq!(nodes, ["node-2", "node-0"]);
    }
    let absurd = PutOptions {
        preferred_nodes: vec!["node-0".into(); 65],
        ..PutOptions::default()
    };
    let third = self::key(3);
    let outcome = client
        .batch_put(vec![put_of(&third, 9000)], &absurd)
        .await
        .remove(0);
    assert_eq!(outcome.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_other_systems_are_kept_as_they_are() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let hex = "0123456789abcdef".repeat(4);
    let names = [
        format!("llama@pcp0@dcp0@head_or_tp_rank:1@pp_rank:0@{hex}"),
        format!("{hex}@layer3"),
        "vllm@org_model@8@3@00000000deadbeef".to_owned(),
        "k".repeat(1024),
    ];
    for name in &names {
        let key = Key::parse(name).unwrap();
        client.put(&key, name.clone().into_bytes()).await.unwrap();
    }
    for name in &names {
        let key = Key::parse(name).unwrap();
        assert_eq!(client.get(&key).await.unwrap().unwrap(), name.as_bytes());
    }
    let mut listed: Vec<String> = client
        .list("", 0, None)
        .await
        .unwrap()
        .blocks
        .into_iter()
        .map(|b| b.key)
        .collect();
    listed.sort();
    let mut expected = names.to_vec();
    expected.sort();
    assert_eq!(listed, expected);
}
