//! Shares one fabric between the users with equal options in this process, so that memory is
//! registered once.

use super::device::Fabric;
use super::options::{RdmaOptions, Unavailable};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

static OPENED: Mutex<Vec<(RdmaOptions, Weak<Fabric>)>> = Mutex::new(Vec::new());

impl Fabric {
    /// The open fabric with these options, or a new one.
    ///
    /// # Errors
    ///
    /// As [`Fabric::open`].
    pub fn shared(options: &RdmaOptions) -> Result<Arc<Self>, Unavailable> {
        let mut opened = OPENED.lock();
        opened.retain(|(_, fabric)| fabric.strong_count() > 0);
        let same = opened.iter().find(|(with, _)| with == options);
        if let Some(fabric) = same.and_then(|(_, fabric)| fabric.upgrade()) {
            return Ok(fabric);
        }
        let fabric = Self::open(options)?;
        opened.push((options.clone(), Arc::downgrade(&fabric)));
        Ok(fabric)
    }
}
