//! A metadata store in memory, with the faults of real ones. It stalls, answers late, or does not say what became of
//! a request. A crash takes what was not yet durable. It elects a leader as etcd does: by a key under a lease,
//! which every write compares.

mod election;
mod frozen;

pub(crate) use frozen::Frozen;

use crate::ambush::Ambushes;
use crate::dice::{Dice, Stream};
use crate::life::Life;
use crate::spans::Spans;
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_master::store::etcd::LeaseId;
use kvpool_master::store::record::{self, Record};
use kvpool_master::store::{
    Claim, Leader, LogSeq, LogSpan, MetadataStore, ShardIndex, Snapshot, SnapshotPositions,
    StoreError,
};
use kvpool_types::{ClusterId, Epoch};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

/// How often what waits looks at the store again.
const LOOK: Duration = Duration::from_millis(20);
/// How long a request to a store over a network waits for its answer, as with etcd.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the start of a term is tried again, as with etcd.
const TAKING_OVER: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct State {
    cluster: Option<ClusterId>,
    epoch: Epoch,
    /// When each lease ends, and how long a renewal lasts.
    leases: BTreeMap<i64, (Instant, Duration)>,
    leader: Option<Leader>,
    /// The announced masters. The one that was announced last comes last.
    members: Vec<(String, LeaseId, Bytes)>,
    cut: LogSeq,
    last: LogSeq,
    log: BTreeMap<LogSeq, Bytes>,
    snapshots: BTreeMap<ShardIndex, Snapshot>,
    /// Snapshots whose files were written and not flushed, with what a crash brings back.
    unflushed: BTreeMap<ShardIndex, Option<Snapshot>>,
    appends: u64,
    snapshots_written: u64,
}

/// What is durable, whoever asks.
#[derive(Debug)]
pub(crate) struct Disk {
    elects: bool,
    state: Mutex<State>,
    dice: Dice,
    /// For the watches alone.
    watches: Dice,
    /// The masters whose watch of the leader sees nothing new.
    unseen: Spans<usize>,
    stalled: Spans<usize>,
    unknown: Spans<usize>,
    full: Spans<()>,
    ambushes: Arc<Ambushes>,
    /// Told when a group is in the log that ends a segment.
    segment_ended: Notify,
    /// The snapshots that a slow load reads first.
    seen_late: Mutex<BTreeMap<ShardIndex, Snapshot>>,
}

impl State {
    fn check(&mut self, elects: bool, asked: Epoch) -> Result<(), StoreError> {
        let leads = !elects || self.leader().is_some_and(|leader| leader.epoch == asked);
        if asked == self.epoch && leads {
            Ok(())
        } else {
            let current = self.epoch;
            Err(StoreError::Fenced { asked, current })
        }
    }

    fn append(
        &mut self,
        elects: bool,
        epoch: Epoch,
        seq: LogSeq,
        group: Bytes,
    ) -> Result<(), StoreError> {
        self.check(elects, epoch)?;
        if seq != self.last.next() {
            let last = self.last;
            return Err(StoreError::Gap { asked: seq, last });
        }
        self.log.insert(seq, group);
        self.last = seq;
        self.appends += 1;
        Ok(())
    }

    fn is_in_log(&self, asked: LogSeq) -> Result<(), StoreError> {
        let (cut, last) = (self.cut, self.last);
        if asked < cut || asked > last {
            return Err(StoreError::OutsideLog { asked, cut, last });
        }
        Ok(())
    }
}

impl Disk {
    /// An empty store. With `elects`, only the elected leader writes.
    pub(crate) fn new(elects: bool, seed: u64, ambushes: &Arc<Ambushes>) -> Arc<Self> {
        Arc::new(Self {
            elects,
            state: Mutex::default(),
            dice: Dice::new(seed, Stream::Store),
            watches: Dice::new(seed, Stream::Watches),
            unseen: Spans::default(),
            stalled: Spans::default(),
            unknown: Spans::default(),
            full: Spans::default(),
            ambushes: Arc::clone(ambushes),
            segment_ended: Notify::new(),
            seen_late: Mutex::default(),
        })
    }

