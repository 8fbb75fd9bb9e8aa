//! A slab in chunks of fixed size. A value never moves, the slab never copies itself to grow, and
//! less than one chunk is unused.

/// The index of no slot.
pub(crate) const NONE: u32 = u32::MAX;

/// A type with a vacant form of its own, so that slots need no tag.
pub(crate) trait Slot {
    /// The number of slots in a chunk.
    const CHUNK: usize;

    /// A vacant slot, with the index of the next vacant slot.
    fn vacant(next: u32) -> Self;

    /// The next vacant slot; `None` for an occupied slot.
    fn next_vacant(&self) -> Option<u32>;
}

/// Values at stable indexes.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    chunks: Vec<Vec<T>>,
    vacant: u32,
    high: u32,
    len: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            vacant: NONE,
            high: 0,
            len: 0,
        }
    }
}

impl<T: Slot> Slab<T> {
    /// Stores a value and returns its index.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        if self.vacant != NONE {
            let index = self.vacant;
            let slot = self
                .slot_mut(index)
                .expect("invariant: vacant slots are linked");
            let next = slot
                .next_vacant()
                .expect("invariant: only vacant slots are linked");
            *slot = value;
            self.vacant = next;
            return index;
        }
        let index = self.high;
        self.high = index
            .checked_add(1)
            .filter(|high| *high != NONE)
            .expect("invariant: memory ends before the indexes do");
        match self.chunks.last_mut() {
            Some(chunk) if chunk.len() < T::CHUNK => chunk.push(value),
            _ => {
                let mut chunk = Vec::with_capacity(T::CHUNK);
                chunk.push(value);
                self.chunks.push(chunk);
            }
        }
        index
    }

    /// Removes and returns a value.
    pub(crate) fn remove(&mut self, index: u32) -> T {
        let vacant = T::vacant(self.vacant);
        let value = std::mem::replace(self.at_mut(index), vacant);
        self.vacant = index;
        self.len -= 1;
        value
    }

    /// The value at `index`; `None` for a vacant slot.
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.slot(index).filter(|slot| slot.next_vacant().is_none())
    }

    /// The value at `index`; `None` for a vacant slot.
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slot_mut(index)
            .filter(|slot| slot.next_vacant().is_none())
    }

    /// The value of an occupied slot.
    pub(crate) fn at(&self, index: u32) -> &T {
        self.get(index).expect("invariant: what is linked is there")
    }

    /// The value of an occupied slot.
    pub(crate) fn at_mut(&mut self, index: u32) -> &mut T {
        self.get_mut(index)
            .expect("invariant: what is linked is there")
    }

    /// The number of values.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The first index that was never used.
    pub(crate) fn high(&self) -> u32 {
        self.high
    }

    /// The bytes of all chunks.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let chunks = self.chunks.len() * T::CHUNK * size_of::<T>();
        (chunks + self.chunks.capacity() * size_of::<Vec<T>>()) as u64
    }

    fn slot(&self, index: u32) -> Option<&T> {
        let index = index as usize;
        self.chunks.get(index / T::CHUNK)?.get(index % T::CHUNK)
    }

    fn slot_mut(&mut self, index: u32) -> Option<&mut T> {
        let index = index as usize;
        self.chunks
            .get_mut(index / T::CHUNK)?
            .get_mut(index % T::CHUNK)
    }
}

/// A slot for values that are few and may be large.
#[derive(Debug)]
pub(crate) enum Rare<T> {
    /// A value.
    Held(T),
    /// No value; the next vacant slot.
    Vacant(u32),
}

impl<T> Slot for Rare<T> {
    const CHUNK: usize = 32;

    fn vacant(next: u32) -> Self {
        Self::Vacant(next)
    }

    fn next_vacant(&self) -> Option<u32> {
        match self {
            Self::Held(_) => None,
            Self::Vacant(next) => Some(*next),
        }
    }
}

impl<T> Rare<T> {
    /// The value of an occupied slot.
    pub(crate) fn held(&self) -> &T {
        match self {
            Self::Held(value) => value,
            Self::Vacant(_) => unreachable!("invariant: vacant slots are not handed out"),
        }
    }

    /// The value of an occupied slot.
    pub(crate) fn held_mut(&mut self) -> &mut T {
        match self {
            Self::Held(value) => value,
            Self::Vacant(_) => unreachable!("invariant: vacant slots are not handed out"),
        }
    }

    /// The value of an occupied slot.
    pub(crate) fn into_held(self) -> T {
        match self {
            Self::Held(value) => value,
            Self::Vacant(_) => unreachable!("invariant: vacant slots are not handed out"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_are_stable_and_reused() {
        let mut slab: Slab<Rare<u32>> = Slab::default();
        let indexes: Vec<u32> = (0..100).map(|n| slab.insert(Rare::Held(n))).collect();
        assert_eq!(slab.remove(indexes[7]).into_held(), 7);
        assert_eq!(slab.remove(indexes[50]).into_held(), 50);
        assert!(slab.get(indexes[7]).is_none());
        assert_eq!(slab.len(), 98);
        assert_eq!(slab.insert(Rare::Held(500)), indexes[50]);
        assert_eq!(slab.insert(Rare::Held(700)), indexes[7]);
        assert_eq!(slab.insert(Rare::Held(1000)), 100);
        assert_eq!(*slab.at(indexes[99]).held(), 99);
        assert_eq!(slab.high(), 101);
    }
}
