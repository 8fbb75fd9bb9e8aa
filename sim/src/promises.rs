//! What masters promised to readers: until its lease ends, nobody writes where a located block lies.
//!
//! A reader would see a broken promise only if it read just then, and would take it for a stale location. So the
//! network notes every location that it carries under a lease, and the checks compare them with the pool.

use crate::leases::{Given, Leases};
use crate::plan::Process;
use crate::sight::Sight;
use bytes::Bytes;
use kvpool_master::pool::Pool;
use kvpool_master::pool::audit::Use;
use kvpool_master::standby::Standby;
use kvpool_proto as proto;
use kvpool_types::wire::keys::unpack;
use kvpool_types::{Code, Incarnation, Key, SegmentId, Version};
use parking_lot::Mutex;
use prost::Message;
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;
use tokio::time::Instant;

/// A place of a version: its segment, and its first byte there.
type Place = (u64, SegmentId, u64);

/// One located replica.
#[derive(Clone, Debug)]
struct Promise {
    reader: Process,
    key: Key,
    token: u64,
    epoch: u64,
    version: u64,
    node: Incarnation,
    segment: SegmentId,
    range: Range<u64>,
    asked: Instant,
    until: Instant,
    /// Whether the block has left its leader's pool.
    has_left: bool,
    /// Whether the log was seen to have the block at this place.
    is_logged: bool,
    /// When the block was seen to have left this place, on a segment that is there.
    left_at: Option<Instant>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    all: Mutex<Vec<Promise>>,
    last: Mutex<Option<Instant>>,
    /// When the clock of a master jumped last. No lease counts that a reader asked for before.
    jumped: Mutex<Option<Instant>>,
    looked: Mutex<Option<Instant>>,
    /// The places of all blocks at the last look.
    places: Mutex<BTreeSet<Place>>,
    /// The leases of all terms.
    pub(crate) leases: Leases,
}

/// A leased block that its leader has no more.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) reader: Process,
    pub(crate) key: Key,
    /// The block was there at this time.
    pub(crate) since: Instant,
    pub(crate) what: String,
}

impl std::fmt::Display for Promise {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let left = self.until.saturating_duration_since(Instant::now());
        write!(
            f,
            "{} may read version {} of {} in segment {} for {} ms more",
            self.reader,
            self.version,
            self.key,
            self.segment,
            left.as_millis()
        )
    }
}

/// When a lease ends for the reader that asked at `asked`. Clocks drift by a part in two thousand at most.
fn end_of(lease: proto::Lease, asked: Instant) -> Instant {
    let ttl = Duration::from_millis(lease.ttl_ms);
    asked + (ttl - ttl / 1_000)
}

/// What is wrong with an answer of this term: a master refuses whoever knows a later one.
fn of_earlier_term(reader: Process, asked: Option<&proto::Caller>, epoch: u64) -> Option<String> {
    let known = asked.map_or(0, |caller| caller.epoch);
    let is_earlier = epoch < known;
    is_earlier.then(|| format!("{reader} knows epoch {known}, and gets an answer of epoch {epoch}"))
}

fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Promise {
    fn is_of(&self, reader: Process, token: u64, key: &Key) -> bool {
        self.reader == reader && self.token == token && self.key == *key
    }
}

/// When the reader asked for the last of the leases for which `is_it` is true. A renewal or a release is of one lease,
/// and does not say which. What stays is judged for the least time.
fn last_asked(promises: &[Promise], is_it: impl Fn(&Promise) -> bool) -> Option<Instant> {
    let alike = promises.iter().filter(|promise| is_it(promise));
    alike.map(|promise| promise.asked).max()
}

impl Promises {
    /// The clock of a master jumps: what it has promised may end early.
    pub(crate) fn clock_jumps(&self) {
        *self.jumped.lock() = Some(Instant::now());
        self.all.lock().clear();
        self.leases.clear();
    }

    /// Whether the clock of a master jumped so lately.
    pub(crate) fn has_jumped_within(&self, wait: Duration) -> bool {
        self.jumped
            .lock()
            .is_some_and(|jumped| jumped.elapsed() <= wait)
    }

    fn counts(&self, asked: Instant) -> bool {
        self.jumped.lock().is_none_or(|jumped| asked > jumped)
    }

    /// The promise that the pool breaks.
    pub(crate) fn broken_by(&self, sight: &Sight<'_>) -> Option<String> {
        self.note_left(sight);
        self.broken_by_pool(&sight.survey.uses)
            .or_else(|| self.broken_by_free_room(sight.pool))
            .or_else(|| self.forgotten_by(sight.pool))
    }

