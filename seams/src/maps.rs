//! Hash maps whose order a simulation decides.
//!
//! The keys of other hash maps come from addresses or from the machine's randomness. A program that goes through such
//! a map may act in another order each time it runs.

use foldhash::fast::{FoldHasher, SeedableRandomState};
use std::hash::BuildHasher;

/// A map with foldhash, which is fast for short keys.
pub type HashMap<K, V> = hashbrown::HashMap<K, V, MapHasher>;
/// A set with foldhash.
pub type HashSet<T> = hashbrown::HashSet<T, MapHasher>;

/// Makes the hashers of one map. Each map has a seed of its own, which nobody outside of the process knows.
#[derive(Clone, Debug)]
pub struct MapHasher(SeedableRandomState);

impl Default for MapHasher {
    #[inline]
    fn default() -> Self {
        #[cfg(feature = "simulation")]
        if let Some(seed) = crate::simulation::draw(|generator| generator.next_u64()) {
            let shared = foldhash::SharedSeed::global_fixed();
            return Self(SeedableRandomState::with_seed(seed, shared));
        }
        Self(SeedableRandomState::random())
    }
}

impl BuildHasher for MapHasher {
    type Hasher = FoldHasher<'static>;

    #[inline]
    fn build_hasher(&self) -> FoldHasher<'static> {
        self.0.build_hasher()
    }
}

#[cfg(all(test, feature = "simulation"))]
mod tests {
    use super::*;
    use crate::simulation::{Machine, enter};
    use rand::SeedableRng;
    use rand::rngs::StdRng;
    use std::time::Duration;

    fn order_in_simulation(seed: u64) -> Vec<u32> {
        let _entered = enter(Machine {
            now: Box::new(|| Duration::ZERO),
            generator: Box::new(StdRng::seed_from_u64(seed)),
        });
        (0..64).collect::<HashSet<u32>>().into_iter().collect()
    }

    #[test]
    fn the_order_of_a_map_follows_from_the_seed_of_the_simulation() {
        assert_eq!(order_in_simulation(1), order_in_simulation(1));
        assert_ne!(order_in_simulation(1), order_in_simulation(2));
    }

    #[test]
    fn outside_of_a_simulation_two_maps_differ() {
        let hash = || MapHasher::default().hash_one(7_u32);
        assert_ne!((hash(), hash()), (hash(), hash()));
    }
}