    /// Answers a master nothing for a while.
    pub(crate) fn stall(&self, master: usize, wait: Duration) {
        self.stalled.begin(master, wait);
    }

    /// Does not say for a while what became of a master's writes.
    pub(crate) fn forget_outcomes(&self, master: usize, wait: Duration) {
        self.unknown.begin(master, wait);
    }

    /// Shows a master's watch no change of the leader for a while.
    pub(crate) fn hide_leaders(&self, master: usize, wait: Duration) {
        self.unseen.begin(master, wait);
    }

    /// Whether a master holds the leader's key.
    pub(crate) fn is_led(&self) -> bool {
        self.state.lock().leader().is_some()
    }

    /// Whether the store does what a master asks, and shows it who leads.
    pub(crate) fn answers(&self, master: usize) -> bool {
        let disturbed = [&self.stalled, &self.unknown, &self.unseen];
        !self.is_full() && !disturbed.iter().any(|spans| spans.lasts(&master))
    }

    /// Has no room for a while.
    pub(crate) fn fill(&self, wait: Duration) {
        self.full.begin((), wait);
    }

    fn is_full(&self) -> bool {
        self.full.lasts(&())
    }

    /// Why nothing can be added now.
    fn no_room(&self) -> Option<StoreError> {
        self.is_full().then(|| match self.elects {
            true => StoreError::NoSpace,
            false => StoreError::DirectoryFull {
                directory: "of the simulation".into(),
            },
        })
    }

    /// Ends all faults.
    pub(crate) fn heal(&self) {
        self.full.clear();
        self.unseen.clear();
        self.stalled.clear();
        self.unknown.clear();
    }

    /// The only master died: snapshots that were not flushed may be the old ones again.
    pub(crate) fn lose_unflushed(&self) {
        let mut state = self.state.lock();
        for (shard, before) in std::mem::take(&mut state.unflushed) {
            if self.dice.chance(500) {
                match before {
                    Some(before) => state.snapshots.insert(shard, before),
                    None => state.snapshots.remove(&shard),
                };
            }
        }
    }

    /// How many groups were appended.
    pub(crate) fn appends(&self) -> u64 {
        self.state.lock().appends
    }

    /// The bytes of the log and the snapshots.
    pub(crate) fn size(&self) -> u64 {
        let state = self.state.lock();
        let log: usize = state.log.values().map(Bytes::len).sum();
        let chunks = state.snapshots.values().flat_map(|one| &one.chunks);
        (log + chunks.map(Bytes::len).sum::<usize>()) as u64
    }
}

/// One connection of a master's life to the store.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    disk: Arc<Disk>,
    master: usize,
    life: Life,
    is_closed: Arc<AtomicBool>,
    /// Writes of terms up to this one end.
    abandoned: Arc<watch::Sender<Option<Epoch>>>,
    /// As whom the latest term was begun here.
    candidate: Arc<Mutex<Option<(LeaseId, Claim)>>>,
    /// How many appends wait for room.
    space_waits: Arc<AtomicUsize>,
}

/// An append that waits for room, until it is dropped.
struct SpaceWait(Arc<AtomicUsize>);

impl SpaceWait {
    fn begin(waits: &Arc<AtomicUsize>) -> Self {
        waits.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(waits))
    }
}

impl Drop for SpaceWait {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether a group says that a segment is gone.
fn ends_segment(group: &[u8]) -> bool {
    let is_end = |one: &Record| matches!(one, Record::SegmentGone(gone) if !gone.id.is_on_medium());
    record::decode(group).is_ok_and(|group| group.records.iter().any(is_end))
}

fn no_answer(reason: &str) -> StoreError {
    StoreError::Unavailable {
        reason: reason.into(),
    }
}

impl Store {
    pub(crate) fn new(disk: &Arc<Disk>, master: usize, life: &Life) -> Self {
        Self {
            disk: Arc::clone(disk),
            master,
            life: life.clone(),
            is_closed: Arc::default(),
            abandoned: Arc::new(watch::Sender::new(None)),
            candidate: Arc::default(),
            space_waits: Arc::default(),
        }
    }

