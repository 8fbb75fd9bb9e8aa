//! With tokens, a node sends a byte only to a caller with a location that the master signed for it.

mod expiry;
mod isolation;
mod pool;
mod relay;

use kvpool_client::{
    Client, GetOptions, Key, Remove, ReplicaBlocks, ReplicaChange, ReplicaTaskState, ReplicaWish,
};
use kvpool_store_node::Isolation;
use kvpool_transport::SumsOp;
use kvpool_types::wire::data::ReadItem;
use kvpool_types::{Code, Epoch, Extent, Length, Offset, ReadRight, Version};
use pool::{Place, Pool, Port, Shape};
use std::time::{Duration, Instant};

const LENGTH: usize = 4096;

fn key(name: impl std::fmt::Display) -> Key {
    Key::parse(&name.to_string()).unwrap()
}

fn bytes(seed: u8, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| seed.wrapping_add(u8::try_from(at % 251).unwrap()))
        .collect()
}

async fn put(client: &Client, name: &str, seed: u8) {
    let block = bytes(seed, LENGTH);
    client.put(&key(name), block).await.unwrap();
}

async fn only(pool: &Pool, subject: &str, name: &str) -> Place {
    let mut places = pool.lookup(subject, subject, name).await.unwrap();
    assert_eq!(places.len(), 1);
    places.remove(0)
}