    /// A reader that asked at `asked` has got this answer. Returns what is wrong with it.
    pub(crate) fn located(
        &self,
        reader: Process,
        asked: Instant,
        request: &Bytes,
        reply: &Bytes,
    ) -> Option<String> {
        let (Ok(request), Ok(reply)) = (
            proto::LookupRequest::decode(request.clone()),
            proto::LookupReply::decode(reply.clone()),
        ) else {
            return None;
        };
        if let Some(wrong) = of_earlier_term(reader, request.caller.as_ref(), reply.epoch) {
            return Some(wrong);
        }
        let lease = reply.lease.filter(|lease| lease.ttl_ms > 0)?;
        if !self.counts(asked) {
            return None;
        }
        let until = end_of(lease, asked);
        let given = Given {
            reader,
            token: lease.token,
            epoch: reply.epoch,
            asked,
            until,
        };
        let found = unpack(&request.keys).flatten().zip(&reply.locations);
        let found = found.filter(|(_, location)| !location.replicas.is_empty());
        let found = found.map(|(key, at)| (key.to_key(), Some(Version(at.version))));
        self.leases.begin(given, found);
        let mut promises = self.all.lock();
        promises.retain(|promise| promise.until > Instant::now());
        let before = promises.len();
        let keys = unpack(&request.keys).flatten();
        for (key, location) in keys.zip(&reply.locations) {
            for replica in &location.replicas {
                let node = reply.nodes.get(replica.node as usize);
                let Some(node) = node.and_then(|node| Incarnation::from_slice(&node.incarnation))
                else {
                    continue;
                };
                promises.push(Promise {
                    reader,
                    key: key.to_key(),
                    token: lease.token,
                    epoch: reply.epoch,
                    version: location.version,
                    node,
                    segment: SegmentId(replica.segment),
                    range: replica.offset..replica.offset + location.length,
                    asked,
                    until,
                    has_left: false,
                    is_logged: false,
                    left_at: None,
                });
            }
        }
        if promises.len() > before {
            *self.last.lock() = Some(Instant::now());
        }
        None
    }

    /// A reader that asked at `asked` was told which keys are present. Returns what is wrong with the answer.
    pub(crate) fn present(
        &self,
        reader: Process,
        asked: Instant,
        request: &Bytes,
        reply: &Bytes,
    ) -> Option<String> {
        let (Ok(request), Ok(reply)) = (
            proto::ExistRequest::decode(request.clone()),
            proto::ExistReply::decode(reply.clone()),
        ) else {
            return None;
        };
        if let Some(wrong) = of_earlier_term(reader, request.caller.as_ref(), reply.epoch) {
            return Some(wrong);
        }
        let lease = reply.lease.filter(|lease| lease.ttl_ms > 0)?;
        if !self.counts(asked) {
            return None;
        }
        let given = Given {
            reader,
            token: lease.token,
            epoch: reply.epoch,
            asked,
            until: end_of(lease, asked),
        };
        let is_there = |at: usize| {
            let byte = reply.present.get(at / 8);
            byte.is_some_and(|byte| byte & 1 << (at % 8) != 0)
        };
        let keys = unpack(&request.keys).flatten().enumerate();
        let keys = keys.filter(|(at, _)| is_there(*at));
        let keys = keys.map(|(_, key)| (key.to_key(), None));
        self.leases.begin(given, keys);
        None
    }

    /// Whether a reader has got a location just now.
    pub(crate) fn is_fresh(&self) -> bool {
        const FRESH: Duration = Duration::from_millis(20);
        self.last.lock().is_some_and(|last| last.elapsed() < FRESH)
    }

