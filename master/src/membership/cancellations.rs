//! Cancelled drains of a node: how many there were, and which of them the node has confirmed.

/// How often operators have cancelled drains of the node in this term.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cancellations {
    pub(super) made: u64,
    /// The number of the last cancellation that the node has confirmed.
    pub(super) confirmed: u64,
}

impl Cancellations {
    /// The number of the latest cancellation, unless the node has confirmed it.
    pub(super) fn open(self) -> Option<u64> {
        (self.confirmed < self.made).then_some(self.made)
    }
}

/// The outcome of the cancellation of a node's drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UndrainOutcome {
    /// The node itself is shutting down, so it continues to drain.
    Stops,
    /// The node was draining. It is told that it is back in service.
    Now,
    /// Another call has cancelled the drain, and the node has not confirmed it.
    Unconfirmed,
    /// The node was not draining.
    Before,
}