/// Reads without a valid signed location, each with its fault.
fn forged(x: &Place, y: &Place, z: &Place) -> Vec<(&'static str, ReadItem)> {
    let right = x.right.unwrap();
    let at = |extent: Extent, right: ReadRight| ReadItem::whole(extent).with(Some(right));
    let with = |right: ReadRight| at(x.extent, right);
    let mut mac = right.mac;
    mac[15] ^= 1;
    vec![
        ("nothing", ReadItem::whole(x.extent)),
        ("the location of a neighbour", at(y.extent, right)),
        ("a location of another namespace", with(z.right.unwrap())),
        (
            "more than the block",
            at(
                Extent {
                    length: Length(x.extent.length.0 + 64),
                    ..x.extent
                },
                right,
            ),
        ),
        (
            "the bytes behind it",
            at(
                Extent {
                    offset: Offset(x.extent.offset.0 + 64),
                    ..x.extent
                },
                right,
            ),
        ),
        (
            "another version",
            with(ReadRight {
                version: Version(right.version.0 + 1),
                ..right
            }),
        ),
        (
            "a later deadline",
            with(ReadRight {
                deadline_ms: right.deadline_ms + 1,
                ..right
            }),
        ),
        ("another signature", with(ReadRight { mac, ..right })),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_without_the_location_that_the_master_signed_gets_no_byte() {
    let pool = Pool::start(1, true).await;
    let (a, b) = (pool.client("a", "a").await, pool.client("b", "b").await);
    put(&a, "x", 1).await;
    put(&a, "y", 2).await;
    put(&b, "z", 3).await;
    let refused = pool.lookup("b", "a", "x").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    let x = only(&pool, "a", "x").await;
    let (y, z) = (only(&pool, "a", "y").await, only(&pool, "b", "z").await);

    let mut port = Port::open(&x, pool.token("b"));
    for (what, item) in forged(&x, &y, &z) {
        let (code, sent) = port.read(x.epoch, item);
        assert_eq!((code, sent.len()), (Code::LocationRefused, 0), "{what}");
        let summed = port.sums(x.epoch, item);
        assert_eq!(summed, Err(Code::LocationRefused), "{what}");
    }
    // The signature covers the epoch. A wrong epoch has a code of its own.
    let next = Epoch(x.epoch.0 + 1);
    let (code, sent) = port.read(next, x.item());
    assert_eq!((code, sent.len()), (Code::StaleEpoch, 0));

    let (code, sent) = port.read(z.epoch, z.item());
    assert_eq!(code, Code::Ok);
    assert!(sent == bytes(3, LENGTH));
    let part = ReadItem {
        from: Offset(100),
        length: Length(50),
        ..z.item()
    };
    let (code, sent) = port.read(z.epoch, part);
    assert_eq!(code, Code::Ok);
    assert!(sent == bytes(3, LENGTH)[100..150]);
    assert_eq!(port.sums(z.epoch, z.item()), Ok(1));

    // The Unix socket sends no bytes, but checksums.
    let until = Instant::now() + Duration::from_secs(20);
    let link = x.shm_link(pool.token("b")).await.unwrap();
    let ops = vec![
        x.extent.into(),
        SumsOp {
            extent: z.extent,
            right: z.right,
        },
    ];
    let summed = link.sums(x.epoch, ops, until).await;
    assert_eq!(summed[0].as_ref().unwrap_err().code, Code::LocationRefused);
    assert!(summed[1].is_ok());
    drop((a, b, link));
    pool.stop().await;
}

/// A reader that takes no bytes still has its read open after the block has left, when another
/// tenant's block could get the extent.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_gets_no_byte_of_the_next_block() {
    // More than the sockets of a connection hold.
    const LARGE: usize = 12 << 20;
    let pool = Pool::start(1, true).await;
    let (a, b) = (pool.client("a", "a").await, pool.client("b", "b").await);
    let root = pool.client("root", "a").await;
    a.put(&key("mine"), bytes(1, LARGE)).await.unwrap();
    let mine = only(&pool, "a", "mine").await;
    let mut port = Port::open(&mine, pool.token("a"));
    port.begin_read(mine.epoch, mine.item());
    tokio::time::sleep(Duration::from_millis(300)).await;

    let removed = root.remove(Remove::Keys(vec![key("mine")]), true).await;
    assert_eq!(removed.unwrap().removed, 1);
    // Only the extent of the removed block has room for it.
    b.put(&key("other"), bytes(100, LARGE)).await.unwrap();
    let other = only(&pool, "b", "other").await;
    assert_eq!(other.extent.offset, mine.extent.offset);
    let came = port.rest(LARGE);
    assert!(
        came == bytes(1, LARGE)[..came.len()],
        "bytes of another block among {}",
        came.len()
    );
    assert!(came.len() < LARGE, "the sockets held the whole block");
    // The connection has ended, and the next one reads as usual.
    assert!(
        b.get(&key("other"))
            .await
            .unwrap()
            .is_some_and(|got| got == bytes(100, LARGE))
    );
    drop((a, b, root));
    pool.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_tokens_signs_nothing_and_asks_for_nothing() {
    let pool = Pool::start(1, false).await;
    let client = pool.client("a", "a").await;
    put(&client, "x", 1).await;
    let x = only(&pool, "a", "x").await;
    assert_eq!(x.right, None);
    let mut port = Port::open(&x, pool.token("a"));
    let (code, sent) = port.read(x.epoch, ReadItem::whole(x.extent));
    assert_eq!(code, Code::Ok);
    assert!(sent == bytes(1, LENGTH));
    assert_eq!(port.sums(x.epoch, ReadItem::whole(x.extent)), Ok(1));
    drop(client);
    pool.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_and_nodes_read_what_the_master_signed_for_them() {
    let pool = Pool::start(2, true).await;
    let client = pool.client("a", "a").await;
    let names: Vec<String> = (0..8).map(|n| format!("k{n}")).collect();
    let length = 200_000;
    for (seed, name) in (0u8..).zip(&names) {
        let block = bytes(seed, length);
        client.put(&key(name), block).await.unwrap();
    }
    // Another client, which knows no location from a put.
    let reader = pool.client("a", "a").await;
    for (seed, name) in (0u8..).zip(&names) {
        let block = bytes(seed, length);
        assert!(reader.get(&key(name)).await.unwrap() == Some(block));
    }
    let into = kvpool_transport::Region::allocate(Length(1000));
    let (buffers, options) = (vec![into.whole()], GetOptions::default());
    let name = key("k1");
    let ranged = reader.get_range(&name, Offset(70_000), buffers, &options);
    ranged.await.unwrap();
    assert!(into.whole().to_vec() == bytes(1, length)[70_000..71_000]);

    // Each node pulls from the other, and presents the location that the master signed.
    let root = pool.client("root", "a").await;
    let wish = ReplicaWish {
        change: ReplicaChange::Copy,
        blocks: ReplicaBlocks::Keys(names.iter().map(key).collect()),
        from: None,
        to: Vec::new(),
        evict: false,
    };
    let begun = root.change_replicas(&wish).await.unwrap();
    let task = root.wait_replica_task(begun.id, Duration::from_secs(60));
    let task = task.await.unwrap().unwrap();
    let outcome = (task.state, task.changed);
    assert_eq!(outcome, (ReplicaTaskState::Done, 8), "{task:?}");
    for (seed, name) in (0u8..).zip(&names) {
        let places = pool.lookup("a", "a", name).await.unwrap();
        assert_eq!(places.len(), 2);
        for place in places {
            let mut port = Port::open(&place, pool.token("a"));
            let (code, sent) = port.read(place.epoch, place.item());
            assert_eq!(code, Code::Ok, "{place:?}");
            assert!(sent == bytes(seed, length));
            let (code, sent) = port.read(place.epoch, ReadItem::whole(place.extent));
            assert_eq!((code, sent.len()), (Code::LocationRefused, 0));
        }
    }
    drop((client, reader, root));
    pool.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_come_back_from_an_ssd_are_read_with_their_version() {
    const MIB: usize = 1 << 20;
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = disk.path().join("ssd");
    let ssd = format!("path={},size=256MiB", file.display());
    let shape = Shape {
        ssd: Some(ssd),
        ..Shape::of(1, true, Isolation::Shared)
    };
    let pool = Pool::with(shape).await;
    let client = pool.client("a", "a").await;
    // Three times the memory, slowly enough for the disk.
    for seed in 0..48 {
        let block = bytes(seed, MIB);
        client.put(&key(seed), block).await.unwrap();
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    let reader = pool.client("a", "a").await;
    let mut hits = 0;
    for seed in 0..48 {
        if let Some(block) = reader.get(&key(seed)).await.unwrap() {
            assert!(block == bytes(seed, MIB));
            hits += 1;
        }
    }
    // Memory alone holds at most 16 of them.
    assert!(hits > 24, "{hits} of 48 were found");
    drop((client, reader));
    pool.stop().await;
}
