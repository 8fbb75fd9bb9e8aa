//! The file that names the directory's store and pool, and its latest term.
//!
//! It is text, so that an operator can read it. It is written before the store acknowledges
//! anything, and replaced as a whole at each term. So a directory with this file is never taken for
//! an empty one. On a full disk the log holds the term instead
//! ([`Log::begin_epoch`](super::log::Log::begin_epoch)).

use super::files;
use crate::store::record::crc;
use kvpool_types::{ClusterId, Epoch};
use std::fmt;
use std::io::{self, Write};
use std::path::Path;

/// The file's name.
pub(super) const NAME: &str = "identity";
/// The format of the files beside it.
pub(super) const FORMAT: u64 = 2;

const TITLE: &str = "kvmaster's metadata. Do not edit or move the files of this directory.";

/// The store that a file belongs to: a random id, written into each file of the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoreId(pub(super) u128);

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The content of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) store: StoreId,
    /// The pool's id; `None` before the pool has one.
    pub(super) cluster: Option<ClusterId>,
    pub(super) epoch: Epoch,
}

/// Why the file is unusable.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the file is empty")]
    Empty,
    #[error("the checksum does not match: the file was changed or truncated")]
    Changed,
    #[error("the file has format {0}")]
    Format(u64),
}

impl Identity {
    /// Replaces the file.
    pub(super) fn write(&self, directory: &Path) -> io::Result<()> {
        let text = self.text();
        files::replace(&directory.join(NAME), |mut file| {
            file.write_all(text.as_bytes())
        })
    }

    /// Reads the file; `None` without a file.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, Unreadable> {
        match std::fs::read(directory.join(NAME)) {
            Ok(bytes) if bytes.is_empty() => Err(Unreadable::Empty),
            Ok(bytes) => Self::parse(&bytes).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn text(&self) -> String {
        let Self {
            store,
            cluster,
            epoch,
        } = self;
        let pool = cluster.map_or_else(|| "none".to_owned(), |id| format!("{:032x}", id.0));
        let body = format!("{TITLE}\nformat {FORMAT}\nstore {store}\npool {pool}\nepoch {epoch}\n");
        let crc = crc(body.as_bytes());
        format!("{body}checksum {crc:016x}\n")
    }

    fn parse(bytes: &[u8]) -> Result<Self, Unreadable> {
        let text = std::str::from_utf8(bytes).map_err(|_| Unreadable::Changed)?;
        let (body, sum) = text.rsplit_once("checksum ").ok_or(Unreadable::Changed)?;
        let sum = sum
            .strip_suffix('\n')
            .and_then(|sum| u64::from_str_radix(sum, 16).ok());
        if sum != Some(crc(body.as_bytes())) {
            return Err(Unreadable::Changed);
        }
        let field = |name: &str| {
            let mut lines = body.lines();
            lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        };
        let number = |name: &str| field(name).and_then(|n| n.parse().ok());
        match number("format") {
            Some(FORMAT) => {}
            Some(other) => return Err(Unreadable::Format(other)),
            None => return Err(Unreadable::Changed),
        }
        let id = |name: &str| field(name).and_then(|id| u128::from_str_radix(id, 16).ok());
        let cluster = match field("pool") {
            Some("none") => Some(None),
            Some(_) => id("pool").map(|id| Some(ClusterId(id))),
            None => None,
        };
        match (id("store"), cluster, number("epoch")) {
            (Some(store), Some(cluster), Some(epoch)) => Ok(Self {
                store: StoreId(store),
                cluster,
                epoch: Epoch(epoch),
            }),
            _ => Err(Unreadable::Changed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_that_was_changed_in_any_byte_is_refused() {
        let identity = Identity {
            store: StoreId(0x1234_5678_9abc_def0),
            cluster: Some(ClusterId(3)),
            epoch: Epoch(17),
        };
        let text = identity.text().into_bytes();
        assert_eq!(Identity::parse(&text).unwrap(), identity);
        for at in 0..text.len() {
            let mut changed = text.clone();
            changed[at] ^= 1;
            assert!(Identity::parse(&changed).is_err(), "byte {at}");
            assert!(Identity::parse(&text[..at]).is_err(), "cut at {at}");
        }
    }
}
