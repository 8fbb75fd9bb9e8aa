//! Ends the work of a link at its deadline.

use crate::outcomes::{Batch, Outcomes};
use crate::timer::Timer;
use parking_lot::Mutex;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Work that a deadline ends.
pub(crate) trait Expire: Send + Sync {
    /// Called once the deadline has passed.
    fn expire(&self);
    /// Whether the work has ended already.
    fn is_done(&self) -> bool;
}

impl<T: Send> Expire for Batch<T> {
    fn expire(&self) {
        Batch::expire(self);
    }

    fn is_done(&self) -> bool {
        Batch::is_done(self)
    }
}

/// The deadlines of one link.
pub(crate) struct Deadlines {
    tracked: Arc<Mutex<Tracked>>,
    timer: Timer,
}

#[derive(Default)]
struct Tracked {
    things: Vec<(Instant, Weak<dyn Expire>)>,
    /// The length at which the list is swept of work that has ended.
    sweep_at: usize,
}

impl Deadlines {
    /// Starts the timer thread under `name`.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let tracked: Arc<Mutex<Tracked>> = Arc::default();
        let timer = Timer::start(name, {
            let tracked = tracked.clone();
            move |now| expire(&tracked, now)
        })?;
        Ok(Self { tracked, timer })
    }

    /// A batch that ends at `deadline`, and its outcomes.
    pub(crate) fn batch<T: Send + 'static>(
        &self,
        count: usize,
        deadline: Instant,
    ) -> (Arc<Batch<T>>, Outcomes<T>) {
        let (batch, outcomes) = Batch::new(count);
        if count > 0 {
            let batch: Arc<dyn Expire> = batch.clone();
            self.track(deadline, &batch);
        }
        (batch, outcomes)
    }

    /// Ends `thing` at `deadline`. The table holds it weakly.
    pub(crate) fn track(&self, deadline: Instant, thing: &Arc<dyn Expire>) {
        {
            let mut tracked = self.tracked.lock();
            if tracked.things.len() >= tracked.sweep_at {
                tracked.things.retain(|(_, thing)| is_live(thing));
                tracked.sweep_at = 64 + 2 * tracked.things.len();
            }
            tracked.things.push((deadline, Arc::downgrade(thing)));
        }
        self.timer.scan_by(deadline);
    }
}

/// Ends all work past its deadline. Returns the next deadline.
fn expire(tracked: &Mutex<Tracked>, now: Instant) -> Option<Instant> {
    let mut late = Vec::new();
    let next = {
        let mut tracked = tracked.lock();
        tracked.things.retain(|(deadline, thing)| {
            if *deadline <= now {
                late.extend(thing.upgrade());
            }
            *deadline > now && is_live(thing)
        });
        tracked.things.iter().map(|(deadline, _)| *deadline).min()
    };
    for thing in late {
        thing.expire();
    }
    next
}

fn is_live(thing: &Weak<dyn Expire>) -> bool {
    thing.upgrade().is_some_and(|thing| !thing.is_done())
}
