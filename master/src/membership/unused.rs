//! The media that a node has and does not use, as it reports them in its present session.

use super::{StoreNode, short};
use kvpool_proto as proto;
use kvpool_types::MediumId;

/// The most unused media that are kept of a node.
const MOST_UNUSED: usize = 64;

/// A device or file that its node does not use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusedMedium {
    /// The device or file at the node.
    pub path: String,
    /// Why the node does not use it, for operators.
    pub reason: String,
    /// The id of the medium, if the node knows it.
    pub medium: Option<MediumId>,
}

impl StoreNode {
    /// Records the unused media that the node reports in its session `number`, in place of those before. Operators read
    /// them, so their texts are cut short and have no control characters.
    pub(crate) fn note_unused(&self, number: u64, said: Vec<proto::UnusedMedium>) {
        let said = said.into_iter().take(MOST_UNUSED);
        let said = said.map(|one| UnusedMedium {
            path: short(&one.path),
            reason: short(&one.reason),
            medium: MediumId::from_slice(&one.medium_id),
        });
        let mut session = self.session.lock();
        if session.number == number && session.outbox.is_some() {
            session.unused = said.collect();
        }
    }

    /// The media that the node does not use. Without a session there are none.
    pub(crate) fn unused_media(&self) -> Vec<UnusedMedium> {
        self.session.lock().unused.clone()
    }
}
