//! The affixes of digest keys, stored once for all keys that share them.
//!
//! An interned entry is a namespace with a prefix and a suffix. The pair without affixes has the namespace's
//! number and needs no memory. Other pairs have numbers from 2^31 on, and a count of the blocks that use them.
//! A number is never reused. So a number that was found before a stripe was locked still means the same pair
//! afterwards.

use super::hash::Seed;
use hashbrown::HashTable;
use kvpool_seams::maps::HashMap;
use kvpool_types::ids::NamespaceId;
use parking_lot::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of affixes that are not interned.
pub(super) const NOT_INTERNED: u32 = u32::MAX;

const FIRST_AFFIXED: u32 = 1 << 31;

/// Limits of the interner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InternerLimit {
    /// The most pairs with affixes.
    pub pairs: usize,
    /// The most bytes of affixes.
    pub bytes: usize,
}

impl Default for InternerLimit {
    fn default() -> Self {
        Self {
            pairs: 65_536,
            bytes: 16 << 20,
        }
    }
}

/// The interned affixes.
#[derive(Debug)]
pub(super) struct Interner {
    limit: InternerLimit,
    seed: Seed,
    inner: RwLock<Inner>,
}

#[derive(Debug)]
struct Inner {
    by_content: HashTable<u32>,
    by_number: HashMap<u32, Affixes>,
    bytes: usize,
    next: u32,
}

#[derive(Debug)]
struct Affixes {
    namespace: NamespaceId,
    prefix: Box<str>,
    suffix: Box<str>,
    hash: u64,
    blocks: AtomicU64,
}

impl Inner {
    fn find(&self, namespace: NamespaceId, prefix: &str, suffix: &str, hash: u64) -> Option<u32> {
        let found = self.by_content.find(hash, |number| {
            self.by_number.get(number).is_some_and(|affixes| {
                affixes.namespace == namespace
                    && *affixes.prefix == *prefix
                    && *affixes.suffix == *suffix
            })
        });
        found.copied()
    }
}

impl Interner {
    pub(super) fn new(limit: InternerLimit, seed: Seed) -> Self {
        let inner = Inner {
            by_content: HashTable::new(),
            by_number: HashMap::default(),
            bytes: 0,
            next: FIRST_AFFIXED,
        };
        Self {
            limit,
            seed,
            inner: RwLock::new(inner),
        }
    }

    /// The number of a pair; `None` when it is not interned. `hash` is its [`Seed::affixes`].
    pub(super) fn find(
        &self,
        namespace: NamespaceId,
        prefix: &str,
        suffix: &str,
        hash: u64,
    ) -> Option<u32> {
        match bare(namespace, prefix, suffix) {
            Some(number) => Some(number),
            None => self.inner.read().find(namespace, prefix, suffix, hash),
        }
    }

    /// The number of a pair, counted for one more block; `None` beyond the limit.
    pub(super) fn acquire(
        &self,
        namespace: NamespaceId,
        prefix: &str,
        suffix: &str,
    ) -> Option<u32> {
        if let Some(number) = bare(namespace, prefix, suffix) {
            return Some(number);
        }
        let hash = self.seed.affixes(namespace, prefix, suffix);
        {
            // A pair leaves only under the write lock, so counting under the read lock is safe.
            let inner = self.inner.read();
            if let Some(number) = inner.find(namespace, prefix, suffix, hash) {
                let affixes = inner.by_number.get(&number)?;
                affixes.blocks.fetch_add(1, Ordering::Relaxed);
                return Some(number);
            }
        }
        let mut inner = self.inner.write();
        if let Some(number) = inner.find(namespace, prefix, suffix, hash) {
            inner
                .by_number
                .get(&number)?
                .blocks
                .fetch_add(1, Ordering::Relaxed);
            return Some(number);
        }
        let bytes = inner.bytes + prefix.len() + suffix.len();
        let number = inner.next;
        let full = inner.by_number.len() >= self.limit.pairs || bytes > self.limit.bytes;
        if full || number == NOT_INTERNED {
            return None;
        }
        inner.bytes = bytes;
        inner.next += 1;
        let affixes = Affixes {
            namespace,
            prefix: prefix.into(),
            suffix: suffix.into(),
            hash,
            blocks: AtomicU64::new(1),
        };
        inner.by_number.insert(number, affixes);
        let Inner {
            by_content,
            by_number,
            ..
        } = &mut *inner;
        by_content.insert_unique(hash, number, |n| by_number.get(n).map_or(0, |s| s.hash));
        Some(number)
    }

