//! The node's media: disks, partitions and files that keep blocks which leave memory.
//!
//! ```text
//!  session ─ begin ──────► attacher: offers, once no transfer of an earlier session is in progress
//!          ─ attach ─────► attacher: the generation is written ─► attached
//!          ─ stores ─────► worker: memory ─ copy and checksum ─► medium
//!          ─ loads ──────► medium ─► memory, under a grant ─► worker: verified, then readable
//!          (not in granules) medium ─► arena ─► worker: verified ─► memory, under a grant
//! ```
//!
//! A reader waits for a load. So the first loads of a message begin on the session's thread, if nothing has to be
//! waited for. The workers begin the others, since the session's thread also answers heartbeats and fences. A
//! short load without concurrent transfers also ends on the disk's thread.
//!
//! To offer or attach a medium may mean to wait for its disk, for seconds. So the attacher threads do nothing
//! else, and there is one more of them than disks.
//!
//! The master decides which blocks move. The node keeps no index of a medium. Work on media has threads of
//! its own, so neither heartbeats nor the data port wait for a disk. An answer goes only to the session that
//! ordered the work.
//!
//! **Architecture Invariant:** no block can be read before its header and all of its chunks are proved. While a
//! disk may write into an extent, the fence counts the extent as touched. No block is stored without the checksum
//! of its commit.

mod config;
mod disk;
mod health;
mod opening;
mod refusals;
#[cfg(feature = "simulation")]
mod simulated;
#[cfg(test)]
mod tests;
mod transfer;
mod work;

pub(crate) use config::SsdConfig;
pub(crate) use opening::MediaError;

use crate::serve::Store;
use disk::{Disk, Front, NotYet, SETTLE};
use kvpool_disk::Arena;
use kvpool_proto::{self as proto, node_message::Body as ToMaster};
use kvpool_types::{ClusterId, Incarnation, MediumId};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use transfer::{MEMORY_WAIT, TransferOrder};
use work::{Duty, Job, Work};

/// Threads that serve the session and verify loads. The disk's own thread waits for the device.
const WORKERS: usize = 2;
/// The most loads of one message that begin on the session's thread. To begin one takes some microseconds.
const AT_ONCE: usize = 64;
/// Attacher threads beyond one for each disk. One thread is free even while every disk hangs.
const SPARE_ATTACHERS: usize = 1;
/// Threads that copy blocks to media. They have a low priority, so that puts and gets do not wait for a copy.
const COPIERS: usize = 2;
/// The nice value of the copier threads.
const NICE: i32 = 10;
/// How long to wait for a medium or a port that the last writes of a killed process still hold.
pub(crate) const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// How long a thread waits for a disk on which another thread works.
const BRIEFLY: Duration = Duration::from_millis(20);
/// If the first offer takes longer than this, a disk hangs. Another thread then offers the other disks.
const SLOW_OFFER: Duration = Duration::from_secs(2);
/// The interval at which stores are flushed, and changed states of media are sent.
const TEND: Duration = Duration::from_millis(500);

/// Whether a medium is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// No master has answered the node's offer yet.
    Pending,
    /// The medium is attached: blocks are copied to it and loaded from it.
    Attached,
    /// The medium is not used, for this reason.
    Refused(String),
}

/// A medium of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumStatus {
    /// The device or file; in a directory, the file that the node took.
    pub path: PathBuf,
    /// The state of its attachment.
    pub attachment: Attachment,
}

/// Sends the answers of one session.
pub(crate) type Answers = UnboundedSender<ToMaster>;

/// All media of the node.
#[derive(Debug)]
pub(crate) struct Media {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    arena: Arc<Arena>,
    disks: Vec<Mutex<Disk>>,
    /// The part of each disk that can be read while the disk is locked.
    fronts: Vec<Arc<Front>>,
    work: Mutex<Work>,
    /// The session to which the media were offered, and the states that it knows.
    told: Mutex<Option<Told>>,
    changed: Changed,
}

/// Wakes the threads that do the jobs.
#[derive(Debug, Default)]
struct Changed {
    /// Wakes the threads that serve the session and verify loads.
    workers: Condvar,
    /// Wakes the threads that copy blocks to media.
    copiers: Condvar,
    /// Wakes the threads that offer and attach media, and the thread that tends them.
    attachers: Condvar,
    #[cfg(feature = "simulation")]
    tasks: tokio::sync::watch::Sender<()>,
}