    /// The way of one request to the store. A dead process gets no answer.
    async fn go(&self) -> Result<(), StoreError> {
        self.life.check().await;
        if self.is_closed.load(Ordering::Acquire) {
            return Err(StoreError::Closed);
        }
        sleep(self.disk.dice.micros(50, 1_500)).await;
        self.stalled().await;
        Ok(())
    }

    /// Waits for the answer to a request. Over a network the wait has an end, and the request is still on its way.
    async fn answered<T: Send + 'static>(
        &self,
        request: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        if !self.disk.elects {
            return request.await;
        }
        let mut request = Box::pin(request);
        if let Ok(answer) = timeout(REQUEST_TIMEOUT, &mut request).await {
            return answer;
        }
        tokio::spawn(request);
        Err(no_answer("no answer in time"))
    }

    /// The way of one answer from the store. A stall may hold it up after the request was done.
    async fn come_back(&self) {
        sleep(self.disk.dice.micros(50, 1_500)).await;
        self.stalled().await;
        self.life.check().await;
    }

    /// Returns when nothing holds up this master's messages to and from the store.
    async fn stalled(&self) {
        self.disk.stalled.ended(&self.master).await;
    }

    /// A request that is made once, whatever becomes of it.
    async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut State) -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let store = self.clone();
        let asked = async move {
            store.go().await?;
            store.life.check().await;
            let found = ask(&mut store.disk.state.lock());
            store.come_back().await;
            Ok(found)
        };
        self.answered(asked).await
    }

    /// Whether the outcome of a write is to be unknown.
    fn is_unknown(&self) -> bool {
        self.disk.unknown.lasts(&self.master)
    }

    /// A write of a term. Where the term is abandoned meanwhile, the request may be on its way still.
    async fn write<T: Send + 'static>(
        &self,
        term: Epoch,
        write: impl FnOnce(&mut State) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let mut abandoned = self.abandoned.subscribe();
        if Some(term) <= *abandoned.borrow() {
            return Err(no_answer("the term is abandoned"));
        }
        let store = self.clone();
        let mut request = Box::pin(async move { store.write_now(write).await });
        tokio::select! {
            biased;
            _ = abandoned.wait_for(|until| Some(term) <= *until) => {}
            written = &mut request => return written,
        }
        tokio::spawn(request);
        Err(no_answer("the term is abandoned"))
    }

    /// Fails while the store is full. Waits for the end of a stall.
    async fn has_room(&self) -> Result<(), StoreError> {
        self.go().await?;
        self.life.check().await;
        self.disk.no_room().map_or(Ok(()), Err)
    }

    /// The same for a request that is made once.
    async fn had_room(&self) -> Result<(), StoreError> {
        let store = self.clone();
        self.answered(async move { store.has_room().await }).await
    }

    async fn wait_for_room(&self, term: Epoch) -> Result<(), StoreError> {
        let _wait = SpaceWait::begin(&self.space_waits);
        while self.disk.is_full() {
            if Some(term) <= *self.abandoned.borrow() {
                return Err(no_answer("the term is abandoned"));
            }
            sleep(LOOK).await;
        }
        Ok(())
    }

    async fn write_now<T: Send + 'static>(
        &self,
        write: impl FnOnce(&mut State) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.go().await?;
        // A crash after the request has left: over a network it may arrive all the same.
        if self.life.is_over() && !self.disk.elects {
            self.life.check().await;
        }
        let is_lost = self.life.is_over() && self.disk.dice.chance(500);
        if is_lost {
            self.life.check().await;
        }
        if self.is_unknown() {
            match self.disk.dice.below(3) {
                0 => {
                    let _unsaid = write(&mut self.disk.state.lock());
                }
                // Later than whatever follows, where the way to the store is a network.
                1 if self.disk.elects => {
                    let disk = Arc::clone(&self.disk);
                    tokio::spawn(async move {
                        sleep(disk.dice.micros(1_000, 3_000_000)).await;
                        let _unsaid = write(&mut disk.state.lock());
                    });
                }
                _ => {}
            }
            self.come_back().await;
            return Err(no_answer("no answer"));
        }
        let written = write(&mut self.disk.state.lock());
        self.come_back().await;
        written
    }
}

