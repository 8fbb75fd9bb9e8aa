//! The node of a drain, from look to look.

use super::POLL;
use crate::connection::{HIDDEN, control_error, is_hidden};
use kvpool_client::Client;
use kvpool_types::Incarnation;
use std::time::{Duration, Instant};

/// The time between two looks while a task runs. The master answers a look with the figures of all nodes.
const GLANCE: Duration = Duration::from_secs(1);

/// The state of a node that has left the pool.
pub(super) const GONE: &str = "gone";
/// The state of a node whose stop loses no block.
pub(super) const DRAINED: &str = "drained";
/// The state of a node that the master does not hear.
pub(super) const SUSPECT: &str = "suspect";
/// The state of a node that a new leader has not heard yet.
pub(super) const UNREPORTED: &str = "unreported";

/// The node at one look.
pub(super) struct Look {
    /// The node's state; [`GONE`] for a node that has left the pool.
    pub(super) state: String,
    /// The blocks that a stop would lose, if the master has counted them.
    pub(super) left_blocks: Option<u64>,
    /// Whether the node has an SSD.
    pub(super) has_ssd: bool,
}

/// Looks at the node of a drain.
pub(super) struct Watch<'a> {
    client: &'a Client,
    name: &'a str,
    seen: Seen,
    looked: Instant,
}

impl<'a> Watch<'a> {
    pub(super) fn of(client: &'a Client, name: &'a str) -> Self {
        Self {
            client,
            name,
            seen: Seen::default(),
            looked: Instant::now(),
        }
    }

    pub(super) const fn name(&self) -> &'a str {
        self.name
    }

    /// Looks at the node, and tells the operator of its silence. Fails when the drain is over because the node has
    /// restarted or was dropped.
    pub(super) async fn look(&mut self) -> anyhow::Result<Look> {
        let stats = self.client.stats().await.map_err(control_error)?;
        anyhow::ensure!(!is_hidden(&stats), HIDDEN);
        self.looked = Instant::now();
        let node = stats.nodes.iter().find(|node| node.name == self.name);
        let seen = node.map(|node| (node.state.as_str(), node.incarnation));
        if let Some(notice) = self.seen.see(self.name, seen)? {
            tracing::warn!("{notice}");
        }
        Ok(Look {
            state: node.map_or_else(|| GONE.to_owned(), |node| node.state.clone()),
            left_blocks: node.and_then(|node| node.left_blocks),
            has_ssd: crate::media::has_ssd(&stats.media, self.name),
        })
    }

    /// Looks at the node, unless the last look is recent.
    pub(super) async fn glance(&mut self) -> anyhow::Result<()> {
        if self.looked.elapsed() >= GLANCE {
            self.look().await?;
        }
        Ok(())
    }

    /// Waits while the node is suspect, at most until `until`.
    pub(super) async fn until_heard(&mut self, until: Instant) -> anyhow::Result<()> {
        while self.look().await?.state == SUSPECT && Instant::now() < until {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Whether the node was suspect at a look since the last call.
    pub(super) fn take_silence(&mut self) -> bool {
        std::mem::take(&mut self.seen.was_suspect)
    }
}

/// What the looks have shown.
#[derive(Default)]
struct Seen {
    /// The incarnation at the first look. A restart of the node ends its drain.
    incarnation: Option<Incarnation>,
    /// Whether the master did not hear the node at the last look.
    is_unheard: bool,
    /// Whether the operator was told that the node is suspect.
    is_told: bool,
    was_suspect: bool,
}

impl Seen {
    /// Processes a look: the node's state and incarnation, or `None` for a node that has left the pool. Returns a
    /// notice for the operator. The first look gives none: the caller judges it.
    fn see(
        &mut self,
        name: &str,
        node: Option<(&str, Incarnation)>,
    ) -> anyhow::Result<Option<String>> {
        let Some((state, incarnation)) = node else {
            anyhow::ensure!(
                !self.is_unheard,
                "the master did not hear node {name} for too long, and has dropped it. Blocks that were only in its \
                 memory are lost. The node takes new blocks when it is back: to drain it then, run the command again"
            );
            return Ok(None);
        };
        let is_first = self.incarnation.is_none();
        let first = *self.incarnation.get_or_insert(incarnation);
        anyhow::ensure!(
            first == incarnation,
            "node {name} has restarted, which has ended its drain: the node takes new blocks. To drain it, run the \
             command again"
        );
        let is_suspect = state == SUSPECT;
        self.is_unheard = is_suspect || state == UNREPORTED;
        self.was_suspect |= is_suspect;
        let notice = match (is_suspect, self.is_told) {
            (true, false) if !is_first => {
                format!(
                    "node {name} is suspect: the master does not hear it. The drain goes on when the node is heard \
                     again"
                )
            }
            (false, true) if !self.is_unheard => {
                format!("the master hears node {name} again, and the drain goes on")
            }
            _ => return Ok(None),
        };
        self.is_told = is_suspect;
        Ok(Some(notice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Incarnation = Incarnation(1);

    /// A node that drains, at the first look.
    fn draining() -> Seen {
        let mut seen = Seen::default();
        let notice = seen.see("n", Some(("draining", FIRST))).unwrap();
        assert_eq!(notice, None);
        seen
    }

    /// Both take blocks, and nobody cancelled the drain of the node that has restarted.
    #[test]
    fn a_node_that_has_restarted_is_told_apart_from_one_whose_drain_was_cancelled() {
        let mut seen = draining();
        assert_eq!(seen.see("n", Some(("live", FIRST))).unwrap(), None);
        let over = seen.see("n", Some(("live", Incarnation(2)))).unwrap_err();
        let text = over.to_string();
        assert!(text.contains("node n has restarted"), "{text}");
        assert!(text.contains("run the command again"), "{text}");
        assert!(!text.contains("cancelled"), "{text}");
    }

    #[test]
    fn a_silence_during_a_drain_is_told_once_and_ends_no_drain() {
        let mut seen = draining();
        let mut notices = Vec::new();
        for state in ["suspect", "suspect", "unreported", "draining", "draining"] {
            notices.extend(seen.see("n", Some((state, FIRST))).unwrap());
        }
        assert_eq!(notices.len(), 2, "{notices:?}");
        assert!(notices[0].contains("node n is suspect"), "{notices:?}");
        assert!(notices[1].contains("hears node n again"), "{notices:?}");
        assert!(seen.was_suspect);
        // A node that was heard and leaves is not lost.
        assert_eq!(seen.see("n", None).unwrap(), None);
    }

    /// A script must not take it for a node that was drained and left.
    #[test]
    fn a_node_that_is_dropped_for_its_silence_fails_its_drain() {
        for state in ["suspect", "unreported"] {
            let mut seen = draining();
            seen.see("n", Some((state, FIRST))).unwrap();
            let over = seen.see("n", None).unwrap_err().to_string();
            assert!(over.contains("has dropped it"), "{over}");
        }
    }
}