impl Changed {
    /// Wakes the threads of this duty for one job, or more. Transfers are frequent, so they wake no threads that
    /// have nothing to do.
    fn notify(&self, duty: Duty, jobs: usize) {
        match (duty, jobs) {
            (Duty::Serve | Duty::Copy, 1) => {
                self.of(duty).notify_one();
            }
            // Attachers and the thread that tends wait together.
            _ => {
                self.of(duty).notify_all();
            }
        }
        #[cfg(feature = "simulation")]
        self.tasks.send_replace(());
    }

    const fn of(&self, duty: Duty) -> &Condvar {
        match duty {
            Duty::Serve => &self.workers,
            Duty::Copy => &self.copiers,
            Duty::Attach | Duty::Tend => &self.attachers,
        }
    }
}

#[derive(Debug)]
struct Told {
    cluster: ClusterId,
    answers: Answers,
    states: Vec<proto::MediumState>,
    /// The number of media that the session was offered.
    offered: usize,
    /// The number of media that the session was told to be unused.
    unused: usize,
    /// The offered media that the master refuses, with the reasons.
    refused: BTreeMap<MediumId, String>,
    /// Whether some disk could not report its content yet.
    is_partial: bool,
    /// Whether an offer is due even without further media: the first offer, and one after a change of state.
    is_due: bool,
    /// When the first offer to the session was begun.
    begun: tokio::time::Instant,
}

impl Media {
    fn start_workers(&mut self) -> std::io::Result<()> {
        for number in 0..WORKERS {
            self.start_worker(&format!("kvnode-media-{number}"), Duty::Serve)?;
        }
        for number in 0..self.shared.attachers() {
            self.start_worker(&format!("kvnode-attach-{number}"), Duty::Attach)?;
        }
        self.start_worker("kvnode-tend", Duty::Tend)?;
        for number in 0..COPIERS {
            self.start_worker(&format!("kvnode-copy-{number}"), Duty::Copy)?;
        }
        Ok(())
    }

