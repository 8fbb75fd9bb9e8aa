//! The caller's view of a room: its poll state, and whether its pages are free.

use crate::room::PollState;
use kvpool_types::Code;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

/// The state of one transfer.
#[derive(Clone, Debug)]
pub struct TransferState {
    /// The poll state of this rank.
    pub poll: PollState,
    /// Why the transfer failed. `None` unless `poll` is [`PollState::Failed`].
    pub failure: Option<Code>,
    /// Whether nothing touches the pages for this transfer any more. It may become true after the end of the
    /// transfer.
    pub is_released: bool,
    /// The slot of metadata, of [`AuxLayout::slot_bytes`](crate::aux::AuxLayout::slot_bytes) bytes. `None`
    /// unless a receiver asked for it and succeeded.
    pub aux: Option<Vec<u8>>,
}

/// Whether a transfer has succeeded or failed.
pub(super) const fn has_ended(state: &TransferState) -> bool {
    matches!(state.poll, PollState::Failed | PollState::Success)
}

/// One transfer, shared by its caller and the agent.
#[derive(Debug)]
pub(super) struct TransferCell {
    state: Mutex<TransferState>,
    changed: Condvar,
}

impl TransferCell {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(TransferState {
                poll: PollState::Bootstrapping,
                failure: None,
                is_released: false,
                aux: None,
            }),
            changed: Condvar::new(),
        })
    }

    pub(super) fn get(&self) -> TransferState {
        self.state.lock().clone()
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut TransferState)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }

    /// Waits until the transfer has ended and its pages are released, or until `deadline`.
    pub(super) fn wait_for_end(&self, deadline: Instant) -> TransferState {
        let mut state = self.state.lock();
        while !has_ended(&state) || !state.is_released {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        state.clone()
    }
}