    /// A reader that asked at `asked` has renewed leases. Returns what is wrong with that: of a block that had left a
    /// place before, no lease on its places is renewed. The reader would go on to read there.
    pub(crate) fn renewed(
        &self,
        reader: Process,
        asked: Instant,
        request: &Bytes,
        reply: &Bytes,
    ) -> Option<String> {
        let (Ok(request), Ok(reply)) = (
            proto::RenewRequest::decode(request.clone()),
            proto::RenewReply::decode(reply.clone()),
        ) else {
            return None;
        };
        if let Some(wrong) = of_earlier_term(reader, request.caller.as_ref(), reply.epoch) {
            return Some(wrong);
        }
        let lease = reply.lease.filter(|lease| lease.ttl_ms > 0)?;
        if !self.counts(asked) {
            return None;
        }
        let given = Given {
            reader,
            token: lease.token,
            epoch: reply.epoch,
            asked,
            until: end_of(lease, asked),
        };
        let ok = u32::from(Code::Ok.to_wire());
        let mut wrong = None;
        let mut promises = self.all.lock();
        let codes = unpack(&request.keys).flatten().zip(reply.codes);
        for (at, (key, _)) in codes.enumerate().filter(|(_, (_, code))| *code == ok) {
            let key = key.to_key();
            self.leases.renew(request.token, given, &key);
            if request.presence {
                continue;
            }
            let is_kept = |promise: &Promise| promise.is_of(reader, request.token, &key);
            let version = request.versions.get(at).copied();
            let last = last_asked(&promises, is_kept);
            for promise in promises.iter_mut().filter(|promise| is_kept(promise)) {
                let has_left = promise.left_at.is_some_and(|left| left < asked);
                if has_left && version == Some(promise.version) {
                    wrong = Some(format!(
                        "{promise} and renews, but the block has left there"
                    ));
                }
                if Some(promise.asked) == last {
                    promise.token = lease.token;
                    promise.until = given.until;
                }
            }
        }
        wrong
    }

    /// A reader gives leases back.
    pub(crate) fn released(&self, reader: Process, request: &Bytes) {
        let Ok(request) = proto::ReleaseRequest::decode(request.clone()) else {
            return;
        };
        for (at, key) in unpack(&request.keys).flatten().enumerate() {
            let key = key.to_key();
            let token = request.tokens.get(at).copied().unwrap_or(request.token);
            let newest = match request.versions.get(at) {
                Some(0) | None => u64::MAX,
                Some(newest) => *newest,
            };
            self.leases.release(reader, &key, token, Version(newest));
            let mut promises = self.all.lock();
            let is_it =
                |promise: &Promise| promise.is_of(reader, token, &key) && promise.version <= newest;
            let asked = last_asked(&promises, is_it);
            promises.retain(|promise| !is_it(promise) || Some(promise.asked) != asked);
        }
    }

    /// A reader has died.
    pub(crate) fn forget(&self, reader: Process) {
        self.all.lock().retain(|promise| promise.reader != reader);
        self.leases.forget(reader);
    }

    /// The promise that a write to these bytes of a node breaks.
    pub(crate) fn broken_by_write(
        &self,
        node: Incarnation,
        segment: SegmentId,
        range: &Range<u64>,
    ) -> Option<String> {
        let now = Instant::now();
        let promises = self.all.lock();
        let mut open = promises.iter().filter(|promise| promise.until > now);
        let broken = open.find(|promise| {
            promise.node == node && promise.segment == segment && meet(&promise.range, range)
        });
        broken.map(ToString::to_string)
    }

    /// The promise that the pool breaks soon: the bytes are free, so whoever comes next gets them.
    fn broken_by_free_room(&self, pool: &Pool) -> Option<String> {
        self.free_at(pool, |promise| {
            let segments = pool.placement.segments();
            let extents = segments.get(promise.segment)?.extents();
            let ranges = extents.longest_free().map(|free| {
                let start = free.offset.0;
                start..start + free.length.0
            });
            Some(ranges.collect())
        })
    }

    /// The log has everything that this leader did, so it has each place that this leader gave to readers, also those
    /// that blocks have left since. A block that was loaded from a medium in an earlier term may have been located
    /// before: until it is logged, its node alone remembers the place.
    pub(crate) fn are_logged(&self, sight: &Sight<'_>) {
        let mut promises = self.all.lock();
        let mut new = promises
            .iter_mut()
            .filter(|promise| !promise.is_logged)
            .peekable();
        if new.peek().is_none() {
            return;
        }
        let epoch = sight.pool.epoch.0;
        let places = places_of(sight);
        for promise in new {
            let place = (promise.version, promise.segment, promise.range.start);
            promise.is_logged = promise.epoch == epoch || places.contains(&place);
        }
    }

    /// Notes which places leased blocks have left. Whatever leaves its leader with its segment is no such place.
    fn note_left(&self, sight: &Sight<'_>) {
        let epoch = sight.pool.epoch.0;
        let mut promises = self.all.lock();
        let is_there = |promise: &&mut Promise| promise.epoch == epoch && promise.left_at.is_none();
        let mut there = promises.iter_mut().filter(is_there).peekable();
        if there.peek().is_none() {
            return;
        }
        let places = places_of(sight);
        let segments = sight.pool.placement.segments();
        for promise in there {
            let place = (promise.version, promise.segment, promise.range.start);
            if segments.get(promise.segment).is_some() && !places.contains(&place) {
                promise.left_at = Some(Instant::now());
            }
        }
    }

