//! The log: consecutive segments. Appends go to the last one.
//!
//! Invariant: every group above the cut is in exactly one segment, in order. The last frame of a full segment
//! says that another segment follows, so a missing segment is always noticed.

use super::files;
use super::frame::{self, Kind};
use super::identity::StoreId;
use super::segment::{self, Active, FIRST, Header, RESERVE};
use super::survey::{Summary, Survey};
use crate::store::{LogSeq, LogSpan, StoreError};
use bytes::Bytes;
use kvpool_types::Epoch;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};

/// The name of a cut segment's file that waits for its next use.
pub(super) const SPARE: &str = "spare";

/// A segment that is full.
#[derive(Debug)]
pub(super) struct Full {
    pub(super) path: PathBuf,
    pub(super) size: u64,
    pub(super) last: LogSeq,
}

/// The log of one store.
#[derive(Debug)]
pub(super) struct Log {
    directory: PathBuf,
    store: StoreId,
    /// The size of a segment. A group that is larger gets a larger segment.
    size: u64,
    full: VecDeque<Full>,
    active: Active,
    /// The next segment, created before its use. Its creation shows that a full store has space
    /// again.
    ahead: Option<Active>,
    has_spare: bool,
    span: LogSpan,
    epoch: Epoch,
    /// Why nothing can be appended any more.
    broken: Option<String>,
}