    fn start_worker(&mut self, name: &str, duty: Duty) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let run = move || {
            if duty == Duty::Copy
                && let Err(error) = rustix::process::setpriority_process(None, NICE)
            {
                tracing::debug!(%error, "copies to media are as urgent as all else");
            }
            shared.run(duty);
        };
        self.workers.push(kvpool_seams::thread(name, run)?);
        Ok(())
    }

    /// The media on these disks, without threads.
    fn of(disks: Vec<Disk>, arena: Arc<Arena>, store: Store) -> Self {
        let fronts = disks.iter().map(|disk| Arc::clone(&disk.front));
        let shared = Shared {
            store,
            arena,
            fronts: fronts.collect(),
            disks: disks.into_iter().map(Mutex::new).collect(),
            work: Mutex::default(),
            told: Mutex::default(),
            changed: Changed::default(),
        };
        Self {
            shared: Arc::new(shared),
            workers: Vec::new(),
        }
    }

    /// Begins a session: offers the media once no transfer of an earlier session is in progress.
    pub(crate) fn begin(&self, cluster: ClusterId, answers: Answers) {
        *self.shared.told.lock() = None;
        self.shared.push(Job::Offer(cluster, answers));
    }

    /// Queues an order of the master to attach a medium.
    pub(crate) fn attach(&self, cluster: ClusterId, order: proto::AttachMedium, answers: Answers) {
        self.shared.note_answer(&order.medium_id, None, &answers);
        self.shared.push(Job::Attach(cluster, order, answers));
    }

    /// Notes that the master refuses an offered medium. The medium may be attached once the master orders that.
    pub(crate) fn refuse(&self, order: proto::RefuseMedium, answers: &Answers) {
        let proto::RefuseMedium { medium_id, reason } = order;
        self.shared.note_answer(&medium_id, Some(reason), answers);
    }

    /// Queues an order of the master to format a medium.
    pub(crate) fn reset(&self, cluster: ClusterId, medium: &[u8], answers: Answers) {
        if let Some(medium) = MediumId::from_slice(medium) {
            self.shared.push(Job::Reset(cluster, medium, answers));
        }
    }

    /// Begins or queues transfers that the master orders.
    pub(crate) fn transfer(
        &self,
        incarnation: Incarnation,
        epoch: kvpool_types::Epoch,
        orders: proto::Transfers,
        answers: &Answers,
    ) {
        self.shared.work.lock().in_flight += orders.transfers.len();
        let until = tokio::time::Instant::now() + MEMORY_WAIT;
        let orders = orders.transfers.into_iter().map(|transfer| {
            Box::new(TransferOrder {
                transfer,
                incarnation,
                epoch,
                answers: answers.clone(),
                until,
            })
        });
        // A reader waits for a load, so the first loads begin here, without another thread.
        let mut at_once = AT_ONCE;
        let rest = orders.filter_map(|order| {
            if at_once == 0 || !order.is_load() {
                return Some(order);
            }
            at_once -= 1;
            self.shared.begin_at_once(order)
        });
        let rest: Vec<_> = rest.collect();
        if !rest.is_empty() {
            let jobs: Vec<_> = rest.into_iter().map(Job::Transfer).collect();
            let of = |duty| jobs.iter().filter(|job| job.duty() == duty).count();
            let counts = [Duty::Serve, Duty::Copy].map(|duty| (duty, of(duty)));
            let mut work = self.shared.work.lock();
            jobs.into_iter().for_each(|job| work.add(job));
            drop(work);
            for (duty, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
                self.shared.changed.notify(duty, count);
            }
        }
    }

    /// Whether a medium is attached. A medium whose disk is busy counts as attached.
    pub(crate) fn is_attached(&self) -> bool {
        let mut disks = self.shared.disks.iter().zip(&self.shared.fronts);
        disks.any(|(disk, front)| {
            let is_attached = || {
                disk.try_lock()
                    .is_none_or(|disk| matches!(disk.attachment(), Attachment::Attached))
            };
            self.shared.refusal_of(front).is_none() && is_attached()
        })
    }

    /// Whether a medium is attached or may still be attached. A refused medium may not.
    pub(crate) fn may_be_attached(&self) -> bool {
        let status = self.status();
        let refused = |medium: &MediumStatus| matches!(medium.attachment, Attachment::Refused(_));
        !status.iter().all(refused)
    }

    /// The status of each medium, in the order of the settings. A medium whose disk is busy counts as
    /// pending.
    pub(crate) fn status(&self) -> Vec<MediumStatus> {
        let disks = self.shared.disks.iter().zip(&self.shared.fronts);
        let status = disks.map(|(disk, front)| MediumStatus {
            path: front.health.path().to_owned(),
            attachment: match self.shared.refusal_of(front) {
                Some(reason) => Attachment::Refused(reason),
                None => disk
                    .try_lock()
                    .map_or(Attachment::Pending, |disk| disk.attachment()),
            },
        });
        status.collect()
    }

    /// Detaches the media: flushes the stores and marks the media as clean. Blocks until `until` at most.
    /// Returns false when a disk has not answered by then. The drop of the media waits for that disk.
    pub(crate) fn detach(&self, until: Instant) -> bool {
        let mut have_ended = true;
        for disk in &self.shared.disks {
            have_ended &= disk.try_lock_until(until).is_some_and(|mut disk| {
                disk.detach(until);
                disk.in_flight() == 0
            });
        }
        have_ended
    }
}

impl Drop for Media {
    fn drop(&mut self) {
        self.shared.work.lock().is_closed = true;
        for duty in [Duty::Serve, Duty::Copy, Duty::Attach] {
            self.shared.changed.notify(duty, usize::MAX);
        }
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                tracing::error!("a thread for media panicked");
            }
        }
    }
}

impl Shared {
    fn push(&self, job: Job) {
        let duty = job.duty();
        self.work.lock().add(job);
        // Each thread does only the jobs of its duty.
        self.changed.notify(duty, 1);
    }

    /// The number of attacher threads.
    fn attachers(&self) -> usize {
        self.disks.len() + SPARE_ATTACHERS
    }

    fn run(self: Arc<Self>, duty: Duty) {
        let now = tokio::time::Instant::now;
        let mut due = now() + TEND;
        while let Some(job) = self.next(duty, (duty == Duty::Tend).then(|| due.into_std())) {
            match job {
                Some(job) => self.serve(job),
                None => {
                    due = now() + TEND;
                    self.tend();
                }
            }
        }
    }