#[async_trait]
impl MetadataStore for Store {
    async fn cluster_id(&self, fresh: ClusterId) -> Result<ClusterId, StoreError> {
        self.ask(move |state| *state.cluster.get_or_insert(fresh))
            .await
    }

    async fn epoch(&self) -> Result<Epoch, StoreError> {
        self.ask(|state| state.epoch).await
    }

    /// The candidate that won here last leads the new term.
    async fn begin_epoch(&self, at_least: Epoch) -> Result<Epoch, StoreError> {
        let candidate = self.candidate.lock().clone();
        let limit = Instant::now() + TAKING_OVER;
        loop {
            let its = candidate.clone();
            let begun = self.ask(move |state| state.take_over(at_least, its.as_ref()));
            match begun.await.flatten() {
                Err(error) if error.is_retryable() && Instant::now() < limit => sleep(LOOK).await,
                begun => return begun,
            }
        }
    }

    async fn append(&self, epoch: Epoch, seq: LogSeq, group: Bytes) -> Result<(), StoreError> {
        let elects = self.disk.elects;
        sleep(self.disk.ambushes.logs(&group)).await;
        match self.has_room().await {
            // As for the outcome of a write to etcd, the store waits until there is room.
            Err(StoreError::NoSpace) => self.wait_for_room(epoch).await?,
            has_room => has_room?,
        }
        let disk = Arc::clone(&self.disk);
        let ends_segment = ends_segment(&group);
        self.write(epoch, move |state| {
            let appended = state.append(elects, epoch, seq, group);
            if ends_segment && appended.is_ok() {
                disk.segment_ended.notify_one();
            }
            appended
        })
        .await
    }

    fn is_full(&self) -> bool {
        self.space_waits.load(Ordering::Acquire) > 0
    }