impl Log {
    /// Creates the log of a new store. The log continues after `span`.
    pub(super) fn create(
        directory: &Path,
        store: StoreId,
        size: u64,
        span: LogSpan,
    ) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let header = Header {
            store,
            number: 1,
            first: span.last.next(),
            cut: span.cut,
            size,
            salt: kvpool_seams::random(),
        };
        Ok(Self {
            directory: directory.to_owned(),
            store,
            size,
            full: VecDeque::new(),
            active: Active::begin(directory, header, None)?,
            ahead: None,
            has_spare: false,
            span,
            epoch: Epoch(0),
            broken: None,
        })
    }

    /// Opens the log, and makes durable the frames that it reads.
    pub(super) fn open(directory: &Path, store: StoreId, size: u64) -> Result<Self, StoreError> {
        let io = |error: io::Error| files::failed(directory, "the log cannot be opened", &error);
        let Survey {
            cut,
            epoch,
            segments,
            has_spare,
        } = Survey::of(directory, store, size)?;
        let mut full: VecDeque<Full> = segments.iter().map(Summary::as_full).collect();
        full.pop_back();
        let Some(last) = segments.into_iter().next_back() else {
            return Err(StoreError::Corrupt {
                reason: format!("{}: the log has no segment", directory.display()),
            });
        };
        let span = LogSpan {
            cut,
            last: last.last,
        };
        if last.torn {
            tracing::warn!(
                file = %last.path.display(), after = %last.last, at = last.end,
                "the log ends with an incomplete append, which is discarded: a crash leaves such an end, and then \
                 nothing acknowledged is lost; if the disk changed it, one acknowledged group may be lost"
            );
        }
        let active = Active::resume(last.path, last.header, last.end).map_err(io)?;
        let log = Self {
            directory: directory.to_owned(),
            store,
            size,
            full,
            active,
            ahead: None,
            has_spare,
            span,
            epoch,
            broken: None,
        };
        log.tell_that_it_goes_on().map_err(io)?;
        Ok(log)
    }

    /// Repeats the frame that announces the last segment, if it is missing. A crash may have come
    /// after the creation of the segment and before that frame.
    fn tell_that_it_goes_on(&self) -> io::Result<()> {
        let Some(before) = self.full.back() else {
            return Ok(());
        };
        let read = segment::read(&before.path).map_err(io::Error::other)?;
        if read.goes_on {
            return Ok(());
        }
        let mut before = Active::resume(before.path.clone(), read.header, read.end)?;
        before.append(Kind::Next, read.last(), self.epoch, &[])?
    }

    pub(super) const fn span(&self) -> LogSpan {
        self.span
    }

    /// The latest epoch in any frame.
    pub(super) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The file for appends.
    pub(super) const fn active(&self) -> &Active {
        &self.active
    }

    /// Appends a group.
    pub(super) fn append(&mut self, epoch: Epoch, group: &[u8]) -> Result<(), StoreError> {
        let seq = self.span.last.next();
        self.write(Kind::Group, seq, epoch, group)?;
        self.span.last = seq;
        self.epoch = self.epoch.max(epoch);
        Ok(())
    }

    /// Marks the end of the log: see [`Active::mark_end`]. A missing mark does no harm.
    pub(super) fn mark_end(&mut self) {
        if self.broken.is_none()
            && let Err(error) = self.active.mark_end(self.span.last, self.epoch)
        {
            tracing::debug!(%error, "mark of the log's end not written");
        }
    }

    fn write(
        &mut self,
        kind: Kind,
        seq: LogSeq,
        epoch: Epoch,
        body: &[u8],
    ) -> Result<(), StoreError> {
        if let Some(reason) = self.broken.clone() {
            return Err(StoreError::Unavailable { reason });
        }
        if !self.active.fits(kind, body.len() as u64) {
            self.go_on(epoch, body.len() as u64)?;
        } else if kind == Kind::Group {
            self.drop_ahead()?;
        }
        let outcome = self.active.append(kind, seq, epoch, body);
        self.settle(outcome, "a group cannot be written")
    }

    /// The result of an append. After an unknown outcome the log takes no more groups. The next
    /// start reads the log.
    fn settle(
        &mut self,
        outcome: io::Result<io::Result<()>>,
        doing: &str,
    ) -> Result<(), StoreError> {
        match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if files::is_full(&error) => {
                Err(files::failed(&self.directory, doing, &error))
            }
            // The disk has lost one write, so the log attempts no further write.
            Ok(Err(error)) | Err(error) => {
                let reason = format!("{}: {doing}: {error}", self.active.path.display());
                self.broken = Some(reason.clone());
                Err(StoreError::Unavailable { reason })
            }
        }
    }

    /// Ensures room for the next group.
    pub(super) fn make_room(&mut self, bytes: u64) -> Result<(), StoreError> {
        if self.ahead.is_none() && !self.active.fits(Kind::Group, bytes) {
            self.ahead = Some(self.next_segment(bytes)?);
        }
        Ok(())
    }

    /// Removes the segment that was created ahead. Its head names its first group, which is about to change.
    fn drop_ahead(&mut self) -> Result<(), StoreError> {
        let Some(ahead) = self.ahead.take() else {
            return Ok(());
        };
        let removed = files::remove_if_there(&ahead.path)
            .and_then(|()| files::sync_directory(&self.directory));
        removed.map_err(|error| {
            // The file may still exist, so the next append tries again.
            self.ahead = Some(ahead);
            files::failed(&self.directory, "a segment cannot be removed", &error)
        })
    }

    fn next_segment(&mut self, bytes: u64) -> Result<Active, StoreError> {
        let least = FIRST + frame::span(bytes) + RESERVE;
        let size = self.size.max(least.next_multiple_of(FIRST));
        let header = Header {
            store: self.store,
            number: self.active.header.number + 1,
            first: self.span.last.next(),
            cut: self.span.cut,
            size,
            salt: kvpool_seams::random(),
        };
        let spare = self.directory.join(SPARE);
        let spare = (self.has_spare && size == self.size).then_some(spare);
        let used_spare = spare.is_some();
        let made = Active::begin(&self.directory, header, spare);
        if used_spare {
            self.has_spare = false;
        }
        made.map_err(|error| {
            files::failed(
                &self.directory,
                "a segment of the log cannot be made",
                &error,
            )
        })
    }

    /// Continues in another segment, with space for a body of `bytes`.
    fn go_on(&mut self, epoch: Epoch, bytes: u64) -> Result<(), StoreError> {
        let next = match self.ahead.take() {
            Some(ahead)
                if ahead.fits(Kind::Group, bytes)
                    && ahead.header.first == self.span.last.next() =>
            {
                ahead
            }
            unfit @ Some(_) => {
                self.ahead = unfit;
                self.drop_ahead()?;
                self.next_segment(bytes)?
            }
            None => self.next_segment(bytes)?,
        };
        let outcome = self.active.append(Kind::Next, self.span.last, epoch, &[]);
        if let Err(error) = self.settle(outcome, "the end of a segment cannot be written") {
            self.ahead = Some(next);
            return Err(error);
        }
        let full = std::mem::replace(&mut self.active, next);
        self.full.push_back(Full {
            path: full.path,
            size: full.header.size,
            last: self.span.last,
        });
        Ok(())
    }

    /// Removes the groups through `through`, which must be in the log.
    pub(super) fn cut(&mut self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError> {
        if through <= self.span.cut {
            return Ok(());
        }
        self.write(Kind::Cut, through, epoch, &[])?;
        self.span.cut = through;
        while let Some(oldest) = self.full.front()
            && oldest.last <= through
        {
            let spare = self.directory.join(SPARE);
            let removed = if self.has_spare || oldest.size != self.size {
                files::remove_if_there(&oldest.path)
            } else {
                let renamed = std::fs::rename(&oldest.path, &spare);
                self.has_spare = renamed.is_ok();
                renamed
            };
            removed.map_err(|error| {
                files::failed(&self.directory, "a segment cannot be removed", &error)
            })?;
            self.full.pop_front();
        }
        Ok(())
    }

    /// Stores a term without a new file: it writes the current cut again under that term. Groups
    /// leave room for this frame.
    pub(super) fn begin_epoch(&mut self, epoch: Epoch) -> Result<(), StoreError> {
        self.write(Kind::Cut, self.span.cut, epoch, &[])?;
        self.epoch = self.epoch.max(epoch);
        Ok(())
    }

    /// The groups behind `after`, as many as fit into `limit_bytes`, and at least one.
    pub(super) fn read(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        let after = after.max(self.span.cut);
        let full = self.full.iter().filter(|full| full.last > after);
        let paths = full.map(|full| &full.path);
        let (mut groups, mut bytes) = (Vec::new(), 0);
        for path in paths.chain([&self.active.path]) {
            let read = segment::read(path)?;
            for place in read.groups.iter().filter(|place| place.seq > after) {
                let group = read.group(*place);
                bytes += group.len() as u64;
                if bytes > limit_bytes && !groups.is_empty() {
                    return Ok(groups);
                }
                groups.push((place.seq, group));
            }
            if bytes > limit_bytes {
                break;
            }
        }
        Ok(groups)
    }

    /// Makes the mark of the log's end durable.
    pub(super) fn close(&mut self) -> io::Result<()> {
        if self.broken.is_some() {
            return Ok(());
        }
        self.active.mark_end(self.span.last, self.epoch)?;
        self.active.file.sync_data()
    }
}
