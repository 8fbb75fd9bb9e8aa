//! Segment ids over the restarts of a master. Nodes join and leave, shards are captured one at a
//! time, and the master restarts, in random order. A segment id names one segment for ever.
//! Otherwise a shard's old snapshot would place blocks of a node that is gone on the node that got
//! its id.

use crate::etcd::{open, started};
use crate::support::SPACE;
use bytesize::ByteSize;
use kvpool_etcd::testing::Etcd;
use kvpool_master::Config;
use kvpool_master::clock::BootClock;
use kvpool_master::membership::StoreNode;
use kvpool_master::pool::{Pool, ReserveOptions};
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore, JournalOptions, MetadataStore};
use kvpool_types::{Code, Key, KeyRef, Length, NodeName, SegmentId, Version};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// The number of restarts in a test.
fn rounds() -> u32 {
    let asked = std::env::var("KVPOOL_RELOADS").ok();
    asked.map_or(100, |text| {
        text.parse().expect("KVPOOL_RELOADS is a number")
    })
}

/// The acknowledged fields of a block.
#[derive(Clone, Debug, PartialEq)]
struct Put {
    version: Version,
    node: String,
}

/// A master over one store, with the answers that its clients received.
struct World {
    random: StdRng,
    store: Arc<dyn MetadataStore>,
    pool: Arc<Pool>,
    /// The present nodes with their incarnations.
    nodes: BTreeMap<String, (u128, Arc<StoreNode>)>,
    puts: BTreeMap<String, Put>,
    ids: HashSet<SegmentId>,
    lives: u128,
    keys: u64,
}

async fn lead(store: &Arc<dyn MetadataStore>) -> Arc<Pool> {
    let config = Config {
        lease_ttl: Duration::from_millis(1),
        ..Config::default()
    };
    // One shard at a time, and few shards in most lives.
    let journal = JournalOptions {
        log_bytes: ByteSize::kib(3),
        log_ratio: 0,
        capture_bytes: ByteSize::b(1),
        ..JournalOptions::default()
    };
    crate::support::lead(store, config, journal, Arc::new(BootClock)).await
}