    /// Removes one block from a pair's count. The last block removes the pair.
    pub(super) fn release(&self, number: u32) {
        if number < FIRST_AFFIXED {
            return;
        }
        let last = self
            .inner
            .read()
            .by_number
            .get(&number)
            .is_some_and(|affixes| {
                let before = affixes.blocks.fetch_sub(1, Ordering::Relaxed);
                debug_assert!(before > 0, "invariant: a block releases its affixes once");
                before == 1
            });
        if !last {
            return;
        }
        let mut inner = self.inner.write();
        let unused = |affixes: &Affixes| affixes.blocks.load(Ordering::Relaxed) == 0;
        if inner.by_number.get(&number).is_some_and(unused)
            && let Some(affixes) = inner.by_number.remove(&number)
        {
            inner.bytes -= affixes.prefix.len() + affixes.suffix.len();
            if let Ok(entry) = inner.by_content.find_entry(affixes.hash, |n| *n == number) {
                entry.remove();
            }
        }
    }

    /// The [`Seed::affixes`] of a pair in use.
    pub(super) fn hash(&self, number: u32) -> u64 {
        self.with(number, |_, _, _, hash| hash)
    }

    /// Passes the namespace, prefix, suffix and hash of a pair in use to `f`.
    pub(super) fn with<T>(
        &self,
        number: u32,
        f: impl FnOnce(NamespaceId, &str, &str, u64) -> T,
    ) -> T {
        if number < FIRST_AFFIXED {
            let namespace = NamespaceId(number);
            return f(namespace, "", "", self.seed.affixes(namespace, "", ""));
        }
        let inner = self.inner.read();
        let affixes = inner
            .by_number
            .get(&number)
            .expect("invariant: blocks hold their affixes");
        f(
            affixes.namespace,
            &affixes.prefix,
            &affixes.suffix,
            affixes.hash,
        )
    }

    /// The bytes of memory in use.
    pub(super) fn memory_bytes(&self) -> u64 {
        let inner = self.inner.read();
        let table = inner.by_content.allocation_size() + inner.by_number.allocation_size();
        (table + inner.bytes) as u64
    }

    /// The number of pairs with affixes.
    pub(super) fn len(&self) -> usize {
        self.inner.read().by_number.len()
    }
}

fn bare(namespace: NamespaceId, prefix: &str, suffix: &str) -> Option<u32> {
    (prefix.is_empty() && suffix.is_empty() && namespace.0 < FIRST_AFFIXED).then_some(namespace.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interner(limit: InternerLimit) -> Interner {
        Interner::new(limit, Seed::new(1))
    }

    fn acquire(interner: &Interner, prefix: &str, suffix: &str) -> Option<u32> {
        interner.acquire(NamespaceId(1), prefix, suffix)
    }

    fn find(interner: &Interner, prefix: &str, suffix: &str) -> Option<u32> {
        let hash = interner.seed.affixes(NamespaceId(1), prefix, suffix);
        interner.find(NamespaceId(1), prefix, suffix, hash)
    }

    #[test]
    fn affixes_stay_interned_while_blocks_use_them_and_numbers_are_not_reused() {
        let interner = interner(InternerLimit::default());
        let number = acquire(&interner, "a", "b").unwrap();
        assert_eq!(acquire(&interner, "a", "b"), Some(number));
        assert_ne!(acquire(&interner, "ab", ""), Some(number));
        interner.release(number);
        assert_eq!(find(&interner, "a", "b"), Some(number));
        interner.release(number);
        assert_eq!(find(&interner, "a", "b"), None);
        assert_ne!(acquire(&interner, "a", "b"), Some(number));
    }

    #[test]
    fn the_interner_is_bounded_in_number_and_bytes() {
        let few = interner(InternerLimit {
            pairs: 2,
            bytes: 1000,
        });
        let first = acquire(&few, "1", "").unwrap();
        assert!(acquire(&few, "2", "").is_some());
        assert_eq!(acquire(&few, "3", ""), None);
        few.release(first);
        assert!(acquire(&few, "3", "").is_some());

        let short = interner(InternerLimit {
            pairs: 100,
            bytes: 10,
        });
        let long = acquire(&short, "12345", "6789").unwrap();
        assert_eq!(acquire(&short, "ab", ""), None);
        short.release(long);
        assert!(acquire(&short, "ab", "").is_some());
    }

    #[test]
    fn the_space_without_affixes_is_free() {
        let interner = interner(InternerLimit { pairs: 0, bytes: 0 });
        assert_eq!(acquire(&interner, "", ""), Some(1));
        assert_eq!(find(&interner, "", ""), Some(1));
        assert_eq!(interner.len(), 0);
        interner.release(1);
        assert_eq!(find(&interner, "", ""), Some(1));
    }
}
