//! Drains of a node: its reports of them, and the cancellations that it has confirmed.

/// A node's report that it drains.
#[derive(Clone, Copy, Debug)]
pub struct DrainReport {
    /// The session of the report if an operator takes the node out of service; `None` if the node stops.
    pub session: Option<u64>,
    /// Whether the node waits until its blocks have moved.
    pub moves: bool,
    /// The node's own number of the report; 0 from a node of an earlier version.
    pub number: u64,
}

/// The drain that a node is in, and its latest report that it drains. A word to the node answers this report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    /// The number of the drain, as [`StoreNode::current_drain`](super::StoreNode::current_drain) has it.
    pub(crate) drain: u64,
    /// The number of the report.
    report: u64,
}

/// How often operators have cancelled drains of the node in this term.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cancellations {
    pub(super) made: u64,
    /// The number of the last cancellation that the node has confirmed.
    pub(super) confirmed: u64,
    /// The highest number of a report that the node drains. Each answer to the node names it: a node that stops
    /// waits for the answer to its stop.
    pub(super) reported: u64,
    /// Whether the node has reported the drain that it is in.
    pub(super) is_reported: bool,
}

impl Cancellations {
    /// The number of the latest cancellation, unless the node has confirmed it.
    pub(super) fn open(self) -> Option<u64> {
        (self.confirmed < self.made).then_some(self.made)
    }

    pub(super) fn question(self) -> Question {
        Question {
            drain: self.made,
            report: self.reported,
        }
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