impl World {
    async fn new(seed: u64, store: Arc<dyn MetadataStore>) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            pool: lead(&store).await,
            store,
            nodes: BTreeMap::new(),
            puts: BTreeMap::new(),
            ids: HashSet::new(),
            lives: 0,
            keys: 0,
        }
    }

    async fn join(&mut self) {
        self.lives += 1;
        let name = format!("node-{}", self.lives);
        let node = crate::support::join(&self.pool, &name, self.lives, 1 << 20).await;
        for id in node.segments() {
            assert!(self.ids.insert(id), "segment id {id} was given before");
        }
        self.nodes.insert(name, (self.lives, node));
    }

    /// The newest node leaves more often than others, because its segment's id is the highest.
    async fn leave(&mut self) {
        let newest = self.random.random_bool(0.7);
        let index = match self.nodes.len() {
            0 => return,
            count if newest => count - 1,
            count => self.random.random_range(0..count),
        };
        let name = self.nodes.keys().nth(index).unwrap().clone();
        let (_, node) = self.nodes.remove(&name).unwrap();
        self.pool.drop_node(&node);
        self.puts.retain(|_, put| put.node != name);
        // No caller waits for a drop to be durable. This put is behind the drop in the log.
        self.put(1).await;
    }

    /// Puts a batch on one node.
    async fn put(&mut self, count: u64) {
        if self.nodes.is_empty() {
            self.join().await;
        }
        let index = self.random.random_range(0..self.nodes.len());
        let name = self.nodes.keys().nth(index).unwrap().clone();
        let mut options = ReserveOptions {
            timeout: Duration::from_secs(10),
            ..ReserveOptions::default()
        };
        options.hints.preferred = vec![NodeName(name)];
        let keys: Vec<Key> = (self.keys..self.keys + count)
            .map(|n| Key::parse(&format!("block-{n}")).unwrap())
            .collect();
        self.keys += count;
        let named: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
        let lengths = vec![Length(64); keys.len()];
        let granted = self.pool.reserve(SPACE, &named[..], &lengths, &options);
        let granted: Vec<_> = granted.await.into_iter().map(Result::unwrap).collect();
        let owner = |id: SegmentId| {
            let mut nodes = self.nodes.iter();
            let owner = nodes.find(|(_, (_, node))| node.segments().contains(&id));
            owner.map(|(name, _)| name.clone()).unwrap()
        };
        let mut acknowledged = Vec::new();
        let mut items = Vec::new();
        for (key, granted) in keys.iter().zip(granted) {
            let node = owner(granted.replicas[0].segment);
            let version = granted.version;
            acknowledged.push((key.to_string(), Put { version, node }));
            items.push(crate::support::item(key, 64, granted));
        }
        let codes = self.pool.commit(SPACE, items).await;
        assert!(codes.iter().all(|code| *code == Code::Ok), "{codes:?}");
        self.puts.extend(acknowledged);
    }

    async fn remove(&mut self) {
        let gone: Vec<String> = {
            let random = &mut self.random;
            let all = self.puts.keys();
            all.filter(|_| random.random_bool(0.2)).cloned().collect()
        };
        let keys: Vec<Key> = gone.iter().map(|key| Key::parse(key).unwrap()).collect();
        let named: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
        self.pool.remove(SPACE, &named, true).await.unwrap();
        self.puts.retain(|key, _| !gone.contains(key));
    }

    /// The master ends, half of the time by a crash, and another one starts over the same store.
    async fn reload(&mut self, store: Arc<dyn MetadataStore>) {
        self.store = store;
        self.pool = lead(&self.store).await;
        for (name, (life, node)) in &mut self.nodes {
            *node = crate::support::join(&self.pool, name, *life, 1 << 20).await;
        }
        self.check();
    }

    async fn end(&mut self) {
        if self.random.random_bool(0.5) {
            self.pool.stop().await;
        } else {
            self.store.close().await.unwrap();
            self.pool.stop().await;
        }
    }

    /// Every acknowledged block is present, on the node that it was written to, and no other block
    /// is.
    fn check(&self) {
        let names: Vec<Key> = self
            .puts
            .keys()
            .map(|key| Key::parse(key).unwrap())
            .collect();
        let named: Vec<KeyRef<'_>> = names.iter().map(Key::as_ref).collect();
        let described = self.pool.describe(SPACE, &named[..]);
        let mut lost = 0;
        let mut elsewhere = 0;
        for (put, found) in self.puts.values().zip(described) {
            match found {
                Some(found) if found.version == put.version && found.replicas.len() == 1 => {
                    elsewhere += u64::from(found.replicas[0].node.0 != put.node);
                }
                _ => lost += 1,
            }
        }
        let ghosts = self.pool.blocks() + lost - self.puts.len() as u64;
        assert_eq!(
            (lost, elsewhere, ghosts),
            (0, 0, 0),
            "lost, elsewhere and ghosts of {} acknowledged blocks",
            self.puts.len()
        );
    }
}

/// Restarts the master `rounds` times over the stores that `open` opens.
async fn live<F: Future<Output = Arc<dyn MetadataStore>>>(seed: u64, open: impl Fn() -> F) {
    println!("seed {seed}");
    let mut world = World::new(seed, open().await).await;
    for _ in 0..rounds() {
        for _ in 0..world.random.random_range(1..7) {
            match world.random.random_range(0..10) {
                0..2 if world.nodes.len() < 4 => world.join().await,
                2..4 => world.leave().await,
                4 => world.remove().await,
                _ => {
                    let count = world.random.random_range(1..60);
                    world.put(count).await;
                }
            }
        }
        world.end().await;
        world.reload(open().await).await;
    }
    world.pool.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_id_is_never_given_twice() {
    let directory = tempfile::tempdir().unwrap();
    live(rand::random(), || async {
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        Arc::new(store) as Arc<dyn MetadataStore>
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_id_is_never_given_twice_over_etcd() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_segment_id_is_never_given_twice_over_etcd",
        Etcd::start(directory.path())
    );
    live(rand::random(), || async {
        Arc::new(open(&etcd, "c").await) as Arc<dyn MetadataStore>
    })
    .await;
}