    /// Flushes stores, and sends the changed states of media to the master. Waits for no disk.
    fn tend(&self) {
        self.give_up_without_memory();
        self.try_again();
        for disk in &self.disks {
            // A disk that is being attached or formatted is tended later.
            if let Some(disk) = disk.try_lock() {
                disk.flush();
            }
        }
        let states = self.states();
        let is_due = {
            let mut told = self.told.lock();
            let Some(told) = told.as_mut() else {
                return;
            };
            for (front, (before, now)) in self.fronts.iter().zip(told.states.iter().zip(&states)) {
                if before != now {
                    front.health.log(*now);
                }
            }
            let has_changed = told.states != states;
            told.is_due |= has_changed;
            told.states = states;
            let now = tokio::time::Instant::now();
            let is_slow = now.duration_since(told.begun) >= SLOW_OFFER;
            told.is_partial || has_changed || (told.is_due && is_slow)
        };
        if is_due {
            self.offer_again();
        }
    }

    /// Queues another offer to the present session, unless one waits already.
    fn offer_again(&self) {
        let mut work = self.work.lock();
        let is_offer = |job: &Job| matches!(job, Job::OfferAgain);
        if !work.attachments.iter().any(is_offer) {
            work.add(Job::OfferAgain);
            drop(work);
            self.changed.notify(Duty::Attach, 1);
        }
    }

    fn states(&self) -> Vec<proto::MediumState> {
        let now = kvpool_seams::boot_time();
        let states = self.fronts.iter().map(|front| front.health.state(now));
        states.collect()
    }

    /// The next job; `Some(None)` at `until`; `None` at the end.
    #[allow(clippy::option_option, reason = "a job, no job yet, or no job ever")]
    fn next(&self, duty: Duty, until: Option<Instant>) -> Option<Option<Job>> {
        let mut work = self.work.lock();
        loop {
            if work.is_closed {
                return None;
            }
            if let Some(job) = work.take(duty) {
                return Some(Some(job));
            }
            let changed = self.changed.of(duty);
            match until {
                Some(until) => {
                    if changed.wait_until(&mut work, until).timed_out() {
                        return Some(None);
                    }
                }
                None => changed.wait(&mut work),
            }
        }
    }

    fn serve(self: &Arc<Self>, job: Job) {
        match job {
            Job::Offer(cluster, answers) => self.offer(cluster, &answers),
            Job::OfferAgain => self.send_offers(),
            Job::Attach(cluster, order, answers) => {
                let attached = self.with_disk(MediumId::from_slice(&order.medium_id), |disk| {
                    disk.attach(cluster, &order, kvpool_seams::end_of_wait(SETTLE))
                });
                match attached {
                    Some(Err(NotYet)) => self.put_off(Job::Attach(cluster, order, answers)),
                    Some(Ok(true)) => {
                        let attached = proto::MediumAttached {
                            medium_id: order.medium_id,
                            generation: order.generation,
                        };
                        // A failure means that the session has ended.
                        let _ended = answers.send(ToMaster::MediumAttached(attached));
                    }
                    Some(Ok(false)) => self.list_again(&answers),
                    None => {}
                }
            }
            Job::Reset(cluster, medium, answers) => {
                let formatted = self.with_disk(Some(medium), |disk| {
                    disk.format(cluster, kvpool_seams::end_of_wait(SETTLE))
                });
                match formatted {
                    Some(Err(NotYet)) => self.put_off(Job::Reset(cluster, medium, answers)),
                    Some(Ok(())) | None => self.offer(cluster, &answers),
                }
            }
            Job::Transfer(order) => self.begin_transfer(order),
            Job::Again(order) => self.begin_again(order),
            Job::Arrived(arrived) => self.end_load(*arrived),
        }
    }

    fn offer(&self, cluster: ClusterId, answers: &Answers) {
        if answers.is_closed() {
            return;
        }
        *self.told.lock() = Some(Told {
            cluster,
            answers: answers.clone(),
            states: self.states(),
            offered: 0,
            unused: 0,
            refused: BTreeMap::new(),
            is_partial: false,
            is_due: true,
            begun: tokio::time::Instant::now(),
        });
        self.send_offers();
    }