    async fn make_room(&self, _: u64) -> Result<(), StoreError> {
        match self.disk.no_room() {
            Some(full) => Err(full),
            None => Ok(()),
        }
    }

    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        self.ask(|state| state.span()).await
    }

    async fn read_log(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        self.ask(move |state| {
            let mut bytes = 0;
            let groups = state.log.range(after.next()..);
            let fits = groups.take_while(|(_, group)| {
                let is_first = bytes == 0;
                bytes += group.len() as u64;
                is_first || bytes <= limit_bytes
            });
            fits.map(|(seq, group)| (*seq, group.clone())).collect()
        })
        .await
    }

    async fn put_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        chunks: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        let elects = self.disk.elects;
        self.has_room().await?;
        self.write(epoch, move |state| {
            state.check(elects, epoch)?;
            state.is_in_log(seq)?;
            state.snapshots_written += 1;
            let before = state.snapshots.insert(shard, Snapshot { seq, chunks });
            if !elects {
                state.unflushed.entry(shard).or_insert(before);
            }
            Ok(())
        })
        .await
    }

    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError> {
        self.ask(move |state| state.snapshots.get(&shard).cloned())
            .await
    }

    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError> {
        self.ask(|state| state.snapshots.keys().copied().collect())
            .await
    }

    async fn snapshot_positions(&self) -> Result<SnapshotPositions, StoreError> {
        self.ask(|state| {
            let sized = state.snapshots.iter().map(|(shard, snapshot)| {
                let bytes = snapshot.chunks.iter().map(|chunk| chunk.len() as u64).sum();
                (*shard, (snapshot.seq, bytes))
            });
            sized.collect()
        })
        .await
    }

    async fn truncate_log(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError> {
        let elects = self.disk.elects;
        self.write(epoch, move |state| {
            state.check(elects, epoch)?;
            if through <= state.cut {
                return Ok(());
            }
            state.is_in_log(through)?;
            state.unflushed.clear();
            state.cut = through;
            state.log = state.log.split_off(&through.next());
            Ok(())
        })
        .await
    }

    async fn size_on_disk(&self) -> Result<u64, StoreError> {
        Ok(self.disk.size())
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.is_closed.store(true, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MachineClock;
    use crate::plan::Plan;
    use kvpool_master::Config;
    use kvpool_master::leadership::{Candidate, Seat, Surroundings};
    use kvpool_master::metrics::Metrics;
    use kvpool_master::store::conformance::{self, Bench, election};
    use kvpool_master::store::{ElectionStore, JournalOptions, OpenError};
    use kvpool_master::workers::Workers;

    fn disk(elects: bool) -> Arc<Disk> {
        let plan = Plan {
            ambushes: Vec::new(),
            ..Plan::of(0)
        };
        Disk::new(elects, 1, &Arc::new(Ambushes::new(&plan)))
    }

    /// The disk of the present store.
    #[derive(Default)]
    struct Memory {
        elects: bool,
        disk: Mutex<Option<Arc<Disk>>>,
    }

    impl Memory {
        fn make(&self) -> Arc<Store> {
            *self.disk.lock() = Some(disk(self.elects));
            self.connect()
        }

        fn connect(&self) -> Arc<Store> {
            let disk = self.disk.lock().clone().unwrap();
            Arc::new(Store::new(&disk, 0, &Life::default()))
        }
    }

    #[async_trait]
    impl Bench for Memory {
        async fn fresh(&self) -> Arc<dyn MetadataStore> {
            self.make()
        }

        async fn reopen(&self, store: Arc<dyn MetadataStore>) -> Arc<dyn MetadataStore> {
            drop(store);
            self.connect()
        }
    }

    #[async_trait]
    impl election::Bench for Memory {
        async fn fresh(&self) -> Arc<dyn ElectionStore> {
            self.make()
        }

        async fn another(&self) -> Arc<dyn ElectionStore> {
            self.connect()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_store_of_the_simulation_passes_the_suite_of_all_stores() {
        for elects in [false, true] {
            let disk = Mutex::default();
            conformance::run(&Memory { elects, disk }).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_store_of_the_simulation_passes_the_suite_of_stores_that_elect() {
        let elects = true;
        let disk = Mutex::default();
        election::run(&Memory { elects, disk }).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_to_a_store_that_stalls_has_an_end_and_an_unknown_outcome() {
        let disk = disk(true);
        let store = Store::new(&disk, 3, &Life::default());
        let other = Store::new(&disk, 4, &Life::default());
        disk.stall(3, Duration::from_secs(8));
        let begun = Instant::now();
        let unknown = store.leader().await;
        assert!(matches!(unknown, Err(StoreError::Unavailable { .. })));
        assert_eq!(begun.elapsed(), REQUEST_TIMEOUT);
        assert_eq!(other.leader().await.unwrap(), None);
        // A term that is taken over is tried again.
        assert!(store.begin_epoch(Epoch(7)).await.unwrap() >= Epoch(7));
        assert!(begun.elapsed() >= Duration::from_secs(8));
    }

    /// Opens the store for a master whose network has nobody.
    #[derive(Debug)]
    struct Alone(Arc<Disk>);

    #[async_trait]
    impl Surroundings for Alone {
        async fn open(&self) -> Result<Arc<dyn ElectionStore>, OpenError> {
            Ok(Arc::new(Store::new(&self.0, 0, &Life::default())))
        }

        async fn meet(&self, _: &str) -> std::io::Result<()> {
            std::future::pending().await
        }
    }

    fn claim(id: &str) -> Claim {
        Claim {
            id: id.into(),
            address: format!("http://{id}:1"),
            http_address: String::new(),
        }
    }

    /// A candidate at `disk`, and its seat.
    fn stand(disk: &Arc<Disk>) -> (Arc<Seat>, Candidate) {
        let clock = Arc::new(MachineClock::new(0, 1_000_000));
        let metrics = Arc::new(Metrics::new().unwrap());
        let seat = Seat::new(Config::default(), metrics, Arc::clone(&clock) as _);
        let seat = Arc::new(seat);
        let options = JournalOptions {
            workers: Workers::Tasks,
            ..JournalOptions::default()
        };
        let around = Arc::new(Alone(Arc::clone(disk)));
        let (its_seat, its) = (Arc::clone(&seat), claim("standby"));
        let candidate = Candidate::stand(its_seat, clock, its, around, options, None);
        (seat, candidate)
    }

    /// Another master wins the lead under this lease.
    fn elect(disk: &Disk, id: &str, lease: LeaseId) -> Epoch {
        let mut state = disk.state.lock();
        let ttl = Duration::from_secs(60);
        state.leases.insert(lease.0, (Instant::now() + ttl, ttl));
        let other = (lease, claim(id));
        state.take_over(Epoch(0), Some(&other)).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_candidate_that_lost_to_a_short_term_leads_after_it() {
        let disk = disk(true);
        // It sees that nobody leads, and cannot campaign.
        disk.fill(Duration::from_secs(5));
        let (seat, candidate) = stand(&disk);
        sleep(Duration::from_secs(2)).await;
        // Another one wins, and gives its term up before the watch has seen it.
        disk.hide_leaders(0, Duration::from_secs(8));
        let lease = LeaseId(99);
        elect(&disk, "other", lease);
        sleep(Duration::from_secs(5)).await;
        assert!(seat.pool().is_err());
        disk.state.lock().leases.remove(&lease.0);
        sleep(Duration::from_secs(5)).await;
        assert!(seat.pool().is_ok(), "nobody leads");
        candidate.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_master_whose_lease_ends_before_its_term_begins_reports_this_reason() {
        let disk = disk(true);
        let (seat, candidate) = stand(&disk);
        while !disk.is_led() {
            sleep(Duration::from_millis(1)).await;
        }
        // Its first append waits for room, so the term does not begin.
        disk.fill(Duration::from_secs(60));
        let lease = disk.state.lock().leader().unwrap().lease;
        disk.state.lock().leases.remove(&lease.0);
        let failed = async {
            loop {
                let reason = seat.reason();
                if reason.contains("next try in") {
                    return reason;
                }
                sleep(Duration::from_millis(1)).await;
            }
        };
        let reason = timeout(Duration::from_secs(30), failed).await.unwrap();
        assert!(reason.contains("etcd no longer knows"), "{reason}");
        candidate.abort();
    }

    /// A load may take minutes. Clients that ask this master must still find the leader.
    #[tokio::test(start_paused = true)]
    async fn a_master_that_cannot_load_yet_names_each_leader() {
        let disk = disk(true);
        let lease = LeaseId(1_000);
        let epoch = elect(&disk, "first", lease);
        let damaged = Bytes::from_static(b"no group");
        let appended = disk.state.lock().append(true, epoch, LogSeq(1), damaged);
        appended.unwrap();
        let (seat, candidate) = stand(&disk);
        sleep(Duration::from_secs(5)).await;
        assert_eq!(seat.known().leader, "http://first:1");
        // By now this master waits for half a minute until its next attempt.
        sleep(Duration::from_secs(25)).await;
        disk.state.lock().leases.remove(&lease.0);
        let next = elect(&disk, "next", LeaseId(2_000));
        // The watch may be 3 s late.
        sleep(Duration::from_secs(6)).await;
        let known = seat.known();
        assert_eq!(
            (known.leader.as_str(), known.epoch),
            ("http://next:1", next)
        );
        let reason = seat.reason();
        assert!(reason.contains("next try in"), "{reason}");
        candidate.abort();
    }
}