    /// The promise that a standby with these free ranges would break.
    pub(crate) fn broken_by_standby(&self, pool: &Pool, standby: &Standby) -> Option<String> {
        // A reader may get a lease until its block leaves, just after the log has the removal.
        const SLACK: Duration = Duration::from_millis(20);
        self.free_at(pool, |promise| {
            let counts = promise.is_logged && promise.until > Instant::now() + SLACK;
            counts.then(|| standby.free_ranges(promise.segment))?
        })
    }

    /// The promise whose bytes are among the free ranges of their segment. A node without a session gives no room.
    fn free_at(
        &self,
        pool: &Pool,
        free_ranges: impl Fn(&Promise) -> Option<Vec<Range<u64>>>,
    ) -> Option<String> {
        let now = Instant::now();
        let promises = self.all.lock();
        let segments = pool.placement.segments();
        let mut open = promises.iter().filter(|promise| promise.until > now);
        let is_there = |promise: &Promise| {
            let segment = segments.get(promise.segment);
            segment.is_some_and(|segment| {
                segment.node.is_connected() && segment.node.incarnation == promise.node
            })
        };
        let broken = open.find(|promise| {
            is_there(promise)
                && free_ranges(promise)
                    .is_some_and(|free| free.iter().any(|range| meet(&promise.range, range)))
        });
        broken.map(|promise| format!("{promise}, but these bytes are free"))
    }

    /// The promise that its own leader has forgotten: the block may leave before the reader's lease ends.
    fn forgotten_by(&self, pool: &Pool) -> Option<String> {
        const SLACK: Duration = Duration::from_millis(2);
        let now = Instant::now();
        let promises = self.all.lock();
        let mut open = promises
            .iter()
            .filter(|promise| promise.until > now && promise.epoch == pool.epoch.0)
            .peekable();
        open.peek()?;
        let terms = pool.lease_terms();
        open.find_map(|promise| {
            let term = *terms.get(&Version(promise.version))?;
            (now + term + SLACK < promise.until).then(|| {
                let term = term.as_millis();
                format!("{promise}, but the leases on the block end in {term} ms")
            })
        })
    }

    /// Leased blocks that have left their own leader since the last look, on segments that are there. A block may have
    /// moved to segments that have left with their nodes, and may have left with them.
    pub(crate) fn gone_from(&self, sight: &Sight<'_>) -> Vec<Gone> {
        let (now, pool) = (Instant::now(), sight.pool);
        let before = std::mem::replace(&mut *self.places.lock(), places_of(sight));
        let Some(since) = self.looked.lock().replace(now) else {
            return Vec::new();
        };
        let mut promises = self.all.lock();
        let is_open = |promise: &&mut Promise| {
            promise.until > now && promise.epoch == pool.epoch.0 && !promise.has_left
        };
        let mut open = promises.iter_mut().filter(is_open).peekable();
        if open.peek().is_none() {
            return Vec::new();
        }
        let terms = pool.lease_terms();
        let segments = pool.placement.segments();
        let left = open.filter(|promise| !terms.contains_key(&Version(promise.version)));
        let left: Vec<&Promise> = left
            .map(|promise| {
                promise.has_left = true;
                &*promise
            })
            .collect();
        let is_there = |segment: SegmentId| segments.get(segment).is_some();
        let left_with_nodes = |version: u64| {
            let of_version = (version, SegmentId(0), 0)..=(version, SegmentId(u32::MAX), u64::MAX);
            let mut last = before.range(of_version).peekable();
            last.peek().is_some() && !last.any(|(_, segment, _)| is_there(*segment))
        };
        left.into_iter()
            .filter(|promise| is_there(promise.segment) && !left_with_nodes(promise.version))
            .map(|promise| Gone {
                reader: promise.reader,
                key: promise.key.clone(),
                since: since.min(promise.asked),
                what: format!("{promise}, but the block has left"),
            })
            .collect()
    }

    /// The promise that the pool breaks: other blocks, puts or pulls have the bytes.
    fn broken_by_pool(&self, uses: &[Use]) -> Option<String> {
        let now = Instant::now();
        let promises = self.all.lock();
        let open = promises.iter().filter(|promise| promise.until > now);
        open.flat_map(|promise| uses.iter().map(move |other| (promise, other)))
            .find(|(promise, other)| {
                promise.segment == other.segment
                    && promise.version != other.version.0
                    && meet(&promise.range, &other.range)
            })
            .map(|(promise, other)| format!("{promise}, but {other} has these bytes"))
    }
}

