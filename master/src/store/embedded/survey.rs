//! The start of the log: reads its directory, and checks that the log is complete.

use super::files;
use super::identity::StoreId;
use super::log::{Full, SPARE};
use super::segment::{self, Header};
use crate::store::{LogSeq, StoreError};
use kvpool_types::Epoch;
use std::io;
use std::path::{Path, PathBuf};

/// The segments that the log still needs, in order, with their cuts and epochs.
pub(super) struct Survey {
    pub(super) cut: LogSeq,
    pub(super) epoch: Epoch,
    pub(super) segments: Vec<Summary>,
    pub(super) has_spare: bool,
}

impl Survey {
    /// Reads every segment. Removes cut segments and partial files.
    pub(super) fn of(directory: &Path, store: StoreId, size: u64) -> Result<Self, StoreError> {
        let io = |error: io::Error| files::failed(directory, "the log cannot be opened", &error);
        if !directory.try_exists().map_err(io)? {
            return Err(StoreError::Corrupt {
                reason: format!("the directory {} is missing", directory.display()),
            });
        }
        // A crash may come between the rename of a segment and the flush of the directory.
        files::sync_directory(directory).map_err(io)?;
        let (numbers, has_spare) = find(directory, size).map_err(io)?;
        let mut found = Vec::new();
        let settled = numbers.len().saturating_sub(2);
        for (at, number) in numbers.into_iter().enumerate() {
            // A segment is begun when the one before it is full. So only the last two can hold a
            // frame whose flush failed.
            found.push(Summary::read(directory, store, number, at >= settled)?);
        }
        let cut = found.iter().map(|segment| segment.cut).max();
        let cut = cut.unwrap_or_default();
        // A crash may come between a cut and the removal of the segments.
        let needed = found.iter().rposition(|s| s.header.first <= cut.next());
        // The segment with the latest cut stays, because it may be the only record of that cut. So
        // does the one with the latest epoch: a term that began on a full disk is recorded there
        // only. The next cut removes them, and records both.
        let says = found.iter().rposition(|s| s.cut == cut);
        let epoch = found.iter().map(|segment| segment.epoch).max();
        let epoch = epoch.unwrap_or_default();
        let names = found.iter().rposition(|s| s.epoch == epoch);
        let segments = found.split_off(needed.min(says).min(names).unwrap_or(0));
        check_order(directory, cut, &segments)?;
        for obsolete in found {
            std::fs::remove_file(&obsolete.path).map_err(io)?;
        }
        Ok(Self {
            cut,
            epoch,
            segments,
            has_spare,
        })
    }
}

/// A segment that was read, without its groups.
pub(super) struct Summary {
    pub(super) path: PathBuf,
    pub(super) header: Header,
    pub(super) last: LogSeq,
    cut: LogSeq,
    epoch: Epoch,
    pub(super) end: u64,
    goes_on: bool,
    pub(super) torn: bool,
}

impl Summary {
    /// Reads a segment of this store. With `flushes`, it makes the frames durable.
    fn read(
        directory: &Path,
        store: StoreId,
        number: u64,
        flushes: bool,
    ) -> Result<Self, StoreError> {
        let path = directory.join(segment::name(number));
        let read = segment::read(&path)?;
        let damaged = |reason: String| StoreError::Corrupt {
            reason: format!("{}: {reason}", path.display()),
        };
        let Header {
            store: its,
            number: was,
            ..
        } = read.header;
        if its != store {
            return Err(damaged(format!(
                "the file is of store {its}, the directory is of store {store}"
            )));
        }
        if was != number {
            return Err(damaged(format!("the file was segment {was} of the log")));
        }
        if flushes {
            read.make_durable(&path)
                .map_err(|error| files::failed(directory, "the log cannot be flushed", &error))?;
        }
        Ok(Self {
            header: read.header,
            last: read.last(),
            cut: read.cut,
            epoch: read.epoch,
            end: read.end,
            goes_on: read.goes_on,
            torn: read.torn,
            path,
        })
    }

    pub(super) fn as_full(&self) -> Full {
        Full {
            path: self.path.clone(),
            size: self.header.size,
            last: self.last,
        }
    }
}

/// Checks that the segments hold every group above the cut.
fn check_order(directory: &Path, cut: LogSeq, segments: &[Summary]) -> Result<(), StoreError> {
    if let Some(first) = segments.first()
        && first.header.first > cut.next()
    {
        return Err(missing(directory, first.header.number.saturating_sub(1)));
    }
    for pair in segments.windows(2) {
        let [earlier, later] = pair else { continue };
        if later.header.number != earlier.header.number + 1 {
            return Err(missing(directory, earlier.header.number + 1));
        }
        let (lost, found) = (earlier.last.next(), later.header.first);
        if found != lost {
            return Err(StoreError::Corrupt {
                reason: format!(
                    "{}: the end is damaged, groups {lost} to {found} are missing",
                    earlier.path.display()
                ),
            });
        }
    }
    match segments.last() {
        Some(last) if last.goes_on => Err(missing(directory, last.header.number + 1)),
        _ => Ok(()),
    }
}

fn missing(directory: &Path, number: u64) -> StoreError {
    StoreError::Corrupt {
        reason: format!(
            "{} is missing",
            directory.join(segment::name(number)).display()
        ),
    }
}

/// The numbers of the segments in a directory, and whether there is a spare. Removes partial files.
fn find(directory: &Path, size: u64) -> io::Result<(Vec<u64>, bool)> {
    let mut numbers = Vec::new();
    let mut has_spare = false;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if let Some(number) = segment::number_of(&path) {
            numbers.push(number);
        } else if path.extension().is_some_and(|e| e == files::PARTIAL) {
            std::fs::remove_file(&path)?;
        } else if entry.file_name() == SPARE {
            has_spare = entry.metadata()?.len() == size;
            if !has_spare {
                std::fs::remove_file(&path)?;
            }
        }
    }
    numbers.sort_unstable();
    Ok((numbers, has_spare))
}
