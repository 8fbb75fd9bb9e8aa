//! The use of each namespace, counted by walks through the directories.
//!
//! Counters for each namespace would cost every put. A walk costs a bounded share of one core and is a little old.

use crate::pool::Pool;
use kvpool_types::ids::NamespaceId;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Blocks examined at a time: a stripe stays locked for some microseconds.
const STEP: usize = 256;
/// Blocks examined each second while somebody looks, and while nobody does.
const WATCHED: usize = 200_000;
const UNWATCHED: usize = 20_000;
/// The most namespaces shown: those with the most bytes.
const SHOWN: usize = 200;

/// The use of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NamespaceUse {
    /// The name.
    pub name: String,
    /// Blocks in memory.
    pub blocks: u64,
    /// Bytes of their replicas, without the rounding of extents.
    pub bytes: u64,
    /// Copies on media.
    pub copies: u64,
    /// Bytes of these copies.
    pub copy_bytes: u64,
}

/// The result of the last complete walk.
#[derive(Clone, Debug)]
pub(crate) struct Counted {
    pub(crate) namespaces: Arc<[NamespaceUse]>,
    pub(crate) left_off: usize,
    pub(crate) at: Instant,
}

/// The blocks and bytes counted so far in a walk.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) memory: HashMap<NamespaceId, (u64, u64)>,
    pub(crate) media: HashMap<NamespaceId, (u64, u64)>,
}

/// A walk in progress, and the last result.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    tally: Tally,
    page: Vec<u8>,
    on_media: bool,
    pub(crate) counted: Option<Counted>,
}

impl Uses {
    /// Continues the walk for one second's share.
    pub(crate) async fn walk(&mut self, pool: &Pool, watched: bool) {
        let share = if watched { WATCHED } else { UNWATCHED };
        for _ in 0..share / STEP {
            if self.step(pool) {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Forgets the walk and its result: they are of another term.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// One step; true at the end of the walk.
    fn step(&mut self, pool: &Pool) -> bool {
        // A token is refused after the directory shrank; the walk then begins again.
        let next = pool.count_uses(self.on_media, &self.page, STEP, &mut self.tally);
        let Ok(next) = next else {
            let counted = self.counted.take();
            *self = Self {
                counted,
                ..Self::default()
            };
            return false;
        };
        match next {
            Some(page) => {
                self.page = page;
                return false;
            }
            None if !self.on_media => {
                self.on_media = true;
                self.page.clear();
                return false;
            }
            None => {}
        }
        let tally = std::mem::take(&mut self.tally);
        (self.on_media, self.page) = (false, Vec::new());
        self.counted = Some(rank(pool.name_uses(&tally)));
        true
    }
}

fn rank(mut all: Vec<NamespaceUse>) -> Counted {
    all.sort_by(|one, other| {
        let bytes = |of: &NamespaceUse| of.bytes + of.copy_bytes;
        let by_bytes = bytes(other).cmp(&bytes(one));
        by_bytes.then_with(|| one.name.cmp(&other.name))
    });
    let left_off = all.len().saturating_sub(SHOWN);
    all.truncate(SHOWN);
    Counted {
        namespaces: all.into(),
        left_off,
        at: Instant::now(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_namespaces_come_first_and_the_rest_is_counted() {
        let of = |n: u64| NamespaceUse {
            name: format!("{n:03}"),
            bytes: n / 2,
            copy_bytes: n % 2,
            ..NamespaceUse::default()
        };
        let counted = rank((0..250).map(of).collect());
        assert_eq!((counted.namespaces.len(), counted.left_off), (SHOWN, 50));
        assert_eq!(counted.namespaces[0].name, "249");
    }
}
