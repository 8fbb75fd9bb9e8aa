//! Namespaces with settings, for tests.

use super::{Gated, item, patient_with_nodes};
use kvpool_master::Config;
use kvpool_master::accounts::Balance;
use kvpool_master::pool::{Pool, ReserveOptions};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Code, Key, KeyRef, Length, Namespace, NamespaceSettings, Setting};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BLOCK: u64 = 64 * KIB;

/// The nodes of these tests send no heartbeats.
pub(crate) fn patient() -> Config {
    Config {
        lease_ttl: Duration::from_millis(200),
        ..patient_with_nodes()
    }
}

pub(crate) fn key(n: u64) -> Key {
    Key::parse(&format!("key-{n}")).unwrap()
}

pub(crate) fn set(settings: &[(Setting, u64)]) -> NamespaceSettings {
    let none = NamespaceSettings::default();
    settings
        .iter()
        .fold(none, |all, (setting, value)| all.with(*setting, *value))
}

/// A namespace of the pool.
#[derive(Clone)]
pub(crate) struct Tenant {
    pub(crate) pool: Arc<Pool>,
    pub(crate) name: String,
    pub(crate) id: NamespaceId,
}

impl Tenant {
    pub(crate) async fn new(pool: &Arc<Pool>, name: &str, settings: &[(Setting, u64)]) -> Self {
        let namespace = Namespace {
            name: name.into(),
            ..Namespace::default()
        };
        pool.create_namespace(namespace, set(settings))
            .await
            .unwrap();
        Self {
            pool: Arc::clone(pool),
            name: name.into(),
            id: pool.namespace(name).unwrap(),
        }
    }

    pub(crate) fn of(pool: &Arc<Pool>, name: &str) -> Self {
        Self {
            pool: Arc::clone(pool),
            name: name.into(),
            id: pool.namespace(name).unwrap(),
        }
    }

    pub(crate) async fn try_put_with(
        &self,
        n: u64,
        bytes: u64,
        options: &ReserveOptions,
    ) -> Result<(), Code> {
        let keys = [key(n)];
        let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
        let granted = self
            .pool
            .reserve(self.id, &refs[..], &[Length(bytes)], options)
            .await;
        let granted = granted.into_iter().next().unwrap()?;
        let codes = self
            .pool
            .commit(self.id, vec![item(&keys[0], bytes, granted)])
            .await;
        if codes == [Code::Ok] {
            Ok(())
        } else {
            Err(codes[0])
        }
    }

    pub(crate) async fn try_put(&self, n: u64, bytes: u64, timeout: Duration) -> Result<(), Code> {
        let options = ReserveOptions {
            timeout,
            ..ReserveOptions::default()
        };
        self.try_put_with(n, bytes, &options).await
    }

    pub(crate) async fn put(&self, n: u64) {
        let put = self.try_put(n, BLOCK, Duration::from_secs(20)).await;
        put.unwrap_or_else(|code| panic!("put {n} of {}: {code}", self.name));
    }

    pub(crate) async fn fill(&self, numbers: std::ops::Range<u64>) {
        for n in numbers {
            self.put(n).await;
        }
    }

    /// Leases a block, if it is there.
    pub(crate) fn lease(&self, n: u64) {
        self.pool.lookup(self.id, &[key(n).as_ref()][..], true);
    }

    pub(crate) fn has(&self, n: u64) -> bool {
        let present = self.pool.exist(self.id, &[key(n).as_ref()][..], false);
        present.answer[0]
    }

    /// Puts blocks, and waits for the disk when it lags.
    pub(crate) async fn put_paced(&self, numbers: std::ops::Range<u64>) {
        for n in numbers {
            self.put(n).await;
            for _ in 0..100 {
                if self.pool.bytes_due() < 8 * BLOCK {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }

    /// Brings blocks back to memory as a lookup does. Returns the numbers without room.
    pub(crate) async fn restore(&self, numbers: &[u64]) -> Vec<u64> {
        let keys: Vec<Key> = numbers.iter().map(|n| key(*n)).collect();
        let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
        let restored = self.pool.restore(self.id, &keys[..], Duration::MAX).await;
        self.pool.end_restored(self.id, &restored);
        restored.left.iter().map(|index| numbers[*index]).collect()
    }

    pub(crate) fn balance(&self) -> Balance {
        self.pool.namespace_view(&self.name).unwrap().balance
    }
}

/// Ends a master as a crash would: records that are not logged are lost.
pub(crate) async fn stop(pool: Arc<Pool>, store: Arc<Gated>) {
    pool.retire().await;
    let left = Arc::downgrade(&store);
    drop((pool, store));
    // The master's threads notice the end within a second, and then release the directory.
    while left.strong_count() > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until no transfer is in progress, and checks that the accounts equal the contents.
pub(crate) async fn check_sums(pool: &Arc<Pool>) -> Balance {
    for _ in 0..500 {
        let sums = pool.balance();
        let at_rest = sums.puts == 0 && sums.memory == sums.resident;
        if at_rest && sums == pool.counted_balance() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (sums, counted) = (pool.balance(), pool.counted_balance());
    assert_eq!(
        sums, counted,
        "sums over namespaces, and over what is there"
    );
    assert_eq!(
        sums.memory,
        sums.resident + sums.reserved,
        "nothing is under way"
    );
    sums
}

pub(crate) fn balances(pool: &Arc<Pool>) -> BTreeMap<String, Balance> {
    let (views, _) = pool.namespaces_after("", 1000);
    let balances = views
        .into_iter()
        .map(|view| (view.known.fields.name, view.balance));
    balances.collect()
}
