//! The choice of the next replica to read, and the consequences of a failed read.

use crate::cache::{Located, LocatedReplica};
use crate::links::Links;
use kvpool_transport::{Slice, TransportKind};
use kvpool_types::{Code, Length, Offset, SegmentId, Version};

/// The replicas of one version of a block, with the transports over which each has failed.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    version: Version,
    failed: Vec<(SegmentId, TransportKind)>,
}

/// The replica to read next, over the first transport in `ways` that can be opened.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub(crate) replica: LocatedReplica,
    pub(crate) ways: Vec<TransportKind>,
}

impl Tried {
    /// Records that reading `segment` over `kind` failed.
    pub(crate) fn fail(&mut self, segment: SegmentId, kind: TransportKind) {
        if !self.failed.contains(&(segment, kind)) {
            self.failed.push((segment, kind));
        }
    }

    /// Forgets the failures if `version` is another version, or if `exhausted`: all replicas have failed.
    pub(crate) fn renew(&mut self, version: Version, exhausted: bool) {
        if self.version != version || exhausted {
            self.version = version;
            self.failed.clear();
        }
    }

    /// The replica to read next; `None` when every replica has failed over every transport. Replicas that
    /// have not failed come first, then nodes that are not deprioritized, then shared memory before TCP.
    /// Among equals the choice is random.
    pub(crate) fn choose(&self, located: &Located, links: &Links) -> Option<Choice> {
        located
            .replicas
            .iter()
            .filter_map(|replica| {
                let all = links.ways(&replica.node);
                let ways: Vec<_> = all
                    .iter()
                    .copied()
                    .filter(|kind| !self.failed.contains(&(replica.extent.segment, *kind)))
                    .collect();
                let first = *ways.first()?;
                let rank = (
                    all.len() - ways.len(),
                    links.is_deprioritized(&replica.node),
                    first != TransportKind::Shm,
                    kvpool_seams::random::<u32>(),
                );
                Some((rank, replica, ways))
            })
            .min_by_key(|(rank, ..)| *rank)
            .map(|(_, replica, ways)| Choice {
                replica: replica.clone(),
                ways,
            })
    }

    /// The number of replicas that have not failed over any transport.
    pub(crate) fn untried(&self, located: &Located) -> u32 {
        let untried = located
            .replicas
            .iter()
            .filter(|replica| {
                self.failed
                    .iter()
                    .all(|(segment, _)| *segment != replica.extent.segment)
            })
            .count();
        u32::try_from(untried).unwrap_or(u32::MAX)
    }
}

/// The client's next step after a failed read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The node is at fault: read another replica, and report to the master.
    ReportUnreachable,
    /// The bytes are wrong: read another replica, and report to the master.
    ReportMismatch,
    /// The location is out of date: ask the master again.
    Relocate,
    /// Only this replica is at fault: read another one.
    Another,
}

impl Next {
    /// The consequence of a read that failed with `code`.
    pub(crate) const fn after(code: Code) -> Self {
        match code {
            Code::Unreachable | Code::DeadlineExceeded => Self::ReportUnreachable,
            Code::ChecksumMismatch => Self::ReportMismatch,
            Code::StaleEpoch
            | Code::WrongIncarnation
            | Code::IncarnationDropped
            | Code::Missing
            | Code::LeaseEnded
            | Code::LocationRefused
            | Code::LocationExpired
            | Code::OutOfRange => Self::Relocate,
            _ => Self::Another,
        }
    }

    /// The code to report to the master, if any.
    pub(crate) const fn report(self) -> Option<Code> {
        match self {
            Self::ReportUnreachable => Some(Code::Unreachable),
            Self::ReportMismatch => Some(Code::ChecksumMismatch),
            Self::Relocate | Self::Another => None,
        }
    }
}

/// The part of `slices` from offset `from` with `length` bytes; `None` when the slices end before.
pub(crate) fn part_of(slices: &[Slice], from: Offset, length: Length) -> Option<Vec<Slice>> {
    let mut skip = from.0;
    let mut left = length.0;
    let mut parts = Vec::new();
    for slice in slices {
        if left == 0 {
            break;
        }
        let here = slice.length().0;
        let begin = skip.min(here);
        skip -= begin;
        let take = (here - begin).min(left);
        if take > 0 {
            parts.push(slice.slice(Offset(begin), Length(take))?);
            left -= take;
        }
    }
    (left == 0).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_transport::Region;
    use kvpool_transport::memory::total_length;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_part_is_what_stands_there(
            lengths in prop::collection::vec(0usize..20, 0..8),
            from in 0usize..80,
            length in 0usize..80,
        ) {
            let mut next = 0u8;
            let mut all = Vec::new();
            let slices: Vec<Slice> = lengths
                .iter()
                .map(|length| {
                    let bytes: Vec<u8> = (0..*length).map(|_| { next = next.wrapping_add(1); next }).collect();
                    all.extend_from_slice(&bytes);
                    Region::from(bytes).whole()
                })
                .collect();
            let part = part_of(&slices, Offset(from as u64), Length(length as u64));
            match all.get(from..from + length) {
                Some(expected) => {
                    let part = part.unwrap();
                    prop_assert_eq!(total_length(&part), Length(length as u64));
                    let got: Vec<u8> = part.iter().flat_map(Slice::to_vec).collect();
                    prop_assert_eq!(got, expected);
                }
                None => prop_assert!(part.is_none() || length == 0),
            }
        }
    }
}
