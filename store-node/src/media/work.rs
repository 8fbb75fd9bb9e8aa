//! The jobs of the media's threads, and the queues in which they wait.

use super::Answers;
use super::transfer::{Arrived, TransferOrder};
use kvpool_proto as proto;
use kvpool_types::{ClusterId, MediumId};
use std::collections::VecDeque;

/// The jobs that wait, by the threads that do them. A pop looks at no job of other threads.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Loads that were read. Their ends free memory.
    arrived: VecDeque<Job>,
    /// Loads, and moves from one medium to another, in the order of their arrival.
    transfers: VecDeque<Job>,
    /// The number of loads among these transfers.
    queued_loads: usize,
    /// Stores that wait for a copier.
    stores: VecDeque<Job>,
    /// Jobs of the attachers.
    pub(super) attachments: VecDeque<Job>,
    /// Orders for disks that did not answer, which are repeated at intervals.
    pub(super) later: Vec<Job>,
    /// Loads that wait for arena memory, in the order in which they get it.
    pub(super) without_memory: VecDeque<Box<TransferOrder>>,
    /// Transfers that have begun and not ended.
    pub(super) in_flight: usize,
    /// The number of transfers that have ended. Each returned its memory to the arena.
    pub(super) ended: u64,
    /// The value of `ended` when a load last found no memory.
    pub(super) ended_at_try: u64,
    pub(super) is_closed: bool,
}

#[derive(Debug)]
pub(super) enum Job {
    Offer(ClusterId, Answers),
    /// Offers the media again to the session to which they were offered last.
    OfferAgain,
    Attach(ClusterId, proto::AttachMedium, Answers),
    Reset(ClusterId, MediumId, Answers),
    Transfer(Box<TransferOrder>),
    /// A load that found no arena memory before.
    Again(Box<TransferOrder>),
    Arrived(Box<Arrived>),
}

/// The group of threads that does a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Duty {
    Serve,
    Copy,
    /// Offers, attaches and formats media. May wait for a disk.
    Attach,
    /// Does the periodic work, and no jobs. Waits for no disk.
    Tend,
}

impl Job {
    pub(super) fn duty(&self) -> Duty {
        match self {
            Self::Offer(..) | Self::OfferAgain | Self::Attach(..) | Self::Reset(..) => Duty::Attach,
            Self::Transfer(order) if order.is_store() => Duty::Copy,
            Self::Transfer(_) | Self::Again(_) | Self::Arrived(_) => Duty::Serve,
        }
    }

    /// Whether this is a load that has not begun.
    fn is_load(&self) -> bool {
        matches!(self, Self::Transfer(order) if order.is_load())
    }

    /// Whether the session of an order still exists.
    pub(super) fn is_wanted(&self) -> bool {
        match self {
            Self::Attach(_, _, answers) | Self::Reset(_, _, answers) => !answers.is_closed(),
            _ => true,
        }
    }
}

impl Work {
    /// The queue of a job.
    fn queue_of(&mut self, job: &Job) -> &mut VecDeque<Job> {
        match (job, job.duty()) {
            (Job::Arrived(_), _) => &mut self.arrived,
            (_, Duty::Serve) => &mut self.transfers,
            (_, Duty::Copy) => &mut self.stores,
            (_, Duty::Attach | Duty::Tend) => &mut self.attachments,
        }
    }

    pub(super) fn add(&mut self, job: Job) {
        self.queued_loads += usize::from(job.is_load());
        self.queue_of(&job).push_back(job);
    }

    /// Whether loads wait for a worker or for arena memory. A later load must not begin before them.
    pub(super) fn has_waiting_loads(&self) -> bool {
        self.queued_loads > 0 || !self.without_memory.is_empty()
    }

    /// The first job that can be done now. Jobs that free arena memory come before jobs that take it.
    pub(super) fn take(&mut self, duty: Duty) -> Option<Job> {
        match duty {
            Duty::Serve => {
                if let Some(arrived) = self.arrived.pop_front() {
                    return Some(arrived);
                }
                if self.ended != self.ended_at_try
                    && let Some(order) = self.without_memory.pop_front()
                {
                    return Some(Job::Again(order));
                }
                let transfer = self.transfers.pop_front()?;
                self.queued_loads -= usize::from(transfer.is_load());
                Some(transfer)
            }
            Duty::Copy => self.stores.pop_front(),
            Duty::Attach => {
                // An offer waits until the transfers of earlier sessions have ended. Later jobs do not wait for
                // the offer.
                let is_ready = |job: &Job| !matches!(job, Job::Offer(..)) || self.in_flight == 0;
                let at = self.attachments.iter().position(is_ready)?;
                self.attachments.remove(at)
            }
            Duty::Tend => None,
        }
    }
}