    /// Calls `work` with the disk that has this medium; `None` if there is none. If another thread works with
    /// the disk, the result is [`NotYet`] after a short wait, since the disk may hang.
    fn with_disk<T>(
        &self,
        medium: Option<MediumId>,
        work: impl FnOnce(&mut Disk) -> Result<T, NotYet>,
    ) -> Option<Result<T, NotYet>> {
        let mut disks = self.disks.iter().zip(&self.fronts);
        let (disk, _) = disks.find(|(_, front)| medium.is_some() && front.id() == medium)?;
        let Some(mut disk) = disk.try_lock_for(BRIEFLY) else {
            return Some(Err(NotYet));
        };
        (disk.id() == medium).then(|| work(&mut disk))
    }

    /// Queues a job for a later attempt, unless its session ends.
    fn put_off(&self, job: Job) {
        self.work.lock().later.push(job);
    }

    /// Queues the jobs that were put off again.
    fn try_again(&self) {
        let mut work = self.work.lock();
        let later = std::mem::take(&mut work.later);
        if later.is_empty() {
            return;
        }
        let wanted = later.into_iter().filter(Job::is_wanted);
        wanted.for_each(|job| work.add(job));
        drop(work);
        self.changed.notify(Duty::Attach, 1);
    }

    /// Offers the media to the present session, if an offer is due or more media can be offered. Several
    /// threads may do this at once while a disk hangs.
    fn send_offers(&self) {
        let told = self.told.lock();
        let session = told.as_ref();
        let session = session.map(|told| (told.cluster, told.answers.clone()));
        drop(told);
        let Some((cluster, answers)) = session else {
            return;
        };
        let is_present = || {
            let told = self.told.lock();
            told.as_ref()
                .is_some_and(|told| told.answers.same_channel(&answers))
        };
        let (mut media, mut unused) = (Vec::new(), Vec::new());
        let mut is_partial = false;
        for (disk, front) in self.disks.iter().zip(&self.fronts) {
            let disk = disk.try_lock_for(BRIEFLY);
            // An offer to an earlier session would detach a medium that a later one has attached. A later session
            // offers this disk again, after this thread has left it.
            if !is_present() {
                return;
            }
            let until = kvpool_seams::end_of_wait(SETTLE);
            match disk.map(|mut disk| (disk.offer(cluster, until), disk.unused())) {
                Some((Ok(offered), no_use)) => {
                    media.extend(offered.map(|offered| (front, offered)));
                    unused.extend(no_use);
                }
                Some((Err(NotYet), _)) | None => is_partial = true,
            }
        }
        let mut told = self.told.lock();
        let told = told.as_mut();
        let Some(told) = told.filter(|told| told.answers.same_channel(&answers)) else {
            return;
        };
        let refused = self.fronts.iter().filter_map(|front| {
            let medium = front.id()?;
            let reason = told.refused.get(&medium)?;
            Some(disk::unused(front.health.path(), reason, Some(medium)))
        });
        unused.extend(refused);
        let is_more = media.len() > told.offered || unused.len() > told.unused;
        (told.offered, told.unused) = (media.len(), unused.len());
        told.is_partial = is_partial;
        let is_known = !media.is_empty() || !unused.is_empty() || !is_partial;
        if is_more || (told.is_due && is_known) {
            told.is_due = false;
            let now = kvpool_seams::boot_time();
            let media = media
                .into_iter()
                .map(|(front, offered)| proto::OfferedMedium {
                    // The state is read now, since an offer that waited for a disk may be sent after later
                    // ones.
                    state: front.health.state(now).into(),
                    ..offered
                });
            let media = media.collect();
            let _ended = answers.send(ToMaster::Media(proto::Media { media, unused }));
        }
    }

    /// Whether exactly one transfer is in progress.
    fn is_last(&self) -> bool {
        self.work.lock().in_flight == 1
    }

    /// Ends a transfer. The next offer may have waited for its end, and a load for its arena memory.
    fn ended(&self) {
        let mut work = self.work.lock();
        work.in_flight -= 1;
        work.ended += 1;
        let is_offer = |job: &Job| matches!(job, Job::Offer(..));
        let is_offer_ready = work.in_flight == 0 && work.attachments.iter().any(is_offer);
        let has_loads = !work.without_memory.is_empty();
        drop(work);
        if is_offer_ready {
            self.changed.notify(Duty::Attach, 1);
        }
        if has_loads {
            self.changed.notify(Duty::Serve, 1);
        }
    }
}
