//! The next step for a silent node, for `status` and `doctor`.

const SUSPECT: &str = ". Look at its host and its log. Its blocks are misses until it is heard again. They are lost \
                       if its process has ended, or after `--drop-after` of silence (10 minutes by default)";

/// Follows the sentence about the state of a node. Empty for a node that is not silent.
pub(crate) fn next_step(state: &str) -> &'static str {
    if state == "suspect" { SUSPECT } else { "" }
}