/// The places of all blocks in memory.
fn places_of(sight: &Sight<'_>) -> BTreeSet<Place> {
    let blocks = sight.survey.blocks.iter();
    let places = blocks.flat_map(|block| {
        let replicas = block.replicas.iter();
        replicas.map(|at| (block.version.0, at.segment, at.offset.0))
    });
    places.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::wire::keys::pack;
    use tokio::time::advance;

    const READER: Process = Process::Client(0);
    const NODE: Incarnation = Incarnation(7);
    const SEGMENT: SegmentId = SegmentId(3);

    fn encoded(message: &impl Message) -> Bytes {
        message.encode_to_vec().into()
    }

    fn lease(token: u64) -> Option<proto::Lease> {
        Some(proto::Lease {
            token,
            ttl_ms: 1_000,
            newest: 5,
        })
    }

    /// The reader looks up a block, and gets a lease.
    fn looks_up(promises: &Promises, key: &Key, token: u64) {
        let request = proto::LookupRequest {
            keys: pack([key]).into(),
            ..proto::LookupRequest::default()
        };
        let node = proto::NodeAddress {
            incarnation: NODE.to_bytes().to_vec().into(),
            ..proto::NodeAddress::default()
        };
        let replica = proto::ReplicaLocation {
            segment: SEGMENT.0,
            ..proto::ReplicaLocation::default()
        };
        let location = proto::Location {
            length: 100,
            version: 5,
            replicas: vec![replica],
            ..proto::Location::default()
        };
        let reply = proto::LookupReply {
            epoch: 1,
            nodes: vec![node],
            locations: vec![location],
            lease: lease(token),
            ..proto::LookupReply::default()
        };
        let (request, reply) = (encoded(&request), encoded(&reply));
        assert_eq!(
            promises.located(READER, Instant::now(), &request, &reply),
            None
        );
    }

    fn renews(promises: &Promises, key: &Key, before: u64, token: u64) {
        let request = proto::RenewRequest {
            keys: pack([key]).into(),
            token: before,
            versions: vec![5],
            ..proto::RenewRequest::default()
        };
        let reply = proto::RenewReply {
            epoch: 1,
            codes: vec![Code::Ok.to_wire().into()],
            lease: lease(token),
        };
        let (request, reply) = (encoded(&request), encoded(&reply));
        assert_eq!(
            promises.renewed(READER, Instant::now(), &request, &reply),
            None
        );
    }

    fn releases(promises: &Promises, key: &Key, token: u64, version: u64) {
        let request = proto::ReleaseRequest {
            keys: pack([key]).into(),
            token,
            versions: vec![version],
            ..proto::ReleaseRequest::default()
        };
        promises.released(READER, &encoded(&request));
    }

    /// The promises of a reader that has two leases with token 9 on one block.
    async fn leased_twice() -> (Promises, Key) {
        let (promises, key) = (Promises::default(), Key::parse("key-2").unwrap());
        for _ in 0..2 {
            looks_up(&promises, &key, 9);
            advance(Duration::from_millis(2)).await;
        }
        (promises, key)
    }

    /// Whether the block's bytes are still promised to the reader.
    fn is_kept(promises: &Promises) -> bool {
        promises.broken_by_write(NODE, SEGMENT, &(50..60)).is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn a_promise_lasts_until_the_last_lease_with_its_token_is_released() {
        let (promises, key) = leased_twice().await;
        releases(&promises, &key, 9, 4);
        releases(&promises, &key, 9, 5);
        assert!(is_kept(&promises));
        releases(&promises, &key, 9, 0);
        assert!(!is_kept(&promises));
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_is_of_one_promise_where_two_have_one_token() {
        let (promises, key) = leased_twice().await;
        renews(&promises, &key, 9, 10);
        releases(&promises, &key, 9, 5);
        assert!(is_kept(&promises));
        releases(&promises, &key, 10, 5);
        assert!(!is_kept(&promises));
    }

    #[test]
    fn whoever_knows_a_later_term_gets_no_answer() {
        let caller = proto::Caller {
            epoch: 4,
            ..proto::Caller::default()
        };
        for (epoch, is_wrong) in [(3, true), (4, false), (5, false)] {
            let wrong = of_earlier_term(READER, Some(&caller), epoch);
            assert_eq!(wrong.is_some(), is_wrong, "{epoch}");
        }
        assert_eq!(of_earlier_term(READER, None, 0), None);
    }
}
