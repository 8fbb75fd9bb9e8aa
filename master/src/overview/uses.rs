//! The usage of each namespace.

use crate::accounts::Balance;
use serde::Serialize;

/// The most namespaces shown: those with the most bytes.
pub(super) const SHOWN: usize = 200;

/// The usage of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NamespaceUse {
    /// The name.
    pub name: String,
    /// Blocks in memory.
    pub blocks: u64,
    /// Bytes of their extents, and of the extents that open puts may write.
    pub bytes: u64,
    /// Copies on media.
    pub copies: u64,
    /// Bytes of these copies, with their headers.
    pub copy_bytes: u64,
}

impl NamespaceUse {
    pub(crate) const fn new(name: String, balance: Balance) -> Self {
        Self {
            name,
            blocks: balance.blocks,
            bytes: balance.memory,
            copies: balance.copies,
            copy_bytes: balance.media,
        }
    }
}
